"""A directory's model, quantized with factors that smooth its inputs, by a text that passes through it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..accepted import format_of
from ..layouts.formats import GemmFormat
from ..weights.any_kind import AnyKind
from ..weights.calibrate_smooth import calibrate_smoothing
from ..weights.checkpoint_config import CheckpointError
from ..weights.modules import quantize_model
from ..weights.smooth import expect_smoothed
from .config import TilebitConfig
from .opening import expect_tokens, open_model, open_tokenizer, quantized_by, read_config
from .products import multiply_in_fp32

SAMPLES, TOKENS = 16, 512  # of the text, and of each sample, at most


def smoothed_model(
    folder: Path, text: str, wanted: TilebitConfig, dtype: torch.dtype | None, device: torch.device, progress: bool = False
) -> PreTrainedModel:
    """The model in ``folder``, of floats, quantized to the formats of ``wanted``, after
    ``calibrate_smoothing`` of the layers whose format has 8-bit x, as that of most must: up to 16 samples of
    512 tokens of ``text``, at equal distances, pass through it. All of its floats are in memory meanwhile;
    ``dtype`` and ``device`` are ``open_model``'s. Raises ``ValueError`` as that and ``calibrate_smoothing``
    do, for layers of any precision, for an embedding that is to be quantized, and for a text without
    tokens, or with one that the model has not."""
    _expect_floats_to_round(wanted)
    expect_smoothed(format_of(wanted.format))
    config = read_config(folder)
    if quantized_by(config) is not None:
        raise CheckpointError(f"{folder} is quantized already; accepted: the directory that it was made of, of floats")
    ids = torch.tensor(open_tokenizer(folder)(text, verbose=False)["input_ids"], dtype=torch.int64)
    if not len(ids):
        raise ValueError("the text has no tokens; accepted: text of the kind that the model will see")
    expect_tokens(ids, config)
    model = open_model(folder, None, dtype, device)
    multiply_in_fp32(model)
    layers: dict[GemmFormat, set[str]] = {}
    for name, format in wanted.formats_of(model).items():
        assert isinstance(format, GemmFormat)
        layers.setdefault(format, set()).add(name)
    count = min(SAMPLES, -(-len(ids) // TOKENS))
    distance = max(0, len(ids) - TOKENS) // max(1, count - 1)
    batches = [ids[None, place * distance :][:, :TOKENS] for place in range(count)]
    smoothing = {
        format: calibrate_smoothing(model, batches, format, _others(names), clip_search=wanted.clip_search, progress=progress)
        for format, names in layers.items()
        if format.x
    }
    for format, names in layers.items():
        quantize_model(model, format, _others(names), wanted.clip_search, smoothing=smoothing.get(format))
    return model


def _others(names: Collection[str]) -> Callable[[str, nn.Linear], bool]:
    return lambda name, _: name not in names


def _expect_floats_to_round(wanted: TilebitConfig) -> None:
    kinds = [wanted.format, *(kind for kind in wanted.per_layer.values() if kind is not None)]
    of_any = next((kind for kind in kinds if AnyKind.parse(kind) is not None), None)
    if of_any is not None:
        raise ValueError(f"layers are to be {of_any}, and inputs to be smoothed; accepted: formats with scales, such as 'w4a8_lqq_g64'")
    if wanted.embeddings is not None:
        raise ValueError(
            f"embeddings are to be in {wanted.embeddings}, and inputs of layers to be smoothed; accepted: one of both, in this version"
        )
