"""A packed-weight GEMM program, run from its own source on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

import tilebit.tiles.gemm
from tilebit.autotune.problems.gemm import Problem, split_workspace
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import find_rule, params
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name

from .device_code import CUDA_ARCH
from .emulated_program import ORDERS, Edits, EmulatedProgram
from .launch import Plan

GEMMS = tilebit.tiles.gemm.__name__
TORCH_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
# What programs take from other files, which edits may name, too.
HELPERS = {
    "operands.py": ("Operands", "addresses", "column_of", "finish"),
    "wgmma_exchange.py": ("exchange_macro", "first_of", "meet_macro"),
    "wgmma_load.py": ("load_macros",),
    "wgmma_numbers.py": ("numbers_macros",),
    "wgmma_scatter.py": ("scatter_macro",),
}
TARGETS = {name: target_from_name("sm_80" if arch < 900 else "sm_90a") for name, arch in CUDA_ARCH.items() if name.startswith("gemm")}
Case = tuple[Workload, Schedule]
__all__ = ["ORDERS", "Case", "Edits", "EmulatedGemm"]


class EmulatedGemm(EmulatedProgram):
    """``gemm(problem, y)`` computes the first ``len(y)`` rows of the problem into y, as a launch does.

    ``workspaces`` are kept from launch to launch, by m, as a captured graph keeps them. ``together`` are cases whose device functions are
    compiled with this one's.
    """

    late = ("x", "workspace", "y")
    guarded = ("y",)

    def __init__(
        self,
        workload: Workload,
        schedule: Schedule,
        edits: Edits | None = None,
        together: Iterable[Case] = (),
        target: Target | None = None,
        order: str = "shuffled",
        seed: int = 0,
    ) -> None:
        super().__init__(workload, schedule, target or TARGETS[schedule.program], edits, order, seed)
        self.together = tuple(together)
        self.workspaces: dict[int, np.ndarray] = {}

    def __call__(self, problem: Problem, y: Tensor) -> None:
        m = y.shape[0]
        given = {name: t for name, t in problem.named(y).items() if name != "y"}
        arrays = {**{name: _bits(t).numpy() for name, t in given.items()}, "x": _x(problem, m)}
        self.launch(arrays, _storage(y), int(y.storage_offset()), m)

    def launch(self, arrays: dict[str, np.ndarray], y: np.ndarray, start: int, m: int) -> None:
        """``arrays`` are the operands as the kernel takes them (16-bit floats as uint16 bits); y [m, n] is in the flat ``y`` from
        element ``start`` on."""
        words = 0
        for name, tensor in split_workspace(self.workload.with_m(m), self.schedule, self.target, "cpu").items():
            fresh = tensor.numpy()
            if m in self.workspaces:
                fresh[:TICKETS] = self.workspaces[m][:TICKETS]
            self.workspaces[m], words = fresh, fresh.size
            arrays = {**arrays, name: fresh}
        flat = {name: (np.ascontiguousarray(array).reshape(-1), 0) for name, array in arrays.items()}
        self.run_blocks({"m": m, "words": words}, {**flat, "y": (y, start)})

    def params(self) -> tuple[str, ...]:
        return params(self.workload, self.schedule, self.target)

    def expected_calls(self, plan: Plan) -> tuple[str, ...]:
        cases = tuple(case for case in self.together if case[1].program == self.schedule.program)
        return device_calls(cases).get(plan.source, ())

    def build(self) -> Callable[..., None]:
        module = self.module(find_rule(self.schedule.program).module)
        for file, names in HELPERS.items():
            if file in self.edits:
                edited = self.module(f"{GEMMS}.{file.removesuffix('.py')}")
                module.__dict__.update({name: getattr(edited, name) for name in names})
        return module.build(self.workload, self.schedule, self.target)


@cache
def device_calls(cases: tuple[Case, ...]) -> dict[str, tuple[str, ...]]:
    """The device functions that the kernels of ``cases`` call, by the source they are in: compiling them at once costs less than one by
    one."""
    found: dict[str, dict[str, None]] = {}
    for workload, schedule in cases:
        plan = EmulatedGemm(workload, schedule).rehearse({"m": workload.m, "words": 0})
        found.setdefault(plan.source, {}).update(plan.calls)
    return {source: tuple(calls) for source, calls in found.items()}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(TORCH_BITS.get(tensor.dtype, tensor.dtype))


def _x(problem: Problem, m: int) -> np.ndarray:
    """The first m rows, rows padded with zeros to whole 16 bytes."""
    x = _bits(problem.x[:m]).numpy()
    x = x if problem.workload.format.x else x.view(np.uint16)
    return np.pad(x, ((0, 0), (0, -problem.workload.k % (16 // x.itemsize))))


def _storage(y: Tensor) -> np.ndarray:
    """All of the memory that y lies in, guard bands included, as 16-bit words."""
    return torch.empty(0, dtype=torch.int16).set_(y.untyped_storage()).numpy().view(np.uint16)
