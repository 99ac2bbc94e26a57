"""Bugs to plant in the small-m programs: in the loops and places of their Python files, and in the device functions they call."""

from __future__ import annotations

from dataclasses import replace

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule

from .planted import MXFP4, TWO_LEVELS, W4, W4Z, Bug, device, swap, tokens, work

FEW, FEW_Z = work(W4, m=5), work(W4Z, m=5)
STREAM = Schedule("gemm_stream", 64, 8, 64, 3, 2)
WIDE = Schedule("gemm_stream", 128, 8, 64, 2, 4)
SPLIT = Schedule("gemm_stream", 64, 8, 64, 2, 2, split_k=2)
BULK = Schedule("gemm_stream_bulk", 64, 8, 64, 3, 2)
BULK_SPLIT = Schedule("gemm_stream_bulk", 64, 8, 64, 2, 2, split_k=2)
THREE = Schedule("gemm_stream", 192, 16, 128, 2, 3)  # that bring six rows of x at once
SIXTEEN = Schedule("gemm_stream", 64, 16, 64, 2, 2)
APART = Schedule("gemm_stream_bulk", 256, 16, 128, 2, 4)
OVERLAPPING = Schedule("gemm_stream_bulk", 128, 8, 64, 2, 2)  # of 192 rows the second block begins with row 64
OFF = Schedule("gemm_stream", 80, 8, 64, 2, 2)  # a warp's rows lie in two packed records
MANY, WIDE_M = work(W4Z, m=16), work(W4Z, m=16, n=256, k=1024)
FINE = QuantFormat(4, 32, False)

AFTER = "finish(value * factor if normed else value, after, m="
FILL = "for stage in T.unroll({}):\n            if step + stage * rings < end:\n                ring.request_weights"
READERS = 'T.call_extern("handle", "tilebit::mbarrier_wait", ring.x_read(shared, own, slot), phase)\n'
MEET = "            ring.meet(own)\n"
FENCE = 'T.call_extern("handle", "tilebit::fence_barriers")'
TOLD = 'T.call_extern("handle", "tilebit::mbarrier_wait", T.address_of(shared[told]), 0)'


def loop(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the program's loop."""
    return Bug(name, workload, schedule, {"stream.py": swap(*pairs)}, sign=sign)


def ring(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in what fills the slots."""
    return Bug(name, workload, schedule, {"stream_ring.py": swap(*pairs)}, sign=sign)


def sums(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the end of a tile."""
    return Bug(name, workload, schedule, {"stream_sums.py": swap(*pairs)}, sign=sign)


BUGS = (
    # the product
    device("power of two of the upper rows wrong", FEW, STREAM, ("INVERSE_HIGH = 1048576.0f", "INVERSE_HIGH = 16777216.0f")),
    device("zero point not subtracted", FEW_Z, STREAM, (" - (i < 2 ? z0 : z1) * of_x[c][i]", "")),
    device("sum of x not cleared", FEW_Z, STREAM, ("sum[c][i] = 0.0f;", ";")),
    device("scale of the wrong group", work(FINE, m=5), STREAM, ("done / GROUP - 1, pairs)", "0, pairs)")),
    device("sum of x of every second k16 step only", MANY, SIXTEEN, ("atom % 2 == 0) add_x(", "atom % 4 == 0) add_x(")),
    device("half of a k16 step not in the sum of x", MANY, SIXTEEN, ("sum[c][0] + sum[c][2]", "sum[c][0]")),
    device("sum of another column of x", MANY, SIXTEEN, ("both, (lane & 3) * 8 + i * 4)", "both, (lane & 3) * 4 + i * 4)")),
    device("scale of the wrong row of a tile", FEW, STREAM, ("to_float(high[0])", "to_float(low[0])")),
    device("scale for a zero point", FEW_Z, STREAM, ("odd * SCALE_BYTES", "0")),
    device("codes of row r + 8 left in row r", FEW, STREAM, ("R::BOTH_ROWS && i < 2", "false")),
    device("power of two of raw floats wrong", work(MXFP4, m=5), STREAM, ("INVERSE_LOW = 16384.0f", "INVERSE_LOW = 8192.0f")),
    device("zero point taken of floats", work(MXFP4, m=5), STREAM, ("MIDDLE = 0.0f", "MIDDLE = 1.0f"), sign=""),
    # the end of a tile
    sums("token scale of the first row", tokens(W4, m=5), STREAM, ("m=by * s.block_m + element // bn, n=", "m=by * s.block_m, n=")),
    # copies
    device("tile in the wrong record", work(W4, m=5, n=320), OFF, ("(above * (k_tiles - 1) + r)", "r")),
    device(
        "rows of the next record over the first", work(W4, m=5, n=320), replace(OFF, program="gemm_stream_bulk"),
        ("(r * ROWS + first) * 32", "r * ROWS * 32"), sign="",
    ),
    device("rows of x behind the first of a thread lost", MANY, SIXTEEN, ("i * PITCH, from + int64_t(i) * stride", "i * PITCH, from")),
    device("rows of x behind the tile's last", work(W4Z, m=16, n=192, k=512), THREE, ("|| row + i < ROWS", "|| true"), sign=""),
    ring("k tail of x not zero", work(W4, m=5, k=500), STREAM, ("True if whole else step", "True if True else step"), sign=""),
    ring(
        "scales of a group past k read", work(FINE, m=5, k=480), STREAM,
        ("True if whole else group", "True if True else group"), sign="past the ends",
    ),
    ring("rows of x read that are not there", FEW, STREAM, ("own.column + s.block_m <= x.shape[0]", "True"), sign="past the ends"),
    ring("x of the first step in every slot", FEW, STREAM, ("own.x + step * s.block_k]", "own.x]")),
    ring("weights of a neighbour", FEW, WIDE, ("own.member * warp_bytes", "0 * warp_bytes"), sign=""),
    ring("bytes expected by every lane", FEW, BULK, ('elif T.call_extern("bool", "tilebit::elect"):', "else:"), sign=""),
    ring(
        "bytes of a bulk copy miscounted", FEW, BULK,
        ("filled(shared, own, slot), weight_bytes)", "filled(shared, own, slot), weight_bytes + 16)"), sign="threads",
    ),
    # the loop
    loop("last slot not filled", FEW, STREAM, (FILL.format("stages"), FILL.format("stages - 1"))),
    loop("one copy too few waited for", FEW, STREAM, ("T.ptx_wait_group(stages - 1)", "T.ptx_wait_group(stages)")),
    loop("slot refilled while a neighbour reads it", FEW, WIDE, (MEET + "\n    @T.prim_func", "            pass\n\n    @T.prim_func")),
    loop("own copies taken for the neighbour's", FEW, WIDE, ("T.ptx_wait_group(stages - 1)\n" + MEET, "T.ptx_wait_group(stages - 1)\n")),
    loop("x refilled while a neighbour reads it", WIDE_M, APART, (READERS, "pass\n"), sign=""),
    loop(
        "x taken for read by all when one warp has", WIDE_M, APART,
        ("ring.x_read(shared, own, own.lane), warps_n)", "ring.x_read(shared, own, own.lane), 1)"), sign="",
    ),
    loop("phase never turns", FEW, BULK, ("phase ^ 1, phase)", "phase, phase)"), sign=""),
    loop("fewer arrivals than lanes", FEW, BULK, ("33 * warps_n", "32 * warps_n"), sign=""),
    loop("every ring takes every step", FEW, STREAM, ("step = step + rings", "step = step + 1")),
    loop("shares of k that overlap", FEW, SPLIT, ("(bz + 1) * p.steps", "(bz + 2) * p.steps"), sign="past the ends"),
    # the end of a tile
    loop("warps' sums not met", FEW, STREAM, ("own_sums = thread // 32 // warps_n", "own_sums = 0")),
    sums(
        "n tail not masked, small m", work(W4, m=5, n=100), STREAM,
        ("T.And(row < p.n, by", "T.And(row < p.n_pad, by"), sign="after the output",
    ),
    sums("row scale forgotten, small m", work(TWO_LEVELS, m=5), STREAM, (AFTER, AFTER.replace("after", "after[1:]"))),
    sums("bias before the row scale, small m", work(TWO_LEVELS, bias=True, m=5), SPLIT, (AFTER, AFTER.replace("after", "after[::-1]"))),
    sums("row scale forgotten, bulk", work(TWO_LEVELS, bias=True, m=5), BULK_SPLIT, (AFTER, AFTER.replace("after", "after[1:]"))),
    sums("bias before the row scale, bulk", work(TWO_LEVELS, bias=True, m=5), BULK, (AFTER, AFTER.replace("after", "after[::-1]"))),
    sums("a ring's sums lost", FEW, STREAM, ("for ring in T.unroll(rings):", "for ring in T.unroll(rings - 1):")),
    sums("part of the first block lost", FEW, SPLIT, ("for block in T.serial(splits):", "for block in T.serial(1, splits):")),
    sums("part of another tile", FEW, SPLIT, ("(tile * splits + bz) * share", "bz * share")),
    sums("share of a cluster's block lost", FEW, BULK_SPLIT, ("for block in T.serial(1, splits):", "for block in T.serial(2, splits):")),
    sums("cluster's barrier not fenced", FEW, BULK_SPLIT, (FENCE, "pass"), sign="without a fence"),
    loop("ring's barriers not fenced", FEW, BULK, (FENCE, "pass"), sign="without a fence"),
    device("ticket without a fence before it, small m", FEW, SPLIT, ("    __threadfence();\n    arrived", "    arrived"), sign="fence"),
    device("ticket without a fence after it, small m", FEW, SPLIT, ("others);\n    __threadfence();", "others);"), sign="fence"),
    sums("sums read before they are sent", FEW, BULK_SPLIT, (TOLD, "pass"), sign=""),
    sums(
        "sums of a block that was moved back as if it were not", work(W4, m=5, n=192), OVERLAPPING,
        ("p.first_row(T, bx) + element % bn", "bx * bn + element % bn"),
    ),
    sums("rows of a block that was moved back lost", work(W4, m=5, n=192), OVERLAPPING, ("row >= bx * bn)", "row >= bx * bn + 16)")),
    sums("sums sent to the wrong place", FEW, BULK_SPLIT, ("piece % each) * 4", "piece) * 4"), sign=""),
)  # fmt: skip
