"""The memories of an emulated thread block: buffers, thread-local elements, and register tiles placed by ``layouts.fragments``.

Memory is poisoned when it is allocated (NaN), so that reading what was never written shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import numpy as np

from tilebit.layouts.formats import E4M3, FP8
from tilebit.layouts.fragments import Fragment
from tilebit.tiles.device.twins import round_to, widen

from .device_code import KernelFault

STORED = {
    "float16": np.uint16, "bfloat16": np.uint16, "float32": np.float32, "int32": np.int32, "int8": np.int8, "uint8": np.uint8,
    FP8: np.uint8,
}  # fmt: skip
PLAIN = ("float32", "int32", "int8", "uint8")  # stored as numpy has them
# int32: NaN as 16-bit floats too, for memory that is declared as words
POISON = {"float16": 0x7E5A, "bfloat16": 0x7FDA, "float32": np.nan, "int32": 0x7FDA7FDA, "int8": 0x5A, "uint8": 0xDA, FP8: 0x7F}
E4M3_NUMBERS = np.array((*E4M3, *(-value for value in E4M3)), np.float32)
SLAB = 64  # rows that four warps hold


class IllegalAccess(KernelFault):
    """A kernel wrote outside of an allocation, or touched what it may not touch yet."""


@dataclass(frozen=True, slots=True)
class Element:
    """``buffer[indices]``: a value in expressions, a start in copies, an address for device functions; with slices, a region."""

    buffer: Buffer
    indices: tuple[Any, ...]

    @property
    def start(self) -> tuple[int, ...]:
        return tuple((i.start or 0) if isinstance(i, slice) else i for i in self.indices)

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(
            (n if i.stop is None else i.stop) - (i.start or 0) if isinstance(i, slice) else 1
            for i, n in zip(self.indices, self.buffer.shape, strict=True)
        )

    def numbers(self) -> np.ndarray:
        """A region as float32, without the axes of which it has one index."""
        bits = self.buffer.window(self.start, self.extents)
        rank = [n for n, i in zip(self.extents, self.indices, strict=True) if isinstance(i, slice)]
        return as_float32(bits, self.buffer.dtype).reshape(rank)

    def fill(self, values: np.ndarray | int) -> None:
        """Write a whole region, ``values`` in the same order."""
        start, extents = self.start, self.extents
        if any(s < 0 or s + e > n for s, e, n in zip(start, extents, self.buffer.shape, strict=True)):
            raise IllegalAccess(f"a write of {extents} at {start} of a buffer of {tuple(self.buffer.shape)}")
        where = tuple(slice(s, s + e) for s, e in zip(start, extents, strict=True))
        self.buffer.whole()[where] = np.reshape(values, extents) if isinstance(values, np.ndarray) else values

    def value(self) -> Any:
        return self.buffer.read(self.indices)

    def astype(self, dtype: str) -> Any:
        assert dtype == "float32", dtype
        return np.float32(self.value())

    def __add__(self, other: Any) -> Any:
        return self.value() + _value(other)

    def __ge__(self, other: Any) -> bool:
        return self.value() >= _value(other)

    def __lt__(self, other: Any) -> bool:
        return self.value() < _value(other)

    def __mul__(self, other: Any) -> Any:
        return self.value() * _value(other)

    def __eq__(self, other: object) -> bool:
        return bool(self.value() == _value(other))

    __hash__ = None  # type: ignore[assignment]


def as_float32(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Floats of 16 and 8 bits as float32; what numpy has as it is, bytes as integers that hold their products."""
    if dtype in PLAIN:
        return stored.astype(np.int64) if stored.itemsize == 1 else stored
    return E4M3_NUMBERS[stored] if dtype == FP8 else widen(stored, dtype).astype(np.float32)


def _value(operand: Any) -> Any:
    return operand.value() if isinstance(operand, Element) else operand


def _bfloat16(value: np.float32) -> int:
    """What ``round_to`` says of one number, which is half of the time of a kernel that stores its y number by number."""
    if value != value:
        return 0x7FFF
    bits = int(value.view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


class Buffer:
    """Row-major memory of one scope: ``data`` is flat and may be longer than the tensor, which starts at ``start``. ``late`` says that an
    earlier kernel may still be writing it when this one starts."""

    def __init__(self, shape: tuple[int, ...], dtype: str, data: np.ndarray | None = None, start: int = 0, late: bool = False) -> None:
        self.shape, self.dtype, self.start, self.late = tuple(map(int, shape)), dtype, start, late
        self.size = prod(self.shape)
        self.data = np.full(self.size, POISON[dtype], dtype=STORED[dtype]) if data is None else data
        self.strides = tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

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
        if self.dtype == "bfloat16":
            return _bfloat16(value) if type(value) is np.float32 else round_to(np.asarray(value, np.float64), "bfloat16")
        return value

    def address(self, indices: tuple[int, ...]) -> tuple[int, int]:
        return self.data.ctypes.data + self.offset(indices) * self.data.itemsize, 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Where the tensor begins and ends."""
        begin = self.data.ctypes.data + self.start * self.data.itemsize
        return begin, begin + self.size * self.data.itemsize

    def whole(self) -> np.ndarray:
        return self.data[self.start : self.start + self.size].reshape(self.shape)

    def window(self, start: tuple[int, ...], extents: tuple[int, ...]) -> np.ndarray:
        """``extents`` elements from ``start`` on, zeros past the tensor's ends."""
        found = self.whole()[tuple(slice(s, s + e) for s, e in zip(start, extents, strict=True))]
        whole = np.zeros(extents, found.dtype)
        whole[tuple(map(slice, found.shape))] = found
        return whole

    def numbers(self) -> np.ndarray:
        """All of it as float32."""
        return as_float32(self.whole(), self.dtype)


class ThreadLocal:
    """A few elements that every thread has for itself."""

    late = False  # no kernel before this one can touch it

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
    """A fragment: ``registers`` [threads, elements of a thread]; ``place`` says which matrix element is where, once its role in a product
    is known."""

    def __init__(self, shape: tuple[int, int], dtype: str, threads: int) -> None:
        self.shape, self.dtype, self.threads = shape, dtype, threads
        self.place: tuple[np.ndarray, np.ndarray] | None = None
        self.alike: list[RegisterTile] = []  # tiles whose elements are where this one's will be

    @cached_property
    def registers(self) -> np.ndarray:
        return np.full((self.threads, self.shape[0] * self.shape[1] // self.threads), POISON[self.dtype], dtype=STORED[self.dtype])

    def access_ptr(self, _: str) -> tuple[int, int]:
        return self.registers.ctypes.data, self.registers.strides[0]

    def plays(self, fragment: Callable[[int], Fragment], step: int) -> None:
        self.place = placement(fragment, step, *self.shape, self.threads)
        for tile in self.alike:
            tile.place = self.place

    def matrix(self) -> np.ndarray:
        assert self.place is not None
        return as_float32(self.registers[self.place], self.dtype)

    def fill(self, matrix: np.ndarray) -> None:
        assert self.place is not None
        self.registers[self.place] = matrix if self.dtype in PLAIN else round_to(matrix.astype(np.float64), self.dtype)

    def __getitem__(self, indices: tuple[int, int]) -> Element:
        return Element(self, indices)  # type: ignore[arg-type]

    def __setitem__(self, indices: tuple[int, int], value: Any) -> None:
        assert self.place is not None
        self.registers[self.place[0][indices], self.place[1][indices]] = _value(value)

    def read(self, indices: tuple[int, int]) -> Any:
        assert self.place is not None
        stored = self.registers[self.place[0][indices], self.place[1][indices]]
        return stored if self.dtype in PLAIN else np.float32(widen(stored, self.dtype))


@cache
def placement(fragment: Callable[[int], Fragment], step: int, rows: int, cols: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """(thread, register element) of each element of a ``rows`` x ``cols`` operand made of 64-row slabs and fragments ``step`` columns wide.

    Each group of four warps has neighbouring slabs; a thread's registers count steps along the columns, in them slabs, in those the
    fragment's own elements."""
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
