"""What two warps of ``gemm_wgmma`` do that load nothing: they store tiles of bytes, whose columns of y lie
apart, while the computing warps are at the next tile.

Those hand over a tile in the workspace, of which each block has a place for one (``handed``), and hand over
the next when this one is stored (``vacant``). ``device/store/scatter.cuh``.
"""

from typing import Any

from .wgmma_plan import Plan

FIRST = 64  # thread of them


def scatter_macro(plan: Plan, m: Any) -> Any:
    """The TileLang macro of all that they do. ``of_bytes``, ``left`` and ``turn`` are variables: whether a piece is
    of such a tile, its steps that are left, the turn of what is handed over; ``left`` and ``turn`` begin as 0."""
    import tilelang.language as T

    def ask(what, *where):
        return plan.ask(T, what, m, *where)

    @T.macro
    def scatter(workspace, channels, y, handed, vacant, block, thread, of_bytes: T.Ref, left: T.Ref, turn: T.Ref):
        turn = 0
        for i in T.serial(ask("iterations", block)):
            if left == 0:
                of_bytes, left = ask("of_bytes", block, i), ask("left", block, i)
            left = left - 1
            if left == 0:  # noqa: SIM102 (both are asked on the device)
                if of_bytes == 1:
                    T.call_extern("handle", "tilebit::await_stage", T.address_of(handed[0]), turn)
                    T.call_extern(
                        "handle", plan.scatter, T.address_of(workspace[0]), T.address_of(channels[0]), T.address_of(y[0, 0]), block,
                        thread - FIRST,
                    )  # fmt: skip
                    T.call_extern("handle", plan.release, T.address_of(vacant[0]), thread, 1)
                    turn = turn ^ 1

    return scatter
