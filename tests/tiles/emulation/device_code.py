"""The CUDA device headers, compiled by the host compiler and called for every thread of a block."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tilebit.tiles.gemm.operands import HEADERS
from tilebit.tiles.program import DEVICE_DIR

SHIM = Path(__file__).with_name("cuda_shim.h")
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC")
CUDA_ARCH = {"gemm_wgmma": 900, "gemm_mma": 800}  # of the paths that each program's kernels take

Argument = tuple[int, int]  # what thread 0 passes and how much more each next thread does: (address, bytes a thread), (value, 0) ...


def host_compiler() -> str | None:
    return next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)


needs_host_compiler = pytest.mark.skipif(
    host_compiler() is None, reason="needs a C++17 compiler (g++, c++ or clang++ on PATH) to run device code on the host"
)


def device_source() -> str:
    return "\n".join((DEVICE_DIR / name).read_text() for name in HEADERS)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tilebit-emulation-")


def build(source: str) -> ctypes.CDLL:
    """A library of ``source`` after the shim. Raises ``RuntimeError`` with the compiler's words."""
    path = Path(_folder().name) / hashlib.sha256(source.encode()).hexdigest()[:16]
    library = path.with_suffix(".so")
    if not library.exists():
        path.with_suffix(".cc").write_text(f'#include "{SHIM}"\n' + source.replace("#pragma once", ""))
        command = [host_compiler() or "c++", *FLAGS, str(path.with_suffix(".cc")), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the host compiler refused the device code:\n{done.stderr[:4000]}")
    return ctypes.CDLL(str(library))


class DeviceCode:
    """Functions of a device source, by the names that the programs call them by ("tilebit::dequantize<half, 4, ...>").

    ``calls`` are compiled together, at the first of them; any other one on its own. ``cuda_arch`` chooses among the source's paths.
    """

    def __init__(self, source: str, cuda_arch: int, calls: Iterable[str] = ()) -> None:
        self.source = f"#define __CUDA_ARCH__ {cuda_arch}\n{source}"
        self.expected = tuple(dict.fromkeys(calls))
        self.functions: dict[str, Callable[..., int]] = {}

    def call(self, name: str, arguments: Sequence[Argument], threads: int) -> None:
        """``name(arguments)`` on every thread of a block. Raises ``RuntimeError`` when threads do not meet at a barrier."""
        if name not in self.functions:
            self._compile(self.expected if name in self.expected else (name,))
        base, stride = ((ctypes.c_ssize_t * len(arguments))(*values) for values in zip(*arguments, strict=True))
        if self.functions[name](base, stride, threads):
            raise RuntimeError(f"{name}: some threads ended while others waited at a barrier")

    def _compile(self, names: Sequence[str]) -> None:
        wrappers = [
            f'extern "C" int call_{i}(const intptr_t* base, const intptr_t* stride, int threads) {{ static bool alone; '
            f"return tilebit_host::call(&{name}, base, stride, threads, alone); }}"
            for i, name in enumerate(names)
        ]
        library = build("\n".join([self.source, *wrappers]))
        self.functions.update({name: getattr(library, f"call_{i}") for i, name in enumerate(names)})
