"""A packed-weight GEMM program, run from its own source on a CPU; the source may first be edited, which is how bugs are planted."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilebit.tiles.gemm
from tilebit.autotune.problem import Problem, split_workspace
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.workload import Workload
from tilebit.tiles.gemm.operands import BARRIER, Operands, gemm_params

from .device_code import CUDA_ARCH, DeviceCode
from .tile_language import GridKnown, TensorType, TileLanguage
from .tile_memory import Buffer

GEMM_DIR = Path(tilebit.tiles.gemm.__file__).parent
TORCH_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16}
WORKSPACE = {"floats": "partials", "tiles": "tickets"}  # dynamic extents and whose they are
Edits = Mapping[str, Callable[[str], str]]  # file name ("packed.py", "operands.py", "device": all headers) -> how its text is changed


def device_calls(cases: Iterable[tuple[Workload, Schedule]]) -> list[str]:
    """The device functions that the kernels of ``cases`` call: compiling them at once costs less than one by one."""
    calls = []
    for workload, s in cases:
        p = Operands(workload, s)
        threads = s.num_warps * 32
        calls.append(p.dequantize_call())
        if s.block_m % 16 == 0:
            calls.append(p.stage_call())
        if s.split_k > 1:
            calls.append(f"tilebit::reduce_split_k<{s.block_n * s.block_m // threads}, {threads}, {BARRIER}>")
    return list(dict.fromkeys(calls))


class EmulatedGemm:
    """The kernel of (workload, schedule): ``gemm(problem, y)`` computes the first ``len(y)`` rows of the problem into y, as a launch does.

    Blocks run one after another, in an order drawn from ``order``: split-k tickets see another arrival order with each. ``tickets`` are
    kept from launch to launch, as a captured graph keeps them. ``calls`` are the device functions worth compiling together.
    """

    def __init__(
        self, workload: Workload, schedule: Schedule, edits: Edits | None = None, calls: Iterable[str] = (), order: int = 0
    ) -> None:
        self.workload, self.schedule, self.edits = workload, schedule, dict(edits or {})
        self.calls = tuple(calls) or tuple(device_calls([(workload, schedule)]))
        self.random = random.Random(order)
        self.tickets: dict[int, np.ndarray] = {}
        self.devices: dict[str, DeviceCode] = {}

    def __call__(self, problem: Problem, y: Tensor) -> None:
        m = y.shape[0]
        arrays = {"x": _x(problem, m), **{name: _bits(t).numpy() for name, t in problem.operands.items()}}
        self.launch(arrays, _storage(y), int(y.storage_offset()), m)

    def launch(self, arrays: dict[str, np.ndarray], y: np.ndarray, start: int, m: int) -> None:
        """``arrays`` are the operands as the kernel takes them (16-bit floats as uint16 bits); y [m, n] is in the flat ``y`` from
        element ``start`` on."""
        if self.schedule.split_k > 1:
            workspace = {name: t.numpy() for name, t in split_workspace(self.workload.with_m(m), self.schedule, "cpu").items()}
            workspace["partials"][:] = np.nan
            tickets = self.tickets.setdefault(m, workspace["tickets"])
            arrays = {**arrays, "partials": workspace["partials"], "tickets": tickets}
        symbols = {"m": m, **{symbol: arrays[name].size if name in arrays else 0 for symbol, name in WORKSPACE.items()}}
        language = TileLanguage(symbols, self._device)
        main = self._build(language)
        types_of = {name: t for name, t in main.__annotations__.items() if isinstance(t, TensorType)}
        assert tuple(types_of) == gemm_params(self.workload, self.schedule)
        buffers: dict[str, Any] = {name: None for name in main.__annotations__}
        for name, kind in types_of.items():
            data, first = (y, start) if name == "y" else (np.ascontiguousarray(arrays[name]).reshape(-1), 0)
            assert name == "y" or data.size == np.prod(kind.shape), f"{name} is {arrays[name].shape}, the kernel takes {kind.shape}"
            buffers[name] = Buffer(kind.shape, kind.dtype, data, first)
        try:
            main(**buffers)
        except GridKnown:
            blocks = list(product(*map(range, language.grid)))
        self.random.shuffle(blocks)
        for block in blocks:
            language.block = block
            main(**buffers)

    def _device(self, source: str) -> DeviceCode:
        source = self.edits["device"](source) if "device" in self.edits else source
        if source not in self.devices:
            self.devices[source] = DeviceCode(source, CUDA_ARCH[self.schedule.program], self.calls)
        return self.devices[source]

    def _build(self, language: TileLanguage) -> Callable[..., None]:
        tilelang = types.SimpleNamespace(language=language)
        layout = types.SimpleNamespace(make_linear_layout=id)
        with _modules({"tilelang": tilelang, "tilelang.language": language, "tilelang.layout": layout}):
            packed = self._module("packed.py")
            if "operands.py" in self.edits:
                packed.Operands = self._module("operands.py").Operands
            return packed.build(self.workload, self.schedule)

    def _module(self, name: str) -> Any:
        """A fresh copy of a module of the GEMM programs, edited."""
        text = (GEMM_DIR / name).read_text()
        module: Any = types.ModuleType(f"{tilebit.tiles.gemm.__name__}._emulated_{name.removesuffix('.py')}")
        module.__package__ = tilebit.tiles.gemm.__name__
        with _modules({module.__name__: module}):
            exec(compile(self.edits[name](text) if name in self.edits else text, name, "exec", dont_inherit=True), module.__dict__)
        return module


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
