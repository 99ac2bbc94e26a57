"""Bugs to plant in ``gemm_any``: in the order of planes and bits, in its tables, in its loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.packing import PackedLayout
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule

from .planted import Bug, device, swap


def of_width(bits: int, m: int = 5, n: int = 60, k: int = 700) -> Workload:
    return Workload(m, n, k, GemmFormat.parse(f"w{bits}a16_any"), bias=True)


ONE = Schedule("gemm_any", 16, 8, 1, 2, 2)
TWO = Schedule("gemm_any", 32, 8, 1, 2, 2)
FEW = Schedule("gemm_any", 16, 4, 1, 2, 2)  # of few columns: some codes of 3 bits are looked up in registers
CROWDED = Schedule("gemm_any", 32, 8, 1, 1, 2, min_blocks=2)  # too many blocks for four copies of a table
SPLIT = replace(ONE, split_k=3)
W3, W4, W6 = of_width(3), of_width(4), of_width(6)


def loop(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the program's page."""
    return Bug(name, workload, schedule, {"any.py": swap(*pairs)}, sign=sign)


def neighbours_first(layout: PackedLayout) -> np.ndarray:
    """A word's bits in the order of k."""
    return np.sort(layout.order, axis=1)


# A layout of another name is that of all planes.
BUGS = (
    Bug("planes not rotated", W3, ONE, order=lambda layout: layout.order),
    Bug("bits of planes in the order of k", W6, ONE, order=neighbours_first),
    device("planes in the wrong order", W3, ONE, ("from + p * stride", "from + (PLANES - 1 - p) * stride")),
    device("highest bit dropped", W3, ONE, ("high = 2 * i < BITS ?", "high = i > 0 && 2 * i < BITS ?")),
    device("lowest bit of an even width dropped", W6, ONE, ("low = 2 * i + 1 < BITS ?", "low = 2 * i + 2 < BITS ?")),
    device("codes turned by a bit too few", W3, ONE, ("(j + 33 - BITS)", "(j + 32 - BITS)")),
    device("four planes selected as the other four", W6, ONE, ("0xe1e1e1e1u", "0x1e1e1e1eu")),
    device("codebook of the neighbour", W3, ONE, ("(tile * AT_A_TIME * 16 + row)", "(tile * AT_A_TIME * 16 + (row ^ 1))")),
    device("codebook of the same row of the first tile", W3, TWO, ("(tile * AT_A_TIME * 16 + row)", "(row)")),
    device("codebook of the first tile for both of a table", W6, TWO, ("own + (16 << BITS)", "own")),
    device("table of row r for row r + 8", W6, ONE, ("low + HALF", "low")),
    device("table of the first tile", W3, TWO, ("t / TOGETHER * TABLE", "0 * TABLE")),
    device("numbers of the other tile of a table", W6, TWO, ("t % TOGETHER * NEXT", "(1 - t) * NEXT")),
    device("rows exchanged for the other lanes of two", W4, CROWDED, ("COPIES == 2 && lane & 2", "COPIES == 2 && lane & 1")),
    device("rows of two exchanged and not exchanged back", W4, CROWDED, ("a[2 * i] = exchanged(lane) ?", "a[2 * i] = !exchanged(lane) ?")),
    device("pairs of a row looked up in the other's table", W4, CROWDED, ("COPIES == 2 ? own ^ HALF : own", "own")),
    device("pairs of the second tile over the first's", W4, CROWDED, ("tile % TOGETHER * NEXT", "0")),
    device("second code of a pair for the first", W3, ONE, ("j % 2 ? 0x5432 : 0x5410", "j % 2 ? 0x3254 : 0x1054")),
    device("numbers of a register exchanged", W6, ONE, ("high << 16 | low", "low << 16 | high")),
    device("rows of a fragment exchanged", W3, ONE, ("words[0][j], words[0]", "words[1][j], words[1]")),
    device("x of a neighbouring lane", W6, TWO, ("(lane >> 3 ^ lane & 7) * 16", "(lane >> 3 ^ 1 ^ lane & 7) * 16")),
    device("pairs of few rows of x exchanged", W3, FEW, ("(lane >> 2 & 3) * 4, own", "(lane >> 2 & 3 ^ 1) * 4, own")),
    device("second half of a step with the first half's x", W3, ONE, ("load_x(column, u * 4 + q", "load_x(column, q")),
    device("sums of the first tile", W3, TWO, ("sums + (t * NT + c) * 4, a", "sums + c * 4, a")),
    device("kept codebook of the neighbour", W3, FEW, ("row * 8 + (lane >> 2)", "row * 8 + (lane >> 2 ^ 1)")),
    device("kept codebook of the first row", W3, FEW, ("codebooks + (t * 2 + h) * 4", "codebooks + t * 2 * 4")),
    device("second half of a word's codes for the first", W3, FEW, ("words[h][j] >> 16 * i", "words[h][j]")),
    device("low bytes of kept numbers for the high", W3, FEW, ("(kept + KEPT_NUMBERS / 4, at)", "(kept, at)")),
    loop(
        "planes of the next step for this one",
        W6,
        ONE,
        ("planes_at(weight, bx * s.block_n, step)", "planes_at(weight, bx * s.block_n, T.min(step + 1, k_tiles - 1))"),
    ),
    loop(
        "numbers of x past k read", of_width(3, k=500), ONE, ("rules.STEP_K if whole else p.kx", "rules.STEP_K if True else p.kx"), sign=""
    ),
    loop("x read before it has come", W3, ONE, ("T.ptx_wait_group(stages - 1)", "T.ptx_wait_group(stages)")),
    loop("tables read while they are filled", W3, ONE, ("T.sync_threads()\n\n            while", "\n            while"), sign=""),
    loop("all warps' sums in one place", W3, ONE, ("warp * (s.block_m * sum_pitch)", "0 * (s.block_m * sum_pitch)"), sign=""),
    loop("rows of the tile's first block", W3, ONE, ("row % CUDA_TILE_N * 8", "0")),
    loop(
        "a step that two blocks take", of_width(6, k=1200), SPLIT, ("bz * steps // splits + warp", "bz * (steps // splits) + warp"), sign=""
    ),
    loop("x of the first step", W6, ONE, ("x[by * s.block_m, step * rules.STEP_K]", "x[by * s.block_m, 0]")),
    loop("x of the first rows", of_width(3, m=13), ONE, ("x[by * s.block_m, step", "x[0, step")),
)
