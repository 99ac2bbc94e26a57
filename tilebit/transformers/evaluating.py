"""A directory's model on a text, in several formats and with several caches, beside the 16-bit model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from ..quality import Score, Window, log_probabilities, windows
from .cache import TilebitCache
from .config import TilebitConfig
from .opening import expect_tokens, most_tokens, open_model, open_tokenizer, read_config
from .products import multiply_in_fp32


def evaluate_model(
    folder: Path,
    text: str,
    kv_formats: Sequence[str | None],
    reference: Path | None,
    sizes: tuple[int, int],
    max_tokens: int | None = None,
    quantizations: Sequence[TilebitConfig | None] = (None,),
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Rows of ``model``, ``format`` (None: as the directory is), ``kv_format``, ``tokens`` (predicted),
    ``perplexity``, ``kl`` and ``top1`` (None without a reference): the reference's first, then for each of
    ``quantizations``, by which a 16-bit model is quantized while it loads, one for each of ``kv_formats``
    (None: attention without a cache, in 16 bits). Models are opened one after another, each beside the
    reference, which reads the text again for each. ``sizes`` are (window, stride) of
    ``tilebit.quality.windows``. On CPUs layers that are not quantized multiply in fp32
    (``multiply_in_fp32``). Raises ``ValueError`` for what cannot be, before a weight is read."""
    config, window = read_config(folder), sizes[0]
    most = most_tokens(config)
    if most is not None and window > most:
        raise ValueError(f"windows of {window} tokens; accepted: at most {most}, which is what the model was made for: make them smaller")
    if reference is not None:
        sizes_of = [each.get_text_config(decoder=True).vocab_size for each in (config, read_config(reference))]
        if sizes_of[0] != sizes_of[1]:
            raise ValueError(
                f"{folder} has {sizes_of[0]} tokens in its vocabulary and {reference} {sizes_of[1]}; accepted: the model it was made of"
            )
    ids = torch.tensor(open_tokenizer(folder)(text, verbose=False)["input_ids"], dtype=torch.int64)[:max_tokens]
    parts = windows(ids, *sizes)
    expect_tokens(ids, config)
    other = None if reference is None else _opened(reference, None, dtype, device)
    rows: list[dict[str, Any]] = []
    for quantization in quantizations:
        model = _opened(folder, quantization, dtype, device)
        shown = "windows" if quantization is None else quantization.format
        own, scores = _scored(model, other, track(parts, shown, disable=not progress), kv_formats, window)
        if reference is not None and not rows:
            rows.append(_row(str(reference), None, None, ids, own))
        format = None if quantization is None else quantization.format
        rows += [_row(str(folder), format, name, ids, score) for name, score in zip(kv_formats, scores, strict=True)]
        del model
    return rows


def _opened(folder: Path, quantization: TilebitConfig | None, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    model = open_model(folder, quantization, dtype, device)
    multiply_in_fp32(model)
    return model


def _scored(model: Any, other: Any, parts: Iterable[Window], kv_formats: Sequence[str | None], window: int) -> tuple[Score, list[Score]]:
    """Scores of ``other`` (empty without one) and of ``model`` over each cache."""
    caches = [None if name is None else TilebitCache(model.config, format=name, max_tokens=window, sequences=1) for name in kv_formats]
    if any(cache is not None for cache in caches):
        model.set_attn_implementation("tilebit")
    own, scores = Score(), [Score() for _ in caches]
    for part in parts:
        seen, following = part.ids[:, :-1], part.ids[0, -part.scored :]
        expected = None if other is None else log_probabilities(other, seen, part.scored)
        if expected is not None:
            own.add(expected, following)
        for cache, score in zip(caches, scores, strict=True):
            score.add(log_probabilities(model, seen, part.scored, cache), following, expected)
    return own, scores


def _row(model: str, format: str | None, kv_format: str | None, ids: torch.Tensor, score: Score) -> dict[str, Any]:
    numbers = {"perplexity": score.perplexity, "kl": score.kl, "top1": score.top1}
    return {"model": model, "format": format, "kv_format": kv_format, "tokens": len(ids) - 1, **numbers}
