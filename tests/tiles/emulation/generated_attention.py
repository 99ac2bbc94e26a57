"""A program of attention, run as the CUDA that TileLang generates from it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .generated_kernel import GeneratedKernel


class GeneratedAttention(GeneratedKernel):
    """``kernel(tensors)`` launches the kernel on torch tensors by the names of its parameters; outputs are written in place."""

    guarded = ("out", "lse", "out_k", "out_v")

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        self.launch(tensors)
