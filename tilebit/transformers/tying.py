"""Weights that modules of a model share, an output layer and the input embedding above all, and what
transformers is told when one of them is packed."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedModel


def tied_weights(model: PreTrainedModel) -> dict[str, frozenset[str]]:
    """By the name of each module whose weight is another one's too: the names of that weight's parameters,
    any of which a directory may hold."""
    groups: list[set[str]] = []
    for pair in model.all_tied_weights_keys.items():
        joined = {*pair}
        for group in [group for group in groups if group & joined]:
            joined |= group
            groups.remove(group)
        groups.append(joined)
    return {name.removesuffix(".weight"): frozenset(group) for group in groups for name in group}


def untie(model: nn.Module, packed: Collection[str], shared: bool = False) -> None:
    """Have transformers tie no weight to that of a layer of ``packed`` (names), nor of such a layer to
    another, now and when the model is saved and read again: where nothing else is tied,
    ``tie_word_embeddings`` of the config becomes False, unless the layers share what is packed
    (``shared``). What a module holds is not changed."""
    for prefix, part in model.named_modules():
        pairs: dict[str, str] = getattr(part, "all_tied_weights_keys", None) or {}
        if not isinstance(part, PreTrainedModel):
            continue
        full = f"{prefix}." if prefix else ""
        left = {
            target: source
            for target, source in pairs.items()
            if not any(f"{full}{name.removesuffix('.weight')}" in packed for name in (target, source))
        }
        if len(left) == len(pairs):
            continue
        part.all_tied_weights_keys = left
        if part._tied_weights_keys:  # else a part inside is who ties them
            part._tied_weights_keys = left
            if not left and not shared:
                part.config.tie_word_embeddings = False
