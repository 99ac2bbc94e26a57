"""Kernels of attention, norms and gates of tiny models, compiled in parallel before a test calls them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilebit.kernels import build
from tilebit.layouts.kv_formats import KVFormat
from tilebit.ops.dispatch import device_target
from tilebit.transformers.needed import kernels_of


def build_attention(model: Any, formats: Iterable[str], batches: Sequence[int], tokens: int) -> None:
    """What prompts of ``tokens`` tokens and steps of ``model``, in 16 bits and of a known kind, launch over caches of ``formats`` on its
    device, fused and not; on a CPU, where a kernel compiles in a moment, nothing: what is needed is compiled when it is called."""
    if model.device.type == "cuda":
        target = device_target(model.device)
        build(kernels_of(model, map(KVFormat.from_name, formats), batches, tokens, target), target, jobs=None)
