"""The CUDA that TileLang generates from a program, run whole on a CPU: what its passes make of loops, branches and shared memory is tested
too, which a stand-in for the language cannot see.

TileLang lowers in a process of its own: it must not share one with TVM, and tests load both.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from operator import floordiv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.operations import find_rule, operands, params, workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

from .device_code import CUDA_ARCH, DeviceCode, KernelFault, Place
from .emulated_program import Edits

SHARED_BYTES = 228 * 1024
GUARDED = ("out", "lse", "out_k", "out_v")  # outputs with memory of the test's own around them
UNTOUCHED = 0x7E  # what shared memory holds before a kernel stores to it: two of them are a NaN
# What generated code calls of TileLang's own headers, and its names of types.
TILELANG = """
namespace tl {
inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> inline void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
}
using half_t = half; using bfloat16_t = __nv_bfloat16; using uint = unsigned;
"""
KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\) main_kernel\((.*?)\) \{')
SHARED = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")


@dataclass(frozen=True, slots=True)
class Lowered:
    """A generated kernel: its CUDA, the names of its tensors in call order, its symbols, (name, tensor, dimension) each, and its launch: a
    grid of C expressions of ``dim_<symbol>``, threads and bytes of shared memory."""

    cuda: str
    tensors: tuple[str, ...]
    symbols: tuple[tuple[str, int, int], ...]
    grid: tuple[str, ...]
    threads: int
    shared_bytes: int

    def grid_of(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """Its extents, x first."""
        named = {f"dim_{name}": value for name, value in symbols.items()}
        return tuple(int(eval(extent, {"__builtins__": {}, "tb_floordiv": floordiv}, named)) for extent in self.grid)


class GeneratedAttention:
    """``kernel(tensors)`` launches the whole generated kernel on torch tensors by the names of its parameters; outputs are written in
    place.

    The workspace, where the program takes one, is kept from launch to launch as a captured graph keeps it: only its tickets survive, all
    else is poisoned anew. Blocks run one after another, in an order drawn from ``seed`` anew at each launch. ``edits`` are of the
    program's files by name ("ring.py"), and of its device functions ("device").
    """

    def __init__(self, workload: AttentionWorkload, schedule: Schedule, target: Target, edits: Edits | None = None, seed: int = 0) -> None:
        self.workload, self.schedule, self.target, self.edits = workload, schedule, target, dict(edits or {})
        self.random = random.Random(seed)
        self.workspace = torch.zeros(workspace_words(workload, schedule, target), dtype=torch.int32)

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        self.workspace[TICKETS:] = -1  # NaN
        named = {"workspace": self.workspace, **tensors}
        names = params(self.workload, self.schedule, self.target)
        passed = [named[name] for name in names]
        lowered = lower(self.workload, self.schedule, self.target, self._edited())
        cuda = self.edits["device"](lowered.cuda) if "device" in self.edits else lowered.cuda
        code, arguments = compiled(cuda, CUDA_ARCH[self.schedule.program])
        assert all(tensor.is_contiguous() for tensor in passed)
        values = {name: passed[tensor].shape[dim] for name, tensor, dim in lowered.symbols}
        grid = lowered.grid_of(values)
        values |= {name: tensor.data_ptr() for name, tensor in zip(lowered.tensors, passed, strict=True)}
        readable = [_extent(tensor, name in GUARDED) for name, tensor in zip(names, passed, strict=True)]
        memory = np.empty(SHARED_BYTES + 1024, np.uint8)
        base = -memory.ctypes.data % 1024
        blocks = [index[::-1] for index in np.ndindex(*grid[::-1])]
        self.random.shuffle(blocks)
        for block in blocks:
            memory[:] = UNTOUCHED
            place = Place.of(grid, [block], [memory.ctypes.data + base], readable)
            code.call("main_kernel", [(values[name], 0) for name in arguments], lowered.threads, place)
            if (memory[:base] != UNTOUCHED).any() or (memory[base + lowered.shared_bytes :] != UNTOUCHED).any():
                raise KernelFault(f"a block stores outside of its {lowered.shared_bytes} bytes of shared memory")

    @property
    def tickets_left(self) -> bool:
        return bool(self.workspace[:TICKETS].any())

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


def _extent(tensor: Tensor, guarded: bool) -> tuple[int, int]:
    """Where the memory that a kernel may touch begins and ends: a guarded tensor's guards, too, which the gate looks at."""
    if guarded:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@cache
def compiled(cuda: str, arch: int) -> tuple[DeviceCode, tuple[str, ...]]:
    """The kernel ``main_kernel`` for the host, and its parameters in order."""
    found = KERNEL.search(cuda)
    assert found is not None, "the generated source has no main_kernel"
    body = "inline void main_kernel(" + found[1].replace("__restrict__", "") + ") {" + cuda[found.end() :]
    body = SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(tilebit_host::place.shared[tilebit_host::rank()]);", body)
    functions = cuda[: cuda.index("#if defined(_MSC_VER)")]
    params = tuple(param.replace("*", " ").split()[-1] for param in found[1].split(","))
    return DeviceCode(functions + TILELANG + body, arch, ["main_kernel"]), params


@cache
def lower(workload: AttentionWorkload, schedule: Schedule, target: Target, edited: tuple[tuple[str, str], ...] = ()) -> Lowered:
    return _lowering_process().submit(_lower, workload, schedule, target, edited).result()


@cache
def _lowering_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _lower(workload: AttentionWorkload, schedule: Schedule, target: Target, edited: tuple[tuple[str, str], ...]) -> Lowered:
    """In the other process: modules of ``edited`` have the text that is given with them."""
    from tilebit.tiles.compiler.cuda import lower_cuda, lowered_arch
    from tilebit.tiles.compiler.host_plan import describe_params, read_host

    tile_program = importlib.import_module(find_rule(schedule.program).module).PROGRAM
    with tempfile.TemporaryDirectory() as folder, _modules(Path(folder), edited):
        build = importlib.import_module(find_rule(schedule.program).module).PROGRAM.build
        function = build(workload, schedule, target)
    artifact = lower_cuda(function, lowered_arch(tile_program, target), dict(tile_program.pass_configs))
    # plain Python all of it: TVM's own strings and numbers would load TVM where they arrive
    names = tuple(str(function.buffer_map[param].name) for param in function.params)
    declared = operands(workload, schedule.program, target.arch)
    described = describe_params(function, params(workload, schedule, target), declared)
    plan = read_host(artifact.host_mod, artifact.device_mod, described)
    (launch,) = plan.launches
    symbols = tuple((str(name), int(tensor), int(dim)) for name, tensor, dim in plan.symbols)
    return Lowered(str(artifact.kernel_source), names, symbols, tuple(map(str, launch.grid)), int(launch.block[0]), int(launch.smem))


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
