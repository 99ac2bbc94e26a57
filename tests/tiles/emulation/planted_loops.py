"""Bugs to plant in the loops of the CUDA GEMM programs: what is loaded when, who waits for whom, whose share is whose."""

from __future__ import annotations

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule

from .planted import DIRECT, MMA, SPLIT, TWO_SLABS, W4, Bug, device, swap, work

RING = Schedule("gemm_wgmma", 64, 16, 64, 2, 4)
PAIR = Schedule("gemm_wgmma", 64, 16, 64, 2, 4, cluster=2)
CLUSTERED = Schedule("gemm_wgmma", 64, 32, 64, 2, 4, split_k=2)
MEETING = Schedule("gemm_wgmma", 64, 32, 64, 2, 4, split_k=4)  # two clusters
SHARED = Schedule("gemm_wgmma", 64, 16, 64, 2, 4, split_k=3)
STREAM_K = Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)
BOXES = Schedule("gemm_wgmma", 64, 64, 64, 2, 4)  # x comes in several boxes, not all of which hold rows
STRIPS = Schedule("gemm_wgmma", 64, 32, 64, 2, 4, tail=2)  # with 5 SMs: a last wave that is cut
CUT = work(W4, m=100, n=192)
HALVES = Schedule("gemm_wgmma", 64, 16, 128, 2, 4)  # a step in two parts: a product is always under way
BUSY = work(W4, m=60, n=192, k=1472)  # with 5 SMs: a wave of whole tiles, and shares that begin in the middle of others

TRIPS = "T.min(steps, p.steps - bz * steps)"
RELEASE = "last = stage\n" + " " * 28 + "release(empty[last], thread, 1)\n"
AWAIT = "await_full(full[stage * parts], phase)\n"
RELEASE_LAST = "release(empty[last * parts + 1], thread, j)"
RELEASE_FIRST = "release(empty[stage * parts], thread, 1)\n"
REST = "multiply_rest[kind](W_rest, Xs, sums[kind], Ws, Ss, Zs, thread, stage, of_bytes, False)\n"
DRAIN = "T.wait_wgmma(0)\n"
LAST_RELEASE = DRAIN + " " * 20 + RELEASE_LAST.replace("j)", "1)")
PRODUCT = "multiply[kind](W, Xs, sums[kind], Ws, Ss, Zs, thread, stage, of_bytes, j == 0)\n"
FREE = "T.mbarrier_wait_parity(empty[i % stages * parts + part], (i // stages & 1) ^ 1)\n"
LOAD = "load_weights[part](halves,"
LEFT = "meet_cluster()  # has left its stages\n"
ADD_SENT = """T.call_extern(
                    "handle", plan.add_sent(i), T.address_of(own_sums[0]), _begin(T, slots), T.address_of(numbers[0]), m, block,
                    thread - PRODUCERS,
                )"""
SENT = 'T.call_extern("handle", "tilebit::await_stage", T.address_of(sent[i]), 0)'
PREDECESSOR = 'T.call_extern("handle", "tilebit::wait_for_predecessor")\n'
LOADS_X = " " * 20 + "load.x("


def loop(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the program's own file."""
    return Bug(name, workload, schedule, {f"{schedule.program.removeprefix('gemm_')}.py": swap(*pairs)}, sign=sign)


def load(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the loading warps of ``gemm_wgmma``."""
    return Bug(name, workload, schedule, {"wgmma_load.py": swap(*pairs)}, sign=sign)


def exchange(name: str, *pairs: tuple[str, str]) -> Bug:
    """A bug in how two blocks add up a tile that they share."""
    return Bug(name, work(W4, m=40), CLUSTERED, {"wgmma_exchange.py": swap(*pairs)}, sign="")


def meeting(name: str, *pairs: tuple[str, str]) -> Bug:
    """A bug in how clusters that share a tile meet."""
    return Bug(name, work(W4, m=40, k=576), MEETING, {"wgmma_exchange.py": swap(*pairs)}, sign="")


BUGS = (
    # mma.sync
    loop("k stage lost", work(W4), DIRECT, (TRIPS, TRIPS + " - 1")),
    loop("k stage repeated", work(W4), DIRECT, ("bz * steps + i", "bz * steps + i - (i == 1)")),
    loop("accumulators not cleared", work(W4), DIRECT, ("T.clear(sums)", "pass")),
    loop("fp16 accumulators", work(W4), DIRECT, ("(bn, bm), p.product_dtype)", '(bn, bm), "float16")')),
    loop("tile lost", work(W4), DIRECT, ("T.ceildiv(m, bm), splits", "T.ceildiv(m, bm) - (m > bm), splits"), sign="NaN"),
    loop("scales of the wrong tile", work(W4), DIRECT, ("bx * scale_columns], Ss", "by * scale_columns], Ss")),
    loop("split's own k forgotten", work(W4, k=576), SPLIT, ("x[by * bm, step * bk]", "x[by * bm, i * bk]")),
    loop("n tail not masked, mma.sync", work(W4, n=100), MMA, ("bx * bn + r < p.n", "bx * bn + r < p.n_pad"), sign="after the output"),
    # wgmma: the pipeline
    loop("sum never starts from zero", work(W4), RING, ("stage, of_bytes, j == 0)", "stage, of_bytes, False)")),
    loop("sum starts anew at every step", work(W4), RING, ("stage, of_bytes, j == 0)", "stage, of_bytes, True)")),
    loop(
        "stage released before the product",
        work(W4),
        RING,
        (RELEASE, "pass\n"),
        (PRODUCT, RELEASE + " " * 28 + PRODUCT),
    ),
    loop(
        "stage released before the product, in parts",
        work(W4, k=1024),
        HALVES,
        (RELEASE_LAST, RELEASE_LAST.replace("last", "stage").replace("j)", "1)")),
        (LAST_RELEASE, DRAIN),
        sign="nobody can go on",
    ),
    loop("weights overwritten while they are multiplied", work(W4, k=512), HALVES, ("T.wait_wgmma(parts - 1)", "T.wait_wgmma(parts)")),
    loop("sums read before the last product", work(W4, k=512), HALVES, (DRAIN, "pass\n")),
    loop(
        "last stage of a tile never released",
        work(W4, m=40, k=512),
        Schedule("gemm_wgmma", 64, 16, 128, 2, 4, stream_k=True),
        (LAST_RELEASE, DRAIN),
        sign="nobody can go on",
    ),
    loop(
        "second part of a step multiplied twice",
        work(W4, k=512),
        HALVES,
        ("for part in (0, parts - 1))", "for part in (parts - 1, parts - 1))"),
    ),
    loop("stage never released", work(W4), RING, (RELEASE, "pass\n"), sign="nobody can go on"),
    loop(
        "second part of a stage not waited for",
        work(W4, n=640, k=1024),
        HALVES,
        ("await_full(full[stage * parts + 1], phase)", "await_full(full[stage * parts], phase)"),
        sign="",
    ),
    loop(
        "first part released before the last is dequantized",
        work(W4, k=512),
        HALVES,
        (REST, RELEASE_FIRST + " " * 28 + REST),
        (REST + " " * 28 + RELEASE_FIRST, REST),
        sign="",
    ),
    loop("full stage not waited for", work(W4), RING, (AWAIT, "pass\n"), sign=""),
    loop(
        "full stage's parity wrong",
        work(W4),
        RING,
        ("full[stage * parts], phase)", "full[stage * parts], phase ^ 1)"),
        sign="",
    ),
    load("empty stage's parity wrong", work(W4), RING, ("(i // stages & 1) ^ 1)", "i // stages & 1)"), sign="nobody can go on"),
    load("weights loaded over a stage in use", work(W4), RING, (FREE + " " * 16 + LOAD, "pass\n" + " " * 16 + LOAD), sign=""),
    loop(
        "last ring stage skipped",
        work(W4),
        Schedule("gemm_wgmma", 64, 16, 64, 3, 4),
        ("Xs[stage, part, 0:height, :]", "Xs[stage % (stages - 1), part, 0:height, :]"),
    ),
    load("weights of the wrong slab", work(W4, n=256), TWO_SLABS, ("bx * (bn // 64)", "bx")),
    load("x of the wrong rows", work(W4, m=40), RING, ("x[top + first : top + first + rows", "x[first : first + rows")),
    load("x of few rows left out", work(W4, m=70), BOXES, ("first + few * FEW_ROWS:", "first + few * FEW_ROWS + 8:")),
    loop("one loading warp counted", work(W4), RING, ("alloc_barrier([64] * (", "alloc_barrier([32] * ("), sign=""),
    loop(
        "x loaded before the kernel that writes it ends",
        work(W4),
        RING,
        (PREDECESSOR + LOADS_X, "pass\n" + LOADS_X),
        sign="earlier kernel",
    ),
    loop(
        "y stored before the kernel that reads it ends",
        work(W4),
        RING,
        (PREDECESSOR + " " * 16 + "# the half", "pass\n" + " " * 16 + "# the half"),
        sign="earlier",
    ),
    loop("shared x released by one block alone", work(W4), PAIR, ("schedule.num_warps * cluster", "schedule.num_warps"), sign=""),
    device("stage released in one block of two", work(W4), PAIR, ("lane < CLUSTER", "lane < 1"), sign="nobody can go on"),
    load("each step loaded like the first of its tile", work(W4), RING, ("step, left = step + 1, left - 1", "left = left - 1")),
    device("piece of a shared tile as long as a tile", BUSY, STREAM_K, ("min(tile, share - i)", "tile")),
    # wgmma: strips of tiles
    device("strip of a tile lost", CUT, STRIPS, ("% TAIL * (BLOCK_M / TAIL)", "% 1 * (BLOCK_M / TAIL)"), sign="NaN"),
    device("strips of the wrong tile", CUT, STRIPS, ("places - cut + strip / TAIL", "places - cut + strip % TAIL"), sign=""),
    device("strips of some blocks lost", CUT, STRIPS, ("(cut * TAIL - team + teams - 1)", "(cut * TAIL - team)"), sign="NaN"),
    Bug(
        "strip's sums stored for the tile before",
        CUT,
        STRIPS,
        {"wgmma_numbers.py": swap(("m, block, i, T.address_of(ready", "m, block, max(i - 1, 0), T.address_of(ready"))},
        sign="",
    ),
    loop(
        "a block leaves while others still tell it of stages",
        work(W4, k=1472),
        PAIR,
        ("if cluster > 1:  # a block that left", "if False:  # a block that left"),
        sign="left the cluster",
    ),
    # wgmma: shares of tiles
    device("ticket without a fence before it", work(W4), SHARED, ("    __threadfence();\n    arrived", "    arrived"), sign="fence"),
    device("ticket without a fence after it", work(W4), SHARED, ("others);\n    __threadfence();", "others);"), sign="fence"),
    device("parts read without a fence", BUSY, STREAM_K, ("      __threadfence();\n    }\n", "    }\n"), sign="fence"),
    exchange("parts added up before they are there", (SENT, "pass")),
    exchange("parts sent over stages in use", (LEFT, "pass\n")),
    meeting("clusters that meet store all but the last", ("last[0] == 1", "last[0] == 0")),
    meeting("what a cluster's other block sent does not reach the meeting", (ADD_SENT, "pass")),
    device(
        "bytes of a sent part miscounted",
        work(W4, m=40),
        CLUSTERED,
        ("H::COUNT * THREADS * 4 : 0", "H::COUNT * THREADS * 2 : 0"),
        sign="",
    ),
    device(
        "part of a cluster lost",
        work(W4, m=40),
        CLUSTERED,
        ("chunk[e + i] += theirs[i]", "chunk[e + i] += i == 1 ? 0 : theirs[i]"),
    ),
    device("halves of a cluster's tile exchanged", work(W4, m=40), CLUSTERED, ("i, e + j, 1 - rank)", "i, e + j, rank)")),
    device(
        "columns of a cluster's tile lost",
        work(W4, m=40),
        CLUSTERED,
        (".store(values, own, channels", ".store(values, 2 * I, channels"),
        sign="NaN",
    ),
    device(
        "share summed twice",
        work(W4),
        SHARED,
        ("part == Part::ALL ? A(0) : accumulators", "part == Part::NOTHING ? A(0) : accumulators"),
    ),
    device("share of the last block lost", work(W4), SHARED, ("last = first + O::SPLIT - 1", "last = first + O::SPLIT - 2"), sign=""),
    device(
        "split begins a step late",
        work(W4),
        SHARED,
        ("return block % SPLITS * STEPS / SPLITS;", "return (block % SPLITS * STEPS + SPLITS - 1) / SPLITS;"),
    ),
    device("longer shares miscounted", BUSY, STREAM_K, ("team * quota + min(team, extra)", "team * quota"), sign=""),
    device(
        "order of the waves off by one",
        BUSY,
        STREAM_K,
        ("shared + late / STEPS * teams + team", "shared + (late / STEPS + 1) * teams + team"),
        sign="",
    ),
    device(
        "owner of a step off by one",
        BUSY,
        STREAM_K,
        ("(step - longer) / max(quota, 1)", "(step - longer + 1) / max(quota, 1)"),
        sign="",
    ),
    device(
        "part of a tile not stored at the end of a share",
        BUSY,
        STREAM_K,
        ("min(share(team), (first / STEPS + piece + 1) * STEPS - first)", "(first / STEPS + piece + 1) * STEPS - first"),
        sign="",
    ),
    device("first part added twice", BUSY, STREAM_K, ("part == Part::ALL ? first : first + O::TEAM", "first"), sign=""),
    device("ticket not reset", BUSY, STREAM_K, ("if (complete) *ticket = 0;", ""), sign=""),
)
