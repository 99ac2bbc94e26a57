"""A packed-weight GEMM program, run as the CUDA that TileLang generates from it."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from tilebit.autotune.problems.gemm import Problem
from tilebit.schedules.gemm.workload import X_ROW_BYTES

from .generated_kernel import GeneratedKernel


class GeneratedGemm(GeneratedKernel):
    """``gemm(problem, y)`` computes the first ``len(y)`` rows of the problem into y, as a launch does."""

    guarded = ("y",)

    def __call__(self, problem: Problem, y: Tensor) -> None:
        m = y.shape[0]
        x = pad(problem.x[:m], (0, -problem.workload.k % (X_ROW_BYTES // problem.workload.x_bytes)))
        operands = {name: tensor.contiguous() for name, tensor in problem.named(y).items() if name != "y"}
        self.launch({**operands, "x": x, "y": y}, self.workload.with_m(m))
