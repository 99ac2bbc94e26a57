"""The CUDA that TileLang generates from a program, run whole on a CPU: what its passes make of loops, branches and shared memory is tested
too, which a stand-in for the language cannot see.

TileLang lowers in a process of its own: it must not share one with TVM, and tests load both.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
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

from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.program import program, program_module

from .device_code import CUDA_ARCH, DeviceCode, KernelFault, Place
from .emulated_attention import EmulatedAttention

SHARED_BYTES = 228 * 1024
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
    """A generated kernel: its CUDA, and its launch: a grid of C expressions of ``dim_<symbol>``, threads and bytes of shared memory."""

    cuda: str
    grid: tuple[str, ...]
    threads: int
    shared_bytes: int

    def grid_of(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """Its extents, x first."""
        named = {f"dim_{name}": value for name, value in symbols.items()}
        return tuple(int(eval(extent, {"__builtins__": {}, "tb_floordiv": floordiv}, named)) for extent in self.grid)


class GeneratedAttention(EmulatedAttention):
    """``kernel(tensors)`` launches the whole generated kernel on torch tensors by the names of its parameters."""

    def run_blocks(self, symbols: dict[str, int], arrays: Mapping[str, tuple[np.ndarray, int]]) -> None:
        lowered = lower(self.workload, self.schedule, self.target, self.edited())
        cuda = self.edits["device"](lowered.cuda) if "device" in self.edits else lowered.cuda
        code, params = compiled(cuda, CUDA_ARCH[self.schedule.program])
        grid = lowered.grid_of(symbols)
        addresses = {name: array.ctypes.data + first * array.itemsize for name, (array, first) in arrays.items()}
        addresses |= {"slots_of": addresses["slots"]}
        arguments = [(addresses[p] if p in addresses else int(symbols[p]), 0) for p in params]
        tensors = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a, _ in arrays.values()]
        memory = np.empty(SHARED_BYTES + 1024, np.uint8)
        base = -memory.ctypes.data % 1024
        blocks = [index[::-1] for index in np.ndindex(*grid[::-1])]
        if self.order == "shuffled":
            self.random.shuffle(blocks)
        for block in reversed(blocks) if self.order == "descending" else blocks:
            memory[:] = UNTOUCHED
            place = Place.of(grid, [block], [memory.ctypes.data + base], tensors)
            code.call("main_kernel", arguments, lowered.threads, place)
            if (memory[:base] != UNTOUCHED).any() or (memory[base + lowered.shared_bytes :] != UNTOUCHED).any():
                raise KernelFault(f"a block stores outside of its {lowered.shared_bytes} bytes of shared memory")

    def edited(self) -> tuple[tuple[str, str], ...]:
        """(module, its text) of the program's files that are edited."""
        package = program_module(self.schedule.program).rpartition(".")[0]
        found = []
        for name, edit in self.edits.items():
            if name != "device":
                of_file = f"{package}.{Path(name).stem}"
                spec = find_spec(of_file)
                assert spec is not None and spec.origin is not None
                found.append((of_file, edit(Path(spec.origin).read_text())))
        return tuple(found)


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

    tile_program = program(schedule.program)
    with tempfile.TemporaryDirectory() as folder, _modules(Path(folder), edited):
        build = importlib.import_module(program_module(schedule.program)).PROGRAM.build
        function = build(workload, schedule, target)
    artifact = lower_cuda(function, lowered_arch(tile_program, target), dict(tile_program.pass_configs))
    params = describe_params(function, tile_program.params(workload, schedule))
    (launch,) = read_host(artifact.host_mod, artifact.device_mod, params).launches
    return Lowered(artifact.kernel_source, launch.grid, int(launch.block[0]), int(launch.smem))


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
