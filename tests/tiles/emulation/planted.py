"""Bugs to plant in the CUDA GEMM programs: edits of their own text; a bug whose place has changed is an error.

``planted_loops.py`` has those of the programs' loops, this file those of what they share: packed layout, dequantization, stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from sample.two_levels import FORMAT as TWO_LEVELS

from tilebit.autotune.problems.gemm import Problem
from tilebit.layouts.formats import PER_CHANNEL, GemmFormat, QuantFormat
from tilebit.layouts.packing import PackedLayout, register_order
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule

Edit = Callable[[str], str]


def swap(*pairs: tuple[str, str]) -> Edit:
    """Replaces every occurrence of each ``old`` by its ``new``; raises ``LookupError`` where there is none."""

    def edit(text: str) -> str:
        for old, new in pairs:
            if old not in text:
                raise LookupError(f"the bug cannot be planted: {old!r} is no longer in the source; plant it elsewhere")
            text = text.replace(old, new)
        return text

    return edit


W4, W4Z, W8, W8Z = (QuantFormat(bits, 64, symmetric) for bits in (4, 8) for symmetric in (True, False))
CHANNEL = QuantFormat(4, PER_CHANNEL, True)
MXFP4 = QuantFormat.parse("w4a16_mxfp4")
SMALL = Schedule("gemm_wgmma", 64, 16, 64, 2, 4)
TWO_SLABS = Schedule("gemm_wgmma", 128, 16, 64, 2, 8)
DEEP = Schedule("gemm_wgmma", 64, 16, 128, 2, 4)  # two records a part at 8 bits
TALL = Schedule("gemm_wgmma", 128, 16, 64, 2, 4)
LONG = Schedule("gemm_wgmma", 64, 64, 64, 2, 4)
MMA = Schedule("gemm_mma", 64, 32, 64, 2, 4)
DIRECT = Schedule("gemm_mma", 64, 8, 64, 2, 4)
SPLIT = Schedule("gemm_mma", 64, 16, 64, 3, 4, split_k=3)


def work(format: GemmFormat, dtype: str = "float16", bias: bool = False, m: int = 13, n: int = 128, k: int = 448) -> Workload:
    return Workload(m, n, k, format, dtype, bias)


def tokens(format: GemmFormat, m: int = 13) -> Workload:
    return replace(work(format, bias=True, m=m), token_scales=True)


@dataclass(frozen=True, slots=True)
class Bug:
    """``edits`` of a kernel's source files, or ``order``, another order of the packed words; ``sign`` is a word of the verdict, or of the
    fault that the emulation reports."""

    name: str
    workload: Workload
    schedule: Schedule
    edits: Mapping[str, Edit] = field(default_factory=dict)
    order: Callable[[PackedLayout], np.ndarray] | None = None
    sign: str = "wrong"

    def packed(self, problem: Problem) -> Problem:
        """The problem as its packer would see it: the same codes, for a kernel that expects them in another order."""
        if self.order is None:
            return problem
        layout = problem.layout
        return replace(problem, layout=PackedLayout("planted", layout.bits, layout.tile_n, layout.tile_k, self.order(layout)))


def _natural(layout: PackedLayout) -> np.ndarray:
    return layout.order[:, np.argsort(register_order(layout.bits, 16))]


def _transposed(layout: PackedLayout) -> np.ndarray:
    return layout.order % layout.tile_k * layout.tile_n + layout.order // layout.tile_k


def device(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the device headers: each ``old`` becomes its ``new``."""
    return Bug(name, workload, schedule, {"device": swap(*pairs)}, sign=sign)


FP16_UNPACK = "scaled<SCALED>(__hsub2({0}, r0.low), r0.scale)"
UNSCALED_ZERO = "__hsub2(scaled<SCALED>(__hsub2({0}, as_pair<half2>(0x64006400u)), r0.scale), __hsub2(r0.low, as_pair<half2>(0x64006400u)))"
UPPER = "__hneg(__hadd(__ushort_as_half(0x5400), z))"
PARTS = "for part in parts(self.workload, applied)"
SUMS = "four(accumulators + 4 * i)"
HALF_SUMS = "make_float4(" + ", ".join(f"__half2float(__float2half_rn(accumulators[4 * i + {j}]))" for j in range(4)) + ")"
SOURCE = "group * SLABS + slab) * RECORDS"

BUGS = (
    # the packed layout
    Bug("nibbles of a byte swapped", work(W4), SMALL, order=lambda layout: layout.order[:, [1, 0, 3, 2, 5, 4, 7, 6]]),
    Bug("no interleave", work(W4), SMALL, order=_natural),
    Bug("tile transposed", work(W4), SMALL, order=_transposed),
    Bug("words of two threads swapped", work(W8), SMALL, order=lambda layout: layout.order.reshape(-1, 2, 4, 4)[:, ::-1].reshape(-1, 4)),
    # the dequantization header
    device("upper nibbles shifted by 4 instead of 8", work(W4), SMALL, ("v = w >> 8", "v = w >> 4")),
    device("sign error in the upper nibble", work(W4Z), SMALL, (UPPER, UPPER.removeprefix("__hneg"))),
    device("upper nibble's magic off", work(W4), SMALL, ("0x5400", "0x5401")),
    device("zero point missed", work(W4Z), SMALL, ("SYMMETRIC ? implied : zeros[g]", "implied")),
    device("zero point of the wrong row", work(W4Z), SMALL, ("zeros[g + 8]", "zeros[g]")),
    device("zero point not scaled", work(W4Z), SMALL, *((FP16_UNPACK.format(v), UNSCALED_ZERO.format(v)) for v in "ac")),
    device("scale of the wrong row", work(W4), SMALL, ("scales[g + 8]", "scales[g]")),
    device("scale groups of a stage merged", work(QuantFormat(4, 32, True)), SMALL, ("/ GROUP_STEPS *", "/ GROUP_STEPS / 2 *")),
    device("bytes swapped at 8 bits", work(W8), SMALL, ("0x4140", "0x4041")),
    device("bytes swapped at 8 bits, bf16", work(W8Z, "bfloat16"), SMALL, ("0x7542", "0x7543")),
    device("bf16 magic off", work(W4, "bfloat16"), SMALL, ("0x43004300u", "0x43804380u")),
    device("records of a part reversed", work(W8, k=512), DEEP, ("record * 512", "(RECORDS - 1 - record) * 512")),
    device("parts of a stage swapped", work(W8, k=512), DEEP, ("(PART * (STRIDE / 64)", "((1 - PART) * (STRIDE / 64)")),
    device("slabs of the warpgroups swapped", work(W4), TWO_SLABS, (SOURCE, "(1 - group) * SLABS + slab) * RECORDS")),
    device("slabs of a warpgroup swapped", work(W4), TALL, (SOURCE, "group * SLABS + (SLABS - 1 - slab)) * RECORDS")),
    # 4-bit floats
    device("sign of a float lost", work(MXFP4), SMALL, ("PLACES = 0x8e008e00u", "PLACES = 0x0e000e00u")),
    device("sign of a float lost, bf16", work(MXFP4, "bfloat16"), MMA, ("(w), 0x80008000u", "(w), 0u")),
    device("exponent of a float a bit too low", work(MXFP4), SMALL, ("LOW_THREE, w << 1, w << 4", "LOW_THREE, w, w << 4")),
    device("exponent of a float a bit too high, bf16", work(MXFP4, "bfloat16"), MMA, ("LOW = 6;", "LOW = 7;")),
    device("floats of a byte swapped", work(MXFP4), SMALL, ("out[2] = even &", "out[2] = odd &"), ("out[3] = odd &", "out[3] = even &")),
    device("power of two of a float's scale wrong", work(MXFP4), SMALL, ("0x7400", "0x7000")),
    device("power of two of a float's scale wrong, bf16", work(MXFP4, "bfloat16"), MMA, ("0x7e80", "0x7e00")),
    device("float's scale of the wrong row", work(MXFP4), SMALL, ("(i & 1 ? r1 : r0).scale", "r0.scale")),
    # the operands' indices
    Bug(
        "scale group off by one", work(W4), SMALL,
        {"operands.py": swap(("return step * self.schedule.block_k //", "return (step + 1) * self.schedule.block_k //"))},
    ),
    Bug(
        "bias added twice, mma.sync", work(W4, bias=True), DIRECT,
        {"operands.py": swap(("else value + number", "else value + number + number"))},
    ),
    Bug(
        "bias lost, mma.sync", work(W4, bias=True), MMA,
        {"operands.py": swap((PARTS, PARTS + " if part.does != 'add'"))},
    ),
    Bug(
        "per-channel scale applied twice, mma.sync", work(CHANNEL), DIRECT,
        {"operands.py": swap(("value = value * number if", "value = value * number * number if"))},
    ),
    Bug(
        "token scale forgotten, mma.sync", tokens(W4), DIRECT,
        {"operands.py": swap((PARTS, PARTS + " if part.operand != 'token_scales'"))},
    ),
    Bug(
        "token scale of the next row, mma.sync", tokens(W4), MMA,
        {"mma.py": swap(("m=T.min(by * bm + c, m - 1)", "m=T.min(by * bm + c + 1, m - 1)"))},
    ),
    device("token scale of the next row", tokens(W4), SMALL, ("i & 1 ? of_rows.y : of_rows.x", "i & 1 ? of_rows.x : of_rows.y")),
    device("token scale of the first columns", tokens(W4, m=40), LONG, ("+ chunk * (COLUMNS / 2) + (thread & 3)", "+ (thread & 3)")),
    device("token scales not awaited", tokens(W4), SMALL, ("mbarrier_arrive_after_copies(barrier);", "mbarrier_arrive(barrier);")),
    # stores
    device("bias lost", work(W4, bias=True), SMALL, ("return sum + number;", "return sum;")),
    device("per-channel scale lost", work(CHANNEL), SMALL, ("return sum * number;", "return sum;")),
    # the second level of scales
    Bug(
        "row scale forgotten, mma.sync", work(TWO_LEVELS), DIRECT,
        {"operands.py": swap((PARTS, PARTS + " if part.operand != 'row_scales'"))},
    ),
    Bug(
        "bias before the row scale, mma.sync", work(TWO_LEVELS, bias=True), MMA,
        {"operands.py": swap(("for part, tensor in after:", "for part, tensor in after[::-1]:"))},
    ),
    device("row scale forgotten", work(TWO_LEVELS), SMALL, ("return sum * number;", "return sum;")),
    Bug(
        "bias before the row scale", work(TWO_LEVELS, bias=True), SMALL,
        {"operands.py": swap(("parts(self.workload)]", "parts(self.workload)[::-1]]"), ("in after]", "in after[::-1]]"))},
    ),
    device(
        "n tail not masked", work(W4, n=100), SMALL,
        (" && (N % BLOCK_N == 0 || p.at * 8 < rows)", ""), ("min(8, rows - p.at * 8)", "8"), sign="after the output",
    ),
    device("m tail not masked", work(W4), SMALL, (" && chunk * COLUMNS + p.column < columns", ""), sign="after the output"),
    device(
        "matrices of the output swapped", work(W4), SMALL,
        ("(lane >> 4) * 8 + (lane & 7)", "((lane >> 3) & 1) * 8 + (lane & 7)"), ("warp * 2 + ((lane >> 3) & 1)", "warp * 2 + (lane >> 4)"),
    ),
    device(
        "pieces of the output read in place", work(W4), SMALL,
        ("source = mine + place(column, OF_Y * at)", "source = mine + place(column, at ^ (column & 7))"),
    ),
    device(
        "columns of the output swapped, mma.sync", work(W4), MMA,
        ("(values[i] >> (16 * e))", "(values[i] >> (16 - 16 * e))"),
    ),
    # the sum of a tile's shares, mma.sync
    device("split lost", work(W4, k=576), SPLIT, ("for (int s = 0; s < splits; ++s)", "for (int s = 1; s < splits; ++s)")),
    device("last split counted twice", work(W4, k=576), SPLIT, ("accumulators[i] = A(0);", ";")),
    device("fp16 partial sums", work(W4, k=576), SPLIT, (SUMS, HALF_SUMS)),
    device("ticket left behind", work(W4, k=576), SPLIT, ("+ tile, splits - 1, thread)", "+ tile, splits, thread)"), sign=""),
)  # fmt: skip
