"""``attention_prefill_mma``: causal attention of many new tokens over 16-bit keys and values, on
sm_80 and later.

The computation, the operands and the order of the work are ``attention_prefill``'s
(``prefill.py``). A warp has 16 of the block's ``block_m`` query rows and multiplies with mma.sync.
All threads load tiles of ``block_n`` keys and their values with cp.async, ``num_stages`` - 1 tiles
ahead; rows beyond the sequence arrive as zeros. Accumulators become the next product's operand in
place here, too.
"""

from typing import Any

from ...schedules.attention import rules as rules
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .prefill_calls import FIELDS, FIRST_KEY, FIRST_ROW, KEYS, MASK_WHERE_NEEDED, ROWS, STATE_FLOATS, STEPS, PrefillCalls

HEADERS = ("ptx/instructions.cuh", "kv/pairs.cuh", "kv/sequences.cuh", "kv/prefill.cuh")


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); parameters as in ``prefill.build``."""
    import tilelang.language as T
    from tilelang.layout import make_swizzled_layout

    w, calls = workload, PrefillCalls(workload, schedule)
    bm, bn, hd, dtype, stages = schedule.block_m, schedule.block_n, w.head_dim, w.dtype, schedule.num_stages
    threads = schedule.num_warps * 32
    scale, argument = T.float32(calls.scale), T.float32(calls.argument)
    load_queries, load_tile = (f"tilebit::load_rows<{TYPES[dtype]}, {rows}, {hd}, {threads}>" for rows in (bm, bn))
    commit, await_tile = "tilebit::commit_copies", f"tilebit::await_copies<{stages - 1}>"
    policy = T.GemmWarpPolicy.FullRow

    tokens, total, bounds = T.dynamic("tokens"), T.dynamic("total"), T.dynamic("bounds")
    Sinks = T.Tensor((w.heads_q,), "float32") if w.sinks else None
    Lse = T.Tensor((tokens, w.heads_q), "float32") if w.lse else None

    @T.macro
    def load_step(k, v, Ks, Vs, tile, step, head, thread):
        # A group of copies is committed for each step, loaded or not, so that the wait counts the
        # same groups at every step.
        if step < tile[STEPS]:
            first = T.call_pure_extern("int32", calls.key, T.address_of(tile[0]), step)
            row = T.min(tile[FIRST_KEY] + first, k.shape[0] - 1)
            T.call_extern(
                "handle", load_tile, T.address_of(Ks[step % stages, 0, 0]), T.address_of(k[row, head // w.group, 0]), w.heads_kv * hd,
                tile[KEYS] - first, thread,
            )  # fmt: skip
            T.call_extern(
                "handle", load_tile, T.address_of(Vs[step % stages, 0, 0]), T.address_of(v[row, head // w.group, 0]), w.heads_kv * hd,
                tile[KEYS] - first, thread,
            )  # fmt: skip
        T.call_extern("handle", commit)

    @T.prim_func
    def main(
        q: T.Tensor((tokens, w.heads_q, hd), dtype),
        k: T.Tensor((total, w.heads_kv, hd), dtype),
        v: T.Tensor((total, w.heads_kv, hd), dtype),
        cu_q: T.Tensor((bounds,), "int32"),
        cu_kv: T.Tensor((bounds,), "int32"),
        sinks: Sinks,
        out: T.Tensor((tokens, w.heads_q, hd), dtype),
        lse: Lse,
    ):
        with T.Kernel(w.heads_q, T.ceildiv(tokens, bm) + bounds, threads=threads) as (head, index):
            thread = T.get_thread_binding()
            Qs = T.alloc_shared((bm, hd), dtype)
            Ks = T.alloc_shared((stages, bn, hd), dtype)
            Vs = T.alloc_shared((stages, bn, hd), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            O = T.alloc_fragment((bm, hd), "float32")  # noqa: E741
            tile = T.alloc_local((FIELDS,), "int32")
            state = T.alloc_local((STATE_FLOATS,), "float32")
            T.import_source(device_source(HEADERS))
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            T.annotate_layout({Qs: make_swizzled_layout(Qs), Ks: make_swizzled_layout(Ks), Vs: make_swizzled_layout(Vs)})

            T.call_extern(
                "handle", calls.find(threads), T.address_of(cu_q[0]), T.address_of(cu_kv[0]), bounds - 1, index, T.address_of(tile[0])
            )
            T.call_extern(
                "handle",
                load_queries,
                T.address_of(Qs[0, 0]),
                T.address_of(q[tile[FIRST_ROW], head, 0]),
                w.heads_q * hd,
                tile[ROWS],
                thread,
            )
            for step in T.unroll(stages - 1):
                load_step(k, v, Ks, Vs, tile, step, head, thread)
            T.call_extern("handle", "tilebit::begin_rows", T.address_of(state[0]))
            T.clear(O)
            for i in T.serial(tile[STEPS]):
                load_step(k, v, Ks, Vs, tile, i + stages - 1, head, thread)
                T.call_extern("handle", await_tile)
                T.sync_threads()
                T.gemm(Qs, Ks[i % stages, :, :], S, transpose_B=True, clear_accum=True, policy=policy)
                T.call_extern(
                    "handle", calls.softmax(MASK_WHERE_NEEDED), S.access_ptr("rw"), T.address_of(state[0]), T.address_of(tile[0]),
                    i, scale, argument, thread,
                )  # fmt: skip
                T.call_extern("handle", calls.rescale, O.access_ptr("rw"), T.address_of(state[0]))
                T.call_extern("handle", calls.round_weights, S.access_ptr("r"), P.access_ptr("w"))
                T.gemm(P, Vs[i % stages, :, :], O, policy=policy)
                T.sync_threads()  # the next load may take this stage
            T.call_extern(
                "handle", calls.finish(threads), O.access_ptr("r"), T.address_of(state[0]), T.address_of(tile[0]), T.address_of(Qs[0, 0]),
                T.address_of(out[0, 0, 0]), T.address_of(sinks[0]) if w.sinks else 0, T.address_of(lse[0, 0]) if w.lse else 0,
                head, w.heads_q, scale, thread,
            )  # fmt: skip

    return main


PROGRAM = TileProgram(
    name=rules.MMA,
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    newest_arch="sm_89",  # for sm_90a TileLang would turn the same body into wgmma
)
