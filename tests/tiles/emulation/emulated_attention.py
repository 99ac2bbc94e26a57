"""The CUDA programs of attention over a low-bit cache, run from their own source on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.operations import find_rule, params, workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

from .emulated_program import Edits, EmulatedProgram
from .launch import Plan, TensorType
from .tile_language import TileLanguage

ATTENTION = "tilebit.tiles.attention"
SOURCES = {"attention_decode_bulk": f"{ATTENTION}.decode"}  # where a program's `build` is, if not in the module of its name
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16}
Case = tuple[AttentionWorkload, Schedule, Target]


class EmulatedAttention(EmulatedProgram):
    """``kernel(tensors)`` launches it on torch tensors by the names of its parameters; outputs are written in place.

    The workspace, where the program takes one, is kept from launch to launch as a captured graph keeps it: only its tickets survive, all
    else is poisoned anew. ``together`` are cases whose device functions are compiled with this one's.
    """

    guarded = ("out", "lse", "out_k", "out_v")

    def __init__(
        self,
        workload: AttentionWorkload,
        schedule: Schedule,
        target: Target,
        edits: Edits | None = None,
        together: Iterable[Case] = (),
        order: str = "shuffled",
        seed: int = 0,
    ) -> None:
        super().__init__(workload, schedule, target, edits, order, seed)
        self.together = tuple(together)
        self.workspace = torch.zeros(workspace_words(workload, schedule, target), dtype=torch.int32)

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        self.workspace[TICKETS:] = -1  # NaN
        named = {"workspace": self.workspace, **tensors}
        arrays = {name: _memory(named[name], name in self.guarded) for name in self.params()}
        self.run_blocks(self._symbols(named), arrays)

    @property
    def tickets_left(self) -> bool:
        return bool(self.workspace[:TICKETS].any())

    def params(self) -> tuple[str, ...]:
        return params(self.workload, self.schedule, self.target)

    def expected_calls(self, plan: Plan) -> tuple[str, ...]:
        return device_calls(self.together).get(plan.source, ())

    def build(self) -> Callable[..., None]:
        name = self.schedule.program
        return self.module(SOURCES.get(name, find_rule(name).module)).build(self.workload, self.schedule, self.target)

    def plan(self) -> Plan:
        """The launch's grid is that of no tokens at all; what it calls does not depend on them."""
        return self.rehearse(_AnySymbols())

    def _symbols(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """The dynamic extents, from the tensors that have them."""
        found: dict[str, int] = {}
        kinds = [t for t in self._build(_Shapes()).__annotations__.values() if isinstance(t, TensorType)]
        for kind, name in zip(kinds, self.params(), strict=True):
            for extent, size in zip(kind.shape, tensors[name].shape, strict=True):
                if isinstance(extent, _Extent):
                    symbol, value = extent.name, size - extent.more
                    assert found.setdefault(symbol, value) == value, f"{symbol} is {found[symbol]}, and {value} in {name}"
        return _AnySymbols(found)


@cache
def device_calls(cases: tuple[Case, ...]) -> dict[str, tuple[str, ...]]:
    """The device functions that the kernels of ``cases`` call, by the source they are in: compiling them at once costs less than one by
    one."""
    found: dict[str, dict[str, None]] = {}
    for workload, schedule, target in cases:
        plan = EmulatedAttention(workload, schedule, target).plan()
        found.setdefault(plan.source, {}).update(plan.calls)
    return {source: tuple(calls) for source, calls in found.items()}


class _AnySymbols(dict[str, int]):
    """Extents, 1 where no tensor has one."""

    def __missing__(self, _: str) -> int:
        return 1


class _Extent:
    """A dynamic extent and a number more."""

    def __init__(self, name: str, more: int = 0) -> None:
        self.name, self.more = name, more

    def __add__(self, more: int) -> _Extent:
        return _Extent(self.name, self.more + more)


class _Shapes(TileLanguage):
    """Stands in while a program's signature is read: extents keep their names."""

    def __init__(self) -> None:  # nothing will run
        pass

    def dynamic(self, name: str) -> Any:
        return _Extent(name)

    def Tensor(self, shape: tuple[Any, ...], dtype: str) -> TensorType:
        return TensorType(shape, dtype)


def _memory(tensor: Tensor, guarded: bool) -> tuple[np.ndarray, int]:
    """The memory of a contiguous tensor, as it is stored; of a guarded one all that it lies in, and the element at which it begins."""
    assert tensor.is_contiguous()
    bits, begin = BITS.get(tensor.dtype, tensor.dtype), int(tensor.storage_offset())
    flat = torch.empty(0, dtype=bits).set_(tensor.untyped_storage()).numpy()
    flat = flat.view(np.uint16) if bits == torch.int16 else flat
    return (flat, begin) if guarded else (flat[begin : begin + tensor.numel()], 0)
