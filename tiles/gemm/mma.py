"""``gemm_mma``: the packed-weight GEMM on sm_80, sm_86 and sm_89.

    y[m, n] = sum_k x[m, k] * w[n, k] (* row_scales[n]) (+ bias[n]) (+ residual[m, n]),   w = (number of q - z) * s
                                                  of int8 x (* token_scales[m])   w = q * s + offset - 128, or q - z

computed as Y^T = W X^T, so that the dequantized weight is the MMA's A operand, in registers, and x
its B operand: the small side, tokens, is the instruction's n, from 8 up. Accumulation is fp32, of
int8 x int32, which becomes fp32 once all parts of a tile are added up; per-group scales are applied
to the weights, per-channel ones to the accumulators (TurboMind sections 4.1-4.3). Where groups of x
have scales too (token_scales [groups, m]) a step is a group, whose int32 sums are multiplied by both
and added to fp32 ones (``device/codecs/group_sums.cuh``). cp.async fills
``num_stages`` buffers, each warp dequantizes its own 16 rows of a 64-row slab into the A registers
of mma.m16n8k16, of int8 x mma.m16n8k32, and multiplies with x from ldmatrix. The packed records are
the ones of ``gemm_wgmma``: four warps of mma.sync own a slab exactly as a warpgroup does, so a
checkpoint packed once serves every NVIDIA target. One slab per four warps (block_n = 16 *
num_warps): with two, mma.sync would give a warp 32 neighbouring rows where the record has rows of
two slabs.
"""

from typing import Any

from ...schedules.gemm import rules as rules
from ...schedules.gemm.codecs import codec_of
from ...schedules.gemm.parts import GATE_ROWS
from ...schedules.gemm.workload import Workload
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ..compiler.headers import GATES, device_source
from ..program import TileProgram
from .operands import BARRIER, Operands, column_of, finish, gate_of, stored

HEADERS = ("ptx/instructions.cuh", "codecs/dequant.cuh", "store/split_k.cuh", "store/epilogue.cuh", "store/gate.cuh", "store/pairs.cuh")

# From here on the tile goes to y through shared memory: below, a thread holds few columns and
# storing them directly costs less.
STAGED_BLOCK_M = 32


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc of one (workload, schedule). Parameters, absent ones left out:

    x ``[m, kx]`` (kx: k rounded up to whole 16 bytes), weight int32 ``[n_tiles,
    k_tiles, 512]`` (the storage of ``layouts.packing.gemm_layout``), scales and zeros ``[groups,
    n_pad]``, row_scales fp32 ``[n_pad]``, bias ``[n]``, residual ``[m, n]``, channels int32 ``[n]``,
    workspace int32 (of a split k: tickets, then sums; ``device/store/split_k.cuh``), y ``[m, n]``, of
    a workload with a width ``[m, width]``, with a gate ``[m, n / 2]``. m is dynamic.
    """
    import tilelang.language as T
    from tilelang.layout import make_linear_layout

    p = Operands(workload, schedule)
    bn, bm, bk, splits, dtype = schedule.block_n, schedule.block_m, schedule.block_k, schedule.split_k, workload.dtype
    x_dtype, parameter_dtype = workload.x_dtype, p.parameter_dtype
    (scale_dtype, scale_columns), (zero_dtype, zero_columns) = p.copied_as(parameter_dtype), p.copied_as(p.zero_dtype)
    threads = schedule.num_warps * 32
    n_blocks, steps = p.n_pad // bn, -(-p.steps // splits)
    split, staged, integer = splits > 1, bm >= STAGED_BLOCK_M, workload.format.integer_sums
    stepped, grouped = p.step_sums, p.x_grouped
    reduce = f"tilebit::reduce_split_k<{bn * bm // threads}, {threads}, {BARRIER}{p.sum_type()}>"
    dequantize, stage, add_group = p.dequantize_call(), p.stage_call(), p.add_group_call(bm) if p.step_sums else ""
    gated, placed = workload.gate != "", workload.width > 0
    gate = f"tilebit::gate_sums<{GATES.get(workload.gate)}, {bn * bm // threads}>"
    add_pairs = f"tilebit::add_pairs<{p.slabs}, {bn * bm // threads // p.slabs}, {p.n}>"

    m, words = T.dynamic("m"), T.dynamic("words")
    Zeros, RowScales, TokenScales, Bias, Residual, Channels = p.tensors(
        T, target.arch, "zeros", "row_scales", "token_scales", "bias", "residual", "channels", m=m
    )
    Workspace = T.Tensor((words,), "int32") if split else None

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
        with T.Kernel(n_blocks, T.ceildiv(m, bm), splits, threads=threads) as (bx, by, bz):
            thread = T.get_thread_binding()
            after = p.after(
                scales=scales, row_scales=row_scales, token_scales=token_scales, bias=bias, residual=residual, channels=channels
            )
            Xs = T.alloc_shared((bm, bk), x_dtype)
            halves = T.reshape(weight, p.halves(T))
            Ws = T.alloc_shared((bn // 64, p.records * 2, 256), "int32")
            Ss = T.alloc_shared((p.step_groups, scale_columns), scale_dtype)
            Zs = T.alloc_shared((p.step_groups, zero_columns), zero_dtype) if p.asymmetric else Ss
            W = T.alloc_fragment((bn, bk), x_dtype)
            As = T.alloc_shared((1, bm), "float32") if grouped else None
            sums = T.alloc_fragment((bn, bm), p.product_dtype)  # where steps are scaled and added up, a step's
            Y = T.alloc_fragment((bn, bm), "float32") if integer or stepped else sums
            if split:
                last = T.alloc_local((1,), "int32")
            if staged:
                Ys = T.alloc_shared((bm, bn + 8), dtype)
                T.annotate_layout({Ys: make_linear_layout(Ys)})
            T.import_source(device_source((*HEADERS, *codec_of(workload.format).headers)))
            T.annotate_min_blocks_per_sm(schedule.min_blocks)
            if schedule.raster > 0:
                T.use_swizzle(schedule.raster)

            T.clear(sums)
            if stepped:
                T.copy(sums, Y)  # zeros
            for i in T.Pipelined(T.min(steps, p.steps - bz * steps), num_stages=schedule.num_stages):
                step = bz * steps + i
                T.copy(halves[bx * (bn // 64), step * p.records * 2, 0], Ws)
                if p.grouped or not workload.format.x:
                    T.copy(p.copied(T, scales, parameter_dtype)[p.group_of(step), bx * scale_columns], Ss)
                if p.asymmetric:
                    T.copy(p.copied(T, zeros, p.zero_dtype)[p.group_of(step), bx * zero_columns], Zs)
                T.copy(x[by * bm, step * bk], Xs)
                if grouped:
                    T.copy(token_scales[step, by * bm], As)
                T.call_extern(
                    "handle",
                    dequantize,
                    W.access_ptr("w"),
                    T.address_of(Ws[0, 0, 0]),
                    T.address_of(Ss[0, 0]),
                    T.address_of(Zs[0, 0]),
                    thread,
                )
                if p.magic_start:
                    T.call_extern("handle", p.start_sums_call(bm), sums.access_ptr("w"))
                T.gemm(W, Xs, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=stepped and not p.magic_start)
                if stepped:
                    T.call_extern(
                        "handle", add_group, Y.access_ptr("rw"), sums.access_ptr("r"), T.address_of(Ss[0, 0]),
                        T.address_of(As[0, 0]) if grouped else T.address_of(Ss[0, 0]), True, False,
                        thread,
                    )  # fmt: skip

            if split:
                T.call_extern(
                    "handle", reduce, (Y if stepped else sums).access_ptr("rw"), T.address_of(workspace[0]),
                    by * n_blocks + bx, bz, splits, thread, T.address_of(last[0]),
                )  # fmt: skip
            if not split or last[0] == 1:
                if integer and not stepped:
                    T.copy(sums, Y)
                if (staged or gated or placed) and len(after) > 0:
                    for r, c in T.Parallel(bn, bm):
                        Y[r, c] = finish(Y[r, c], after, m=T.min(by * bm + c, m - 1), n=T.min(bx * bn + r, p.n - 1))
                if gated:
                    T.call_extern("handle", gate, Y.access_ptr("rw"))
                if placed:
                    T.call_extern("handle", add_pairs, Y.access_ptr("rw"), T.address_of(channels[0]), bx * bn, thread)
                if staged:
                    T.call_extern("handle", stage, Y.access_ptr("r"), T.address_of(Ys[0, 0]), thread)
                if staged and gated:
                    for c, r in T.Parallel(bm, bn // 2):
                        if by * bm + c < m and bx * (bn // 2) + r < p.columns:
                            y[by * bm + c, bx * (bn // 2) + r] = Ys[c, gate_of(r)]
                elif gated:
                    for r, c in T.Parallel(bn, bm):
                        if by * bm + c < m and bx * bn + r < p.n and r % (2 * GATE_ROWS) < GATE_ROWS:
                            y[by * bm + c, (bx * bn + r) // (2 * GATE_ROWS) * GATE_ROWS + r % GATE_ROWS] = Y[r, c]
                elif staged:
                    for c, r in T.Parallel(bm, bn):
                        if by * bm + c < m and bx * bn + r < p.n and stored(bx * bn + r, after, p.columns):
                            y[by * bm + c, column_of(bx * bn + r, after)] = Ys[c, r]
                else:
                    for r, c in T.Parallel(bn, bm):
                        if by * bm + c < m and bx * bn + r < p.n and stored(bx * bn + r, after, p.columns):
                            y[by * bm + c, column_of(bx * bn + r, after)] = (
                                Y[r, c] if placed else finish(Y[r, c], after, m=by * bm + c, n=bx * bn + r)
                            )

    return main


PROGRAM = TileProgram(
    name="gemm_mma",
    compiler="tilelang",
    build=build,
    headers=HEADERS,
    newest_arch="sm_89",  # for sm_90a TileLang would turn the same body into wgmma
)
