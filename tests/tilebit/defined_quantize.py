"""Kernels of rows of codes that are their definition in torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.problems.activations import QuantizeProblem
from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.operands import kernel_params
from tilebit.schedules.schedule import Schedule


class DefinedQuantize:
    """Stands for ``find_kernel``: the definition in torch, whatever is asked for."""

    def __init__(self) -> None:
        self.asked: list[QuantizeWorkload] = []
        self.early: list[bool] = []

    def find(self, w: QuantizeWorkload, target: Any) -> Any:
        self.asked.append(w)
        names = kernel_params(w.operands(target.arch), False)

        def run(*tensors: Tensor, early: bool = False) -> None:
            o = dict(zip(names, tensors, strict=True))
            if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors):
                raise RuntimeError("the kernel refuses its operands")
            self.early.append(early)
            for name, right in QuantizeProblem(replace(w, m=len(o["x"])), o).reference().items():
                o[name].copy_(right.view(torch.int8) if name == "codes" else right)

        schedule = Schedule("quantize_cpu", 1, 1, 1).to_json()
        dependent = lambda *tensors: run(*tensors, early=True)  # noqa: E731
        return SimpleNamespace(params=names, run=run, run_dependent=dependent, path="defined", manifest={"schedule": schedule})
