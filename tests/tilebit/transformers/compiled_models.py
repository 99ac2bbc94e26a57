"""Models of every kind that ``compile`` knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny_models import SIZES, gemma2, llama, made, phi3, qwen3
from torch import Tensor
from transformers import MistralConfig, PreTrainedConfig, Qwen2Config

import tilebit

LIMIT = 0.1  # of float16 logits with a deviation of 2
ROWS, PADDING = 2, (0, 7)


def mistral() -> PreTrainedConfig:
    return MistralConfig(**{**SIZES, "head_dim": 64, "sliding_window": 24})


def qwen2() -> PreTrainedConfig:
    """Biases of q, k and v."""
    return Qwen2Config(**{**SIZES, "hidden_size": 256})


KINDS: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "llama": (llama, "w4a16_g64"), "mistral": (mistral, ""), "qwen2": (qwen2, "w8a16_g128"), "qwen3": (qwen3, "w4a16_g32"),
    "phi3": (lambda: phi3(hidden_size=256), ""), "gemma2": (gemma2, "w4a16_g128"),
}  # fmt: skip


def model_of(kind: str, quantized: bool = True, format: str | None = None) -> Any:
    """``format`` is another than the kind's in ``KINDS``."""
    config, own = KINDS[kind]
    model: Any = made(config(), torch.float16)
    format = own if format is None else format
    if format and quantized:
        tilebit.quantize_model(model, format)
    return model


def alike(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert float((a - b).abs().max()) < LIMIT
