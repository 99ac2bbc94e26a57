"""The quantization of activations, run as the CUDA that TileLang generates from it."""

from __future__ import annotations

from torch import Tensor

from tilebit.autotune.problems.activations import QuantizeProblem

from .generated_kernel import GeneratedKernel


class GeneratedQuantize(GeneratedKernel):
    """``kernel(problem, outputs)`` launches the kernel, as the gate wants it."""

    guarded = ("codes", "scales")

    def __call__(self, problem: QuantizeProblem, outputs: dict[str, Tensor]) -> None:
        self.launch(problem.named(outputs))
