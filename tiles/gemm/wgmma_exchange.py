"""How the two blocks of a cluster that share a tile add its parts up and store it: each sends the
other's half of its sums, over the slots of x, and stores its own half; where several clusters share
it, the last of them does (``device/store/exchange.cuh``)."""

from typing import Any

from .operands import addresses
from .wgmma_plan import PRODUCERS, Plan


def exchange_macro(plan: Plan, m: Any) -> Any:
    """The TileLang macro of the computing threads, when the last product is done: ``sums`` are a
    thread's, ``own_sums`` a place for the half that it keeps, ``slots`` the shared memory of x,
    ``sent`` a barrier for each chunk of columns that this block stores."""
    import tilelang.language as T

    meet_cluster = meet_macro()

    def store(chunk, own_sums, slots, numbers, staging, after, y, block, thread):
        return T.call_extern(
            "handle", plan.store_chunk(chunk), T.address_of(own_sums[0]), _begin(T, slots), T.address_of(numbers[0]),
            T.address_of(staging[0]), T.address_of(y[0, 0]), m, block, thread - PRODUCERS, *addresses(T, after),
        )  # fmt: skip

    @T.macro
    def exchange_and_store(sums, own_sums, slots, numbers, staging, sent, workspace, after, y, block, thread):
        """Barriers tell of what is sent, so nobody needs a fence or waits to leave
        (results/notes/wgmma-pairs.md)."""
        meet_cluster()  # has left its stages
        T.call_extern(
            "handle", plan.send_half, first_of(plan, T, sums), T.address_of(own_sums[0]), _begin(T, slots),
            T.address_of(sent[0]), T.address_of(numbers[0]), m, block, thread - PRODUCERS,
        )  # fmt: skip
        for i in plan.own_chunks:
            T.call_extern("handle", "tilebit::await_stage", T.address_of(sent[i]), 0)
            if plan.paired:
                T.call_extern(
                    "handle", plan.add_sent(i), T.address_of(own_sums[0]), _begin(T, slots), T.address_of(numbers[0]), m, block,
                    thread - PRODUCERS,
                )  # fmt: skip
            else:
                store(i, own_sums, slots, numbers, staging, after, y, block, thread)
        if plan.paired:
            last = T.alloc_local((1,), "int32")
            T.call_extern(
                "handle", plan.meet_clusters, T.address_of(own_sums[0]), T.address_of(workspace[0]), block, thread - PRODUCERS,
                T.address_of(last[0]),
            )  # fmt: skip
            if last[0] == 1:
                for i in plan.own_chunks:
                    store(i, own_sums, slots, numbers, staging, after, y, block, thread)

    return exchange_and_store


def meet_macro() -> Any:
    """The TileLang macro by which all threads of a cluster's blocks wait for one another."""
    import tilelang.language as T

    @T.macro
    def meet_cluster():
        T.cluster_arrive_relaxed()
        T.cluster_wait()

    return meet_cluster


def first_of(plan: Plan, T: Any, sums: Any) -> Any:
    """Where a thread's sums of a tile begin: a product's own accumulators, or what groups are added to."""
    return T.address_of(sums[0]) if plan.operands.step_sums else sums.access_ptr("r")


def _begin(T: Any, slots: Any) -> Any:
    return T.address_of(slots[(0,) * len(slots.shape)])
