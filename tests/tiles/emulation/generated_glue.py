"""What stands between products, run as the CUDA that TileLang generates from it."""

from __future__ import annotations

from torch import Tensor

from tilebit.autotune.problems.glue import GlueProblem

from .generated_kernel import GeneratedKernel


class GeneratedGlue(GeneratedKernel):
    """``kernel(problem, outputs)`` launches the kernel, as the gate wants it."""

    guarded = ("y",)

    def __call__(self, problem: GlueProblem, outputs: dict[str, Tensor]) -> None:
        self.launch(problem.named(outputs))
