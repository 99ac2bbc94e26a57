"""``gemm_wgmma``: the packed-weight GEMM on sm_90a.

    y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]),   w = (q - z) * s

computed as Y^T = W X^T, so that the dequantized weight is wgmma's register operand and x, in shared memory, the other: tokens are the
instruction's n, from 16 up (TurboMind sections 4.1-4.3). Accumulation is fp32; per-group scales are applied to the weights, per-channel
ones to the accumulators. Two warps load by TMA into ``num_stages`` stages, one what no earlier kernel writes (weights, scales, zero points:
in a dependent launch it need not wait), one x. ``num_warps / 4`` warpgroups dequantize whole 64-row slabs (one conflict-free 128-bit load
per thread and 2 KiB record) and multiply. A step is taken in two parts whose weights have registers of their own: while a part is
multiplied, the next is dequantized, across the borders of steps, so that a product is always under way (LiquidGEMM section 5; 128 x 256
gained nothing, 256 x 128 gained 4 to 8 %: 8192 x 28672, m = 1024: 756 us, so 698, H200). Parts are loaded and released one
by one, so that more of a stage is on its way (1 to 2 % of the cycles of 256 x 128). A kernel that runs alone for long is bound by 700 W:
repeated for a second, Machete needs 682 us for that product at 1.5 to 1.6 GHz, cuBLAS in 16 bits 718; what saves energy (x loaded once for
two blocks, weights dequantized once for 256 columns of x) saves time.

One loop runs over all steps that a block owns (``order/tiles.cuh``). Without ``stream_k`` these are the steps of one tile, or of one of
``split_k`` parts of it (two are added up by a cluster through its shared memory, more through a workspace). With it the grid is as many
blocks as the device holds at once, and the next tile is loaded while one is stored: tiles are dealt out one a block, in whole waves
(28672 x 4096, m = 4096: 2,185,000 cycles, so 2,107,000, H200); where a last wave would idle for longer than summing takes, it and one
more are cut into equal shares of steps, which cross tile borders (Osama et al. 2023). A tile that several blocks share is summed in the
order of k. Shares cost more where neither x nor W stays in the L2 cache: blocks that share are not at the same k any more (8192 x 28672,
m = 1024: 837 us, without 703). With ``tail`` the tiles of a last, short wave are dealt out as strips of fewer rows of x instead, which
repeat the dequantization and need no sums.

What is missing to 100 %, by cycles of a tile of 128 x 256 x 14336 on every SM (H200): products 229,400, all 238,400; without dequantizing
237,900, without loading too 236,400. A product needs its 128 cycles even while the same warps dequantize. It needed 136 while loading warps
found the place of each step anew: their divisions, although on other warps, kept the tensor cores waiting (247,400 cycles; so a place is
found once a tile), and while waits slept (``await_stage``). In vain: one arrival a warpgroup, warpgroups that start half a part to three
steps apart or take turns, products without the proxy fence; a whole tile staged and stored by bulk copies while the next is multiplied (a
stage less costs as much), stores by single warps. A part's barrier asked, and its words loaded, as soon as the products of the one before
are issued, or just before they are: up to 9 and 8 % slower (192 x 128, in alternation), although it takes a dozen instructions less.

``cluster`` blocks work on neighbouring tiles of the same rows of x, in step, and the first loads x for all (TMA multicast): at 128 x 256 a
step's weights are 8 KB and its x 64 KB.

The pipeline is written out (TileLang's automatic specialization gives each operand a pair of barriers, releases buffers that an extern
still reads and keeps idle producer warps that can wait for ever: two rare races, both seen on an H200).
"""

from typing import Any

from ...schedules.gemm import rules as rules
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import device_source
from ..program import TileProgram
from .operands import BARRIER, Operands

HEADERS = (
    "ptx/instructions.cuh",
    "codecs/dequant.cuh",
    "store/split_k.cuh",
    "store/epilogue.cuh",
    "pipeline/dependent.cuh",
    "order/tiles.cuh",
    "store/finish.cuh",
)
# Rows of x that a load of a tile with fewer than ``block_m`` fetches: those beyond the last take TMA longer to fill with zeros than to load
# (4096 x 4096, m = 129: 22.1 us, so 15.5; 28672 x 4096, m = 257: 236, so 173; H200). Whole tiles come in one box: in boxes of 32 rows
# 28672 x 4096 at m = 512 took 246 us, so 187.
MANY_ROWS, FEW_ROWS = 64, 16
PRODUCERS = 128  # threads of the warpgroup that loads: registers are handed from warpgroup to warpgroup


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule). Parameters, absent ones left out:

    x ``[m, kx]`` (kx: k rounded up to 8, TMA rows are whole 16 bytes), weight int32 ``[n_tiles, k_tiles, 512]`` (the storage of
    ``layouts.packing.gemm_layout``), scales and zeros ``[groups, n_pad]``, bias ``[n]``, workspace int32 (of shared tiles: tickets,
    then fp32 sums; ``device/store/split_k.cuh``), y ``[m, n]``. m is dynamic.
    """
    import tilelang.language as T

    p = Operands(workload, schedule)
    bn, bm, bk, dtype = schedule.block_n, schedule.block_m, schedule.block_k, workload.dtype
    stages, cluster, tail = schedule.num_stages, schedule.cluster, schedule.tail
    consumers, splits = schedule.num_warps * 32, schedule.split_k
    clustered = rules.clustered_split(schedule)
    shared = schedule.stream_k or (splits > 1 and not clustered)  # through a workspace
    order = f"tilebit::Order<{-(-p.n_pad // bn)}, {bm}, {p.steps}, {splits}, {cluster}, {max(1, schedule.raster)}, {tail}>"
    producer_registers, consumer_registers = rules.wgmma_registers(schedule)
    columns, overlapped = p.staged_columns, p.records % 2 == 0
    parts = 2 if overlapped else 1  # of a step, each of which has registers of its own for the weights, and is loaded by itself
    lines = p.records // parts * 2  # half records of a slab in a part
    dequantize = [p.dequantize_call(part, parts) for part in range(parts)]
    heights = (bm, bm // tail)[: min(tail, 2)]  # rows of x of a whole tile and, where there are any, of a strip
    finish = [f"tilebit::finish_tile<{order}, {p.store_type(rows)}, {consumers}, {BARRIER}, {str(shared).lower()}>" for rows in heights]
    store = p.store_type(bm)
    send = f"tilebit::send_half<{order}, {store}, {consumers}>"
    own_chunks = tuple(range(-(-bm // columns // 2)))  # each block's, of a tile that two share
    store_chunk = [f"tilebit::store_chunk<{order}, {store}, {consumers}, {i}>" for i in own_chunks]
    release = f"tilebit::release<{cluster}>"

    def of(what: str, *where: Any) -> Any:
        """A member of ``tilebit::Order``, which the device computes: as TIR the divisions would be written out at every use."""
        return T.call_pure_extern("int32", f"{order}::{what}", *where)

    m, words = T.dynamic("m"), T.dynamic("words")
    Zeros = T.Tensor((p.groups, p.n_pad), dtype) if p.asymmetric else None
    Bias = T.Tensor((p.n,), dtype) if workload.bias else None
    Workspace = T.Tensor((words,), "int32") if shared else None
    tiles = -(-p.n_pad // bn) * T.ceildiv(m, bm)
    blocks = rules.grid_blocks(schedule, target) if rules.persistent(schedule) else tiles * splits

    def run(kind, block):
        """The iterations of a block that multiply whole tiles, or parts of them; those that multiply strips."""
        first, end = of("first_strip", m, block) if tail > 1 else None, of("iterations", m, block)
        return (first, end) if kind else (0, end if first is None else first)

    def load_weight(part):
        @T.macro
        def load(halves, scales, zeros, Ws, Ss, Zs, full, step, bx, stage):
            rows, line, group = bx * (bn // 64), (step * parts + part) * lines, p.group_of(step)
            T.tma_copy(
                halves[rows : rows + bn // 64, line : line + lines, 0:256], Ws[stage, part, :, :, :], barrier=full[stage * parts + part]
            )
            if part == 0:  # for all parts, the last of which is dequantized before the first is released
                T.tma_copy(scales[group : group + p.step_groups, bx * bn : bx * bn + bn], Ss[stage, :, :], barrier=full[stage * parts])
            if part == 0 and p.asymmetric:
                T.tma_copy(zeros[group : group + p.step_groups, bx * bn : bx * bn + bn], Zs[stage, :, :], barrier=full[stage * parts])

        return load

    def load_x(part, height):
        @T.macro
        def load_rows(x, Xs, full, step, top, stage, first, rows):
            k0 = (step * parts + part) * (bk // parts)
            T.tma_copy(
                x[top + first : top + first + rows, k0 : k0 + bk // parts], Xs[stage, part, first : first + rows, :],
                barrier=full[stage * parts + part], cluster_mask=(1 << cluster) - 1 if cluster > 1 else None,
            )  # fmt: skip

        @T.macro
        def load(x, Xs, full, step, top, stage):
            if m - top > height - FEW_ROWS:
                load_rows(x, Xs, full, step, top, stage, 0, height)
            elif height >= MANY_ROWS:
                for box in T.unroll(height // MANY_ROWS):
                    if m - top > box * MANY_ROWS + MANY_ROWS - FEW_ROWS:
                        load_rows(x, Xs, full, step, top, stage, box * MANY_ROWS, MANY_ROWS)
                    else:
                        for few in T.unroll(MANY_ROWS // FEW_ROWS - 1):
                            if m - top > box * MANY_ROWS + few * FEW_ROWS:
                                load_rows(x, Xs, full, step, top, stage, box * MANY_ROWS + few * FEW_ROWS, FEW_ROWS)
                if height % MANY_ROWS:
                    for few in T.unroll(height % MANY_ROWS // FEW_ROWS):
                        if m - top > height // MANY_ROWS * MANY_ROWS + few * FEW_ROWS:
                            load_rows(x, Xs, full, step, top, stage, height // MANY_ROWS * MANY_ROWS + few * FEW_ROWS, FEW_ROWS)
            else:
                for few in T.unroll(height // FEW_ROWS):
                    if m - top > few * FEW_ROWS:
                        load_rows(x, Xs, full, step, top, stage, few * FEW_ROWS, FEW_ROWS)

        return load

    def multiplication(part, height):
        @T.macro
        def multiply(W, Xs, Y, Ws, Ss, Zs, thread, stage, clear):
            T.call_extern(
                "handle", dequantize[part], W.access_ptr("w"), T.address_of(Ws[stage, 0, 0, 0, 0]), T.address_of(Ss[stage, 0, 0]),
                T.address_of(Zs[stage, 0, 0]), thread - PRODUCERS,
            )  # fmt: skip
            T.wgmma_gemm(W, Xs[stage, part, 0:height, :], Y, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=clear)
            T.wait_wgmma(parts - 1)  # the other part's product, whose weights are overwritten next

        return multiply

    multiply, multiply_rest = ([multiplication(part, rows) for rows in heights] for part in (0, parts - 1))
    load_first_weight, load_other_weight = load_weight(0), load_weight(parts - 1)
    load_first_x, load_other_x = ([load_x(part, rows) for rows in heights] for part in (0, parts - 1))
    kinds = tuple(range(len(heights)))

    @T.prim_func
    def main(
        x: T.Tensor((m, p.kx), dtype),
        weight: T.Tensor((p.n_tiles, p.k_tiles, 512), "int32"),
        scales: T.Tensor((p.groups, p.n_pad), dtype),
        zeros: Zeros,
        bias: Bias,
        workspace: Workspace,
        y: T.Tensor((m, p.n), dtype),
    ):
        with T.Kernel(blocks, threads=PRODUCERS + consumers, cluster_dims=splits if clustered else cluster) as block:
            thread = T.get_thread_binding()
            halves = T.reshape(weight, p.halves(T))
            Xs = T.alloc_shared((stages, parts, bm, bk // parts), dtype)
            Ws = T.alloc_shared((stages, parts, bn // 64, lines, 256), "int32")
            Ss = T.alloc_shared((stages, p.step_groups, bn), dtype)
            Zs = T.alloc_shared((stages, p.step_groups, bn), dtype) if p.asymmetric else Ss
            staging = T.alloc_shared((columns * bn,), dtype)
            full = T.alloc_barrier([64] * (stages * parts))  # the lanes of the two loading warps
            empty = (T.alloc_barrier if cluster == 1 else T.alloc_cluster_barrier)([schedule.num_warps * cluster] * (stages * parts))
            sent = T.alloc_barrier([1] * len(own_chunks)) if clustered else None  # what the other block has sent of a chunk
            W = T.alloc_fragment((bn, bk // parts), dtype)
            W_rest = T.alloc_fragment((bn, bk // parts), dtype)
            Y = T.alloc_fragment((bn, bm), "float32")
            sums = (Y, T.alloc_fragment((bn, bm // tail), "float32"))[: len(kinds)]
            T.import_source(device_source(HEADERS))
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            T.disable_warp_group_reg_alloc()

            T.call_extern("handle", "tilebit::launch_dependents")
            if thread < PRODUCERS:
                T.set_max_nreg(producer_registers, 0)
                step, bx, top = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
                left = T.alloc_var("int32", init=0)  # iterations of a piece of a tile; where one begins is found once
                if thread < 32:  # loads what no earlier kernel writes: need not wait for one
                    for i in T.serial(of("iterations", m, block)):
                        if left == 0:
                            step, bx, left = of("step", m, block, i), of("n_block", m, block, i), of("left", m, block, i)
                        T.mbarrier_wait_parity(empty[i % stages * parts], (i // stages & 1) ^ 1)
                        load_first_weight(halves, scales, zeros, Ws, Ss, Zs, full, step, bx, i % stages)
                        T.barrier_arrive(full[i % stages * parts])
                        if overlapped:
                            T.mbarrier_wait_parity(empty[i % stages * parts + 1], (i // stages & 1) ^ 1)
                            load_other_weight(halves, scales, zeros, Ws, Ss, Zs, full, step, bx, i % stages)
                            T.barrier_arrive(full[i % stages * parts + 1])
                        step, left = step + 1, left - 1
                elif thread < 64:
                    T.call_extern("handle", "tilebit::wait_for_predecessor")
                    for kind in kinds:
                        for i in T.serial(*run(kind, block)):
                            if left == 0:
                                step, top, left = of("step", m, block, i), of("first_row", m, block, i), of("left", m, block, i)
                            T.mbarrier_wait_parity(empty[i % stages * parts], (i // stages & 1) ^ 1)
                            load_first_x[kind](x, Xs, full, step, top, i % stages)
                            T.barrier_arrive(full[i % stages * parts])
                            if overlapped:
                                T.mbarrier_wait_parity(empty[i % stages * parts + 1], (i // stages & 1) ^ 1)
                                load_other_x[kind](x, Xs, full, step, top, i % stages)
                                T.barrier_arrive(full[i % stages * parts + 1])
                            step, left = step + 1, left - 1
                if clustered:
                    T.cluster_arrive_relaxed()
                    T.cluster_wait()
            else:
                T.set_max_nreg(consumer_registers, 1)
                T.call_extern("handle", f"{order}::keep<{BARRIER}, {consumers}>", m, thread - PRODUCERS)
                T.call_extern("handle", "tilebit::wait_for_predecessor")
                stage, phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
                last = T.alloc_var("int32", init=stages - 1)  # the stage before ``stage``
                steps = T.alloc_var("int32")
                # Of the half of a shared tile that this block stores. The other's part is sent, and told of by barriers: nobody needs a
                # fence or waits to leave. A release to a cluster is a fence of the GPU (4096 x 4096, m = 256: 16.5 us, so 15.9, H200).
                own_sums = T.alloc_local((bn * max(bm // 2, columns) // consumers,), "float32") if clustered else None
                for kind in kinds:
                    for piece in T.serial(of("strips" if kind else "pieces", m, block)):
                        steps = p.steps if kind else of("length", m, block, piece)
                        for j in T.serial(steps):
                            T.call_extern("handle", "tilebit::await_stage", T.address_of(full[stage * parts]), phase)
                            multiply[kind](W, Xs, sums[kind], Ws, Ss, Zs, thread, stage, j == 0)
                            if overlapped:
                                T.call_extern("handle", release, T.address_of(empty[last * parts + 1]), thread, j)
                                T.call_extern("handle", "tilebit::await_stage", T.address_of(full[stage * parts + 1]), phase)
                                multiply_rest[kind](W_rest, Xs, sums[kind], Ws, Ss, Zs, thread, stage, False)
                                T.call_extern("handle", release, T.address_of(empty[stage * parts]), thread, 1)
                                last = stage
                            else:
                                last = stage
                                T.call_extern("handle", release, T.address_of(empty[last]), thread, 1)
                            phase = T.if_then_else(stage == stages - 1, phase ^ 1, phase)
                            stage = T.if_then_else(stage == stages - 1, 0, stage + 1)
                        if overlapped:
                            T.wait_wgmma(0)
                            T.call_extern("handle", release, T.address_of(empty[last * parts + 1]), thread, 1)
                        if not clustered:
                            T.call_extern(
                                "handle", finish[kind], sums[kind].access_ptr("r"), T.address_of(staging[0]),
                                T.address_of(workspace[0]) if shared else T.address_of(y[0, 0]), T.address_of(y[0, 0]),
                                T.address_of(scales[0, 0]), T.address_of(bias[0]) if workload.bias else T.address_of(scales[0, 0]),
                                m, of("last", m, block, (of("pieces", m, block) + piece) if kind else piece), block, thread - PRODUCERS,
                            )  # fmt: skip
                if clustered:  # in this branch: after it, a thread has only the producers' registers
                    T.cluster_arrive_relaxed()  # has left its stages
                    T.cluster_wait()
                    T.call_extern(
                        "handle", send, Y.access_ptr("r"), T.address_of(own_sums[0]), T.address_of(Xs[0, 0, 0, 0]), T.address_of(sent[0]),
                        m, block, thread - PRODUCERS,
                    )  # fmt: skip
                    for i in own_chunks:
                        T.call_extern("handle", "tilebit::await_stage", T.address_of(sent[i]), 0)
                        T.call_extern(
                            "handle", store_chunk[i], T.address_of(own_sums[0]), T.address_of(Xs[0, 0, 0, 0]), T.address_of(staging[0]),
                            T.address_of(y[0, 0]), T.address_of(scales[0, 0]),
                            T.address_of(bias[0]) if workload.bias else T.address_of(scales[0, 0]), m, block, thread - PRODUCERS,
                        )  # fmt: skip
            if cluster > 1:  # a block that left could no longer be told of released stages
                T.cluster_arrive_relaxed()
                T.cluster_wait()

    return main


PROGRAM = TileProgram(
    name="gemm_wgmma",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
)
