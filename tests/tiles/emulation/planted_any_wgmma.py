"""Bugs to plant in ``gemm_any_wgmma``: in its look-ups, in its rings, in its loops."""

from __future__ import annotations

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule

from .planted import Bug, device, swap
from .planted_any_cuda import of_width


def wide(block_n: int, block_m: int, stages: int, split_k: int = 1, stream_k: bool = False, cluster: int = 1) -> Schedule:
    return Schedule("gemm_any_wgmma", block_n, block_m, 256, stages, block_n // 16, split_k, stream_k=stream_k, cluster=cluster)


ONE, TWO, SPLIT, STREAM = wide(64, 32, 3), wide(128, 64, 2), wide(64, 32, 2, split_k=2), wide(64, 32, 3, stream_k=True)
W3, W4, W5, W8 = (of_width(bits, m=40, n=120, k=520) for bits in (3, 4, 5, 8))
MANY = of_width(5, m=150, n=250, k=520)  # of several tiles a block
FOUR, LONG = wide(64, 32, 2, split_k=4), of_width(5, m=40, n=120, k=1100)
PAIR, PAIRS = wide(128, 32, 3, cluster=2), wide(128, 32, 3, stream_k=True, cluster=2)
PAIRED, PAIRED_TILES = of_width(6, m=60, n=250, k=1100), of_width(6, m=150, n=500, k=520)
SHORT, AHEAD = of_width(6, m=60, n=120, k=256), wide(128, 32, 8, cluster=2)  # some warps come to the end long before others


def page(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the program's page."""
    return Bug(name, workload, schedule, {"any_wgmma.py": swap(*pairs)}, sign=sign)


def shared(name: str, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in how two blocks add a tile's parts up."""
    return Bug(name, W5, SPLIT, {"wgmma_exchange.py": swap(*pairs)}, sign=sign)


AWAITED, HANDED = "await_full({}[PLACE_OF[part]], TURN_OF[part]{})", "PLACE_OF[part]]), lane, other)"
RELEASE = "T.address_of(empty[last]), lane, step * len(PARTS) + part > 0)"
BUGS = (
    device("groups of an operand exchanged", W5, ONE, ("q = 2 * g + i / 8", "q = 2 * g + 1 - i / 8")),
    device("first half of a step looked up twice", W5, ONE, ("q = 2 * g + i / 8", "q = i / 8")),
    device("pairs of k16 steps exchanged", W5, ONE, ("j = i % 8 / 2", "j = i % 8 / 2 ^ 2")),
    device("kept pairs of k16 steps exchanged", W3, ONE, ("a[i], a[8 + i]", "a[i ^ 4], a[8 + (i ^ 4)]")),
    device("codes of the other 128 k", W3, ONE, ("planes[p * 4 + 2 * u + h]", "planes[p * 4 + 2 - 2 * u + h]")),
    device("planes of the other rows", W5, ONE, ("planes[p * 4 + 2 * u + h]", "planes[p * 4 + 2 * u + 1 - h]")),
    device("planes of the first warp", W5, TWO, ("p * (ROWS * 32) + warp * 512", "p * (ROWS * 32)")),
    device("tables of row r for row r + 8", W5, ONE, ("table : table + h * HALF", "table : table")),
    device("tables of a neighbour", W5, TWO, ("tables.address + place(warp)", "tables.address + place(warp ^ 1)")),
    device("tables of the first warps", W8, TWO, ("tables.address + place(warp)", "tables.address + place(warp % 2)")),
    device("a copy of a table lost", W8, TWO, ("make_uint2(v, v)", "make_uint2(v, 0u)")),
    device("numbers of two warps exchanged", W8, ONE, ("j % 2 ? 0x7632 : 0x5410", "j % 2 ? 0x3276 : 0x1054")),
    device("kept codebooks of the first warp", W3, TWO, ("thread / 32 * (16 * NUMBERS)", "0 * (16 * NUMBERS)")),
    device("kept codebook of row r for row r + 8", W3, ONE, ("permuted(kept + h * KEPT", "permuted(kept")),
    device("kept numbers of the first half", W3, ONE, ("own[0] >> 16 * g", "own[0]")),
    device("the first eight numbers kept for all sixteen", W4, ONE, ("(codes >> 1 & 0x4444u) | 0x3210u", "0x3210u")),
    device("a kept code's first bit lost", W5, ONE, ("BITS > 4 ? own[4] >> 16 * g : 0", "0")),
    device("kept numbers of the first half's upper bits", W5, ONE, ("own[4] >> 16 * g", "own[4]")),
    device("kept pairs looked up in the other number's place", W5, ONE, ("one, other << 4)", "other, one << 4)")),
    device("numbers of an operand exchanged", W8, ONE, ("a[i] = Product::joined(first, second)", "a[i] = Product::joined(second, first)")),
    page("an operand overwritten while it is multiplied", W5, ONE, ("operands[part % 2]", "operands[0]")),
    page("a slot released while it is multiplied", W5, ONE, (RELEASE, "T.address_of(empty[stage]), lane)")),
    page("planes released by a lane for those that have not read them", W5, ONE, ("T.sync_warp()", "pass")),
    page("planes of the first step for all", W5, ONE, ("step * 2 : step * 2 + 2, 0:256", "0:2, 0:256")),
    page("x of the first share", W5, SPLIT, ("k0 = step * rules.STEP_K + part", "k0 = i * rules.STEP_K + part")),
    device("the other block's sums left out", W5, SPLIT, ("chunk[e + i] += theirs[i]", "chunk[e + i] += 0 * theirs[i]")),
    device("a pair's blocks store the same half", W5, SPLIT, ("own = 2 * I + block % 2", "own = 2 * I")),
    shared("sums sent over slots that are read", ("meet_cluster()  # has", "pass  # has"), sign=""),
    shared("sums read before they are there", ('T.call_extern("handle", "tilebit::await_stage"', 'T.call_extern("handle", "(void)"'),
           sign="in flight"),
    device("both halves of a tile at one ticket", LONG, FOUR, ("block / O::SPLIT * 2 + block % 2", "block / O::SPLIT * 2"), sign=""),
    device("clusters' sums in one place", LONG, FOUR, ("cluster = block % O::SPLIT / 2", "cluster = 0")),
    device("as many tickets as blocks", LONG, FOUR, ("half, cluster, O::SPLIT / 2,", "half, cluster, O::SPLIT,"), sign=""),
    Bug("a half stored by all but the last", LONG, FOUR, {"wgmma_exchange.py": swap(("last[0] == 1", "last[0] == 0"))}, sign=""),
    device("rows exchanged for the other lanes", W8, TWO, ("COPIES == 2 && lane & 2", "COPIES == 2 && lane & 1")),
    device("rows exchanged and not exchanged back", W8, TWO, ("a[i] = exchanged(lane) ?", "a[i] = !exchanged(lane) ?")),
    device("codes of a row looked up in the other's table", W8, TWO, ("lane * 4 ^ h * HALF", "lane * 4")),
    device("operand sent to the first warp", PAIRED, PAIR, ("+ warp * (WORDS * 8) + lane, pieces", "+ lane, pieces")),
    device("words exchanged on their way", PAIRED, PAIR, ("(words[4 * i], words[4 * i + 1]", "(words[4 * i + 1], words[4 * i]")),
    device("operand read where it is not sent", PAIRED, PAIR, ("+ i * 512 + lane * 16", "+ i * 512 + (lane ^ 1) * 16")),
    device("a pair's second block has the rows of the first", PAIRED, PAIR, ("fresh(block) % CLUSTER * BLOCK_M", "0")),
    page("a pair's planes of the first half", PAIRED, PAIR, ("+ block % cluster * (own_rows // 64)", "")),
    page("a pair's tables of the first half", PAIRED, PAIR, ("* bn + block % cluster * own_rows", "* bn")),
    page("an operand sent over one that is not read", PAIRED, PAIR, (AWAITED.format("vacant", " ^ 1"), "pass"), sign="barrier"),
    page("an operand read before it is there", PAIRED, PAIR, (AWAITED.format("given", ""), "pass"), sign="barrier"),
    page("an operand handed back to the block itself", PAIRED, PAIR, (HANDED, HANDED.replace("other", "1 - other")), sign="barrier"),
    page("y staged in tables that are looked up", SHORT, AHEAD, ("sync_group<{TABLES_DONE}", "arrive_group<{TABLES_DONE}")),
    page("tables filled where y is staged", PAIRED_TILES, PAIRS, ("sync_group<{TABLES_FREE}", "arrive_group<{TABLES_FREE}")),
    page("tables of the tile before", MANY, STREAM, ('ask("tile", block, taken) * bn', 'ask("tile", block, 0) * bn')),
)  # fmt: skip
