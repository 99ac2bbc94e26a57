"""Fragments: which thread and which of its register elements holds element (row, col) of a matrix
operand.

Every register operand of NVIDIA's matrix instructions is a grid of one building block, the *core*:
8 rows, each held by 4 neighbouring lanes, each lane holding ``run`` neighbouring columns (PTX ISA,
"Matrix Fragments for mma.m16n8k16" and "wgmma.mma_async Register Fragments"). A fragment says how
cores go to registers (down 8 rows first, then along the columns) and to warps (16 rows each).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layout import Layout


@dataclass(frozen=True, slots=True)
class Fragment:
    """A bijection (thread, value) <-> (row, col) of a ``rows x cols`` operand.

    ``thread`` and ``value`` are layouts into the operand's column-major offsets: element ``value``
    of thread ``thread`` is at ``thread(t) + value(v) = row + rows * col``. Values count in register
    order: value 0 is in the low bits of the first register. ``element_bits`` is the width of an
    element in a register of ``register_bits``; ``dims`` names the two axes. Raises ``ValueError``
    if an element is held twice or by no one.
    """

    name: str
    rows: int
    cols: int
    thread: Layout
    value: Layout
    element_bits: int
    register_bits: int = 32
    dims: tuple[str, str] = ("m", "k")

    def __post_init__(self) -> None:
        held = np.bincount(self.offsets().ravel(), minlength=self.rows * self.cols)
        if held.size != self.rows * self.cols or (held != 1).any():
            raise ValueError(
                f"fragment {self.name}: thread layout {self.thread} and value layout {self.value} do not hold each element of a "
                f"{self.rows} x {self.cols} operand exactly once; choose strides that tile it"
            )

    @property
    def threads(self) -> int:
        return self.thread.size

    @property
    def values(self) -> int:
        """Elements that one thread holds."""
        return self.value.size

    def offsets(self) -> np.ndarray:
        """int64 [threads, values]: the column-major offset of each element."""
        return self.thread.offsets()[:, None] + self.value.offsets()[None, :]

    def coords(self) -> tuple[np.ndarray, np.ndarray]:
        """(row, col), each int64 [threads, values]."""
        offsets = self.offsets()
        return offsets % self.rows, offsets // self.rows

    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """(thread, value), each int64 [rows, cols]: the inverse of ``coords``."""
        thread, value = np.empty((2, self.rows, self.cols), dtype=np.int64)
        row, col = self.coords()
        thread[row, col], value[row, col] = np.indices(row.shape)
        return thread, value


def _cores(name: str, rows: int, cols: int, run: int, element_bits: int, dims: tuple[str, str]) -> Fragment:
    """An operand made of 8 x ``4 * run`` cores: registers down a warp's rows (at most 16), then
    along the columns; warps down the rows."""
    down = min(rows, 16) // 8
    return Fragment(
        name, rows, cols,
        thread=Layout((4, 8, rows // (8 * down)), (run * rows, 1, 16)),
        value=Layout((run, down, cols // (4 * run)), (rows, 8, 4 * run * rows)),
        element_bits=element_bits, dims=dims,
    )  # fmt: skip


def mma_a(k: int = 16) -> Fragment:
    """A of mma.sync.m16n8k16 (fp16, bf16) or, with ``k=32``, of m16n8k32 (int8, fp8): 16 x k,
    row-major."""
    bits = _element_bits(k)
    return _cores(f"mma.m16n8k{k}.A", 16, k, 32 // bits, bits, ("m", "k"))


def mma_b(k: int = 16, n: int = 8) -> Fragment:
    """B of the same instructions as rows of n: 8 x k; ``n=16`` is two B operands, all of the
    first's registers before the second's."""
    bits = _element_bits(k)
    if n not in (8, 16):
        raise ValueError(f"n is {n}; accepted: 8 (one operand) or 16 (two)")
    run = 32 // bits
    return Fragment(
        f"mma.m16n8k{k}.B" + ("x2" if n == 16 else ""), n, k,
        thread=Layout((4, 8), (run * n, 1)),
        value=Layout((run, k // (4 * run), n // 8), (n, 4 * run * n, 8)),
        element_bits=bits, dims=("n", "k"),
    )  # fmt: skip


def mma_c(n: int = 8) -> Fragment:
    """C (and D) of mma.sync.m16n8k*: 16 x n 32-bit accumulators; n > 8 is several instructions side
    by side."""
    return _cores(f"mma.m16n{_steps_of_8(n)}.C", 16, n, 2, 32, ("m", "n"))


def wgmma_a(k: int = 16) -> Fragment:
    """A in registers of wgmma.m64nNk16 (fp16, bf16) or, with ``k=32``, of m64nNk32 (int8, fp8): 64
    x k over 4 warps.

    Warp w holds rows 16 w .. 16 w + 15 exactly as mma.sync's A: one record serves both
    instructions.
    """
    bits = _element_bits(k)
    return _cores(f"wgmma.m64nNk{k}.A", 64, k, 32 // bits, bits, ("m", "k"))


def wgmma_c(n: int) -> Fragment:
    """Accumulator of wgmma.m64nNk*: 64 x n, n a multiple of 8 up to 256."""
    return _cores(f"wgmma.m64n{_steps_of_8(n)}.C", 64, n, 2, 32, ("m", "n"))


def ldmatrix(matrices: int = 4, trans: bool = False) -> Fragment:
    """What ldmatrix.m8n8.x{1,2,4}[.trans].b16 leaves in registers: register i of a lane is from
    matrix i.

    The matrices are stacked: row 8 i + r is the 16-byte row whose address lane 8 i + r supplied.
    """
    if matrices not in (1, 2, 4):
        raise ValueError(f"ldmatrix loads 1, 2 or 4 matrices; got {matrices}")
    rows = 8 * matrices
    lane, run = ((2 * rows, 1), rows) if not trans else ((2, rows), 1)
    return Fragment(
        f"ldmatrix.x{matrices}" + (".trans" if trans else ""), rows, 8,
        thread=Layout((4, 8), lane), value=Layout((2, matrices), (run, 8)), element_bits=16, dims=("row", "col"),
    )  # fmt: skip


def lanes(count: int, per_lane: int) -> Fragment:
    """A column of bytes in a CPU vector register: byte lane l holds rows l, count + l, ...
    (``per_lane`` of them); one step of k."""
    return Fragment(
        f"lanes{count}x{per_lane}", count * per_lane, 1,
        thread=Layout(count, 1), value=Layout(per_lane, count), element_bits=8, register_bits=8, dims=("n", "k"),
    )  # fmt: skip


def lane_pairs() -> Fragment:
    """16 lanes of 32 bits, as AVX512-BF16's dot product takes them: a lane's register holds two
    neighbouring k of one row; lane l holds rows l and 16 + l, four k of each."""
    return Fragment(
        "lanes16_pairs", 32, 4,
        thread=Layout(16, 1), value=Layout((2, 2, 2), (32, 16, 64)), element_bits=16, dims=("n", "k"),
    )  # fmt: skip


def _element_bits(k: int) -> int:
    if k not in (16, 32):
        raise ValueError(f"k is {k}; accepted: 16 (fp16, bf16) or 32 (int8, fp8)")
    return 256 // k


def _steps_of_8(n: int) -> int:
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"n is {n}; accepted: multiples of 8 from 8 to 256")
    return n
