"""The CUDA device headers, compiled by the host compiler and called for every thread of a block, or of a cluster of blocks."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from .ptx import host_source

SHIM = Path(__file__).with_name("cuda_shim.h")
# Hidden: else an inline variable of two libraries is one, and a planted bug's constant the sound kernel's.
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w", "-fPIC", "-fvisibility=hidden")
# libstdc++'s Bessel functions, which come with <math.h> and which each file would instantiate anew: a fifth of its time.
FLAGS += ("-D_GLIBCXX_BITS_SPECFUN_H",)
# The shim is compiled once and runs all the time; device code is compiled anew for each bug and runs little.
OURS, THEIRS = ("-O2",), ("-O0", "-fsanitize=alignment")
EXPORTED = 'extern "C" __attribute__((visibility("default")))'
# __CUDA_ARCH__ of the paths that each program's kernels take
CUDA_ARCH = {
    "gemm_wgmma": 900, "gemm_mma": 800, "gemm_stream": 800, "gemm_stream_bulk": 900, "gemm_any": 800,
    "gemm_any_binary": 800, "gemm_any_wgmma": 900, "gemm_dense": 900, "expand_any": 800,
    "attention_prefill": 900, "attention_prefill_mma": 800,
    "attention_decode": 800, "attention_decode_bulk": 900, "attention_append": 800, "attention_pack": 800,
    "attention_gather": 800,
    "quantize_rows": 900, "norm_rows": 900, "gated_rows": 900,
}  # fmt: skip
MAX_BLOCKS = 8  # of a cluster; cuda_threads.h has the same numbers

MAX_TENSORS = 16


class KernelFault(Exception):
    """A kernel did what no kernel may do: threads that wait for ever, an access outside of its memory."""


Argument = tuple[int, int]  # what thread 0 passes and how much more each next thread does: (address, bytes a thread), (value, 0) ...


class Place(ctypes.Structure):
    """Where a launch stands, for ``gridDim``, ``blockIdx`` and addresses of shared memory: the blocks of the cluster that runs now, and the
    tensors that copies may read."""

    _fields_ = (
        ("grid", ctypes.c_int32 * 3),
        ("blocks", ctypes.c_int32),
        ("index", ctypes.c_int32 * 3 * MAX_BLOCKS),
        ("shared", ctypes.c_ssize_t * MAX_BLOCKS),
        ("tensors", ctypes.c_ssize_t * 2 * MAX_TENSORS),
        ("shared_bytes", ctypes.c_int32),
    )

    @classmethod
    def of(
        cls,
        grid: Sequence[int],
        blocks: Sequence[Sequence[int]],
        shared: Sequence[int],
        tensors: Sequence[tuple[int, int]] = (),
        shared_bytes: int = 0,
    ) -> Place:
        """``blocks``: their indices, by rank; ``shared``: where their memory starts; ``tensors``: where each begins and ends;
        ``shared_bytes`` of a block whose whole kernel runs."""
        place = cls(blocks=len(blocks), shared_bytes=shared_bytes)
        place.grid[:] = (*grid, 1, 1)[:3]
        for rank, (block, address) in enumerate(zip(blocks, shared, strict=True)):
            place.index[rank][:] = (*block, 0, 0)[:3]
            place.shared[rank] = address
        for i, bounds in enumerate(tensors):
            place.tensors[i][:] = bounds
        return place


ALONE = Place.of((1,), [(0,)], [0])  # one block that has no shared memory


def _linker() -> tuple[str, ...]:
    """The faster one, where it is there: linking is a good part of compiling a function."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


def host_compiler() -> str | None:
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


needs_host_compiler = pytest.mark.skipif(
    host_compiler() is None, reason="needs a C++17 compiler (g++, c++ or clang++ on PATH) to run device code on the host"
)


@cache
def run_folder() -> Path:
    """For what is compiled: that of the whole run, whose workers share it, else one of this process."""
    if shared := os.environ.get("TILEBIT_EMULATION"):
        return Path(shared)
    folder = tempfile.TemporaryDirectory(prefix="tilebit-emulation-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@contextmanager
def alone_at(path: Path) -> Iterator[None]:
    """While this lasts no other worker of the run makes ``path``: it waits, and finds it made."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _shim() -> tuple[Path, Path]:
    """A header that includes the shim, compiled ahead, and an object with the bodies of what it declares: most of the time of what includes
    them. A compiler that does not look for such a file reads the header."""
    header, bodies = run_folder() / "shim.h", run_folder() / "shim.o"
    with alone_at(header):
        if not bodies.exists():
            header.write_text(f'#include "{SHIM}"\n')
            _run(*THEIRS, "-x", "c++-header", str(header), "-o", f"{header}.gch")
            _run(*OURS, "-c", str(SHIM.with_suffix(".cc")), "-o", f"{bodies}.new")
            os.replace(f"{bodies}.new", bodies)  # last and whole: it says that the others are there
    return header, bodies


def _run(*arguments: str) -> None:
    """The host compiler. Raises ``RuntimeError`` with its words."""
    done = subprocess.run([host_compiler() or "c++", *FLAGS, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the host compiler refused the device code:\n{done.stderr[:4000]}")


def build(source: str) -> ctypes.CDLL:
    """A library of ``source`` after the shim. Raises ``RuntimeError`` with the compiler's words."""
    library = run_folder() / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
    header, bodies = _shim()
    with alone_at(library):
        if not library.exists():
            own = library.with_suffix(".cc")
            own.write_text(host_source(source.replace("#pragma once", "")).replace('extern "C" ', f"{EXPORTED} "))
            _run(*THEIRS, "-c", "-include", str(header), str(own), "-o", f"{own}.o")
            _run("-shared", *_linker(), f"{own}.o", str(bodies), "-o", f"{own}.so")  # without the sanitizer, whose library is not needed
            os.replace(f"{own}.so", library)
    return ctypes.CDLL(str(library))


class DeviceCode:
    """Functions of a device source, by the names that the programs call them by ("tilebit::dequantize<half, 4, ...>").

    ``calls`` are compiled together, at the first of them; any other one on its own. ``cuda_arch`` chooses among the source's paths.
    """

    def __init__(self, source: str, cuda_arch: int, calls: Iterable[str] = ()) -> None:
        self.source = f"#define __CUDA_ARCH__ {cuda_arch}\n{source}"
        self.expected = tuple(dict.fromkeys(calls))
        self.functions: dict[str, tuple[ctypes.CDLL, int]] = {}

    def call(self, name: str, arguments: Sequence[Argument], threads: int, place: Place = ALONE, rank: int = 0) -> None:
        """``name(arguments)`` on ``threads`` threads of block ``rank``. Raises ``KernelFault``."""
        self.call_blocks(name, [arguments], threads, place, rank)

    def call_blocks(self, name: str, arguments: Sequence[Sequence[Argument]], threads: int, place: Place, first: int = 0) -> None:
        """``name`` on several blocks of a cluster at once, from rank ``first`` on, each with its own arguments."""
        base = (ctypes.c_ssize_t * (len(arguments) * len(arguments[0])))(*(start for row in arguments for start, _ in row))
        stride = (ctypes.c_ssize_t * len(arguments[0]))(*(step for _, step in arguments[0]))
        library, index = self._find(name)
        call = getattr(library, f"call_{index}")
        call.restype = ctypes.c_char_p
        if wrong := call(ctypes.byref(place), first, len(arguments), base, stride, threads):
            raise KernelFault(f"{name}: {wrong.decode()}")

    def copied_bytes(self, name: str, tensor: int) -> int:
        """How much the calls of ``name``, and of what was compiled with it, have copied of a launch's tensor, ever."""
        count = self._find(name)[0].host_copied_bytes
        count.restype = ctypes.c_int64
        return count(tensor)

    def value(self, name: str, arguments: Sequence[int], place: Place) -> int:
        """What the pure function ``name`` returns, an int."""
        library, index = self._find(name)
        return getattr(library, f"value_{index}")(ctypes.byref(place), (ctypes.c_ssize_t * len(arguments))(*arguments))

    def _find(self, name: str) -> tuple[ctypes.CDLL, int]:
        if name not in self.functions:
            names = self.expected if name in self.expected else (name,)
            library = build("\n".join([self.source, *(_wrapper(i, name) for i, name in enumerate(names))]))
            self.functions.update({name: (library, i) for i, name in enumerate(names)})
        return self.functions[name]


def _wrapper(index: int, name: str) -> str:
    return (
        f'extern "C" const char* call_{index}(const tilebit_host::Place* place, int first, int blocks, const intptr_t* base, '
        f"const intptr_t* stride, int threads) {{ return tilebit_host::call(&{name}, place, first, blocks, base, stride, threads); }}\n"
        f'extern "C" int value_{index}(const tilebit_host::Place* place, const intptr_t* base) '
        f"{{ return tilebit_host::value(&{name}, place, base); }}"
    )
