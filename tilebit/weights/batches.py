"""Calibration batches: what they may be, and how a model takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ACCEPTED = "an iterable of batches: tensors, tuples or dicts of what the model takes"


def batches_of(calibration: Any) -> list[Any]:
    """``calibration`` as a list. Raises ``TypeError`` for what is no iterable of batches and
    ``ValueError`` for an empty one."""
    if isinstance(calibration, Tensor | Mapping | str) or not isinstance(calibration, Iterable):
        raise TypeError(f"calibration is {type(calibration).__name__}; accepted: {ACCEPTED} (for a single one: [batch])")
    found = list(calibration)
    if not found:
        raise ValueError(f"calibration is empty; accepted: {ACCEPTED}, at least one")
    return found


def run(model: nn.Module, batch: Any) -> Any:
    """The output of ``model`` for a batch, moved to the device of its first parameter: a dict is
    its keywords, a tuple or list its arguments, anything else its only argument."""
    batch = moved(batch, next(model.parameters()).device)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``, in dicts, tuples and lists too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(part, device) for name, part in value.items()}
    return type(value)(moved(part, device) for part in value) if type(value) in (tuple, list) else value


def next_token_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross entropy of each token given those before it, fp32, of a causal language model.

    ``batch`` is a tensor of token ids int64 [sequences, tokens] or a dict that holds it as
    ``input_ids``; the model gives logits [sequences, tokens, vocabulary], or an object that holds
    them as ``logits``. Raises ``TypeError`` for another batch.
    """
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"batch is {type(batch).__name__}; accepted: token ids as a tensor [sequences, tokens], or a dict with input_ids; "
            "for other models pass loss=, a function of (model, batch)"
        )
    found = run(model, batch)
    logits = found if isinstance(found, Tensor) else found.logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten().to(logits.device))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model`` in evaluation mode and, where its configuration says ``use_cache``, without a
    cache; afterwards as it was."""
    training = [module for module in model.modules() if module.training]
    config = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    try:
        model.eval()
        if config is not None and use_cache:
            config.use_cache = False
        yield
    finally:
        for module in training:
            module.training = True
        if config is not None and use_cache:
            config.use_cache = use_cache
