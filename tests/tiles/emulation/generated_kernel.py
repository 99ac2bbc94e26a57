"""The CUDA that TileLang generates from a program, run whole on a CPU: what its passes make of loops, branches and shared memory is tested
too, which a stand-in for the language cannot see.

TileLang lowers in a process of its own: it must not share one with TVM, and tests load both.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from operator import floordiv
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.operations import find_rule, operands, params, workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.compiler.host_plan import PITCH, TensorMap

from .device_code import CUDA_ARCH, DeviceCode, KernelFault, Place, alone_at, run_folder
from .emulated_program import Edits
from .fences import Fences

SHARED_BYTES = 228 * 1024
UNTOUCHED = 0x7E  # what shared memory holds before a kernel stores to it: two of them are a NaN
KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\) main_kernel\((.*?)\) \{')
SHARED = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")
STATIC = re.compile(r"  __shared__ __align__\(16\) uint64_t (\w+)\[(\d+)\];")  # barriers
LOCAL = re.compile(
    r"^  (?:float|int|uint|signed char|fp8_e4_t|half_t|bfloat16_t|int64_t) (\w+)\[\d+\];", re.MULTILINE
)  # a thread's own arrays
MAP = re.compile(r"__grid_constant__ const CUtensorMap (\w+)")


@dataclass(frozen=True, slots=True)
class Lowered:
    """A generated kernel: its CUDA, its pointers, (name, tensor) each (a view of a tensor has a name of its own), its symbols, (name,
    tensor, dimension) each, and its launch: a grid of C expressions of ``dim_<symbol>``, blocks of a cluster in each direction, threads
    and bytes of shared memory of a block."""

    cuda: str
    pointers: tuple[tuple[str, int], ...]
    symbols: tuple[tuple[str, int, int], ...]
    grid: tuple[str, ...]
    cluster: tuple[int, ...]
    threads: int
    shared_bytes: int  # the dynamic part
    maps: tuple[tuple[str, TensorMap], ...]  # by the names of the kernel's parameters

    def grid_of(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """Its extents, x first."""
        return tuple(_value(extent, symbols) for extent in self.grid)

    def maps_of(self, symbols: Mapping[str, int], tensors: Sequence[Tensor]) -> dict[str, EncodedMap]:
        """What the host encodes of the tensors of a launch."""
        found = {}
        for name, map in self.maps:
            encoded = EncodedMap(tensors[map.param].data_ptr(), rank=len(map.dims), element_bytes=tensors[map.param].element_size())
            encoded.dims[: len(map.dims)] = [_value(e, symbols) for e in map.dims]
            encoded.strides[: len(map.dims)] = [encoded.element_bytes, *(_value(e, symbols) for e in map.strides)]
            encoded.box[: len(map.dims)] = [_value(e, symbols) for e in map.box]
            encoded.swizzle = _value(map.options[1], symbols)
            found[name] = encoded
        return found

    def clusters(self, grid: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
        """The blocks of the grid, (x, y, z) each, cluster by cluster in the order of their ranks."""
        counts = [extent // size for extent, size in zip(grid, self.cluster, strict=True)]
        return [
            [
                tuple(c * size + i for c, size, i in zip(corner[::-1], self.cluster, inner[::-1], strict=True))
                for inner in np.ndindex(*self.cluster[::-1])
            ]
            for corner in np.ndindex(*counts[::-1])
        ]


class EncodedMap(ctypes.Structure):
    """``CUtensorMap`` of ``cuda_wgmma.h``."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("dims", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("box", ctypes.c_int64 * 5),
        ("rank", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
        ("swizzle", ctypes.c_int32),
    )


def _value(expression: str, symbols: Mapping[str, int]) -> int:
    """Of a C expression over the dimensions."""
    named = {f"dim_{name}": value for name, value in symbols.items()}
    return int(eval(expression, {"__builtins__": {}, "tb_floordiv": floordiv}, named))


class GeneratedKernel:
    """The whole generated kernel of (workload, schedule) on torch tensors of the CPU.

    Blocks run one after another, those of a cluster together, in one of ``ORDERS`` of ``emulated_program``; shuffled: drawn from ``seed``
    anew at each launch. ``edits`` are of the program's files by name ("stream.py"), and of its device functions ("device"). Raises
    ``KernelFault`` for what no kernel may do.
    """

    guarded: tuple[str, ...] = ()  # outputs with memory of the test's own around them

    def __init__(
        self, workload: Any, schedule: Schedule, target: Target, edits: Edits | None = None, order: str = "shuffled", seed: int = 0
    ) -> None:
        self.workload, self.schedule, self.target, self.edits = workload, schedule, target, dict(edits or {})
        self.order, self.random = order, random.Random(seed)
        self.workspaces: dict[Any, Tensor] = {}
        self.copied: dict[str, int] = {}  # bytes that asynchronous copies of the last launch have read, by tensor

    def launch(self, tensors: Mapping[str, Tensor], workload: Any = None) -> None:
        """Runs the kernel once on tensors by the names of its parameters, in place. ``workload``: as this launch has it, where its size
        differs from the kernel's.

        The workspace, where the program takes one, is kept from launch to launch as a captured graph keeps it: only its tickets survive,
        all else is poisoned anew.
        """
        names = params(self.workload, self.schedule, self.target)
        named = {**tensors, "workspace": self._workspace(workload or self.workload)}
        fences = Fences()
        passed = [fences.tensor(named[name]) for name in names]
        declared = {o.name: o for o in operands(self.workload, self.schedule.program, self.target.arch)}
        assert all(t.is_contiguous() or (name in declared and declared[name].apart) for name, t in zip(names, passed, strict=True))
        lowered = lower(self.workload, self.schedule, self.target, self._edited())
        cuda = self.edits["device"](lowered.cuda) if "device" in self.edits else lowered.cuda
        code, arguments, shared_bytes = compiled(cuda, CUDA_ARCH[self.schedule.program], lowered.shared_bytes)
        values = {name: passed[tensor].stride(0) if dim == PITCH else passed[tensor].shape[dim] for name, tensor, dim in lowered.symbols}
        grid = lowered.grid_of(values)
        maps = lowered.maps_of(values, passed)
        values |= {name: ctypes.addressof(map) for name, map in maps.items()}
        values |= {name: passed[tensor].data_ptr() for name, tensor in lowered.pointers}
        readable = [_extent(named[name], tensor, name in self.guarded) for name, tensor in zip(names, passed, strict=True)]
        before = [code.copied_bytes("main_kernel", i) for i in range(len(names))]
        clusters = lowered.clusters(grid)
        if self.order == "shuffled":
            self.random.shuffle(clusters)
        memory = np.empty((len(clusters[0]), SHARED_BYTES + 1024), np.uint8)
        bases = [-block.ctypes.data % 1024 for block in memory]
        for blocks in reversed(clusters) if self.order == "descending" else clusters:
            memory[:] = UNTOUCHED
            bases_of = [block.ctypes.data + base for block, base in zip(memory, bases, strict=True)]
            place = Place.of(grid, blocks, bases_of, readable, shared_bytes)
            code.call_blocks("main_kernel", [[(values[name], 0) for name in arguments]] * len(blocks), lowered.threads, place)
            for block, base in zip(memory, bases, strict=True):
                if (block[:base] != UNTOUCHED).any() or (block[base + shared_bytes :] != UNTOUCHED).any():
                    raise KernelFault(f"a block stores outside of its {shared_bytes} bytes of shared memory")

        fences.take_back()
        self.copied = {name: code.copied_bytes("main_kernel", i) - before[i] for i, name in enumerate(names)}

    @property
    def tickets_left(self) -> bool:
        return any(bool(workspace[:TICKETS].any()) for workspace in self.workspaces.values())

    def _workspace(self, workload: Any) -> Tensor:
        words = workspace_words(workload, self.schedule, self.target)
        workspace = self.workspaces.setdefault(workload, torch.zeros(words, dtype=torch.int32))
        workspace[TICKETS:] = -1  # NaN
        return workspace

    def _edited(self) -> tuple[tuple[str, str], ...]:
        """(module, its text) of the program's files that are edited."""
        package = find_rule(self.schedule.program).module.rpartition(".")[0]
        found = []
        for name, edit in self.edits.items():
            if name != "device":
                module = f"{package}.{Path(name).stem}"
                spec = find_spec(module)
                assert spec is not None and spec.origin is not None
                found.append((module, edit(Path(spec.origin).read_text())))
        return tuple(found)


def _extent(own: Tensor, tensor: Tensor, guarded: bool) -> tuple[int, int]:
    """Where the memory that a kernel may touch begins and ends of the copy ``tensor`` of a test's ``own``: a guarded one's guards, too,
    which the gate looks at."""
    if guarded:
        begin = tensor.data_ptr() - int(own.storage_offset()) * own.element_size()
        return begin, begin + own.untyped_storage().nbytes()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@cache
def compiled(cuda: str, arch: int, shared_bytes: int) -> tuple[DeviceCode, tuple[str, ...], int]:
    """The kernel ``main_kernel`` for the host, its parameters in order, and the bytes of shared memory of its blocks: ``shared_bytes`` and
    then its barriers."""
    found = KERNEL.search(cuda)
    assert found is not None, "the generated source has no main_kernel"
    parameters = MAP.sub(r"const CUtensorMap* \1", found[1].replace("__restrict__", ""))
    body = f"inline void main_kernel({parameters}) {{" + cuda[found.end() :]
    for barriers in STATIC.finditer(body):
        name, count = barriers.groups()
        place = f"reinterpret_cast<uint64_t*>(tilebit_host::place.shared[tilebit_host::rank()] + {shared_bytes})"
        body, shared_bytes = body.replace(barriers[0], f"  uint64_t* {name} = {place};"), shared_bytes + -(-int(count) // 2) * 16
    body = SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(tilebit_host::place.shared[tilebit_host::rank()]);", body)
    body = LOCAL.sub(r"\g<0> memset(\1, 0xff, sizeof \1);", body)  # NaN until it is written
    functions = cuda[: cuda.index("#if defined(_MSC_VER)")]
    return DeviceCode(functions + body, arch, ["main_kernel"]), _names(found[1]), max(shared_bytes, 1)


def _names(parameters: str) -> tuple[str, ...]:
    """Of a kernel's parameters, in order."""
    return tuple(parameter.replace("*", " ").split()[-1] for parameter in parameters.split(","))


@cache
def lower(workload: Any, schedule: Schedule, target: Target, edited: tuple[tuple[str, str], ...] = ()) -> Lowered:
    """What TileLang makes of the program, whose modules ``edited`` have the text that is given with them: once a run, whose workers share
    it."""
    asked = hashlib.sha256(repr((workload, schedule, target, edited)).encode()).hexdigest()[:16]
    path = run_folder() / f"{asked}.lowered"
    with alone_at(path):
        if not path.exists():
            lowered = _lowering_process().submit(_lower, workload, schedule, target, edited).result()
            own = path.with_suffix(".new")
            own.write_bytes(pickle.dumps(lowered))
            os.replace(own, path)
    return pickle.loads(path.read_bytes())


@cache
def _lowering_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_load_compiler)


def _load_compiler() -> None:
    from tilebit.tiles.compiler.hasten import hasten_tilelang

    hasten_tilelang()
    gc.freeze()  # else what was loaded is searched for garbage again and again


def _lower(workload: Any, schedule: Schedule, target: Target, edited: tuple[tuple[str, str], ...]) -> Lowered:
    """In the other process, from which TVM's own exceptions could not return."""
    try:
        return _lower_here(workload, schedule, target, edited)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _lower_here(workload: Any, schedule: Schedule, target: Target, edited: tuple[tuple[str, str], ...]) -> Lowered:
    from tilebit.tiles.compiler.cuda import lower_cuda, lowered_arch
    from tilebit.tiles.compiler.host_plan import describe_params, read_host

    tile_program = importlib.import_module(find_rule(schedule.program).module).PROGRAM
    with tempfile.TemporaryDirectory() as folder, _modules(Path(folder), edited):
        build = importlib.import_module(find_rule(schedule.program).module).PROGRAM.build
        function = build(workload, schedule, target)
    artifact = lower_cuda(function, lowered_arch(tile_program, target), dict(tile_program.pass_configs))
    # plain Python all of it: TVM's own strings and numbers would load TVM where they arrive
    declared = operands(workload, schedule.program, target.arch)
    described = describe_params(function, params(workload, schedule, target), declared)
    plan = read_host(artifact.host_mod, artifact.device_mod, described)
    (launch,) = plan.launches
    symbols = tuple((str(name), int(tensor), int(dim)) for name, tensor, dim in plan.symbols)
    grid, cluster = tuple(map(str, launch.grid)), tuple(map(int, launch.cluster or (1, 1, 1)))
    cuda = str(artifact.kernel_source)
    signature = KERNEL.search(cuda)
    assert signature is not None, "the generated source has no main_kernel"
    pointers = tuple((name, int(arg.value)) for name, arg in zip(_names(signature[1]), launch.args, strict=True) if arg.kind == "pointer")
    mapped = [arg.value for arg in launch.args if arg.kind == "map"]
    maps = tuple((name, plan.maps[int(value)]) for name, value in zip(MAP.findall(signature[1]), mapped, strict=True))
    return Lowered(cuda, pointers, symbols, grid, cluster, int(launch.block[0]), int(launch.smem), maps)


@contextmanager
def _modules(folder: Path, edited: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """While this lasts, the edited modules and what imports them are others; their files lie in ``folder``, where TileLang reads the text
    of their functions."""
    packages = tuple({name.rpartition(".")[0] + "." for name, _ in edited})
    before = {name: module for name, module in sys.modules.items() if packages and name.startswith(packages)}
    for name in before:
        del sys.modules[name]
    try:
        for name, text in edited:
            path = folder / f"{name}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        yield
    finally:
        for name in [name for name in sys.modules if packages and name.startswith(packages)]:
            del sys.modules[name]
        sys.modules.update(before)
