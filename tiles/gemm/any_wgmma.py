"""``gemm_any_wgmma``: the GEMM on bit planes and codebooks (Any-Precision LLM) for many rows of x, on
sm_90a.

    y[m, n] = sum_k x[m, k] * codebook[n, q[n, k]] (* token_scales[m]) (+ bias[n]) (+ residual[m, n])

computed as Y^T = W X^T as ``gemm_wgmma`` does: numbers that were looked up are wgmma's register
operand, x in shared memory is the other, and each weight is looked up once for ``block_m`` rows of x.
A block lays out its channels' tables in shared memory, then its threads have two roles:

    warpgroup 0            x -> Xs, by TMA, then in the order of k in which planes hold bits
    warpgroups 1, 2, ...   planes -> codes -> numbers, multiply, store

``raw`` says that a slot of 64 k of x has come, ``full`` hands it to the computing warpgroups in order,
``empty`` hands it back. A computing warp has 16 channels; the planes of a step, 256 k of these, are 16
bytes of each plane a lane, asked for when the codes of the step before have been taken. A step is four
parts of 64 k, which have two operands in turn: while one is multiplied, the next is looked up. What it
gains and what binds it: results/notes/any-many-rows.md.
"""

from typing import Any

from ...schedules.gemm import any_wgmma as rules
from ...schedules.gemm.rules import row_bytes
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .any import PASS_CONFIGS
from .operands import Operands, addresses
from .wgmma_plan import Plan

HEADERS = (
    "ptx/instructions.cuh", "codecs/dequant.cuh", "codecs/any_product.cuh", "codecs/any_operand.cuh", "store/split_k.cuh",
    "store/epilogue.cuh", "store/gate.cuh", "store/parts.cuh", "order/tiles.cuh", "store/finish.cuh",
)  # fmt: skip
PARTS = tuple(range(rules.STEP_K // rules.STAGE_K))  # of a step
WORDS = 16  # of codes, of 128 k
AHEAD_OF_PRODUCTS = 2  # slots that are in order before they are needed: of these none is on its way


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); parameters as in ``any.build``."""
    import tilelang.language as T

    p, s, dtype, bits = Operands(workload, schedule), schedule, workload.dtype, workload.format.bits
    plan, bn, bm, stages = Plan(p), s.block_n, s.block_m, s.num_stages
    k_tiles, consumers, columns = rules.steps(workload), s.num_warps * 32, p.staged_columns
    operand = f"tilebit::AnyOperand<{TYPES[dtype]}, {bits}, tilebit::Tables::{rules.tables_in(workload)}>"
    ahead = max(1, stages - AHEAD_OF_PRODUCTS)
    producer_registers, consumer_registers = rules.registers(s)

    m, words = T.dynamic("m"), T.dynamic("words")
    TokenScales, Bias, Residual = p.tensors(T, target.arch, "token_scales", "bias", "residual", m=m)
    Workspace = T.Tensor((words,), "int32") if plan.shared else None
    blocks = p.n_pad // bn * T.ceildiv(m, bm) * s.split_k

    def ask(what, *where):
        return plan.ask(T, what, m, *where)

    def arrive(barrier, lane, really=True):
        """Of a warp's lanes one."""
        return T.call_extern("handle", plan.release, T.address_of(barrier), lane, really)

    @T.macro
    def ask_for_x(x, Xs, raw, empty, lane, top, first, slot):
        """By a warp."""
        T.mbarrier_wait_parity(empty[slot % stages], (slot // stages & 1) ^ 1)
        k0 = first * rules.STEP_K + slot * rules.STAGE_K
        T.tma_copy(x[top : top + bm, k0 : k0 + rules.STAGE_K], Xs[slot % stages, :, :], barrier=raw[slot % stages])
        T.sync_warp()  # one lane has told how much comes
        arrive(raw[slot % stages], lane)

    @T.macro
    def bring_x(x, Xs, raw, full, empty, warp, lane, top, first, slots):
        """All slots in turn: asked for ``ahead`` before they are put in order."""
        if warp == 0:
            for slot in T.serial(T.min(ahead, slots)):
                ask_for_x(x, Xs, raw, empty, lane, top, first, slot)
        for slot in T.serial(slots):
            T.call_extern("handle", "tilebit::await_stage", T.address_of(raw[slot % stages]), slot // stages & 1)
            T.call_extern("handle", f"tilebit::order_slot<{bm}>", T.address_of(Xs[slot % stages, 0, 0]), warp, lane)
            T.call_extern("handle", "tilebit::fence_before_bulk_copies")
            T.sync_warp()
            arrive(full[slot % stages], lane)
            if warp == 0 and slot + ahead < slots:
                ask_for_x(x, Xs, raw, empty, lane, top, first, slot + ahead)

    @T.macro
    def request(weight, planes, warp, lane, first_row, step):
        row = first_row + warp * rules.ROWS
        T.call_extern(
            "handle", f"tilebit::request_planes<{bits}, 1>", planes.access_ptr("w"),
            T.address_of(weight[0, row // 64, step, row % 64 * 8]), T.int64(p.n_tiles * k_tiles * 2048), lane,
        )  # fmt: skip

    @T.macro
    def multiply_part(Xs, tables, kept, codes, W, Y, full, empty, warp, lane, stage, last, phase, part, step):
        T.call_extern(
            "handle", f"{operand}::look_up", codes.access_ptr("r"), T.address_of(tables[0]), kept.access_ptr("r"), W.access_ptr("w"),
            part % 2, warp, lane,
        )  # fmt: skip
        T.call_extern("handle", "tilebit::await_stage", T.address_of(full[stage]), phase)
        T.wgmma_gemm(W, Xs[stage, :, :], Y, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=step * len(PARTS) + part == 0)
        T.wait_wgmma(1)  # the part before, whose operand is overwritten next
        arrive(empty[last], lane, step * len(PARTS) + part > 0)

    @T.macro
    def multiply(weight, Xs, tables, kept, planes, codes, operands, Y, full, empty, warp, lane, first_row, first, steps):
        stage, phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
        last = T.alloc_var("int32", init=stages - 1)  # the slot before ``stage``
        for step in T.serial(steps):
            for part in PARTS:
                if part % 2 == 0:
                    T.call_extern("handle", f"{operand}::select", planes.access_ptr("r"), codes.access_ptr("w"), part // 2)
                if part == 2 and step + 1 < steps:  # all codes of the step have been taken
                    request(weight, planes, warp, lane, first_row, first + step + 1)
                multiply_part(Xs, tables, kept, codes, operands[part % 2], Y, full, empty, warp, lane, stage, last, phase, part, step)
                last = stage
                phase = T.if_then_else(stage == stages - 1, phase ^ 1, phase)
                stage = T.if_then_else(stage == stages - 1, 0, stage + 1)

    @T.prim_func
    def main(
        x: T.Tensor((m, p.kx), dtype),
        weight: T.Tensor((bits, p.n_tiles, k_tiles, 512), "int32"),
        scales: T.Tensor((p.n_pad, 1 << bits), dtype),
        token_scales: TokenScales,
        bias: Bias,
        residual: Residual,
        workspace: Workspace,
        y: T.Tensor((m, p.columns), dtype),
    ):
        with T.Kernel(blocks, threads=rules.PRODUCERS + consumers) as block:
            T.import_source(device_source(HEADERS))
            T.annotate_min_blocks_per_sm(s.min_blocks)
            T.disable_warp_group_reg_alloc()
            thread = T.get_thread_binding()
            after = p.after((), token_scales=token_scales, bias=bias, residual=residual)
            Xs = T.alloc_shared((stages, bm, rules.STAGE_K), dtype)
            tables = T.alloc_shared((max(4, rules.tables_bytes(workload, s) // 4),), "int32")
            staging = T.alloc_shared((columns * bn + row_bytes(workload, s) // 2,), dtype)
            raw, full, empty = (T.alloc_barrier([count] * stages) for count in (1, rules.PRODUCERS // 32, s.num_warps))
            W = T.alloc_fragment((bn, rules.STAGE_K), dtype)
            W_rest = T.alloc_fragment((bn, rules.STAGE_K), dtype)
            Y = T.alloc_fragment((bn, bm), "float32")

            if thread < rules.PRODUCERS:
                T.set_max_nreg(producer_registers, 0)
                top, first = T.alloc_var("int32", init=ask("first_row", block, 0)), T.alloc_var("int32", init=ask("step", block, 0))
                slots = T.alloc_var("int32", init=ask("iterations", block) * len(PARTS))
                bring_x(x, Xs, raw, full, empty, T.shfl_sync(thread // 32, 0), thread % 32, top, first, slots)
            else:
                T.set_max_nreg(consumer_registers, 1)
                planes, codes = T.alloc_local((bits * 4,), "uint32"), T.alloc_local((WORDS,), "uint32")
                kept = T.alloc_local((8,), "uint32")  # codebooks of 3 bits
                own, lane = thread - rules.PRODUCERS, thread % 32
                warp, first_row = T.shfl_sync(own // 32, 0), T.alloc_var("int32", init=ask("n_block", block, 0) * bn)
                first, steps = T.alloc_var("int32", init=ask("step", block, 0)), T.alloc_var("int32", init=ask("iterations", block))
                request(weight, planes, warp, lane, first_row, first)
                T.call_extern(
                    "handle", f"{operand}::fill<{bn}, {consumers}>", T.address_of(tables[0]), kept.access_ptr("w"),
                    T.address_of(scales[first_row, 0]), own,
                )  # fmt: skip
                T.call_extern("handle", plan.keep, m, own)  # and all have filled the tables
                multiply(weight, Xs, tables, kept, planes, codes, (W, W_rest), Y, full, empty, warp, lane, first_row, first, steps)
                where, asked = plan.alloc_asked(T, len(after))
                T.call_extern(
                    "handle", plan.ask_end(0), T.address_of(where[0]), T.address_of(asked[0]), T.address_of(staging[0]),
                    m, steps - 1, block, own, *addresses(T, after),
                )  # fmt: skip
                T.wait_wgmma(0)
                T.call_extern(
                    "handle", plan.finish(0), Y.access_ptr("r"), T.address_of(where[0]), T.address_of(asked[0]), T.address_of(staging[0]),
                    T.address_of(workspace[0]) if plan.shared else T.address_of(y[0, 0]), T.address_of(y[0, 0]), m, steps - 1, block, own,
                    *addresses(T, after),
                )  # fmt: skip

    return main


PROGRAM = TileProgram(name=rules.PROGRAM, compiler="tilelang", build=build, headers=HEADERS, pass_configs=PASS_CONFIGS)
