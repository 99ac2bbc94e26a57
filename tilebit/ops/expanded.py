"""Products of many rows with a weight of any precision: one kernel expands the weight to 16 bits, the
library multiplies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runtime import LoadedKernel
from .launchers import Launcher, bind

if TYPE_CHECKING:
    from .dispatch import Plan


def expanded(kernel: LoadedKernel, workload: Any, plan: Plan) -> Launcher:
    """A product's call by ``kernel``, which expands its weight (``workload`` says to what), and torch's
    matrix product with fp32 sums.

    The expanded weight is allocated at each call, by torch on the current stream: a captured CUDA
    graph keeps it in its own pool, and between calls its memory is others'.
    """
    expand = bind(kernel, workload.operands(plan.target.arch), plan.device, 0)
    shape = (workload.n, workload.columns)

    def launch(
        x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, row_scales: Tensor | None, bias: Tensor | None, y: Tensor
    ) -> None:
        dense = x.new_empty(shape)
        expand(weight, scales, dense)
        if bias is None:
            torch.mm(x, dense.t(), out=y)
        else:
            torch.addmm(bias, x, dense.t(), out=y)

    return launch
