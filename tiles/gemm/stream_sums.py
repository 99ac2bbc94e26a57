"""The end of a tile of ``gemm_stream``, ``gemm_stream_bulk`` and ``gemm_any``: the sums of a block's rings, and
of the blocks that share the tile, are added up in one order, ring by ring, block by block, and
stored."""

from types import SimpleNamespace

from ...schedules.gemm import stream as rules
from ...schedules.gemm.rules import TICKETS
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from .operands import Operands, finish


def sum_macros(workload: Workload, schedule: Schedule) -> SimpleNamespace:
    """Macros that end a tile, for one of ``split_k`` (``bz``) blocks that share it. ``shared``
    holds the sums of the block's rings, fp32 or int32 ``[ring][column][sum_pitch]``; an element of the tile
    is numbered ``column * block_n + row``; ``after`` is what follows."""
    import tilelang.language as T

    p, s, splits, bn = Operands(workload, schedule), schedule, schedule.split_k, schedule.block_n
    threads, rings, pitch, elements = s.num_warps * 32, rules.rings(s), rules.sum_pitch(s), s.block_n * s.block_m
    n_blocks, sums_dtype, zero = p.n_pad // bn, p.sums_dtype, 0 if p.workload.format.integer_sums else 0.0
    take_ticket = f"tilebit::take_ticket<{threads}, 0>"
    # Of a cluster: a barrier in 16 bytes, then the parts that the blocks send, float4 [block][what
    # this block stores / 4].
    told = rules.exchange_at(workload, s) if s.program == rules.BULK else 0
    parts = told + 4
    each = -(-elements // 4 // splits)  # quads (of neighbouring rows) that a block stores, the last ones fewer

    def ring_sum(shared, ring, element):
        return shared[(ring * s.block_m + element // bn) * pitch + element % bn]

    @T.macro
    def store(y, after, bx, by, element, value):
        if bx * bn + element % bn < p.n and by * s.block_m + element // bn < y.shape[0]:
            y[by * s.block_m + element // bn, bx * bn + element % bn] = T.cast(
                finish(T.cast(value, "float32"), after, m=by * s.block_m + element // bn, n=bx * bn + element % bn), workload.dtype
            )

    @T.macro
    def store_alone(shared, y, after, bx, by, thread):
        """The block has all of k."""
        total = T.alloc_var(sums_dtype)
        for i in T.serial(T.ceildiv(elements, threads)):
            element = i * threads + thread
            if element < elements:
                total = zero
                for ring in T.unroll(rings):
                    total = total + ring_sum(shared, ring, element)
                store(y, after, bx, by, element, total)

    @T.macro
    def store_by_ticket(shared, workspace, y, after, bx, by, bz, thread):
        """Through a workspace of tickets and sums ``[tile][block][element]``: the block that comes
        last stores the tile."""
        total = T.alloc_var(sums_dtype)
        tile = by * n_blocks + bx
        for i in T.serial(T.ceildiv(elements, threads)):
            element = i * threads + thread
            if element < elements:
                total = zero
                for ring in T.unroll(rings):
                    total = total + ring_sum(shared, ring, element)
                T.call_extern(
                    "handle", "__stcg", T.address_of(workspace[TICKETS + (tile * splits + bz) * elements + element]),
                    T.reinterpret(total, "int32"),
                )  # fmt: skip
        if T.call_extern("int32", take_ticket, T.address_of(workspace[tile]), splits - 1, thread) == splits - 1:
            for i in T.serial(T.ceildiv(elements, threads)):
                element = i * threads + thread
                if element < elements:
                    total = zero
                    for block in T.serial(splits):
                        at = TICKETS + (tile * splits + block) * elements + element
                        total = total + T.reinterpret(T.call_extern("int32", "__ldcg", T.address_of(workspace[at])), sums_dtype)
                    store(y, after, bx, by, element, total)

    @T.macro
    def await_parts(shared, thread):
        """Makes the barrier that counts what other blocks send; the cluster meets before they do."""
        if thread == 0:
            T.call_extern("handle", "tilebit::mbarrier_init", T.address_of(shared[told]), 1)
        T.call_extern("handle", "tilebit::fence_barriers")
        T.cluster_arrive_relaxed()  # nothing else is promised to be seen: a release would be a fence of the whole GPU

    @T.macro
    def store_by_cluster(shared, y, after, bx, by, bz, thread):
        """Each block of the cluster stores a share of the tile, of which the others send it their
        parts and tell it (meeting twice, with fences, 4096 x 4096 at m = 8: 6.7 us, so 6.3, H200).
        """
        total, quad = T.alloc_var(sums_dtype), T.alloc_local((4,), sums_dtype)
        own = T.max(0, T.min(each, elements // 4 - bz * each))
        if thread == 0:
            T.call_extern("handle", "tilebit::mbarrier_expect", T.address_of(shared[told]), own * (splits - 1) * 16)
        T.cluster_wait()  # all have a barrier
        for i in T.serial(T.ceildiv(elements // 4, threads)):
            piece = i * threads + thread
            if piece < elements // 4:
                for j in T.unroll(4):
                    quad[j] = zero
                    for ring in T.unroll(rings):
                        quad[j] = quad[j] + ring_sum(shared, ring, piece * 4 + j)
                T.call_extern(
                    "handle", "tilebit::keep_or_send", T.address_of(shared[parts + (bz * each + piece % each) * 4]),
                    T.address_of(quad[0]), T.address_of(shared[told]), piece // each, bz,
                )  # fmt: skip
        T.sync_threads()
        T.call_extern("handle", "tilebit::mbarrier_wait", T.address_of(shared[told]), 0)
        for i in T.serial(T.ceildiv(own * 4, threads)):
            element = i * threads + thread
            if element < own * 4:
                total = shared[parts + element]
                for block in T.serial(1, splits):
                    total = total + shared[parts + block * each * 4 + element]
                store(y, after, bx, by, bz * each * 4 + element, total)

    return SimpleNamespace(
        await_parts=await_parts, store_alone=store_alone, store_by_ticket=store_by_ticket, store_by_cluster=store_by_cluster
    )
