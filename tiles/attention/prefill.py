"""``attention_prefill``: causal attention of many new tokens over 16-bit keys and values, on sm_90a.

    o[i, h] = sum_j p_j v[j, h'],   p = softmax over the keys j that row i sees,   s_j = scale * q[i, h] . k[j, h']

Sequences lie end to end: rows ``cu_q[b]`` .. of q are the newest tokens of sequence b, whose keys are rows ``cu_kv[b]`` .. of k and v (a
history of the cache, gathered, then the new ones), so the last query sees the last key. h' is the key head of query head h.

FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2) in TileLang. A block has ``block_m`` rows of one head, 64 a warpgroup, and walks
over tiles of ``block_n`` keys from the diagonal backwards; tiles that no row sees are not visited. One warp loads queries and keys by TMA,
one the values, each through ``num_stages`` stages of its own. S = Q K^T reads shared memory; its accumulators become P in place and are
the register operand of O += P V. That product runs while the warpgroup computes the next P, and the warpgroups take turns in handing
products over, so that one's softmax runs under another's products. Blocks whose rows see most come first.

Boxes of TMA may reach into the next sequence: scores are masked by position, values beyond a sequence's last are zeroed, and rows are
stored one by one. Softmax and masks are CUDA (``device/kv/prefill.cuh``): reductions of an accumulator in place, and an order of
instructions that the compilers would not keep.
"""

from dataclasses import dataclass
from math import e, log2
from typing import Any

from ...schedules.attention import rules as rules
from ...schedules.attention.workload import AttentionWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source, literal
from ..program import TileProgram

HEADERS = ("ptx.cuh", "order.cuh", "kv/pairs.cuh", "kv/sequences.cuh", "kv/prefill.cuh")
PRODUCERS = rules.LOADING_WARPS * 32  # threads: registers are handed from warpgroup to warpgroup
TURNS, GROUPS = 3, 6  # first named barriers of the warpgroups' turns and of each warpgroup alone; the generated code uses 0 to 2
MAX_TURN_HEAD_DIM = 128  # beyond it a product outlasts the other warpgroup's softmax, turns or not
ROOM = 64  # registers of a consumer's thread beside its tiles of O, S and P; with fewer, addresses are computed anew at each step
# Fields of `tilebit::PrefillTile`, ints in this order.
ROWS, FIRST_ROW, FIRST_KEY, KEYS, MASKED, CLEAR, STEPS, FIELDS = 0, 1, 2, 3, 6, 7, 8, 11
STATE_FLOATS = 6  # of `tilebit::RowState`
NO_MASK, MASK, MASK_WHERE_NEEDED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class PrefillCalls:
    """The functions of ``device/kv/prefill.cuh`` with their template arguments, for one (workload, schedule)."""

    workload: AttentionWorkload
    schedule: Schedule

    def find(self, threads: int) -> str:
        """``threads``: of a block."""
        w, s = self.workload, self.schedule
        return f"tilebit::find_tile_or_exit<{threads}, {s.block_m}, {s.block_n}, {w.window}, {w.sink_tokens}>"

    @property
    def key(self) -> str:
        return f"tilebit::step_key<{self.schedule.block_n}>"

    def softmax(self, masking: int) -> str:
        w, s = self.workload, self.schedule
        return f"tilebit::softmax_step<{s.block_n}, {w.window}, {w.sink_tokens}, {_cpp(w.soft_cap > 0)}, {masking}>"

    @property
    def round_weights(self) -> str:
        return f"tilebit::round_weights<{TYPES[self.workload.dtype]}, {self.schedule.block_n}>"

    @property
    def rescale(self) -> str:
        return f"tilebit::rescale_rows<{self.workload.head_dim}>"

    def finish(self, threads: int) -> str:
        """``threads`` share what lies in the place where the output is staged."""
        w = self.workload
        return f"tilebit::finish_rows<{TYPES[w.dtype]}, {w.head_dim}, {_cpp(w.sinks)}, {_cpp(w.lse)}, {threads}, {GROUPS}>"

    @property
    def scale(self) -> float:
        """What a score is multiplied by to be an exponent of 2; of capped scores, tanh(..), the cap's."""
        w = self.workload
        return literal((w.soft_cap or w.softmax_scale) * log2(e))

    @property
    def argument(self) -> float:
        """What makes q.k the exponent of 2 in tanh(x) = 1 - 2 / (1 + exp(2 x)); 0 without a cap."""
        w = self.workload
        return literal(2 * log2(e) * w.softmax_scale / w.soft_cap) if w.soft_cap else 0.0


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule). Parameters, absent ones left out:

    q, out ``[tokens, heads_q, head_dim]``, k, v ``[total, heads_kv, head_dim]``, cu_q, cu_kv int32 ``[batch + 1]``, sinks fp32
    ``[heads_q]``, lse fp32 ``[tokens, heads_q]`` (natural logarithm; -inf, and out 0, where a row sees nothing). tokens, total and batch
    are dynamic, from 1 up.
    """
    import tilelang.language as T

    w, calls = workload, PrefillCalls(workload, schedule)
    bm, bn, hd, dtype, stages = schedule.block_m, schedule.block_n, w.head_dim, w.dtype, schedule.num_stages
    groups, consumers = bm // 64, bm * 2
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

    # Polled: TileLang's own wait sleeps (32 heads, 8,192 tokens: 999 us, so 982; 64 heads, 16,384: 7,779, so 7,646; none slower; H200).
    # Pointers to read: one from T.address_of would count as a store, and cost a fence before the next product.
    @T.macro
    def await_stage(full, stage, parity):
        T.call_extern("handle", "tilebit::await_stage", full.access_ptr("r", offset=stage), parity)

    @T.macro
    def release(stage_empty, stage, thread):
        T.call_extern("handle", "tilebit::release<1>", stage_empty.access_ptr("r", offset=stage), thread)

    @T.macro
    def step_of(Qs, Ks, Vs, S, P, O, state, tile, full_k, full_v, empty_k, empty_v, zero, i, masking, thread):  # noqa: E741
        await_stage(full_k, i % stages, i // stages & 1)
        if turns:
            T.call_extern("handle", await_turn, thread)
        if tight:
            zero[0] = T.call_extern("int32", "tilebit::opaque_zero")
            T.wgmma_gemm(Qs[zero[0] : zero[0] + bm, :], Ks[i % stages, :, :], S, transpose_B=True, clear_accum=True, policy=policy)
        else:
            T.wgmma_gemm(Qs, Ks[i % stages, :, :], S, transpose_B=True, clear_accum=True, policy=policy)
        await_stage(full_v, (i - 1) % stages, (i - 1) // stages & 1)
        T.wgmma_gemm(P, Vs[(i - 1) % stages, :, :], O, policy=policy)
        if turns:
            T.call_extern("handle", pass_turn, thread)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(S, num_regs=bn // 2)
        release(empty_k, i % stages, thread)
        T.call_extern(
            "handle", calls.softmax(masking), S.access_ptr("rw"), T.address_of(state[0]), T.address_of(tile[0]), i, scale, argument, thread
        )
        T.call_extern("handle", "tilebit::weights_before_wait", T.address_of(state[0]))
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(O, num_regs=hd // 2)
        release(empty_v, (i - 1) % stages, thread)
        T.call_extern("handle", calls.rescale, O.access_ptr("rw"), T.address_of(state[0]))
        T.call_extern("handle", calls.round_weights, S.access_ptr("r"), P.access_ptr("w"))

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
            T.import_source(device_source(HEADERS))
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            T.disable_warp_group_reg_alloc()

            T.call_extern(
                "handle",
                calls.find(PRODUCERS + consumers),
                T.address_of(cu_q[0]),
                T.address_of(cu_kv[0]),
                bounds - 1,
                index,
                T.address_of(tile[0]),
            )
            if thread < PRODUCERS:
                T.set_max_nreg(producer_registers, 0)
                at = T.alloc_var("int32")
                if thread < 32:
                    T.tma_copy(q[tile[FIRST_ROW] : tile[FIRST_ROW] + bm, head, 0:hd], Qs, barrier=full_q[0])
                    T.barrier_arrive(full_q[0])
                    for i in T.serial(tile[STEPS]):
                        at = tile[FIRST_KEY] + T.call_pure_extern("int32", calls.key, T.address_of(tile[0]), i)
                        T.mbarrier_wait_parity(empty_k[i % stages], (i // stages & 1) ^ 1)
                        T.tma_copy(k[at : at + bn, head // w.group, 0:hd], Ks[i % stages, :, :], barrier=full_k[i % stages])
                        T.barrier_arrive(full_k[i % stages])
                elif thread < 64:
                    for i in T.serial(tile[STEPS]):
                        at = tile[FIRST_KEY] + T.call_pure_extern("int32", calls.key, T.address_of(tile[0]), i)
                        T.mbarrier_wait_parity(empty_v[i % stages], (i // stages & 1) ^ 1)
                        T.tma_copy(v[at : at + bn, head // w.group, 0:hd], Vs[i % stages, :, :], barrier=full_v[i % stages])
                        T.barrier_arrive(full_v[i % stages])
            else:
                T.set_max_nreg(consumer_registers, 1)
                own = thread - PRODUCERS
                if turns and own // 128 == groups - 1:
                    T.call_extern("handle", pass_turn, own)  # the first turn is the first warpgroup's
                T.call_extern("handle", "tilebit::begin_rows", T.address_of(state[0]))
                T.clear(O)
                await_stage(full_q, 0, 0)
                await_stage(full_k, 0, 0)
                T.wgmma_gemm(Qs, Ks[0, :, :], S, transpose_B=True, clear_accum=True, policy=policy)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(S, num_regs=bn // 2)
                release(empty_k, 0, own)
                T.call_extern(
                    "handle",
                    calls.softmax(MASK),
                    S.access_ptr("rw"),
                    T.address_of(state[0]),
                    T.address_of(tile[0]),
                    0,
                    scale,
                    argument,
                    own,
                )
                T.call_extern("handle", calls.round_weights, S.access_ptr("r"), P.access_ptr("w"))
                await_stage(full_v, 0, 0)
                T.call_extern("handle", zero_tail, T.address_of(Vs[0, 0, 0]), T.address_of(tile[0]), own)
                for i in T.serial(1, tile[MASKED]):
                    step_of(Qs, Ks, Vs, S, P, O, state, tile, full_k, full_v, empty_k, empty_v, zero, i, MASK, own)
                for i in T.serial(tile[MASKED], tile[CLEAR]):
                    step_of(Qs, Ks, Vs, S, P, O, state, tile, full_k, full_v, empty_k, empty_v, zero, i, NO_MASK, own)
                if w.window:
                    for i in T.serial(tile[CLEAR], tile[STEPS]):
                        step_of(Qs, Ks, Vs, S, P, O, state, tile, full_k, full_v, empty_k, empty_v, zero, i, MASK, own)
                await_stage(full_v, (tile[STEPS] - 1) % stages, (tile[STEPS] - 1) // stages & 1)
                T.wgmma_gemm(P, Vs[(tile[STEPS] - 1) % stages, :, :], O, policy=policy)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(O, num_regs=hd // 2)
                T.call_extern(
                    "handle", calls.finish(128), O.access_ptr("r"), T.address_of(state[0]), T.address_of(tile[0]), T.address_of(Qs[0, 0]),
                    T.address_of(out[0, 0, 0]), T.address_of(sinks[0]) if w.sinks else 0, T.address_of(lse[0, 0]) if w.lse else 0,
                    head, w.heads_q, scale, own,
                )  # fmt: skip

    return main


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"


PROGRAM = TileProgram(
    name=rules.WGMMA,
    compiler="tilelang",
    build=build,
    headers=HEADERS,
)
