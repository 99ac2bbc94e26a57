"""A TileLang program, run from its own source on a CPU; the source may first be edited, which is how bugs are planted."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tilebit.schedules.operations import find_rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

from .device_code import CUDA_ARCH, DeviceCode
from .fences import Fences
from .launch import Plan, TensorType
from .rehearsal import Rehearsal
from .tile_language import TileLanguage
from .tile_memory import Buffer

ORDERS = ("shuffled", "ascending", "descending")
# File name ("wgmma.py", "operands.py", "device": all headers) -> how its text is changed
Edit = Callable[[str], str]
Edits = Mapping[str, Edit]


class EmulatedProgram:
    """The kernel of (workload, schedule). Clusters of blocks run one after another in one of ``ORDERS``, those drawn from ``seed`` anew at
    each launch: tickets see other orders of arrival; groups of threads inside a cluster take turns, drawn likewise.
    """

    late: tuple[str, ...] = ()  # tensors that an earlier kernel may still be reading or writing
    guarded: tuple[str, ...] = ()  # tensors with memory of the test's own after them

    def __init__(self, workload: Any, schedule: Schedule, target: Target, edits: Edits | None, order: str, seed: int) -> None:
        self.workload, self.schedule, self.target, self.edits = workload, schedule, target, dict(edits or {})
        self.order, self.random = order, random.Random(seed)

    def run_blocks(self, symbols: dict[str, int], arrays: Mapping[str, tuple[np.ndarray, int]]) -> None:
        """One launch. ``symbols`` are the dynamic extents; each array is flat and its tensor begins at the element given with it."""
        plan = self.rehearse(symbols)
        language = TileLanguage(symbols, plan, self.device(plan), self.random)
        fences = Fences()
        run = self._bind(self._build(language), {name: (fences.array(data), first) for name, (data, first) in arrays.items()})
        language.tensors = [b.bounds for b in run.keywords.values() if b is not None]
        clusters = plan.clusters()
        if self.order == "shuffled":
            self.random.shuffle(clusters)
        for cluster in reversed(clusters) if self.order == "descending" else clusters:
            language.run_cluster(cluster, run)
        fences.take_back()

    def rehearse(self, symbols: dict[str, int]) -> Plan:
        rehearsal = Rehearsal(symbols)
        main = self._build(rehearsal)
        return rehearsal.walk(self._bind(main, None))

    def params(self) -> tuple[str, ...]:
        """The tensors that the kernel takes, in call order."""
        raise NotImplementedError

    def expected_calls(self, plan: Plan) -> tuple[str, ...]:
        """Device functions to compile together with those of ``plan``: of the same source, for other kernels."""
        return ()

    def device(self, plan: Plan) -> DeviceCode:
        if "device" in self.edits:
            return _device(self.edits["device"](plan.source), self.schedule.program, tuple(plan.calls))
        shared = self.expected_calls(plan)
        return _device(plan.source, self.schedule.program, shared if plan.calls.keys() <= set(shared) else tuple(plan.calls))

    def _bind(self, main: Callable[..., None], arrays: Mapping[str, tuple[np.ndarray, int]] | None) -> partial[None]:
        """``main`` with its parameters; without ``arrays`` they hold nothing."""
        kinds = {name: t for name, t in main.__annotations__.items() if isinstance(t, TensorType)}
        buffers: dict[str, Any] = {name: None for name in main.__annotations__}
        for (own, kind), name in zip(kinds.items(), self.params(), strict=True):  # a call passes tensors by their order
            data, first = (np.zeros(1, np.int32), 0) if arrays is None else arrays[name]
            elements = data.size - first
            right = arrays is None or elements == np.prod(kind.shape) or (name in self.guarded and elements >= np.prod(kind.shape))
            assert right, f"{name} has {elements} elements, the kernel takes {kind.shape}"
            buffers[own] = Buffer(kind.shape, kind.dtype, data, first, late=name in self.late)
        return partial(main, **buffers)

    def _build(self, language: TileLanguage) -> Callable[..., None]:
        tilelang = types.SimpleNamespace(language=language)
        layout = types.SimpleNamespace(make_linear_layout=id)
        with modules({"tilelang": tilelang, "tilelang.language": language, "tilelang.layout": layout}):
            return self.build()

    def build(self) -> Callable[..., None]:
        """What the program's ``build`` returns while ``tilelang`` is stood in for."""
        return self.module(find_rule(self.schedule.program).module).PROGRAM.build(self.workload, self.schedule, self.target)

    def module(self, name: str) -> Any:
        """A fresh copy of the module ``name``, edited."""
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        package, _, stem = name.rpartition(".")
        text = Path(spec.origin).read_text()
        if (edit := self.edits.get(f"{stem}.py")) is not None:
            text = edit(text)
        module: Any = types.ModuleType(f"{package}._emulated_{stem}")
        module.__package__ = package
        with modules({module.__name__: module}):
            exec(_code(text, f"{stem}.py"), module.__dict__)
        return module


@cache
def _code(text: str, file: str) -> types.CodeType:
    return compile(text, file, "exec", dont_inherit=True)


@cache
def _device(source: str, program: str, calls: tuple[str, ...]) -> DeviceCode:
    return DeviceCode(source, CUDA_ARCH[program], calls)


@contextmanager
def modules(stand_ins: dict[str, Any]) -> Iterator[None]:
    """``sys.modules`` with ``stand_ins``; TileLang itself is never imported here."""
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
