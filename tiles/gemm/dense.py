"""``gemm_dense``: a product with a 16-bit weight as a model holds it, few rows of x, on sm_90a.

    y[m, n] = sum_k x[m, k] * weight[n, k]

computed as Y^T = W X^T by wgmma with both operands in shared memory: output channels are the
instruction's 64 rows, rows of x its columns. What counts is that enough of the weight is on its way:
a block's threads have three roles,

    warp 0                 weight ->  Ws     (no earlier kernel writes it: it need not wait)
    warp 1                 x      ->  Xs
    warpgroups 1, 2, ...   multiply, store

``full`` hands a slot to the computing warps; ``empty`` hands it back when the slot's product has ended,
while the next one runs. TMA writes zeros for columns of k, rows of x and output channels that are not
there. The weight is the first to leave the L2 cache (results/notes/evict-first.md).
"""

from typing import Any

from ...schedules.gemm import dense as rules
from ...schedules.gemm.dense import DenseWorkload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .any import PASS_CONFIGS
from .operands import BARRIER

HEADERS = ("ptx/instructions.cuh", "store/epilogue.cuh", "store/rows.cuh", "pipeline/dependent.cuh", "order/tiles.cuh")


def build(workload: DenseWorkload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc over x [m, k], weight [n, k] and y [m, n]; m is dynamic."""
    import tilelang.language as T

    w, s, dtype = workload, schedule, workload.dtype
    bn, bm, bk, stages, consumers = s.block_n, s.block_m, s.block_k, s.num_stages, s.num_warps * 32
    steps = -(-w.k // bk)
    producer_registers, consumer_registers = rules.registers(s)
    m = T.dynamic("m")

    @T.macro
    def bring(rows, slots, full, empty, first, count, eviction):
        for i in T.serial(steps):
            T.mbarrier_wait_parity(empty[i % stages], (i // stages & 1) ^ 1)
            T.tma_copy(
                rows[first : first + count, i * bk : i * bk + bk], slots[i % stages, :, :],
                barrier=full[i % stages], eviction_policy=eviction,
            )  # fmt: skip
            T.barrier_arrive(full[i % stages])

    @T.macro
    def multiply(Ws, Xs, Y, full, empty, own):
        for i in T.serial(steps):
            T.call_extern("handle", "tilebit::await_stage", T.address_of(full[i % stages]), i // stages & 1)
            T.wgmma_gemm(
                Ws[i % stages, :, :], Xs[i % stages, :, :], Y, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=i == 0
            )  # fmt: skip
            T.wait_wgmma(1)  # the product before, which no longer reads its slot
            T.call_extern("handle", "tilebit::release<1>", T.address_of(empty[(i + stages - 1) % stages]), own, i > 0)
        T.wait_wgmma(0)

    @T.prim_func
    def main(x: T.Tensor((m, w.k), dtype), weight: T.Tensor((w.n, w.k), dtype), y: T.Tensor((m, w.n), dtype)):
        with T.Kernel(-(-w.n // bn), T.ceildiv(m, bm), threads=rules.PRODUCERS + consumers) as (bx, by):
            Ws = T.alloc_shared((stages, bn, bk), dtype)
            Xs = T.alloc_shared((stages, bm, bk), dtype)
            full = T.alloc_barrier([64] * stages)  # the lanes of the two loading warps
            empty = T.alloc_barrier([s.num_warps] * stages)
            Y = T.alloc_fragment((bn, bm), "float32")
            T.import_source("#define STAGES_ARE_COPIED\n" + device_source(HEADERS))
            T.annotate_min_blocks_per_sm(s.min_blocks)
            T.disable_warp_group_reg_alloc()
            thread = T.get_thread_binding()

            T.call_extern("handle", "tilebit::launch_dependents")
            if thread < rules.PRODUCERS:
                T.set_max_nreg(producer_registers, 0)
                if thread < 32:
                    bring(weight, Ws, full, empty, bx * bn, bn, "evict_first")
                elif thread < 64:
                    T.call_extern("handle", "tilebit::wait_for_predecessor")
                    bring(x, Xs, full, empty, by * bm, bm, None)
            else:
                T.set_max_nreg(consumer_registers, 1)
                T.call_extern("handle", "tilebit::wait_for_predecessor")
                multiply(Ws, Xs, Y, full, empty, thread - rules.PRODUCERS)
                staging = T.address_of(Ws[0, 0, 0])  # all slots have been read
                T.call_extern(
                    "handle", f"tilebit::stage_transposed<{TYPES[dtype]}, 1, {bm}, {consumers}, {BARRIER}>", Y.access_ptr("r"), staging,
                    thread - rules.PRODUCERS,
                )  # fmt: skip
                T.call_extern(
                    "handle", f"tilebit::store_staged_rows<{TYPES[dtype]}, {w.n}, {bn}, {bm}, {consumers}>", staging,
                    T.address_of(y[by * bm, bx * bn]), m - by * bm, w.n - bx * bn, thread - rules.PRODUCERS,
                )  # fmt: skip

    return main


PROGRAM = TileProgram(name=rules.PROGRAM, compiler="tilelang", build=build, headers=HEADERS, pass_configs=PASS_CONFIGS)
