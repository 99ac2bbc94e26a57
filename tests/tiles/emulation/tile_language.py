"""A stand-in for ``tilelang.language`` that computes: the part of it that the GEMM programs use, on numpy, one thread block at a time.

It exists so that the very text of a tile program can be run, and run with a planted bug, where there is no GPU. Memory is poisoned when it is
allocated (NaN), so reading what was not written shows. Copies past the end of a tensor read zeros, as TMA and guarded cp.async do.
Scalars are evaluated element by element; products go through each thread's registers, placed by ``layouts.fragments``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
from tilebit.layouts.fragments import Fragment, wgmma_a, wgmma_c
from tilebit.tiles.device.twins import round_to, widen

from .device_code import DeviceCode

STORED = {"float16": np.uint16, "bfloat16": np.uint16, "float32": np.float32, "int32": np.int32}
POISON = {"float16": 0x7E5A, "bfloat16": 0x7FDA, "float32": np.nan, "int32": -1515870811}
SLAB = 64  # rows that four warps hold
THREAD = object()  # what T.get_thread_binding() returns


class IllegalAccess(Exception):
    """A kernel wrote outside of an allocation."""


class GridKnown(Exception):
    """Raised on entry to the kernel when it was run only to learn its grid."""


@dataclass(frozen=True, slots=True)
class TensorType:
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Element:
    """``buffer[indices]``: a value in expressions, a start in copies, an address for device functions."""

    buffer: Buffer
    indices: tuple[int, ...]

    def value(self) -> Any:
        return self.buffer.read(self.indices)

    def astype(self, dtype: str) -> Any:
        assert dtype == "float32", dtype
        return np.float32(self.value())

    def __add__(self, other: Any) -> Any:
        return self.value() + _value(other)

    def __mul__(self, other: Any) -> Any:
        return self.value() * _value(other)

    def __eq__(self, other: object) -> bool:
        return bool(self.value() == _value(other))

    __hash__ = None  # type: ignore[assignment]


def _value(operand: Any) -> Any:
    return operand.value() if isinstance(operand, Element) else operand


class Buffer:
    """Row-major memory of one scope: ``data`` is flat and may be longer than the tensor, which starts at ``start``."""

    def __init__(self, shape: tuple[int, ...], dtype: str, data: np.ndarray | None = None, start: int = 0) -> None:
        self.shape, self.dtype, self.start = tuple(map(int, shape)), dtype, start
        self.size = int(np.prod(self.shape))
        self.data = np.full(self.size, POISON[dtype], dtype=STORED[dtype]) if data is None else data
        self.strides = tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))

    def __getitem__(self, indices: Any) -> Element:
        return Element(self, indices if isinstance(indices, tuple) else (indices,))

    def __setitem__(self, indices: Any, value: Any) -> None:
        self.write(indices if isinstance(indices, tuple) else (indices,), value)

    def offset(self, indices: tuple[int, ...]) -> int:
        """As hardware computes it: an index past its row's end is an element of the next row."""
        return self.start + sum(i * s for i, s in zip(indices, self.strides, strict=True))

    def read(self, indices: tuple[int, ...]) -> Any:
        at = self.offset(indices)
        return self.decode(self.data[at] if 0 <= at < self.data.size else STORED[self.dtype](POISON[self.dtype]))

    def write(self, indices: tuple[int, ...], value: Any) -> None:
        at = self.offset(indices)
        if not 0 <= at < self.data.size:
            raise IllegalAccess(f"element {indices} of a {self.dtype}{list(self.shape)} was written")
        self.data[at] = self.encode(value)

    def decode(self, stored: Any) -> Any:
        if self.dtype == "float16":
            return stored.view(np.float16)
        return (np.uint32(stored) << np.uint32(16)).view(np.float32) if self.dtype == "bfloat16" else stored

    def encode(self, value: Any) -> Any:
        value = _value(value)
        if self.dtype == "float16":
            with np.errstate(over="ignore"):
                return np.float16(value).view(np.uint16)
        return round_to(np.float64(value), "bfloat16") if self.dtype == "bfloat16" else value

    def address(self, indices: tuple[int, ...]) -> tuple[int, int]:
        return self.data.ctypes.data + self.offset(indices) * self.data.itemsize, 0

    def window(self, start: tuple[int, ...], extents: tuple[int, ...]) -> np.ndarray:
        """``extents`` elements from ``start`` on, zeros past the tensor's ends."""
        whole = self.data[self.start : self.start + self.size].reshape(self.shape)
        found = whole[tuple(slice(s, s + e) for s, e in zip(start, extents, strict=True))]
        return np.pad(found, [(0, e - f) for e, f in zip(extents, found.shape, strict=True)])

    def numbers(self) -> np.ndarray:
        """All of it as float32."""
        data = self.data if self.data.dtype == np.float32 else widen(self.data, self.dtype)
        return data.astype(np.float32).reshape(self.shape)


class ThreadLocal:
    """A few elements that every thread has for itself."""

    def __init__(self, shape: tuple[int, ...], dtype: str, threads: int) -> None:
        self.dtype = dtype
        self.data = np.full((threads, *shape), POISON[dtype], dtype=STORED[dtype])

    def __getitem__(self, index: int) -> Any:
        return Element(self, (index,))  # type: ignore[arg-type]

    def read(self, indices: tuple[int, ...]) -> Any:
        values = np.unique(self.data[(slice(None), *indices)])
        assert values.size == 1, f"threads of a block disagree: {values}"
        return values[0]

    def address(self, indices: tuple[int, ...]) -> tuple[int, int]:
        return self.data.ctypes.data + self.data[(0, *indices)].nbytes * indices[0], self.data.strides[0]


class RegisterTile:
    """A fragment: ``registers`` [threads, elements of a thread]; ``place`` says which matrix element is where once its role in a product is known."""

    def __init__(self, shape: tuple[int, int], dtype: str, threads: int) -> None:
        self.shape, self.dtype, self.threads = shape, dtype, threads
        self.registers = np.full((threads, shape[0] * shape[1] // threads), POISON[dtype], dtype=STORED[dtype])
        self.place: tuple[np.ndarray, np.ndarray] | None = None

    def access_ptr(self, _: str) -> tuple[int, int]:
        return self.registers.ctypes.data, self.registers.strides[0]

    def plays(self, fragment: Callable[[int], Fragment], step: int) -> None:
        self.place = placement(fragment, step, *self.shape, self.threads)

    def matrix(self) -> np.ndarray:
        assert self.place is not None
        data = self.registers[self.place]
        return data if self.dtype == "float32" else widen(data, self.dtype).astype(np.float32)

    def fill(self, matrix: np.ndarray) -> None:
        assert self.place is not None
        self.registers[self.place] = matrix if self.dtype == "float32" else round_to(matrix.astype(np.float64), self.dtype)

    def __getitem__(self, indices: tuple[int, int]) -> Element:
        return Element(self, indices)  # type: ignore[arg-type]

    def __setitem__(self, indices: tuple[int, int], value: Any) -> None:
        assert self.place is not None
        self.registers[self.place[0][indices], self.place[1][indices]] = _value(value)

    def read(self, indices: tuple[int, int]) -> Any:
        assert self.place is not None
        stored = self.registers[self.place[0][indices], self.place[1][indices]]
        return stored if self.dtype == "float32" else np.float32(widen(stored, self.dtype))


@cache
def placement(fragment: Callable[[int], Fragment], step: int, rows: int, cols: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """(thread, register element) of each element of a ``rows`` x ``cols`` operand made of 64-row slabs and fragments ``step`` columns wide: each group
    of four warps has neighbouring slabs; a thread's registers count columns first, then slabs, then the fragment's own."""
    groups = threads // 128
    slabs = rows // SLAB // groups
    assert slabs * groups * SLAB == rows, f"{rows} rows cannot be shared by {threads} threads"
    f = fragment(step)
    own_thread, own_value = f.owners()
    row, col = np.indices((rows, cols))
    slab = row // SLAB
    thread = slab // slabs * 128 + own_thread[row % SLAB, col % step]
    value = (col // step * slabs + slab % slabs) * f.values + own_value[row % SLAB, col % step]
    return thread, value


class TileLanguage:
    """Stands in for the module ``tilelang.language`` while one kernel runs; ``symbols`` are its dynamic extents and ``block`` is the one to run (None:
    learn the ``grid``). ``device`` makes callable device code of an imported source."""

    GemmWarpPolicy = SimpleNamespace(FullRow="FullRow")

    def __init__(self, symbols: dict[str, int], device: Callable[[str], DeviceCode]) -> None:
        self.symbols, self.make_device = symbols, device
        self.block: tuple[int, int, int] | None = None
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
    def Kernel(self, *grid: int, threads: int) -> Iterator[tuple[int, int, int]]:
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
