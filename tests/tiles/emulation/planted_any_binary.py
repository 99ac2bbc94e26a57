"""Bugs to plant in ``gemm_any_binary``: in the bits of x, in its sets of planes, in its rings."""

from __future__ import annotations

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule

from .planted import Bug, device, swap
from .planted_any_cuda import of_width


def schedule(block_n: int, stages: int, warps: int) -> Schedule:
    return Schedule("gemm_any_binary", block_n, 1, 1, stages, warps)


def page(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the program's page."""
    return Bug(name, workload, schedule, {"any_binary.py": swap(*pairs)}, sign=sign)


# More tiles than the five blocks of the target; shares of k of unequal length.
MANY, FEW = schedule(16, 3, 3), schedule(32, 4, 4)
W3, W4 = of_width(3, m=2, n=250, k=1000), of_width(4, m=1, n=180, k=900)
LONG, SHORT = of_width(3, m=1, n=60, k=3000), of_width(3, m=1, n=60, k=500)
LEFT = "# sums of the tile after"
NEXT_TILE, ROWS = "asked[1] = 0\n                at[0] = place(warp, lane, ", "groups + warp // shares"
BUGS = (
    device("planes not aligned", W3, MANY, ("__funnelshift_l(held[p * 4 + i], held[p * 4 + i], p)", "held[p * 4 + i]")),
    device("planes in the order of numbers", W4, FEW, ("set >> (BITS - 1 - p) & 1", "set >> p & 1")),
    device("a set with a plane too few", W4, FEW, ("p < BITS; ++p)\n          if (set", "p < BITS - 1; ++p)\n          if (set")),
    device("halves of k exchanged with rows", W3, FEW, ("a[i] &= planes[p][i]", "a[i] &= planes[p][i % 2 * 2 + i / 2]")),
    device("bytes of x exchanged", W3, MANY, ("place / 2 * 256", "(2 - place / 2) * 256")),
    device("bits of x in the order of k", W4, FEW, ("n[i % 2][i / 2] = __float", "n[i / 4][i % 4] = __float")),
    device("digits without a sign", W3, MANY, ("low[byte] ^= HIGHEST[byte], high[byte] ^= HIGHEST[byte]", "low[byte] ^= 0")),
    device("the sign of a digit counted as a bit", W3, MANY, ("d[8] - 2 * d[9]", "d[8] + 2 * d[9]")),
    device("words of x exchanged", W4, FEW, ("(lane >> 4) * 4 + (lane >> 2 & 3)", "(lane >> 4 ^ 1) * 4 + (lane >> 2 & 3)")),
    device("x of the neighbouring quarter", W4, FEW, ("(lane & 3) * 8 + (lane >> 4)", "((lane ^ 1) & 3) * 8 + (lane >> 4)")),
    device("the sum of x of one warp", W3, MANY, ("i < WARPS; ++i) sum", "i < 1; ++i) sum")),
    device("numbers below not subtracted", W4, FEW, ("c[set] -= c[set ^ bit]", "c[set] -= bit > 1 ? c[set ^ bit] : 0.0f")),
    device("codebook of row r for row r + 8", W3, MANY, ("const int row = (lane >> 2) + 8 * h;", "const int row = lane >> 2;")),
    device("counts of the tile before kept", W3, MANY, ("if constexpr (FIRST) d[0]", "if constexpr (false) d[0]")),
    device("bits of the second product worth those of the first", W4, FEW, ("4 * (d[4]", "1 * (d[4]")),
    page("planes of the first tile for all", W3, MANY, (f"{NEXT_TILE}asked[0])", f"{NEXT_TILE}0)")),
    page("codebooks of the tile before", W3, MANY, (f"asked[0] * {ROWS}, lane", f"T.max(asked[0] - grid, 0) * {ROWS}, lane")),
    page("steps of the neighbouring share", W4, FEW, ("* steps + warp % shares, \"int64\"", "* steps + (warp + 1) % shares, \"int64\"")),
    page("planes read before they have come", LONG, MANY, ("T.ptx_wait_group(stages - 2)", "T.ptx_wait_group(stages)")),
    page("bits made of x before it has come", LONG, MANY, ("T.ptx_wait_group(stages - 1)", "T.ptx_wait_group(stages)")),
    page("a slot behind", LONG, MANY, ("if turn < turns - 1:", "if turn < turns - 2:")),
    page("every share adds the sum of x", W4, FEW, ("T.if_then_else(warp % shares == 0, total, T.float32(0))", "total")),
    page("x of the first row for all", W3, MANY, ("T.address_of(x[m_row, step", "T.address_of(x[0, step")),
    page("more of x read than is there", SHORT, schedule(16, 3, 2), ("lane * 8 < p.kx", "lane * 8 < p.kx + 8"), sign=""),
    page("sums stored before all have left theirs", W4, FEW, (f"T.sync_threads()  {LEFT}", LEFT), sign=""),
)  # fmt: skip
