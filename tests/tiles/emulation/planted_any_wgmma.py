"""Bugs to plant in ``gemm_any_wgmma``: in the order of x, in its look-ups, in its loops."""

from __future__ import annotations

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule

from .planted import Bug, device, swap
from .planted_any_cuda import of_width


def wide(block_n: int, block_m: int, stages: int, split_k: int = 1) -> Schedule:
    return Schedule("gemm_any_wgmma", block_n, block_m, 256, stages, block_n // 16, split_k)


ONE, TWO, SPLIT = wide(64, 32, 3), wide(128, 64, 2), wide(64, 32, 2, split_k=2)
W3, W5, W8 = (of_width(bits, m=40, n=120, k=520) for bits in (3, 5, 8))


def page(name: str, workload: Workload, schedule: Schedule, *pairs: tuple[str, str], sign: str = "wrong") -> Bug:
    """A bug in the program's page."""
    return Bug(name, workload, schedule, {"any_wgmma.py": swap(*pairs)}, sign=sign)


OF_ROW = "((lane >> 2) + 8 * h) * (NUMBERS * 2)"
KEPT = "permuted(kept + h * 4, words[h * 8 + j] >>"
RELEASE = "arrive(empty[last], lane, step * len(PARTS) + part > 0)"
COME = "T.address_of(raw[slot % stages]), slot // stages & 1"
BUGS = (
    device("x of many rows left in the order of k", W3, ONE, ("((lane >> 3) * 2 + (lane & 1) ^ r)", "(lane >> 3 ^ (lane & 1) * 4 ^ r)")),
    device("rows of x exchanged in a slot", W5, ONE, ("const int r = target + i % 2;", "const int r = (target + i % 2) ^ 1;")),
    device("x read past its swizzle", W5, ONE, ("((lane & 7) ^ r) * 16, values", "(lane & 7) * 16, values")),
    device("groups of an operand exchanged", W5, ONE, ("q = 2 * g + i / 2", "q = 2 * g + 1 - i / 2")),
    device("first half of a step looked up twice", W5, ONE, ("q = 2 * g + i / 2", "q = i / 2")),
    device("codes of the other 128 k", W3, ONE, ("planes[p * 4 + 2 * h + u]", "planes[p * 4 + 2 * h + 1 - u]")),
    device("own tables of row r for row r + 8", W5, ONE, ("h * (ENTRY / 2)", "0 * (ENTRY / 2)")),
    device("shared tables of the neighbour", W8, ONE, (OF_ROW, "((lane >> 2 ^ 1) + 8 * h) * (NUMBERS * 2)")),
    device("tables of the first warp", W8, TWO, ("warp * TABLE", "0 * TABLE")),
    device("kept codebooks of the first warp", W3, TWO, ("thread / 32 * (16 * NUMBERS)", "0 * (16 * NUMBERS)")),
    device("kept codebook of row r for row r + 8", W3, ONE, (KEPT, "permuted(kept, words[h * 8 + j] >>")),
    device("kept numbers of the first half", W3, ONE, ("words[h * 8 + j] >> 16 * g", "words[h * 8 + j]")),
    device("numbers of an operand exchanged", W8, ONE, ("Product::joined(first, second)", "Product::joined(second, first)")),
    page("an operand overwritten while it is multiplied", W5, ONE, ("operands[part % 2]", "operands[0]")),
    page("a slot released while it is multiplied", W5, ONE, (RELEASE, "arrive(empty[stage], lane)")),
    page("x put in order before it has come", W5, ONE, (COME, f"{COME} ^ 1"), sign=""),
    page("planes asked for before the codes are taken", W3, ONE, ("if part == 2 and", "if part == 0 and")),
    page("planes of the first step for all", W5, ONE, ("first_row, first + step + 1)", "first_row, first)")),
    page("x of the first share", W5, SPLIT, ("first * rules.STEP_K + slot", "slot")),
)  # fmt: skip
