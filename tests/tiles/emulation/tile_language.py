"""A stand-in for ``tilelang.language`` that computes: the part of it that the GEMM programs use, on numpy, one thread block at a time.

It exists so that the very text of a tile program can be run, and run with a planted bug, where there is no GPU. Copies past the end of a
tensor read zeros, as TMA and guarded cp.async do. Scalars are evaluated element by element; products go through each thread's registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilebit.layouts.fragments import wgmma_a, wgmma_c

from .device_code import DeviceCode
from .tile_memory import Buffer, Element, RegisterTile, ThreadLocal

THREAD = object()  # what T.get_thread_binding() returns


class GridKnown(Exception):
    """Raised on entry to the kernel when it was run only to learn its grid."""


@dataclass(frozen=True, slots=True)
class TensorType:
    shape: tuple[int, ...]
    dtype: str


class TileLanguage:
    """Stands in for the module ``tilelang.language`` while one kernel runs.

    ``symbols`` are its dynamic extents, ``block`` is the one to run (None: learn the ``grid``), ``make_device`` makes an imported source
    callable."""

    GemmWarpPolicy = SimpleNamespace(FullRow="FullRow")

    def __init__(self, symbols: dict[str, int], make_device: Callable[[str], DeviceCode]) -> None:
        self.symbols, self.make_device = symbols, make_device
        self.block: tuple[int, ...] | None = None
        self.grid: tuple[int, ...] = ()
        self.threads = 0
        self.device: DeviceCode | None = None

    def dynamic(self, name: str) -> int:
        return self.symbols[name]

    def Tensor(self, shape: tuple[int, ...], dtype: str) -> TensorType:
        return TensorType(tuple(map(int, shape)), dtype)

    def prim_func(self, function: Callable[..., None]) -> Callable[..., None]:
        return function

    @contextmanager
    def Kernel(self, *grid: int, threads: int) -> Iterator[tuple[int, ...]]:
        self.grid, self.threads = grid, threads
        if self.block is None:
            raise GridKnown
        yield self.block

    def ceildiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def min(self, a: int, b: int) -> int:
        return min(a, b)

    def get_thread_binding(self) -> object:
        return THREAD

    def alloc_shared(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        return Buffer(shape, dtype)

    def alloc_fragment(self, shape: tuple[int, int], dtype: str) -> RegisterTile:
        return RegisterTile(shape, dtype, self.threads)

    def alloc_local(self, shape: tuple[int, ...], dtype: str) -> ThreadLocal:
        return ThreadLocal(shape, dtype, self.threads)

    def reshape(self, buffer: Buffer, shape: tuple[int, ...]) -> Buffer:
        view = Buffer(shape, buffer.dtype, buffer.data, buffer.start)
        assert view.size == buffer.size
        return view

    def import_source(self, source: str) -> None:
        self.device = self.make_device(source)

    def ignored(self, *_: Any) -> None:
        """Annotations that decide speed and addresses, not values."""

    annotate_layout = annotate_min_blocks_per_sm = disable_warp_group_reg_alloc = use_swizzle = ignored
    annotate_producer_reg_dealloc = annotate_consumer_reg_alloc = ignored

    def clear(self, tile: RegisterTile) -> None:
        tile.registers[:] = 0

    def Pipelined(self, count: int, num_stages: int) -> range:
        return range(count)

    def Parallel(self, *extents: int) -> Iterator[tuple[int, ...]]:
        return product(*map(range, extents))

    def copy(self, source: Element, target: Buffer) -> None:
        assert source.buffer.dtype == target.dtype
        target.data[:] = source.buffer.window(source.indices, target.shape).ravel()

    def address_of(self, element: Element) -> tuple[int, int]:
        return element.buffer.address(element.indices)

    def call_extern(self, _: str, name: str, *arguments: Any) -> None:
        assert self.device is not None, "no source was imported before the first call"
        passed = [(0, 1) if a is THREAD else a if isinstance(a, tuple) else (int(a), 0) for a in arguments]
        self.device.call(name, passed, self.threads)

    def gemm(self, a: RegisterTile, b: Buffer, c: RegisterTile, transpose_B: bool, policy: str) -> None:
        """c += a @ b^T in fp32. wgmma holds rows as four warps of mma.sync do, each of which has 16 of a slab's 64."""
        assert transpose_B and policy == "FullRow"
        a.plays(wgmma_a, 16)
        c.plays(wgmma_c, c.shape[1])
        with np.errstate(invalid="ignore", over="ignore"):
            c.fill(c.matrix() + a.matrix() @ b.numbers().T)
