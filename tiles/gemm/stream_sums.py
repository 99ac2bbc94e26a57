"""The end of a tile of ``gemm_stream``, ``gemm_stream_bulk`` and the programs of bit planes for few
rows: the sums of a block's rings, and of the blocks that share the tile, are added up in one order,
ring by ring, block by block, and stored: each by itself, or of a gate and what it gates their
product, or of two rows that an index adds up their sum."""

from types import SimpleNamespace

from ...schedules.gemm import stream as rules
from ...schedules.gemm.parts import ADDED, GATE_ROWS
from ...schedules.gemm.rules import TICKETS
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ..compiler.headers import GATES, literal
from .operands import Operands, column_of, finish, gate_of, stored


def sum_macros(workload: Workload, schedule: Schedule, rings: int = 0) -> SimpleNamespace:
    """Macros that end a tile, for one of ``split_k`` (``bz``) blocks that share it. ``shared``
    holds the sums of the block's rings, fp32 or int32 ``[ring][column][sum_pitch]``, of a norm
    followed by the rings' sums of squares of the column; an element of the tile
    is numbered ``column * block_n + row``, where gates are the first half of the weight as if its rows
    lay in turn; ``after`` is what follows. A tile is stored in ``ends``
    pieces: piece i is its element i, or with a gate or an index element ``gate_of(i)`` and the one
    8 rows further: both lie in one tile, as block_n is a multiple of 16. ``rings``:
    how many a block has; 0: what the rule of the streaming programs says."""
    import tilelang.language as T

    p, s, splits, bn = Operands(workload, schedule), schedule, schedule.split_k, schedule.block_n
    rings = rings or rules.rings(s)
    threads, pitch, elements = s.num_warps * 32, rules.sum_pitch(s), s.block_n * s.block_m
    n_blocks, sums_dtype, zero = -(-p.n_pad // bn), p.sums_dtype, 0 if p.integer_sums else 0.0
    take_ticket = f"tilebit::take_ticket<{threads}, 0>"
    # Of a cluster: a barrier in 16 bytes, then the parts that the blocks send, float4 [block][what
    # this block stores / 4].
    told = rules.exchange_at(workload, s) if s.program == rules.BULK else 0
    parts = told + 4
    each = rules.quads_of_block(workload, s)  # quads (of neighbouring rows) that a block stores, the last ones fewer
    quads = rules.squares_quads(workload, s)  # of a norm, sums of squares of the rows of x: behind the sums
    squares = parts + splits * each * 4
    share = elements + (s.block_m if workload.norm else 0)  # words of a block in a workspace
    gated, normed = workload.gate != "", workload.norm
    paired = gated or workload.width > 0  # a thread has both of the rows r and r + 8 of 16
    of_y = 2 if paired else 1  # elements that are stored together
    ends = elements // of_y
    activated = f"{GATES.get(workload.gate)}::apply"

    def across(row, half):
        """Of rows in turn the row of a block, or of W, whose gates are the first ``half`` rows."""
        if not workload.gate_halves:
            return row
        return row // (2 * GATE_ROWS) * GATE_ROWS + row % GATE_ROWS + row % (2 * GATE_ROWS) // GATE_ROWS * half

    def ring_sum(shared, ring, element):
        return shared[(ring * s.block_m + element // bn) * pitch + across(element % bn, bn // 2)]

    def first(index):
        return gate_of(index) if paired else index

    def finished(after, bx, by, element, value, factor):
        value, channel = T.cast(value, "float32"), across(p.first_row(T, bx) + element % bn, p.n // 2)
        return finish(value * factor if normed else value, after, m=by * s.block_m + element // bn, n=channel)

    def ring_squares(shared, ring, column):
        return shared[(ring * s.block_m + column) * pitch + bn]

    def root_of(squares):
        return T.call_pure_extern("float32", "tilebit::inverse_root", squares, T.float32(workload.k), T.float32(literal(workload.eps)))

    def stores(y, bx, by, element):
        """Whether the element is of a row of W that the block before does not have, and of a row of x."""
        row = p.first_row(T, bx) + element % bn
        there = T.And(row < p.n, by * s.block_m + element // bn < y.shape[0])
        return there if p.n_pad % bn == 0 else T.And(there, row >= bx * bn)

    @T.macro
    def put(y, after, bx, by, element, value):
        """``value`` where the index, or the order, says."""
        if stored(p.first_row(T, bx) + element % bn, after, p.columns):
            y[by * s.block_m + element // bn, column_of(p.first_row(T, bx) + element % bn, after)] = T.cast(value, workload.dtype)

    @T.macro
    def store_gated(y, after, bx, by, element, gate, up, factor):
        """Of the gate ``element`` and what it gates."""
        row = p.first_row(T, bx) + element % bn
        if stores(y, bx, by, element):
            y[by * s.block_m + element // bn, row // (2 * GATE_ROWS) * GATE_ROWS + element % GATE_ROWS] = T.cast(
                T.call_pure_extern("float32", activated, finished(after, bx, by, element, gate, factor))
                * finished(after, bx, by, element + GATE_ROWS, up, factor),
                workload.dtype,
            )

    @T.macro
    def store_added(y, after, bx, by, element, value, second, factor):
        """Of ``element`` and the one 8 rows further: their sum, or each, as the index says."""
        total = T.alloc_var("float32")
        if stores(y, bx, by, element):
            total = finished(after, bx, by, element, value, factor)
            if p.first_row(T, bx) + element % bn + GATE_ROWS < p.n:
                if column_of(p.first_row(T, bx) + element % bn + GATE_ROWS, after) == ADDED:
                    total = total + finished(after, bx, by, element + GATE_ROWS, second, factor)
                else:
                    put(y, after, bx, by, element + GATE_ROWS, finished(after, bx, by, element + GATE_ROWS, second, factor))
            put(y, after, bx, by, element, total)

    store_both = store_gated if gated else store_added

    @T.macro
    def store(y, after, bx, by, element, value, factor):
        if stores(y, bx, by, element):
            y[by * s.block_m + element // bn, p.first_row(T, bx) + element % bn] = T.cast(
                finished(after, bx, by, element, value, factor), workload.dtype
            )

    @T.macro
    def store_alone(shared, y, after, bx, by, thread):
        """The block has all of k."""
        total = T.alloc_var(sums_dtype)
        second = T.alloc_var(sums_dtype) if paired else total
        factor = T.alloc_var("float32") if normed else total
        for i in T.serial(T.ceildiv(ends, threads)):
            # Found anew: kept through the loop, places take registers (256 x 16 by sixteen warps, with a gate: 24 bytes of spills).
            element = i * threads + (T.call_extern("int32", "tilebit::fresh", thread) if paired or normed else thread)
            if element < ends:
                if normed:
                    factor = 0.0
                    for ring in T.unroll(rings):
                        factor = factor + ring_squares(shared, ring, first(element) // bn)
                    factor = root_of(factor)
                total = zero
                for ring in T.unroll(rings):
                    total = total + ring_sum(shared, ring, first(element))
                if paired:
                    second = zero
                    for ring in T.unroll(rings):
                        second = second + ring_sum(shared, ring, first(element) + GATE_ROWS)
                    store_both(y, after, bx, by, first(element), total, second, factor)
                else:
                    store(y, after, bx, by, element, total, factor)

    @T.macro
    def hand_in_squares(shared, workspace, tile, bz, thread):
        squares = T.alloc_var("float32")
        if thread < s.block_m:
            squares = 0.0
            for ring in T.unroll(rings):
                squares = squares + ring_squares(shared, ring, thread)
            T.call_extern(
                "handle", "__stcg", T.address_of(workspace[TICKETS + (tile * splits + bz) * share + elements + thread]),
                T.reinterpret(squares, "int32"),
            )  # fmt: skip

    @T.macro
    def store_by_ticket(shared, workspace, y, after, bx, by, bz, thread):
        """Through a workspace of tickets and sums ``[tile][block][element]``: the block that comes
        last stores the tile."""
        total = T.alloc_var(sums_dtype)
        second = T.alloc_var(sums_dtype) if paired else total
        factor = T.alloc_var("float32") if normed else total
        tile = by * n_blocks + bx
        for i in T.serial(T.ceildiv(elements, threads)):
            element = i * threads + thread
            if element < elements:
                total = zero
                for ring in T.unroll(rings):
                    total = total + ring_sum(shared, ring, element)
                T.call_extern(
                    "handle", "__stcg", T.address_of(workspace[TICKETS + (tile * splits + bz) * share + element]),
                    T.reinterpret(total, "int32"),
                )  # fmt: skip
        if normed:
            hand_in_squares(shared, workspace, tile, bz, thread)
        if T.call_extern("int32", take_ticket, T.address_of(workspace[tile]), splits - 1, thread) == splits - 1:
            for i in T.serial(T.ceildiv(ends, threads)):
                element = i * threads + thread
                if element < ends:
                    if normed:
                        factor = 0.0
                        for block in T.serial(splits):
                            at = TICKETS + (tile * splits + block) * share + elements + first(element) // bn
                            factor = factor + T.reinterpret(T.call_extern("int32", "__ldcg", T.address_of(workspace[at])), "float32")
                        factor = root_of(factor)
                    total = zero
                    for block in T.serial(splits):
                        at = TICKETS + (tile * splits + block) * share + first(element)
                        total = total + T.reinterpret(T.call_extern("int32", "__ldcg", T.address_of(workspace[at])), sums_dtype)
                    if paired:
                        second = zero
                        for block in T.serial(splits):
                            at = TICKETS + (tile * splits + block) * share + first(element) + GATE_ROWS
                            second = second + T.reinterpret(T.call_extern("int32", "__ldcg", T.address_of(workspace[at])), sums_dtype)
                        store_both(y, after, bx, by, first(element), total, second, factor)
                    else:
                        store(y, after, bx, by, element, total, factor)

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
        parts and tell it (4096 x 4096 at m = 8: 6.3 us; meeting twice, with fences, 6.7; H200).
        """
        total, quad = T.alloc_var(sums_dtype), T.alloc_local((4,), sums_dtype)
        second = T.alloc_var(sums_dtype) if paired else total
        factor = T.alloc_var("float32") if normed else total
        own = T.max(0, T.min(each, elements // 4 - bz * each))
        if thread == 0:
            T.call_extern("handle", "tilebit::mbarrier_expect", T.address_of(shared[told]), (own + quads) * (splits - 1) * 16)
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
        if normed:  # to every block, all of whose rows need them
            for i in T.serial(T.ceildiv(quads * splits, threads)):
                piece = i * threads + thread
                if piece < quads * splits:
                    for j in T.unroll(4):
                        quad[j] = zero
                        for ring in T.unroll(rings):
                            quad[j] = quad[j] + ring_squares(shared, ring, T.min(piece % quads * 4 + j, s.block_m - 1))
                    T.call_extern(
                        "handle", "tilebit::keep_or_send", T.address_of(shared[squares + (bz * quads + piece % quads) * 4]),
                        T.address_of(quad[0]), T.address_of(shared[told]), piece // quads, bz,
                    )  # fmt: skip
        T.sync_threads()
        T.call_extern("handle", "tilebit::mbarrier_wait", T.address_of(shared[told]), 0)
        for i in T.serial(T.ceildiv(own * (4 // of_y), threads)):
            element = i * threads + thread
            if element < own * (4 // of_y):
                if normed:
                    factor = 0.0
                    for block in T.serial(splits):
                        factor = factor + shared[squares + block * quads * 4 + (bz * each * 4 + first(element)) // bn]
                    factor = root_of(factor)
                total = shared[parts + first(element)]
                for block in T.serial(1, splits):
                    total = total + shared[parts + block * each * 4 + first(element)]
                if paired:
                    second = shared[parts + first(element) + GATE_ROWS]
                    for block in T.serial(1, splits):
                        second = second + shared[parts + block * each * 4 + first(element) + GATE_ROWS]
                    store_both(y, after, bx, by, bz * each * 4 + first(element), total, second, factor)
                else:
                    store(y, after, bx, by, bz * each * 4 + element, total, factor)

    return SimpleNamespace(
        await_parts=await_parts, store_alone=store_alone, store_by_ticket=store_by_ticket, store_by_cluster=store_by_cluster
    )
