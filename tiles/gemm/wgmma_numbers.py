"""What a warp of ``gemm_wgmma`` does that neither loads stages nor computes: it finds where each tile of its block
lies, and brings the numbers of the parts that follow its products, while these are under way.

``ready`` hands them to the computing warps, for the tile's end, and ``free`` back.
"""

from types import SimpleNamespace
from typing import Any

from .wgmma_plan import Plan

FIRST = 64  # thread of the warp


def numbers_macros(plan: Plan, m: Any) -> SimpleNamespace:
    """TileLang macros: ``bring`` those of the tile that iteration ``i`` belongs to, by a warp; ``of_all`` tiles of
    the block, which is all that it does. ``left`` and ``turn`` are variables: the steps that are left of a piece of a
    tile, which begin as 0, and the turn, which changes with each tile; ``operands`` are where the parts' begin."""
    import tilelang.language as T

    def ask(what, *where):
        return plan.ask(T, what, m, *where)

    @T.macro
    def bring(numbers, ready, free, operands, block, thread, i, turn):
        T.call_extern("handle", "tilebit::await_stage", T.address_of(free[0]), turn ^ 1)
        T.call_extern(
            "handle", plan.bring_numbers, T.address_of(numbers[0]), m, block, i, T.address_of(ready[0]), thread, *operands,
        )  # fmt: skip

    @T.macro
    def of_all(numbers, ready, free, operands, block, thread, left: T.Ref, turn: T.Ref):
        turn = 0
        for i in T.serial(ask("iterations", block)):
            if left == 0:
                left = ask("left", block, i)
                bring(numbers, ready, free, operands, block, thread, i, turn)
                turn = turn ^ 1
            left = left - 1

    return SimpleNamespace(bring=bring, of_all=of_all)
