"""What two warps of ``gemm_wgmma`` do that load nothing: they store tiles of bytes, whose columns of y lie
apart, while the computing warps are at the next tile.

Those hand over a tile in the workspace, of which each block has a place for one (``handed``), and hand over
the next when this one is stored (``vacant``). ``device/store/scatter.cuh``.
"""

from typing import Any

from .wgmma_numbers import FIRST, numbers_macros
from .wgmma_plan import Plan


def scatter_macro(plan: Plan, m: Any) -> Any:
    """The TileLang macro of all that they do. ``of_bytes``, ``left`` and ``turn`` are variables: whether a piece is
    of such a tile, its steps that are left, the turns of what is handed over and of what ends of tiles need, which the
    first of the two warps brings; ``left`` begins as 0."""
    import tilelang.language as T

    bring = numbers_macros(plan, m).bring

    def ask(what, *where):
        return plan.ask(T, what, m, *where)

    @T.macro
    def scatter(
        workspace, channels, y, handed, vacant, numbers, ready, free, operands, block, thread, of_bytes: T.Ref, left: T.Ref, turn: T.Ref,
        brought: T.Ref,
    ):  # fmt: skip
        turn = 0
        brought = 1
        if thread < FIRST + 32:
            bring(numbers, ready, free, operands, block, thread, 0, 0)
        for i in T.serial(ask("iterations", block)):
            if left == 0:
                of_bytes, left = ask("of_bytes", block, i), ask("left", block, i)
            left = left - 1
            if left == 0:
                if of_bytes == 1:
                    T.call_extern("handle", "tilebit::await_stage", T.address_of(handed[0]), turn)
                if thread < FIRST + 32:  # noqa: SIM102 (both are asked on the device)
                    if i + 1 < ask("iterations", block):
                        bring(numbers, ready, free, operands, block, thread, i + 1, brought)
                        brought = brought ^ 1
                if of_bytes == 1:
                    T.call_extern(
                        "handle", plan.scatter, T.address_of(workspace[0]), T.address_of(channels[0]), T.address_of(y[0, 0]), block,
                        thread - FIRST,
                    )  # fmt: skip
                    T.call_extern("handle", plan.release, T.address_of(vacant[0]), thread, 1)
                    turn = turn ^ 1

    return scatter
