"""``gemm_any_wgmma``: the GEMM on bit planes and codebooks (Any-Precision LLM) for many rows of x, on
sm_90a.

    y[m, n] = sum_k x[m, k] * codebook[n, q[n, k]] (* token_scales[m]) (+ bias[n]) (+ residual[m, n])

computed as Y^T = W X^T as ``gemm_wgmma`` does: numbers that were looked up are wgmma's register
operand, x in shared memory is the other, and each weight is looked up once for ``block_m`` rows of x.
A block lays out its channels' tables: in its threads' registers (3 bits), in shared memory, or in both (4
and 5 bits), since shared memory, which x passes through, too, is what binds with few blocks an SM. Then its
threads have four roles:

    warp 0                 planes -> Ps, by steps of 256 k
    warp 1                 x      -> Xs, by slots of 64 k, both by TMA
    warp 2                 what a tile's end needs -> numbers (``wgmma_numbers.py``)
    warpgroups 1, 2, ...   planes -> codes -> numbers, multiply, store

``full`` hands what came to the computing warpgroups, ``empty`` hands it back; planes have a pair of
their own. A computing warp has 16 channels; the planes of a step are 16 bytes of each plane a lane, in
registers, so that their place in Ps is filled anew while they are multiplied. A step is four parts of
64 k, which have two operands in turn: while one is multiplied, the next is looked up.

With ``cluster`` two blocks have the same channels and neighbouring rows of x. Each has planes and tables
of half of the channels, looks these up and sends the operands to the other block, too, through places
in its shared memory (``given`` hands a place over, ``vacant`` back): one of its warpgroups looks up, the
other receives. A weight is then looked up once for 2 ``block_m`` rows of x (results/notes/any-pairs.md).

With ``stream_k`` blocks take one tile after another, and share those of a last wave (``gemm_wgmma``); the
next one's planes and x come while its tables are laid out. What it gains and what binds it:
results/notes/any-many-rows.md. The blocks of ``split_k`` 2, 4, ... that share a tile are clusters of two and
add up through shared memory first (``wgmma_exchange.py``, results/notes/any-split-pairs.md).
"""

from typing import Any

from ...schedules.gemm import any_wgmma as rules
from ...schedules.gemm.rules import grid_blocks, number_bytes, persistent
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import TYPES, device_source
from ..program import TileProgram
from .any import PASS_CONFIGS
from .operands import BARRIER, Operands, addresses
from .wgmma_exchange import exchange_macro, meet_macro
from .wgmma_numbers import FIRST, numbers_macros
from .wgmma_plan import Plan

HEADERS = (
    "ptx/instructions.cuh", "codecs/dequant.cuh", "codecs/any_product.cuh", "codecs/any_operand.cuh", "store/split_k.cuh",
    "store/epilogue.cuh", "store/gate.cuh", "store/pairs.cuh", "store/parts.cuh", "order/tiles.cuh",
    "store/scatter.cuh", "store/tile.cuh", "store/finish.cuh", "store/exchange.cuh", "pipeline/operands.cuh",
)  # fmt: skip
PARTS = tuple(range(rules.STEP_K // rules.STAGE_K))  # of a step
WORDS = 16  # of codes, of 128 k
PLACES = tuple(range(rules.SENT))  # of operands that the other block looks up
PLACE_OF, TURN_OF = tuple(part % rules.SENT for part in PARTS), tuple(part // rules.SENT % 2 for part in PARTS)
OPERAND = rules.STAGE_K // 4  # words of a lane's operand
# Named barriers (the four before are warpgroups' own): of the warps that look up; of those and the others, by
# which the place of tables is free, and by which it is the end of a tile's.
LOOKING_UP, TABLES_FREE, TABLES_DONE = (BARRIER + 5 + i for i in range(3))


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule); parameters as in ``any.build``."""
    import tilelang.language as T

    p, s, dtype, bits = Operands(workload, schedule), schedule, workload.dtype, workload.format.bits
    plan, bn, bm, stages, cluster = Plan(p, below=s.cluster > 1), s.block_n, s.block_m, s.num_stages, s.cluster
    k_tiles, consumers, held = rules.steps(workload), s.num_warps * 32, rules.held_steps(workload, s)
    own_rows, own_warps = rules.own_rows(s), s.num_warps // cluster  # of the weight, that a block looks up; its warps that do
    operand = f"tilebit::AnyOperand<{TYPES[dtype]}, {bits}, {rules.copies(workload, s)}, {rules.permuted(workload, s)}>"
    producer_registers, consumer_registers = rules.registers(s)
    planes_of_step, exchanged = tuple(range(bits)), plan.exchanged

    m, words = T.dynamic("m"), T.dynamic("words")
    TokenScales, Bias, Residual = p.tensors(T, target.arch, "token_scales", "bias", "residual", m=m)
    Workspace = T.Tensor((words,), "int32") if plan.shared else None
    blocks = grid_blocks(s, target) if persistent(s) else p.n_pad // bn * T.ceildiv(m, bm * cluster) * (cluster * s.split_k)

    bring = numbers_macros(plan, m)
    meet_cluster, exchange_and_store = meet_macro(), exchange_macro(plan, m) if exchanged else None

    def ask(what, *where):
        return plan.ask(T, what, m, *where)

    def ask_anew(what, *where):
        """Of a loading thread that has no registers to keep the order: 24, of which 3 bits with six slots of x spill one."""
        return plan.ask(T, what, T.call_pure_extern("int32", "tilebit::fresh", m), *where)

    def await_full(barrier, phase):
        return T.call_extern("handle", "tilebit::await_stage", T.address_of(barrier), phase)

    @T.macro
    def bring_planes(halves, Ps, full, empty, block, step: T.Ref, bx: T.Ref, left: T.Ref):
        for i in T.serial(ask("iterations", block)):
            if left == 0:
                step, bx, left = ask("step", block, i), ask("n_block", block, i), ask("left", block, i)
            T.mbarrier_wait_parity(empty[i % held], (i // held & 1) ^ 1)
            for plane in planes_of_step:
                row = plane * p.n_tiles + bx * (bn // 64) + block % cluster * (own_rows // 64)
                T.tma_copy(
                    halves[row : row + own_rows // 64, step * 2 : step * 2 + 2, 0:256], Ps[i % held, plane, :, :, :], barrier=full[i % held]
                )  # fmt: skip
            T.barrier_arrive(full[i % held])
            step, left = step + 1, left - 1

    @T.macro
    def bring_x(x, Xs, full, empty, block, step: T.Ref, top: T.Ref, left: T.Ref, slot: T.Ref, phase: T.Ref):
        for i in T.serial(ask("iterations", block)):
            if left == 0:
                step, top, left = ask_anew("step", block, i), ask_anew("first_row", block, i), ask_anew("left", block, i)
            for part in PARTS:
                k0 = step * rules.STEP_K + part * rules.STAGE_K
                T.mbarrier_wait_parity(empty[slot], phase ^ 1)
                T.tma_copy(x[top : top + bm, k0 : k0 + rules.STAGE_K], Xs[slot, :, :], barrier=full[slot])
                T.barrier_arrive(full[slot])
                phase = T.if_then_else(slot == stages - 1, phase ^ 1, phase)
                slot = T.if_then_else(slot == stages - 1, 0, slot + 1)
            step, left = step + 1, left - 1

    @T.macro
    def look_up(tables, kept, codes, W, Es, given, vacant, warp, lane, part, other):
        T.call_extern(
            "handle", f"{operand}::look_up", codes.access_ptr("r"), T.address_of(tables[0]), kept.access_ptr("r"), W.access_ptr("w"),
            part % 2, warp, lane,
        )  # fmt: skip
        if cluster > 1:
            await_full(vacant[PLACE_OF[part]], TURN_OF[part] ^ 1)
            T.call_extern(
                "handle", f"tilebit::send_operand<{OPERAND}>", W.access_ptr("r"), T.address_of(Es[PLACE_OF[part], 0]),
                T.address_of(given[PLACE_OF[part]]), warp, lane, other,
            )  # fmt: skip

    @T.macro
    def receive(W, Es, given, warp, lane, part):
        await_full(given[PLACE_OF[part]], TURN_OF[part])
        T.call_extern("handle", f"tilebit::expect_operand<{OPERAND}>", T.address_of(given[PLACE_OF[part]]), lane)
        T.call_extern(
            "handle", f"tilebit::receive_operand<{OPERAND}>", W.access_ptr("w"), T.address_of(Es[PLACE_OF[part], 0]), warp, lane
        )  # fmt: skip

    @T.macro
    def multiply_part(Xs, W, Y, full, empty, lane, stage, last, phase, part, step):
        await_full(full[stage], phase)
        T.wgmma_gemm(W, Xs[stage, :, :], Y, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=step * len(PARTS) + part == 0)
        T.wait_wgmma(1)  # the part before, whose operand is overwritten next
        T.call_extern("handle", plan.release, T.address_of(empty[last]), lane, step * len(PARTS) + part > 0)

    @T.macro
    def advance(stage: T.Ref, last: T.Ref, phase: T.Ref):
        last = stage  # noqa: F841 (whoever calls reads it)
        phase = T.if_then_else(stage == stages - 1, phase ^ 1, phase)
        stage = T.if_then_else(stage == stages - 1, 0, stage + 1)

    @T.macro
    def multiply(
        Ps, Xs, Es, tables, kept, planes, codes, operands, Y, planes_full, planes_empty, full, empty, given, vacant, warp, lane, other,
        steps, taken: T.Ref, stage: T.Ref, last: T.Ref, phase: T.Ref,
    ):  # fmt: skip
        for step in T.serial(steps):
            await_full(planes_full[taken % held], taken // held & 1)
            T.call_extern(
                "handle", f"tilebit::read_planes<{bits}, {own_rows}>", planes.access_ptr("w"), T.address_of(Ps[taken % held, 0, 0, 0, 0]),
                warp, lane,
            )  # fmt: skip
            for part in PARTS:
                if part % 2 == 0:
                    T.call_extern("handle", f"{operand}::select", planes.access_ptr("r"), codes.access_ptr("w"), part // 2, lane)
                look_up(tables, kept, codes, operands[part % 2], Es, given, vacant, warp, lane, part, other)
                multiply_part(Xs, operands[part % 2], Y, full, empty, lane, stage, last, phase, part, step)
                if part == 0:  # a product has been made of them: an arrival does not wait for loads that are on their way
                    T.sync_warp()
                    T.call_extern("handle", plan.release, T.address_of(planes_empty[taken % held]), lane)
                advance(stage, last, phase)
            taken = taken + 1

    @T.macro
    def multiply_given(
        Xs, Es, operands, Y, full, empty, given, vacant, warp, lane, other,
        steps, taken: T.Ref, stage: T.Ref, last: T.Ref, phase: T.Ref,
    ):  # fmt: skip
        """``multiply`` by operands that the other block looks up."""
        for step in T.serial(steps):
            for part in PARTS:
                receive(operands[part % 2], Es, given, warp, lane, part)
                multiply_part(Xs, operands[part % 2], Y, full, empty, lane, stage, last, phase, part, step)
                T.sync_warp()  # a product has been made of it, as of planes
                T.call_extern("handle", "tilebit::hand_back", T.address_of(vacant[PLACE_OF[part]]), lane, other)
                advance(stage, last, phase)
            taken = taken + 1

    @T.macro
    def fill(scales, tables, kept, own, first_row):
        """All warps have looked up what they want of the tables before, or stored through their place, and then all that
        look up have filled these."""
        T.call_extern("handle", f"tilebit::sync_group<{TABLES_FREE}, {consumers}>", 0)
        T.call_extern(
            "handle", f"{operand}::fill<{own_rows}, {own_warps * 32}>", T.address_of(tables[0]), kept.access_ptr("w"),
            T.address_of(scales[first_row, 0]), own,
        )  # fmt: skip
        T.call_extern("handle", f"tilebit::sync_group<{LOOKING_UP}, {own_warps * 32}>", 0)

    @T.macro
    def leave_tables():
        """Where columns pass through the tables' place: all that look up have, and tell the others."""
        if cluster > 1:
            T.call_extern("handle", f"tilebit::sync_group<{LOOKING_UP}, {own_warps * 32}>", 0)
            T.call_extern("handle", f"tilebit::arrive_group<{TABLES_DONE}, {consumers}>", 0)

    @T.macro
    def end_tile(Y, numbers, staging, ready, free, workspace, y, empty, last, step, block, own, lane, after, end: T.Ref):
        T.wait_wgmma(0)
        T.call_extern("handle", plan.release, T.address_of(empty[last]), lane)
        await_full(ready[0], end)
        if not exchanged:
            T.call_extern(
                "handle", plan.finish(0), Y.access_ptr("r"), T.address_of(numbers[0]), T.address_of(staging[0]),
                T.address_of(workspace[0]) if plan.shared else T.address_of(y[0, 0]), T.address_of(y[0, 0]), m, step, block, own,
                *addresses(T, after),
            )  # fmt: skip
        if persistent(s):
            T.call_extern("handle", "tilebit::release<1>", T.address_of(free[0]), lane, 1)
            end = end ^ 1

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
        with T.Kernel(blocks, threads=rules.PRODUCERS + consumers, cluster_dims=2 if exchanged else cluster) as block:
            T.import_source("#define STAGES_ARE_COPIED\n" + device_source(HEADERS))
            T.annotate_min_blocks_per_sm(s.min_blocks)
            T.disable_warp_group_reg_alloc()
            thread = T.get_thread_binding()
            after = p.after((), token_scales=token_scales, bias=bias, residual=residual)
            halves = T.reshape(weight, (T.int32(bits * p.n_tiles), k_tiles * 2, 256))  # as of ``Operands.halves``
            Xs = T.alloc_shared((stages, bm, rules.STAGE_K), dtype)
            Ps = T.alloc_shared((held, bits, own_rows // 64, 2, 256), "int32")
            Es = T.alloc_shared((rules.SENT, own_rows * rules.STAGE_K), dtype) if cluster > 1 else None  # operands from the other block
            of_tables, of_staging = rules.tables_bytes(workload, s) // 4, rules.staged_bytes(s) // 4
            tables = T.alloc_shared((max(4, of_tables, of_staging if cluster > 1 else 0),), "int32")
            staging = tables if cluster > 1 else T.alloc_shared((of_staging,), "int32")
            numbers = T.alloc_shared((number_bytes(workload, s) // 4,), "int32")  # what a tile's end needs
            full, planes_full = T.alloc_barrier([32] * stages), T.alloc_barrier([32] * held)  # the lanes of a loading warp
            empty, planes_empty = T.alloc_barrier([s.num_warps] * stages), T.alloc_barrier([own_warps] * held)
            given, vacant = (T.alloc_cluster_barrier([own_warps] * rules.SENT) if cluster > 1 else None for _ in range(2))
            ready, free = T.alloc_barrier([64]), T.alloc_barrier([s.num_warps])  # of the numbers, whose lanes arrive twice
            sent = T.alloc_barrier([1] * len(plan.own_chunks)) if exchanged else None  # what the other block has sent of a chunk
            W = T.alloc_fragment((bn, rules.STAGE_K), dtype)
            W_rest = T.alloc_fragment((bn, rules.STAGE_K), dtype)
            Y = T.alloc_fragment((bn, bm), "float32")

            if thread < rules.PRODUCERS:
                T.set_max_nreg(producer_registers, 0)
                step, where_to, left = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32", init=0)
                if thread < 32:
                    bring_planes(halves, Ps, planes_full, planes_empty, block, step, where_to, left)
                elif thread < 64:
                    slot, turn = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
                    bring_x(x, Xs, full, empty, block, step, where_to, left, slot, turn)
                elif thread < FIRST + 32:
                    bring.of_all(numbers, ready, free, addresses(T, after), block, thread, left, step)
                if exchanged:
                    meet_cluster()
            else:
                T.set_max_nreg(consumer_registers, 1)
                planes, codes = T.alloc_local((bits * 4,), "uint32"), T.alloc_local((WORDS,), "uint32")
                kept = T.alloc_local((max(1, rules.kept_registers(workload, s)),), "uint32")  # codebooks
                own, lane = thread - rules.PRODUCERS, thread % 32
                seat = own % (own_warps * 32) if cluster > 1 else own  # among those that look up, or those that receive
                warp = T.shfl_sync(seat // 32, 0)
                looks_up = T.shfl_sync(own // (own_warps * 32), 0) == block % cluster if cluster > 1 else True
                other = 1 - block % cluster  # of the cluster
                stage, phase, taken = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
                last = T.alloc_var("int32", init=stages - 1)  # the slot before ``stage``
                steps, end = T.alloc_var("int32"), T.alloc_var("int32", init=0)  # of a tile; the turn of what its end needs
                T.call_extern("handle", plan.keep, m, own)
                if not looks_up:
                    for place in PLACES:
                        T.call_extern("handle", f"tilebit::expect_operand<{OPERAND}>", T.address_of(given[place]), lane)
                for piece in T.serial(ask("pieces", block)):
                    steps = ask("length", block, piece)
                    if looks_up:
                        fill(scales, tables, kept, seat, ask("tile", block, taken) * bn + block % cluster * own_rows)
                        multiply(
                            Ps, Xs, Es, tables, kept, planes, codes, (W, W_rest), Y, planes_full, planes_empty, full, empty, given, vacant,
                            warp, lane, other, steps, taken, stage, last, phase,
                        )  # fmt: skip
                        leave_tables()
                    else:
                        T.call_extern("handle", f"tilebit::arrive_group<{TABLES_FREE}, {consumers}>", 0)
                        multiply_given(
                            Xs, Es, (W, W_rest), Y, full, empty, given, vacant, warp, lane, other, steps, taken, stage, last, phase
                        )
                        T.call_extern("handle", f"tilebit::sync_group<{TABLES_DONE}, {consumers}>", 0)
                    end_tile(Y, numbers, staging, ready, free, workspace, y, empty, last, taken - 1, block, own, lane, after, end)
                if exchanged:  # in this branch: after it, a thread has only the producers' registers
                    own_sums = T.alloc_local((bn * max(bm // 2, p.staged_columns) // consumers,), "float32")
                    exchange_and_store(Y, own_sums, Xs, numbers, staging, sent, workspace, after, y, block, thread)
            if cluster > 1:  # a block that left could be sent nothing more
                meet_cluster()

    return main


PROGRAM = TileProgram(name=rules.PROGRAM, compiler="tilelang", build=build, headers=HEADERS, pass_configs=PASS_CONFIGS)
