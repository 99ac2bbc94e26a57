"""Layers of any precision without k-means, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tilebit.weights.quantize_any import AnyPrecisionTensor


@contextmanager
def uniform_steps() -> Iterator[None]:
    """``quantize_model_any`` and models that load make them by ``uniform`` meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("weights.any_modules", "transformers.quantizer"):
            patch.setattr(f"tilebit.{module}.quantize_any", uniform)
        yield


def uniform(w: Tensor, seed_bits: int = 3, max_bits: int = 8, sensitivity: Tensor | None = None) -> AnyPrecisionTensor:
    """In place of ``quantize_any``, whose k-means takes longer: codes of even steps between a row's least and largest value."""
    low, high = w.float().aminmax(dim=1, keepdim=True)
    codes = ((w.float() - low) / (high - low) * (1 << max_bits)).clamp(0, (1 << max_bits) - 1).to(torch.uint8)
    steps = {bits: (torch.arange(1 << bits) + 0.5) / (1 << bits) for bits in range(seed_bits, max_bits + 1)}
    return AnyPrecisionTensor(codes, {bits: (low + (high - low) * step).half() for bits, step in steps.items()})
