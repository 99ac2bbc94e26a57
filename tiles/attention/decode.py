"""``attention_decode`` and ``attention_decode_bulk``: attention of the newest tokens over a low-bit
KV cache.

    o[b, i, h] = sum_t p_t v_t,   p = softmax over the tokens t that query i sees,   s_t = scale * q[b, i, h] . k_t

A cache streams past once, so its bytes decide. Work is counted in units: ``block_n`` packed tokens
of one key head, or sixteen of its 16-bit window. The persistent blocks are dealt segments, the
(sequence, head)s: some whole ones each, or an equal part of one, where sequences are enough and
alike enough. Else all units stand in one line, and each block takes an equal share of it (stream-k),
whatever the lengths are. Nothing is planned on the host, and a captured graph follows lengths that
change on the device. In a block each of ``num_warps`` warps streams its units through a ring of
``num_stages`` slots that no other warp touches; slots hold a unit's keys and its values by turns.
Blocks that hold parts of one segment leave partial results in a workspace and the last to arrive
adds them up in order: the same input gives the same bits.

Codes are the tensor cores' A operand as they lie in the cache; the heads that share a key head, and
the queries of a call, are its n (BitDecoding V-A), ``block_m`` columns at a time: a pass. S^T = K
Q^T and O^T = V^T P^T. What one thread computes is CUDA (``device/kv``). Papers: BitDecoding IV-V,
TurboMind 4.2 and 4.4.
"""

from math import e, log2
from typing import Any

from ...layouts.kv import GRANULE, window_words
from ...schedules.attention import decode as rules
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import device_source, literal
from ..program import TileProgram
from .cache import PASS_CONFIGS, cache_source
from .leaves import caller
from .ring import (
    BASE,
    CURSOR_WORDS,
    END,
    LENGTH,
    PACKED,
    PACKED_UNITS,
    PHASE,
    RING_WORDS,
    SLOT,
    TOTAL,
    UNIT,
    UNITS_END,
    WANTED_WORDS,
    ring_macros,
)  # fmt: skip

FUNCTIONS = ("pairs", "granule", "page", "sequences", "decode", "request", "softmax", "score", "weighted_sum", "reduce")
HEADERS = ("ptx/instructions.cuh", "store/split_k.cuh", "pipeline/dependent.cuh", *(f"kv/{name}.cuh" for name in FUNCTIONS))
PARTS, BLOCKS, TOTAL_UNITS = range(rules.PLAN_WORDS)  # in shared memory: how units are shared out
LAUNCH_WORDS = 14  # of 64 bits, of what `tilebit::Decode` keeps of the launch


def decode_source(workload: AttentionWorkload, schedule: Schedule) -> str:
    """The constants of one kernel as the device functions know them, and ``Launch``, the type that
    they are functions of."""
    w, s = workload, schedule
    constants = {
        "GROUP": w.group, "UNIT": s.block_n, "NT": s.block_m // 8, "WARPS": s.num_warps, "STAGES": s.num_stages,
        "WINDOW": w.window, "SINK_TOKENS": w.sink_tokens, "SINKS": int(w.sinks), "CAPPED": int(w.soft_cap > 0),
        "LSE": int(w.lse), "BULK": int(s.program == rules.BULK), "FULL_WINDOWS": int(w.full_windows),
        "LAUNCH_BYTES": LAUNCH_WORDS * 8,
    }  # fmt: skip
    return f"{cache_source(w, constants)}using Launch = tilebit::Decode<Cache>;\n"


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); batch, q_len and the number of pages are
    dynamic."""
    return build_with(device_source(HEADERS), workload, schedule, target)


def build_with(functions: str, workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """``build`` with other device ``functions``: those of ``HEADERS`` by name."""
    import tilelang.language as T

    w, s, dtype = workload, schedule, workload.dtype
    warps, stages, bulk = s.num_warps, s.num_stages, s.program == rules.BULK
    tiles, strips, column_tiles = w.head_dim // 16, s.block_n // 16, s.block_m // 8
    blocks_launched = target.units * s.min_blocks
    sums_at = rules.results_at(w, s) // 4
    plan_at = rules.shared_bytes(w, s, target) // 4 - rules.PLAN_WORDS
    scale = w.softmax_scale / w.soft_cap if w.soft_cap > 0 else w.softmax_scale * log2(e)
    batch, q_len, words = (T.dynamic(name) for name in ("batch", "q_len", "words"))
    num_pages, slots, max_pages = (T.dynamic(name) for name in ("num_pages", "num_slots", "max_pages"))
    HeadScales = T.Tensor((2, w.heads_kv), "float32") if w.format.has_head_scales else None
    Sinks = T.Tensor((w.heads_q,), "float32") if w.sinks else None
    Lse = T.Tensor((batch, q_len, w.heads_q), "float32") if w.lse else None
    call = caller({"Decode": "Launch"}, "Launch")
    warp_ring = ring_macros(w, s, call)

    def share(total, block, blocks):
        """First unit of a block's share."""
        return T.Cast("int32", T.truncdiv(T.Cast("int64", total) * T.Cast("int64", block), T.Cast("int64", blocks)))

    def owner(unit, blocks, total):
        """The block whose share, from block * total / blocks on, a unit is in."""
        return T.Cast("int32", T.truncdiv((T.Cast("int64", unit) + 1) * T.Cast("int64", blocks) - 1, T.Cast("int64", total)))

    @T.macro
    def wait_for_predecessor():
        T.call_extern("handle", "tilebit::wait_for_predecessor")
        # only now: all but what this kernel writes is settled for the next one, which reads early,
        # too
        T.call_extern("handle", "tilebit::launch_dependents")

    @T.prim_func
    def main(
        q: T.Tensor((batch, q_len, w.heads_q, w.head_dim), dtype),
        pages: T.Tensor((num_pages, w.heads_kv, w.layout.page_words), "int32"),
        windows: T.Tensor((slots, w.heads_kv, window_words(w.head_dim)), "int32"),
        block_tables: T.Tensor((batch, max_pages), "int32"),
        slots_of: T.Tensor((batch,), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        head_scales: HeadScales,
        sinks: Sinks,
        workspace: T.Tensor((words,), "int32"),
        out: T.Tensor((batch, q_len, w.heads_q, w.head_dim), dtype),
        lse: Lse,
    ):
        with T.Kernel(blocks_launched, threads=warps * 32) as block:
            T.import_source(f"{functions}\n{decode_source(w, s)}")
            T.annotate_min_blocks_per_sm(s.min_blocks)
            shared = T.alloc_shared((rules.shared_bytes(w, s, target) // 4,), "int32")  # rings, barriers, sums of the warps
            launch, line = T.alloc_local((LAUNCH_WORDS,), "int64"), T.alloc_local((2,), "int32")
            here, ahead, after = (T.alloc_local((CURSOR_WORDS,), "int32") for _ in range(3))
            wanted, ring = T.alloc_local((WANTED_WORDS,), "int32"), T.alloc_local((RING_WORDS,), "int32")
            queries, query_sums = T.alloc_local((tiles * column_tiles * 2,), "uint32"), T.alloc_local((column_tiles * 2,), "float32")
            scores = T.alloc_local((strips * column_tiles * 4,), "float32")
            state = T.alloc_local((tiles * column_tiles * 4 + column_tiles * 6,), "float32")  # O, maxima, sums, zeros
            total, blocks, parts, begin, x, unit = (T.alloc_var("int32") for _ in range(6))
            first, shares, sequence = (T.alloc_var("int32") for _ in range(3))
            scaled, waited = T.alloc_var("int32"), T.alloc_var("int32", init=0) if bulk else None
            warp = T.get_thread_binding() // 32
            call(
                "Decode::open", launch, shared, q, pages, windows, block_tables, slots_of, lengths,
                head_scales if w.format.has_head_scales else lengths, sinks if w.sinks else lengths,
                batch, q_len, w.heads_kv, max_pages, T.ceildiv(w.group * q_len, s.block_m),
                T.float32(literal(scale)), T.float32(literal(w.soft_cap * log2(e))),
            )  # fmt: skip
            if bulk:
                call("Decode::open_ring", launch)
                T.sync_warp()

            # the block's share: whole segments, or an equal part of one, or of the line of all units
            total = call("Decode::count", launch, line, returns="int32")
            blocks = T.max(1, T.min(blocks_launched, T.truncdiv(total, warps)))  # each has a unit for every warp
            parts = call("Decode::parts", launch, total, blocks, returns="int32")
            if parts > 0:
                begin = call("Decode::deal", launch, block, blocks, parts, here, returns="int32")
            else:
                begin = share(total, T.min(block, blocks), blocks)
                call("Decode::find", launch, line, begin, share(total, T.min(block + 1, blocks), blocks), here)
            if T.get_thread_binding() == 0:  # for when segments are finished; registers are short
                shared[plan_at + PARTS] = parts
                shared[plan_at + BLOCKS] = blocks
                shared[plan_at + TOTAL_UNITS] = total

            # The warp's ring is filled. The preceding kernel of a dependent launch may write the
            # queries, the window, and what the newest q_len tokens fill of the pages; lengths and
            # tables must be older, also than the kernel before that one where that one was launched
            # so too. All that is settled is asked for before it has ended (32 x 4,096 tokens at
            # 4 bits: 35.2 us, and 40.0 after it; H200).
            for i in T.unroll(CURSOR_WORDS):
                ahead[i] = here[i]
            wanted[UNIT] = begin + warp
            wanted[UNITS_END] = T.min(here[BASE] + here[TOTAL], here[END])
            ring[SLOT] = 0
            ring[PHASE] = 0
            warp_ring.find_sources(launch, ahead, wanted, warp)
            for stage in T.unroll(stages, explicit=True):
                if bulk:  # noqa: SIM102 (known when the program is built)
                    if waited == 0 and wanted[UNIT] < wanted[UNITS_END]:  # noqa: SIM102 (only then is there a unit)
                        if not call("Decode::settled", launch, ahead, wanted[UNIT] - ahead[BASE], returns="bool"):
                            wait_for_predecessor()
                            waited = 1
                if stage % 2 == 0:
                    warp_ring.request_keys(launch, ahead, wanted, warp, stage)
                else:
                    warp_ring.request_values(launch, ahead, wanted, warp, stage)
            if bulk:  # noqa: SIM102
                if waited == 0:
                    wait_for_predecessor()

            if here[BASE] < here[END]:
                call("Scores::load_queries", launch, here, queries)
            while here[BASE] < here[END]:  # a piece: what the share has of a segment
                if w.format.key_scales == "token":
                    call("Scores::sum_queries", queries, query_sums)
                call("Softmax::clear", state)
                scaled = 0
                x = T.max(here[BASE], begin) + warp
                while x < T.min(here[BASE] + here[TOTAL], here[END]):
                    unit = x - here[BASE]
                    warp_ring.await_slot(launch, ring)
                    if unit < here[PACKED_UNITS]:
                        token = call("Decode::token", here, unit, returns="int32")
                        call("Scores::score", launch, here, ring[SLOT], queries, query_sums, scores, state)
                        call(f"Softmax::soften<{strips}>", launch, here, scores, state, token)
                        warp_ring.refill_after_keys(launch, ahead, wanted, warp, ring)
                        warp_ring.await_slot(launch, ring)
                        call("WeightedSum::add", launch, ring[SLOT], scores, state)
                    else:
                        if scaled == 0:  # the window comes after all packed tokens
                            call("WeightedSum::scale", launch, here, state)
                        scaled = 1
                        token = here[PACKED] + (unit - here[PACKED_UNITS]) * GRANULE
                        call("Scores::score_window", launch, ring[SLOT], queries, scores, state)
                        call("Softmax::soften<1>", launch, here, scores, state, token)
                        warp_ring.refill_after_keys(launch, ahead, wanted, warp, ring)
                        warp_ring.await_slot(launch, ring)
                        call("WeightedSum::add_window", launch, ring[SLOT], scores, state, here[LENGTH] - token)
                    warp_ring.refill_after_values(launch, ahead, wanted, warp, ring)
                    x = x + warps
                if scaled == 0:
                    call("WeightedSum::scale", launch, here, state)

                # the next piece's queries arrive while this piece is finished
                for i in T.unroll(CURSOR_WORDS):
                    after[i] = here[i]
                call("Decode::advance", launch, after)
                if after[BASE] < after[END]:
                    call("Scores::load_queries", launch, after, queries)

                # the warps' results are added up; so are, by the block that comes last, those of
                # the blocks that share the segment
                T.sync_threads()  # nobody reads the last piece's any more
                call("Reduce::store", launch, state, T.address_of(shared[sums_at]))
                T.sync_threads()
                whole = T.And(begin <= here[BASE], here[BASE] + here[TOTAL] <= here[END])
                call(
                    "Reduce::add_warps", launch, here, T.address_of(shared[sums_at]), whole, workspace,
                    2 * block + T.Cast("int32", begin <= here[BASE]), out, lse if w.lse else lengths,
                )  # fmt: skip
                if not whole:
                    if shared[plan_at + PARTS] > 0:
                        shares = shared[plan_at + PARTS]
                        first = block - block % shares
                    else:
                        first = owner(here[BASE], shared[plan_at + BLOCKS], shared[plan_at + TOTAL_UNITS])
                        shares = owner(here[BASE] + here[TOTAL] - 1, shared[plan_at + BLOCKS], shared[plan_at + TOTAL_UNITS]) - first + 1
                    if call("Reduce::last_of", workspace, first, shares, returns="bool"):
                        call("Reduce::add_blocks", launch, here, workspace, first, shares, out, lse if w.lse else lengths)
                for i in T.unroll(CURSOR_WORDS):
                    here[i] = after[i]

            sequence = block
            while sequence < batch:  # those of which nothing is to be seen
                if call("Decode::units_of", launch, lengths[sequence], returns="int32") == 0:
                    call("Reduce::answer_nothing", launch, sequence, out, lse if w.lse else lengths)
                sequence = sequence + blocks_launched

    return main


def decode_program(name: str) -> TileProgram:
    """The tile program called ``name``, one of the two."""
    return TileProgram(
        name=name,
        compiler="tilelang",
        build=build,
        headers=HEADERS,
        pass_configs=PASS_CONFIGS,
        newest_arch=None if name == rules.BULK else "sm_89",
    )


PROGRAM = decode_program(rules.ASYNC)
