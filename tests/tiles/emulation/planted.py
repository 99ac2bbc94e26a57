"""Bugs to plant in the CUDA GEMM programs: edits of their own text; a bug whose place has changed is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tilebit.autotune.problem import Problem
from tilebit.layouts.formats import PER_CHANNEL, QuantFormat
from tilebit.layouts.packing import PackedLayout, register_order
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.workload import Workload

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
SMALL = Schedule("gemm_wgmma", 64, 8, 64, 4, 4)
TWO_SLABS = Schedule("gemm_wgmma", 128, 8, 64, 4, 8)
TALL = Schedule("gemm_wgmma", 128, 8, 64, 4, 4)
STAGED = Schedule("gemm_wgmma", 64, 32, 64, 2, 4)
MMA = Schedule("gemm_mma", 64, 32, 64, 2, 4)
SPLIT = Schedule("gemm_wgmma", 64, 16, 64, 3, 4, split_k=3)


def work(format: QuantFormat, dtype: str = "float16", bias: bool = False, m: int = 13, n: int = 128, k: int = 448) -> Workload:
    return Workload(m, n, k, format, dtype, bias)


@dataclass(frozen=True, slots=True)
class Bug:
    """``edits`` of a kernel's source files, or ``order``, another order of the packed words; ``sign`` is a word of the verdict."""

    name: str
    workload: Workload
    schedule: Schedule
    edits: dict[str, Edit] = field(default_factory=dict)
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


FP16_UNPACK = "scaled<SCALED>(__hsub2({0}, r0.low), r0.scale)"
UNSCALED_ZERO = "__hsub2(scaled<SCALED>(__hsub2({0}, as_pair<half2>(0x64006400u)), r0.scale), __hsub2(r0.low, as_pair<half2>(0x64006400u)))"
TRIPS = "T.min(steps, p.steps - bz * steps)"
SUMS = "make_float4(accumulators[4 * i], accumulators[4 * i + 1], accumulators[4 * i + 2], accumulators[4 * i + 3])"
HALF_SUMS = "make_float4(" + ", ".join(f"__half2float(__float2half_rn(accumulators[4 * i + {j}]))" for j in range(4)) + ")"
SOURCE = "((group * SLABS + slab) * RECORDS)"

BUGS = (
    # the packed layout
    Bug("nibbles of a byte swapped", work(W4), SMALL, order=lambda layout: layout.order[:, [1, 0, 3, 2, 5, 4, 7, 6]]),
    Bug("no interleave", work(W4), SMALL, order=_natural),
    Bug("tile transposed", work(W4), SMALL, order=_transposed),
    Bug("words of two threads swapped", work(W8), SMALL, order=lambda layout: layout.order.reshape(-1, 2, 4, 4)[:, ::-1].reshape(-1, 4)),
    # the dequantization header
    Bug("upper nibbles shifted by 4 instead of 8", work(W4), SMALL, {"device": swap(("v = w >> 8", "v = w >> 4"))}),
    Bug(
        "sign error in the upper nibble",
        work(W4Z),
        SMALL,
        {
            "device": swap(
                (
                    "high(__half2half2(__hneg(__hadd(__ushort_as_half(0x5400), z))))",
                    "high(__half2half2(__hadd(__ushort_as_half(0x5400), z)))",
                )
            )
        },
    ),
    Bug("upper nibble's magic off", work(W4), SMALL, {"device": swap(("0x5400", "0x5401"))}),
    Bug("zero point missed", work(W4Z), SMALL, {"device": swap(("SYMMETRIC ? implied : zeros[g]", "implied"))}),
    Bug("zero point of the wrong row", work(W4Z), SMALL, {"device": swap(("zeros[g + 8]", "zeros[g]"))}),
    Bug("zero point not scaled", work(W4Z), SMALL, {"device": swap(*((FP16_UNPACK.format(v), UNSCALED_ZERO.format(v)) for v in "ac"))}),
    Bug("scale of the wrong row", work(W4), SMALL, {"device": swap(("scales[g + 8]", "scales[g]"))}),
    Bug(
        "scale groups of a stage merged",
        work(QuantFormat(4, 32, True)),
        SMALL,
        {"device": swap(("/ GROUP_STEPS *", "/ GROUP_STEPS / 2 *"))},
    ),
    Bug("bytes swapped at 8 bits", work(W8), SMALL, {"device": swap(("0x4140", "0x4041"))}),
    Bug("bytes swapped at 8 bits, bf16", work(W8Z, "bfloat16"), SMALL, {"device": swap(("0x7542", "0x7543"))}),
    Bug("bf16 magic off", work(W4, "bfloat16"), SMALL, {"device": swap(("0x43004300u", "0x43804380u"))}),
    Bug("records of a stage reversed", work(W8), SMALL, {"device": swap(("record * 512", "(RECORDS - 1 - record) * 512"))}),
    Bug("slabs of the warpgroups swapped", work(W4), TWO_SLABS, {"device": swap((SOURCE, "(((1 - group) * SLABS + slab) * RECORDS)"))}),
    Bug("slabs of a warpgroup swapped", work(W4), TALL, {"device": swap((SOURCE, "((group * SLABS + (SLABS - 1 - slab)) * RECORDS)"))}),
    # the operands' indices
    Bug(
        "scale group off by one",
        work(W4),
        SMALL,
        {"operands.py": swap(("return step * self.schedule.block_k //", "return (step + 1) * self.schedule.block_k //"))},
    ),
    Bug(
        "bias added twice",
        work(W4, bias=True),
        SMALL,
        {"operands.py": swap(("return value + bias[row]", "return value + bias[row].astype('float32') + bias[row]"))},
    ),
    Bug("bias lost", work(W4, bias=True), STAGED, {"operands.py": swap(("not self.grouped or self.workload.bias", "not self.grouped"))}),
    Bug(
        "per-channel scale applied twice",
        work(CHANNEL),
        SMALL,
        {"operands.py": swap(("accumulator * scales[0, row]", "accumulator * scales[0, row].astype('float32') * scales[0, row]"))},
    ),
    # the tile program
    Bug("k stage lost", work(W4), SMALL, {"packed.py": swap((TRIPS, TRIPS + " - 1"))}),
    Bug("k stage repeated", work(W4), SMALL, {"packed.py": swap(("bz * steps + i", "bz * steps + i - (i == 1)"))}),
    Bug("accumulators not cleared", work(W4), SMALL, {"packed.py": swap(("T.clear(Y)", "pass"))}),
    Bug(
        "fp16 accumulators",
        work(W4),
        SMALL,
        {"packed.py": swap(('T.alloc_fragment((bn, bm), "float32")', 'T.alloc_fragment((bn, bm), "float16")'))},
    ),
    Bug("tile lost", work(W4), SMALL, {"packed.py": swap(("T.ceildiv(m, bm), splits", "T.ceildiv(m, bm) - (m > bm), splits"))}, sign="NaN"),
    Bug("weights of the wrong slab", work(W4, n=256), TWO_SLABS, {"packed.py": swap(("bx * (bn // 64)", "bx"))}),
    Bug(
        "scales of the wrong tile",
        work(W4),
        SMALL,
        {"packed.py": swap(("scales[p.group_of(step), bx * bn]", "scales[p.group_of(step), by * bn]"))},
    ),
    Bug("split's own k forgotten", work(W4), SPLIT, {"packed.py": swap(("x[by * bm, step * bk]", "x[by * bm, i * bk]"))}),
    Bug(
        "n tail not masked",
        work(W4, n=100),
        SMALL,
        {"packed.py": swap(("bx * bn + r < p.n", "bx * bn + r < p.n_pad"))},
        sign="after the output",
    ),
    Bug("m tail not masked", work(W4), SMALL, {"packed.py": swap(("by * bm + c < m", "by * bm + c < m + bm"))}, sign="after the output"),
    # the reduction and the epilogue
    Bug("split lost", work(W4), SPLIT, {"device": swap(("for (int s = 0; s < splits; ++s)", "for (int s = 1; s < splits; ++s)"))}),
    Bug("last split counted twice", work(W4), SPLIT, {"device": swap(("accumulators[i] = 0.0f;", ";"))}),
    Bug("fp16 partial sums", work(W4), SPLIT, {"device": swap((SUMS, HALF_SUMS))}),
    Bug("ticket left behind", work(W4), SPLIT, {"device": swap(("+ tile, splits - 1)", "+ tile, splits)"))}, sign=""),
    Bug(
        "matrices of the output swapped",
        work(W4),
        STAGED,
        {
            "device": swap(
                ("(lane >> 4) * 8 + (lane & 7)", "((lane >> 3) & 1) * 8 + (lane & 7)"),
                ("row + ((lane >> 3) & 1) * 8", "row + (lane >> 4) * 8"),
            )
        },
    ),
    Bug(
        "columns of the output swapped, mma.sync",
        work(W4),
        MMA,
        {
            "device": swap(
                ("p[0] = static_cast<uint16_t>(values[i])", "p[0] = static_cast<uint16_t>(values[i] >> 16)"),
                ("p[STRIDE] = static_cast<uint16_t>(values[i] >> 16)", "p[STRIDE] = static_cast<uint16_t>(values[i])"),
            )
        },
    ),
)
