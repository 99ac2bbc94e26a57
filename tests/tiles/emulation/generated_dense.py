"""A product with a 16-bit weight, run as the CUDA that TileLang generates from it."""

from __future__ import annotations

from torch import Tensor

from tilebit.autotune.problems.dense import DenseProblem

from .generated_kernel import GeneratedKernel


class GeneratedDense(GeneratedKernel):
    """``kernel(problem, y)`` computes the first ``len(y)`` rows of the problem into y, as a launch does."""

    guarded = ("y",)

    def __call__(self, problem: DenseProblem, y: Tensor) -> None:
        self.launch(problem.named(y))
