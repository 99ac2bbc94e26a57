"""``gemm_wgmma``: the packed-weight GEMM on sm_90a.

    y[m, n] = sum_k x[m, k] * w[n, k] (* row_scales[n]) (+ bias[n]) (+ residual[m, n]),   w = (number of q - z) * s
                                                  of int8 x (* token_scales[m])   w = q * s + offset - 128, or q - z (* s[n])

computed as Y^T = W X^T, so that the dequantized weight is wgmma's register operand and x, in shared
memory, the other: tokens are the instruction's n, from 16 up (TurboMind sections 4.1-4.3).
Accumulation is fp32, of int8 x int32; per-group scales are applied to the weights, per-channel ones
to the accumulators. Where groups of x have scales too (token_scales [groups, m]) a step is a group:
its int32 sums are multiplied by both and added to fp32 ones (``device/codecs/group_sums.cuh``).

A block's threads have these roles (``PRODUCERS`` threads do not compute):

    warp 0                 weights, scales, zeros ->  Ws, Ss, Zs     (no earlier kernel writes them: it need not wait)
    warp 1                 x                      ->  Xs             (``wgmma_load.py``)
    warp 2                 what a tile's end needs -> numbers        (``wgmma_numbers.py``)
    warps 2, 3             of some schedules also tiles of bytes -> y (``wgmma_scatter.py``)
    warpgroups 1, 2, ...   dequantize, multiply, store               (here)

``full`` hands a part of a stage to the computing warpgroups, ``empty`` hands it back; ``ready`` and
``free`` do so with what a tile's end needs. A step is taken in two parts whose weights have
registers of their own: while a part is multiplied, the next
is dequantized, across the borders of steps, so that a product is always under way (LiquidGEMM
section 5; results/notes/wgmma-overlap.md). A warpgroup dequantizes whole 64-row slabs, one
conflict-free 128-bit load per thread and 2 KiB record.

One loop runs over all steps that a block owns (``device/order/tiles.cuh``). Without ``stream_k``
these are the steps of one tile, or of one of ``split_k`` parts of it: clusters of two add theirs up
through their shared memory, and meet in a workspace where they are several. With it the grid is as
many blocks as the device holds at once, and the next tile is loaded while one is stored: tiles are
dealt out one a block, in whole waves; where a last wave would idle for longer than summing takes, it
and one more are cut into equal shares of steps, which cross tile borders (Osama et al. 2023;
wgmma-whole-waves.md, wgmma-shares-cost.md). A tile that several blocks share is summed in the order
of k. With ``tail`` the tiles of a last, short wave are dealt out as strips of fewer rows of x
instead, which repeat the dequantization and need no sums. ``cluster`` blocks work on neighbouring
tiles of the same rows of x, in step, and the first loads x for all (TMA multicast): at 128 x 256 a
step's weights are 8 KB and its x 64 KB.

With ``joined`` the last tiles along n are of bytes whose nibbles are two rows of the weight each
(MixLLM's layers of both; ``schedules/gemm/joined.py``): they load twice the rows, put them together
in registers and multiply as often as a tile of codes does. They come first, and are stored, which
takes longer, while others are multiplied (mixed-joined.md).

What bounds it is in wgmma-cycles.md and wgmma-power.md, what did not help in wgmma-in-vain.md.

The pipeline is written out: TileLang's automatic specialization gives each operand a pair of
barriers, releases buffers that an extern still reads and keeps idle producer warps that can wait
for ever (two rare races, both seen on an H200).
"""

from typing import Any

from ...schedules.gemm import rules as rules
from ...schedules.gemm.codecs import codec_of
from ...schedules.gemm.joined import n_blocks, stage_rows
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import device_source
from ..program import TileProgram
from .operands import Operands, addresses
from .wgmma_exchange import exchange_macro, first_of, meet_macro
from .wgmma_load import load_macros
from .wgmma_numbers import FIRST, numbers_macros
from .wgmma_plan import PRODUCERS, SCATTERERS, Plan
from .wgmma_scatter import scatter_macro

HEADERS = (
    "ptx/instructions.cuh",
    "codecs/dequant.cuh",
    "codecs/nibble_pairs.cuh",
    "store/split_k.cuh",
    "store/epilogue.cuh",
    "store/gate.cuh",
    "store/pairs.cuh",
    "store/parts.cuh",
    "pipeline/dependent.cuh",
    "order/tiles.cuh",
    "store/scatter.cuh",
    "store/tile.cuh",
    "store/finish.cuh",
    "store/exchange.cuh",
)


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule). Parameters, absent ones left out:

    x ``[m, kx]`` (kx: k rounded up to whole 16 bytes, for TMA), weight int32 ``[n_tiles,
    k_tiles, 512]`` (the storage of ``layouts.packing.gemm_layout``), scales and zeros ``[groups,
    n_pad]``, row_scales fp32 ``[n_pad]``, token_scales fp32 ``[m]`` or ``[groups, m]``, bias
    ``[n]``, residual ``[m, n]``, channels int32 ``[n]``, workspace int32 (of shared tiles: tickets,
    then fp32 sums; ``device/store/split_k.cuh``), y ``[m, n]``, of a workload with a width
    ``[m, width]``, with a gate ``[m, n / 2]``. m is dynamic.
    """
    import tilelang.language as T

    p = Operands(workload, schedule)
    plan = Plan(p)
    bn, bm, bk, dtype = schedule.block_n, schedule.block_m, schedule.block_k, workload.dtype
    x_dtype, parameter_dtype = workload.x_dtype, p.parameter_dtype
    stages, parts, cluster, exchanged = schedule.num_stages, plan.parts, schedule.cluster, plan.exchanged
    consumers, columns = plan.consumers, p.staged_columns
    producer_registers, consumer_registers = rules.wgmma_registers(schedule)
    kinds = tuple(range(len(plan.heights)))
    ways = (0, 1)[: 1 + schedule.joined]  # of output channels: codes of a row, and bytes of two

    m, words = T.dynamic("m"), T.dynamic("words")
    Zeros, RowScales, TokenScales, Bias, Residual, Channels = p.tensors(
        T, target.arch, "zeros", "row_scales", "token_scales", "bias", "residual", "channels", m=m
    )
    Workspace = T.Tensor((words,), "int32") if plan.scratch else None
    rows, tiles = stage_rows(schedule), n_blocks(workload, schedule) * T.ceildiv(m, bm)
    blocks = rules.grid_blocks(schedule, target) if rules.persistent(schedule) else tiles * schedule.split_k
    load = load_macros(plan, m)
    bring, scatter = numbers_macros(plan, m), scatter_macro(plan, m) if plan.scatters else None
    meet_cluster, exchange_and_store = meet_macro(), exchange_macro(plan, m) if exchanged else None

    def ask(what, *where):
        return plan.ask(T, what, m, *where)

    def last_of(block, piece, kind):
        return ask("last", block, (ask("pieces", block) + piece) if kind else piece)

    def await_full(barrier, phase):
        return T.call_extern("handle", "tilebit::await_stage", T.address_of(barrier), phase)

    def release(barrier, thread, condition):
        return T.call_extern("handle", plan.release, T.address_of(barrier), thread, condition)

    @T.macro
    def dequantize(part, W, Ws, Ss, Zs, thread, stage, joined):
        if joined:
            T.call_extern("handle", plan.join(part), W.access_ptr("w"), T.address_of(Ws[stage, 0, 0, 0, 0]), thread - PRODUCERS)
        else:
            T.call_extern(
                "handle", plan.dequantize(part), W.access_ptr("w"), T.address_of(Ws[stage, 0, 0, 0, 0]), T.address_of(Ss[stage, 0, 0]),
                T.address_of(Zs[stage, 0, 0]), thread - PRODUCERS,
            )  # fmt: skip

    def multiplication(part, height):
        @T.macro
        def multiply(W, Xs, Y, Ws, Ss, Zs, thread, stage, joined, clear):
            dequantize(part, W, Ws, Ss, Zs, thread, stage, joined)
            T.wgmma_gemm(W, Xs[stage, part, 0:height, :], Y, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=clear)
            T.wait_wgmma(parts - 1)  # the other part's product, whose weights are overwritten next

        return multiply

    multiply, multiply_rest = ([multiplication(part, height) for height in plan.heights] for part in (0, parts - 1))

    def multiplication_of_group(kind):
        @T.macro
        def multiply(W, W_rest, Xs, As, products, Y, Ws, Ss, Zs, full, empty, thread, stage, last, phase, joined, j):
            """A step, which is a group. The sums of the one before are scaled and added when this
            one's first weights are dequantized: its stage is read until then."""
            await_full(full[stage * parts], phase)
            dequantize(0, W, Ws, Ss, Zs, thread, stage, joined)
            add_group(kind, products, Y, Ss, As, thread, last, joined, j > 0)
            release(empty[last * parts + 1], thread, j)
            if p.magic_start:
                T.call_extern("handle", plan.start_sums(kind), products.access_ptr("w"))
            T.wgmma_gemm(
                W, Xs[stage, 0, 0 : plan.heights[kind], :], products, transpose_B=True, policy=T.GemmWarpPolicy.FullRow,
                clear_accum=not p.magic_start,
            )  # fmt: skip
            await_full(full[stage * parts + 1], phase)
            dequantize(1, W_rest, Ws, Ss, Zs, thread, stage, joined)
            T.wgmma_gemm(W_rest, Xs[stage, 1, 0 : plan.heights[kind], :], products, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.wait_wgmma(1)
            release(empty[stage * parts], thread, 1)

        return multiply

    @T.macro
    def add_group(kind, products, Y, Ss, As, thread, stage, joined, there):
        T.wait_wgmma(0)
        T.call_extern(
            "handle", plan.add_group(kind), T.address_of(Y[0]), products.access_ptr("r"), T.address_of(Ss[stage, 0, 0]),
            T.address_of(As[stage, 0]) if p.x_grouped else T.address_of(Ss[stage, 0, 0]), there, joined, thread - PRODUCERS,
        )  # fmt: skip

    multiply_group = [multiplication_of_group(kind) for kind in kinds] if p.step_sums else []

    @T.macro
    def multiply_and_store(
        Xs, As, Ws, Ss, Zs, W, W_rest, products, sums, numbers, staging, ready, free, full, empty, handed, vacant, workspace, after, y,
        block, thread,
    ):  # fmt: skip
        """The stages of all steps in turn, and each tile, or part or strip of one, stored when its
        last step is multiplied."""
        stage, phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
        last = T.alloc_var("int32", init=stages - 1)  # the stage before ``stage``
        steps, end = T.alloc_var("int32"), T.alloc_var("int32", init=0)  # of a tile; the turn of what its end needs
        joined = T.alloc_var("int32", init=0) if schedule.joined else 0  # whether the tile's channels are bytes of two rows
        turn = T.alloc_var("int32", init=0) if plan.scatters else 0  # of tiles that are handed over
        for kind in kinds:
            for piece in T.serial(ask("strips" if kind else "pieces", block)):
                steps = ask("length", block, piece) if schedule.stream_k or schedule.split_k > 1 else p.steps
                if schedule.joined:
                    joined = T.if_then_else(ask("tile", block, last_of(block, piece, kind)) < plan.whole_tiles, 0, 1)
                if p.step_sums:
                    T.call_extern("handle", plan.clear(kind), T.address_of(sums[kind][0]))
                for of_bytes in ways:  # a loop for each, of which one multiplies: a step's instructions stay together
                    for j in T.serial(T.if_then_else(joined == of_bytes, steps, 0) if schedule.joined else steps):
                        if p.step_sums:
                            multiply_group[kind](
                                W, W_rest, Xs, As, products[kind], sums[kind], Ws, Ss, Zs, full, empty, thread, stage, last, phase,
                                of_bytes, j,
                            )  # fmt: skip
                            last = stage
                        else:
                            await_full(full[stage * parts], phase)
                            multiply[kind](W, Xs, sums[kind], Ws, Ss, Zs, thread, stage, of_bytes, j == 0)
                        if p.step_sums:
                            pass
                        elif parts == 2:
                            release(empty[last * parts + 1], thread, j)  # the second part of the step before
                            await_full(full[stage * parts + 1], phase)
                            multiply_rest[kind](W_rest, Xs, sums[kind], Ws, Ss, Zs, thread, stage, of_bytes, False)
                            release(empty[stage * parts], thread, 1)
                            last = stage
                        else:
                            last = stage
                            release(empty[last], thread, 1)
                        phase = T.if_then_else(stage == stages - 1, phase ^ 1, phase)
                        stage = T.if_then_else(stage == stages - 1, 0, stage + 1)
                if p.step_sums:
                    add_group(kind, products[kind], sums[kind], Ss, As, thread, last, joined, True)
                    # Loads of scales may still be on their way, and the arrival would not wait for them
                    # (results/notes/arrivals-loads.md).
                    T.call_extern("handle", "tilebit::fence_before_bulk_copies")
                    release(empty[last * parts + 1], thread, 1)
                elif parts == 2:
                    T.wait_wgmma(0)
                    release(empty[last * parts + 1], thread, 1)
                if plan.scatters:  # noqa: SIM102 (the kernel asks the second)
                    if joined == 1:
                        await_full(vacant[0], turn ^ 1)
                await_full(ready[0], end)
                if not exchanged:
                    T.call_extern(
                        "handle", plan.finish(kind), first_of(plan, T, sums[kind]), T.address_of(numbers[0]), T.address_of(staging[0]),
                        T.address_of(workspace[0]) if plan.scratch else T.address_of(y[0, 0]), T.address_of(y[0, 0]),
                        m, last_of(block, piece, kind), block, thread - PRODUCERS,
                        *addresses(T, after),
                    )  # fmt: skip
                if plan.scatters:  # noqa: SIM102 (the kernel asks the second)
                    if joined == 1:
                        release(handed[0], thread, 1)
                        turn = turn ^ 1
                if rules.persistent(schedule):
                    T.call_extern("handle", "tilebit::release<1>", T.address_of(free[0]), thread, 1)
                    end = end ^ 1

    @T.prim_func
    def main(
        x: T.Tensor((m, p.kx), x_dtype),
        weight: T.Tensor((p.n_tiles, p.k_tiles, 512), "int32"),
        scales: T.Tensor((p.groups, p.n_pad), parameter_dtype),
        zeros: Zeros,
        row_scales: RowScales,
        token_scales: TokenScales,
        bias: Bias,
        residual: Residual,
        channels: Channels,
        workspace: Workspace,
        y: T.Tensor((m, p.columns), dtype),
    ):
        with T.Kernel(blocks, threads=PRODUCERS + consumers, cluster_dims=2 if exchanged else cluster) as block:
            thread = T.get_thread_binding()
            after = p.after(
                scales=scales, row_scales=row_scales, token_scales=token_scales, bias=bias, residual=residual, channels=channels
            )
            halves = T.reshape(weight, p.halves(T))
            Xs = T.alloc_shared((stages, parts, bm, bk // parts), x_dtype)
            Ws = T.alloc_shared((stages, parts, rows // 64, plan.lines, 256), "int32")
            Ss = T.alloc_shared((stages, p.stage_groups, rows), parameter_dtype)
            Zs = T.alloc_shared((stages, p.stage_groups, rows), p.zero_dtype) if p.asymmetric else Ss
            As = T.alloc_shared((stages, bm), "float32") if p.x_grouped else None
            numbers = T.alloc_shared((rules.number_bytes(workload, schedule) // 4,), "int32")  # what a tile's end needs
            staging = T.alloc_shared((columns * bn,), dtype)
            full = T.alloc_barrier([64] * (stages * parts))  # the lanes of the two loading warps
            empty = (T.alloc_barrier if cluster == 1 else T.alloc_cluster_barrier)([schedule.num_warps * cluster] * (stages * parts))
            ready, free = T.alloc_barrier([64]), T.alloc_barrier([schedule.num_warps])  # of the numbers, whose lanes arrive twice
            handed, vacant = [T.alloc_barrier([warps]) if plan.scatters else None for warps in (schedule.num_warps, SCATTERERS)]
            sent = T.alloc_barrier([1] * len(plan.own_chunks)) if exchanged else None  # what the other block has sent of a chunk
            W = T.alloc_fragment((bn, bk // parts), x_dtype)
            W_rest = T.alloc_fragment((bn, bk // parts), x_dtype)
            Y = plan.alloc_sums(T, 0)
            sums = (Y, plan.alloc_sums(T, 1))[: len(kinds)]
            products = tuple(T.alloc_fragment((bn, height), p.product_dtype) for height in plan.heights) if p.step_sums else None
            T.import_source("#define STAGES_ARE_COPIED\n" + device_source((*HEADERS, *codec_of(workload.format).headers)))
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            T.disable_warp_group_reg_alloc()

            T.call_extern("handle", "tilebit::launch_dependents")
            if thread < PRODUCERS:
                T.set_max_nreg(producer_registers, 0)
                step, bx, top = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                left = T.alloc_var("int32", init=0)
                if thread < 32:
                    load.weights(halves, scales, zeros, Ws, Ss, Zs, full, empty, block, step, bx, left)
                elif thread < 64:
                    T.call_extern("handle", "tilebit::wait_for_predecessor")
                    load.x(x, token_scales, Xs, As, full, empty, block, thread, step, top, left)
                elif plan.scatters:
                    T.call_extern("handle", "tilebit::wait_for_predecessor")
                    scatter(
                        workspace, channels, y, handed, vacant, numbers, ready, free, addresses(T, after), block, thread, bx, left, step,
                        top,
                    )  # fmt: skip
                elif thread < FIRST + 32:
                    T.call_extern("handle", "tilebit::wait_for_predecessor")
                    bring.of_all(numbers, ready, free, addresses(T, after), block, thread, left, step)
                if exchanged:
                    meet_cluster()
            else:
                T.set_max_nreg(consumer_registers, 1)
                T.call_extern("handle", plan.keep, m, thread - PRODUCERS)
                T.call_extern("handle", "tilebit::wait_for_predecessor")
                # the half of a shared tile that this block stores
                own_sums = T.alloc_local((bn * max(bm // 2, columns) // consumers,), p.sums_dtype) if exchanged else None
                multiply_and_store(
                    Xs, As, Ws, Ss, Zs, W, W_rest, products, sums, numbers, staging, ready, free, full, empty, handed, vacant, workspace,
                    after, y, block, thread,
                )  # fmt: skip
                if exchanged:  # in this branch: after it, a thread has only the producers' registers
                    exchange_and_store(Y, own_sums, Xs, numbers, staging, sent, workspace, after, y, block, thread)
            if cluster > 1:  # a block that left could no longer be told of released stages
                meet_cluster()

    return main


PROGRAM = TileProgram(
    name="gemm_wgmma",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
)
