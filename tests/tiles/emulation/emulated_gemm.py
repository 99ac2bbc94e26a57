"""A packed-weight GEMM program, run from its own source on a CPU; the source may first be edited, which is how bugs are planted."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilebit.tiles.gemm
from tilebit.autotune.problem import Problem, split_workspace
from tilebit.schedules.rules.gemm import TICKETS
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name
from tilebit.schedules.workload import Workload
from tilebit.tiles.gemm.operands import gemm_params
from tilebit.tiles.program import program_module

from .device_code import CUDA_ARCH, DeviceCode
from .launch import Plan, TensorType
from .rehearsal import Rehearsal
from .tile_language import TileLanguage
from .tile_memory import Buffer

GEMM_DIR = Path(tilebit.tiles.gemm.__file__).parent
TORCH_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16}
SOURCES = {"gemm_stream_bulk": "stream"}  # where a program's `build` is, if not in the module of its name
TARGETS = {name: target_from_name("sm_80" if arch < 900 else "sm_90a") for name, arch in CUDA_ARCH.items()}
LATE = ("x", "workspace", "y")  # what an earlier kernel may still be reading or writing
ORDERS = ("shuffled", "ascending", "descending")
# File name ("wgmma.py", "operands.py", "device": all headers) -> how its text is changed
Edits = Mapping[str, Callable[[str], str]]
Case = tuple[Workload, Schedule]


class EmulatedGemm:
    """The kernel of (workload, schedule): ``gemm(problem, y)`` computes the first ``len(y)`` rows of the problem into y, as a launch does.

    Clusters of blocks run one after another in one of ``ORDERS``, those drawn from ``seed`` anew at each launch: tickets see other orders
    of arrival; groups of threads inside a cluster take turns, drawn likewise. ``workspaces`` are kept from launch to launch, by m, as a
    captured graph keeps them. ``together`` are cases whose device functions are compiled with this one's.
    """

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
        self.workload, self.schedule, self.edits = workload, schedule, dict(edits or {})
        self.target = target or TARGETS[schedule.program]
        self.together = tuple(together)
        self.order, self.random = order, random.Random(seed)
        self.workspaces: dict[int, np.ndarray] = {}

    def __call__(self, problem: Problem, y: Tensor) -> None:
        m = y.shape[0]
        arrays = {"x": _x(problem, m), **{name: _bits(t).numpy() for name, t in problem.operands.items()}}
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
        symbols = {"m": m, "words": words}
        plan = self.rehearse(symbols)
        language = TileLanguage(symbols, plan, self._device(plan), self.random)
        run = self._bind(self._build(language), arrays, y, start)
        language.tensors = [b.bounds for b in run.keywords.values() if b is not None]
        clusters = plan.clusters()
        if self.order == "shuffled":
            self.random.shuffle(clusters)
        for cluster in reversed(clusters) if self.order == "descending" else clusters:
            language.run_cluster(cluster, run)

    def rehearse(self, symbols: dict[str, int]) -> Plan:
        rehearsal = Rehearsal(symbols)
        main = self._build(rehearsal)
        return rehearsal.walk(self._bind(main, None, np.zeros(1, np.uint16), 0))

    def _bind(self, main: Callable[..., None], arrays: dict[str, np.ndarray] | None, y: np.ndarray, start: int) -> partial[None]:
        """``main`` with its parameters; without ``arrays`` they hold nothing."""
        kinds = {name: t for name, t in main.__annotations__.items() if isinstance(t, TensorType)}
        assert tuple(kinds) == gemm_params(self.workload, self.schedule)
        buffers: dict[str, Any] = {name: None for name in main.__annotations__}
        for name, kind in kinds.items():
            data, first = y, start
            if name != "y" and arrays is not None:
                data, first = np.ascontiguousarray(arrays[name]).reshape(-1), 0
                assert data.size == np.prod(kind.shape), f"{name} has {data.size} elements, the kernel takes {kind.shape}"
            buffers[name] = Buffer(kind.shape, kind.dtype, data, first, late=name in LATE)
        return partial(main, **buffers)

    def _device(self, plan: Plan) -> DeviceCode:
        if "device" in self.edits:
            return _device(self.edits["device"](plan.source), self.schedule.program, tuple(plan.calls))
        cases = tuple(case for case in self.together if case[1].program == self.schedule.program)
        shared = device_calls(cases).get(plan.source, ())
        return _device(plan.source, self.schedule.program, shared if plan.calls.keys() <= set(shared) else tuple(plan.calls))

    def _build(self, language: TileLanguage) -> Callable[..., None]:
        tilelang = types.SimpleNamespace(language=language)
        layout = types.SimpleNamespace(make_linear_layout=id)
        with _modules({"tilelang": tilelang, "tilelang.language": language, "tilelang.layout": layout}):
            name = self.schedule.program
            module = self._module(f"{SOURCES.get(name, program_module(name).rpartition('.')[2])}.py")
            if "operands.py" in self.edits:
                module.Operands = self._module("operands.py").Operands
            return module.build(self.workload, self.schedule, self.target)

    def _module(self, name: str) -> Any:
        """A fresh copy of a module of the GEMM programs, edited."""
        text = (GEMM_DIR / name).read_text()
        module: Any = types.ModuleType(f"{tilebit.tiles.gemm.__name__}._emulated_{name.removesuffix('.py')}")
        module.__package__ = tilebit.tiles.gemm.__name__
        with _modules({module.__name__: module}):
            exec(compile(self.edits[name](text) if name in self.edits else text, name, "exec", dont_inherit=True), module.__dict__)
        return module


@cache
def _device(source: str, program: str, calls: tuple[str, ...]) -> DeviceCode:
    return DeviceCode(source, CUDA_ARCH[program], calls)


@cache
def device_calls(cases: tuple[Case, ...]) -> dict[str, tuple[str, ...]]:
    """The device functions that the kernels of ``cases`` call, by the source they are in: compiling them at once costs less than one by
    one."""
    found: dict[str, dict[str, None]] = {}
    for workload, schedule in cases:
        plan = EmulatedGemm(workload, schedule).rehearse({"m": workload.m, "words": 0})
        found.setdefault(plan.source, {}).update(plan.calls)
    return {source: tuple(calls) for source, calls in found.items()}


@contextmanager
def _modules(stand_ins: dict[str, Any]) -> Iterator[None]:
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


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(TORCH_BITS.get(tensor.dtype, tensor.dtype))


def _x(problem: Problem, m: int) -> np.ndarray:
    """The first m rows, rows padded with zeros to whole 16 bytes."""
    return np.pad(_bits(problem.x[:m]).numpy().view(np.uint16), ((0, 0), (0, -problem.workload.k % 8)))


def _storage(y: Tensor) -> np.ndarray:
    """All of the memory that y lies in, guard bands included, as 16-bit words."""
    return torch.empty(0, dtype=torch.int16).set_(y.untyped_storage()).numpy().view(np.uint16)
