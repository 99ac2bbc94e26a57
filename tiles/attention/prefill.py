"""``attention_prefill``: causal attention of many new tokens over 16-bit keys and values, on
sm_90a.

    o[i, h] = sum_j p_j v[j, h'],   p = softmax over the keys j that row i sees,   s_j = scale * q[i, h] . k[j, h']

Sequences lie end to end: rows ``cu_q[b]`` .. of q are the newest tokens of sequence b, whose keys
are rows ``cu_kv[b]`` .. of k and v (a history of the cache, gathered, then the new ones), so the
last query sees the last key. h' is the key head of query head h.

FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2) in TileLang. A block has ``block_m`` rows
of one head, 64 a warpgroup, and walks over tiles of ``block_n`` keys from the diagonal backwards;
tiles that no row sees are not visited. Blocks whose rows see most come first. Its threads have
three roles (``PRODUCERS`` threads load, two warps of them):

    warp 0                 queries, once         ->  Qs     full_q
                           keys, tile by tile    ->  Ks     full_k, back by empty_k
    warp 1                 values, tile by tile  ->  Vs     full_v, back by empty_v
    warpgroups 1, 2, ...   S = Q K^T, softmax, O += P V; each stores its rows

Keys and values have ``num_stages`` stages each. S = Q K^T reads shared memory; its accumulators
become P in place and are the register operand of O += P V. That product runs while the warpgroup
computes the next P, and the warpgroups take turns in handing products over, so that one's softmax
runs under another's products.

Boxes of TMA may reach into the next sequence: scores are masked by position, values beyond a
sequence's last are zeroed, and rows are stored one by one. Softmax and masks are CUDA
(``device/kv/prefill.cuh``): reductions of an accumulator in place, and an order of instructions
that the compilers would not keep.
"""

from types import SimpleNamespace
from typing import Any

from ...schedules.attention import rules as rules
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import device_source
from ..program import TileProgram
from .prefill_calls import CLEAR, FIELDS, FIRST_KEY, FIRST_ROW, GROUPS, MASK, MASKED, NO_MASK, STATE_FLOATS, STEPS, TURNS, PrefillCalls

HEADERS = ("ptx/instructions.cuh", "order/tiles.cuh", "kv/pairs.cuh", "kv/sequences.cuh", "kv/prefill.cuh")
PRODUCERS = rules.LOADING_WARPS * 32  # threads: registers are handed from warpgroup to warpgroup
MAX_TURN_HEAD_DIM = 128  # beyond it a product outlasts the other warpgroup's softmax, turns or not
ROOM = 64  # registers of a consumer's thread beside its tiles of O, S and P; with fewer, addresses are computed anew at each step


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule). Parameters, absent ones left out:

    q, out ``[tokens, heads_q, head_dim]``, k, v ``[total, heads_kv, head_dim]``, cu_q, cu_kv int32
    ``[batch + 1]``, sinks fp32 ``[heads_q]``, lse fp32 ``[tokens, heads_q]`` (natural logarithm;
    -inf, and out 0, where a row sees nothing). tokens, total and batch are dynamic, from 1 up.
    """
    import tilelang.language as T

    w, calls = workload, PrefillCalls(workload, schedule)
    bm, bn, hd, dtype, stages = schedule.block_m, schedule.block_n, w.head_dim, w.dtype, schedule.num_stages
    groups, consumers = bm // 64, schedule.num_warps * 32
    producer_registers, consumer_registers = rules.prefill_registers(schedule)
    scale, argument = T.float32(calls.scale), T.float32(calls.argument)
    tight = rules.tile_registers(w, schedule) + ROOM > consumer_registers
    turns = groups > 1 and hd <= MAX_TURN_HEAD_DIM
    await_turn, pass_turn = f"tilebit::await_turn<{TURNS}>", f"tilebit::pass_turn<{groups}, {TURNS}>"
    zero_tail = f"tilebit::zero_tail<{bn}, {hd}, 128, {GROUPS}>"
    policy = T.GemmWarpPolicy.FullRow

    tokens, total, bounds = T.dynamic("tokens"), T.dynamic("total"), T.dynamic("bounds")
    Sinks = T.Tensor((w.heads_q,), "float32") if w.sinks else None  # an argument annotated None is left out of the kernel
    Lse = T.Tensor((tokens, w.heads_q), "float32") if w.lse else None

    # Polled: TileLang's own wait sleeps (results/notes/prefill-polls.md). Pointers to read: one
    # from T.address_of would count as a store, and cost a fence before the next product.
    @T.macro
    def await_stage(full, stage, parity):
        T.call_extern("handle", "tilebit::await_stage", full.access_ptr("r", offset=stage), parity)

    @T.macro
    def release(stage_empty, stage, thread):
        T.call_extern("handle", "tilebit::release<1>", stage_empty.access_ptr("r", offset=stage), thread)

    @T.macro
    def load_queries_and_keys(q, k, shared, tile, at: T.Ref, head):
        T.tma_copy(q[tile[FIRST_ROW] : tile[FIRST_ROW] + bm, head, 0:hd], shared.Qs, barrier=shared.full_q[0])
        T.barrier_arrive(shared.full_q[0])
        for i in T.serial(tile[STEPS]):
            at = tile[FIRST_KEY] + T.call_pure_extern("int32", calls.key, T.address_of(tile[0]), i)
            T.mbarrier_wait_parity(shared.empty_k[i % stages], (i // stages & 1) ^ 1)
            T.tma_copy(k[at : at + bn, head // w.group, 0:hd], shared.Ks[i % stages, :, :], barrier=shared.full_k[i % stages])
            T.barrier_arrive(shared.full_k[i % stages])

    @T.macro
    def load_values(v, shared, tile, at: T.Ref, head):
        for i in T.serial(tile[STEPS]):
            at = tile[FIRST_KEY] + T.call_pure_extern("int32", calls.key, T.address_of(tile[0]), i)
            T.mbarrier_wait_parity(shared.empty_v[i % stages], (i // stages & 1) ^ 1)
            T.tma_copy(v[at : at + bn, head // w.group, 0:hd], shared.Vs[i % stages, :, :], barrier=shared.full_v[i % stages])
            T.barrier_arrive(shared.full_v[i % stages])

    def soften(mine, i, masking, thread):
        """S becomes exponentials under a new maximum, which ``state`` keeps."""
        return T.call_extern(
            "handle", calls.softmax(masking), mine.S.access_ptr("rw"), T.address_of(mine.state[0]), T.address_of(mine.tile[0]),
            i, scale, argument, thread,
        )  # fmt: skip

    @T.macro
    def first_step(shared, mine, thread):
        """P of the newest keys; no product runs meanwhile."""
        await_stage(shared.full_q, 0, 0)
        await_stage(shared.full_k, 0, 0)
        T.wgmma_gemm(shared.Qs, shared.Ks[0, :, :], mine.S, transpose_B=True, clear_accum=True, policy=policy)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(mine.S, num_regs=bn // 2)
        release(shared.empty_k, 0, thread)
        soften(mine, 0, MASK, thread)
        T.call_extern("handle", calls.round_weights, mine.S.access_ptr("r"), mine.P.access_ptr("w"))
        await_stage(shared.full_v, 0, 0)
        T.call_extern("handle", zero_tail, T.address_of(shared.Vs[0, 0, 0]), T.address_of(mine.tile[0]), thread)

    @T.macro
    def next_step(shared, mine, i, masking, thread):
        """S of step i and O += P V of the step before are under way together; P of step i is
        computed under the second."""
        await_stage(shared.full_k, i % stages, i // stages & 1)
        if turns:
            T.call_extern("handle", await_turn, thread)
        if tight:
            mine.zero[0] = T.call_extern("int32", "tilebit::opaque_zero")
            T.wgmma_gemm(
                shared.Qs[mine.zero[0] : mine.zero[0] + bm, :], shared.Ks[i % stages, :, :], mine.S,
                transpose_B=True, clear_accum=True, policy=policy,
            )  # fmt: skip
        else:
            T.wgmma_gemm(shared.Qs, shared.Ks[i % stages, :, :], mine.S, transpose_B=True, clear_accum=True, policy=policy)
        await_stage(shared.full_v, (i - 1) % stages, (i - 1) // stages & 1)
        T.wgmma_gemm(mine.P, shared.Vs[(i - 1) % stages, :, :], mine.O, policy=policy)
        if turns:
            T.call_extern("handle", pass_turn, thread)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(mine.S, num_regs=bn // 2)
        release(shared.empty_k, i % stages, thread)
        soften(mine, i, masking, thread)
        T.call_extern("handle", "tilebit::weights_before_wait", T.address_of(mine.state[0]))
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(mine.O, num_regs=hd // 2)
        release(shared.empty_v, (i - 1) % stages, thread)
        T.call_extern("handle", calls.rescale, mine.O.access_ptr("rw"), T.address_of(mine.state[0]))
        T.call_extern("handle", calls.round_weights, mine.S.access_ptr("r"), mine.P.access_ptr("w"))

    @T.macro
    def last_product(shared, mine):
        await_stage(shared.full_v, (mine.tile[STEPS] - 1) % stages, (mine.tile[STEPS] - 1) // stages & 1)
        T.wgmma_gemm(mine.P, shared.Vs[(mine.tile[STEPS] - 1) % stages, :, :], mine.O, policy=policy)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(mine.O, num_regs=hd // 2)

    @T.macro
    def attend(shared, mine, thread):
        """The computing warpgroups' walk over their tile's keys; then O are its sums, and ``state``
        what they are divided by."""
        if turns and thread // 128 == groups - 1:
            T.call_extern("handle", pass_turn, thread)  # the first turn is the first warpgroup's
        T.call_extern("handle", "tilebit::begin_rows", T.address_of(mine.state[0]))
        T.clear(mine.O)
        first_step(shared, mine, thread)
        for i in T.serial(1, mine.tile[MASKED]):
            next_step(shared, mine, i, MASK, thread)
        for i in T.serial(mine.tile[MASKED], mine.tile[CLEAR]):
            next_step(shared, mine, i, NO_MASK, thread)
        if w.window:
            for i in T.serial(mine.tile[CLEAR], mine.tile[STEPS]):
                next_step(shared, mine, i, MASK, thread)
        last_product(shared, mine)

    @T.macro
    def store(shared, mine, out, sinks, lse, head, thread):
        """Through the place of the queries."""
        T.call_extern(
            "handle", calls.finish(128), mine.O.access_ptr("r"), T.address_of(mine.state[0]), T.address_of(mine.tile[0]),
            T.address_of(shared.Qs[0, 0]), T.address_of(out[0, 0, 0]), T.address_of(sinks[0]) if w.sinks else 0,
            T.address_of(lse[0, 0]) if w.lse else 0, head, w.heads_q, scale, thread,
        )  # fmt: skip

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
        with T.Kernel(w.heads_q, T.ceildiv(tokens, bm) + bounds, threads=PRODUCERS + consumers) as (head, index):
            thread = T.get_thread_binding()
            Qs = T.alloc_shared((bm, hd), dtype)
            Ks = T.alloc_shared((stages, bn, hd), dtype)
            Vs = T.alloc_shared((stages, bn, hd), dtype)
            full_q = T.alloc_barrier([32])  # the lanes of the loading warp
            full_k = T.alloc_barrier([32] * stages)
            full_v = T.alloc_barrier([32] * stages)
            empty_k = T.alloc_barrier([schedule.num_warps] * stages)
            empty_v = T.alloc_barrier([schedule.num_warps] * stages)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            O = T.alloc_fragment((bm, hd), "float32")  # noqa: E741
            tile = T.alloc_local((FIELDS,), "int32")
            zero = T.alloc_local((1,), "int32")
            state = T.alloc_local((STATE_FLOATS,), "float32")
            shared = SimpleNamespace(Qs=Qs, Ks=Ks, Vs=Vs, full_q=full_q, full_k=full_k, full_v=full_v, empty_k=empty_k, empty_v=empty_v)
            mine = SimpleNamespace(S=S, P=P, O=O, tile=tile, zero=zero, state=state)
            T.import_source(device_source(HEADERS))
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            T.disable_warp_group_reg_alloc()

            T.call_extern(
                "handle", calls.find(PRODUCERS + consumers), T.address_of(cu_q[0]), T.address_of(cu_kv[0]), bounds - 1, index,
                T.address_of(tile[0]),
            )  # fmt: skip
            if thread < PRODUCERS:
                T.set_max_nreg(producer_registers, 0)
                at = T.alloc_var("int32")
                if thread < 32:
                    load_queries_and_keys(q, k, shared, tile, at, head)
                elif thread < 64:
                    load_values(v, shared, tile, at, head)
            else:
                T.set_max_nreg(consumer_registers, 1)
                attend(shared, mine, thread - PRODUCERS)
                store(shared, mine, out, sinks, lse, head, thread - PRODUCERS)

    return main


PROGRAM = TileProgram(
    name=rules.WGMMA,
    compiler="tilelang",
    build=build,
    headers=HEADERS,
)
