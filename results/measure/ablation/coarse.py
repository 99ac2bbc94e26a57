"""LiquidGEMM's coarse pipeline (section 5.1, ExCP, figure 6) on ``w4a8_lqq_g128``: what its fine one, a
computing warpgroup that dequantizes what it multiplies, is measured against.

Three roles hand steps of 128 k to each other: TMA loads codes and x, one warpgroup dequantizes codes
into shared memory, one or two multiply from there. With two a launch of 512 threads gives a thread 128
registers, and ptxas compiles no product of more than 192 rows of x (C7602). Packing, arithmetic, order of tiles and the way to y are
those of ``gemm_wgmma``. It is no program of the library (its name is this module's path).
"""
# pyright: reportInvalidTypeForm=false
# The annotations of a TileLang program are no types.

from pathlib import Path
from typing import Any

from tilebit.layouts.formats import FORMATS
from tilebit.schedules.gemm import rules
from tilebit.schedules.gemm.codecs import codec_of, sources_of
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.compiler.headers import device_source
from tilebit.tiles.gemm.operands import Operands, addresses
from tilebit.tiles.gemm.wgmma import HEADERS
from tilebit.tiles.gemm.wgmma_numbers import FIRST, numbers_macros
from tilebit.tiles.gemm.wgmma_plan import PRODUCERS, Plan
from tilebit.tiles.program import TileProgram

NAME = "results.measure.ablation.coarse"
LEAVES = str(Path(__file__).with_suffix(".cuh").resolve())
FORMAT = FORMATS["w4a8_lqq_g128"]
STEP, BUFFERS = 128, 2  # k of a step, and dequantized steps that are kept
DEQUANTIZERS = 128  # threads
REGISTERS = {4: (40, 104, 232), 8: (40, 104, 184)}  # of a thread that loads, dequantizes, multiplies, by computing warps
TILES = ((128, 192, 8), (64, 256, 4), (128, 128, 8), (128, 64, 8), (128, 32, 8), (128, 16, 8))  # and the warps that compute them


def legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why this program cannot serve ``workload`` with ``schedule``; empty: it can."""
    s, reasons = schedule, []
    if workload.format != FORMAT or workload.bias or workload.residual or workload.k % STEP or workload.n % 128:
        reasons.append(f"the workload is {workload}; accepted: plain products of {FORMAT.name} whose n and k are multiples of 128.")
    if (s.block_n, s.block_m, s.num_warps) not in TILES or s.block_k != STEP:
        reasons.append(f"{s} is no tile of {', '.join(f'{n} x {m} by {w} warps' for n, m, w in TILES)} in steps of {STEP}.")
    if s != Schedule(s.program, s.block_n, s.block_m, s.block_k, s.num_stages, s.num_warps, raster=s.raster):
        reasons.append(f"{s} sets more than the tile, num_stages, num_warps and raster; accepted: these (this program has nothing else).")
    if not reasons and shared_memory(workload, s) > target.smem:
        reasons.append(f"a block needs {shared_memory(workload, s)} bytes of shared memory, {target.smem} are there; use fewer num_stages.")
    return reasons


def shared_memory(workload: Workload, schedule: Schedule) -> int:
    """Bytes of a block."""
    s = schedule
    staged = rules.staged_columns(s.block_m) * s.block_n * 2 + rules.number_bytes(workload, s)
    return s.num_stages * (rules.stage_bytes(workload.format, s) + 64) + BUFFERS * (s.block_n * STEP + 32) + staged + 2048


def candidates(workload: Workload, target: Target) -> list[Schedule]:
    """The large tiles, and the smallest one that covers m, in rings of all lengths that fit."""
    covering = [tile for tile in TILES if tile[1] >= workload.m][-1:]
    tiles = dict.fromkeys((*covering, *(TILES[:3] if workload.m > 64 else ())))
    found = [Schedule(NAME, n, m, STEP, stages, warps, raster=raster) for n, m, warps in tiles for stages in (3, 4, 6) for raster in (0, 8)]
    return [s for s in found if not legal(workload, s, target)]


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The TileLang PrimFunc; parameters as in ``gemm_wgmma``."""
    import tilelang.language

    T: Any = tilelang.language  # its declared types are those of the tree it builds, not of the text that builds it
    p = Operands(workload, schedule)
    plan = Plan(p)
    bn, bm, stages, registers = schedule.block_n, schedule.block_m, schedule.num_stages, REGISTERS[schedule.num_warps]
    lines, steps, slabs, columns = p.records * 2, p.steps, bn // 64, p.staged_columns
    first_warp = PRODUCERS + DEQUANTIZERS  # threads before those that multiply
    m = T.dynamic("m")
    Zeros, RowScales, TokenScales = p.tensors(T, target.arch, "zeros", "row_scales", "token_scales", m=m)
    code = codec_of(workload.format).device(workload.format)
    dequantize = f"tilebit::dequantize_to_shared<{code}, {slabs}, {p.records}, {FORMAT.group_size // 32}, {bn}>"
    bring = numbers_macros(plan, m).bring

    def ask(what: str, *where: Any) -> Any:
        return plan.ask(T, what, m, *where)

    def wait(barrier: Any, use: Any) -> Any:
        """For the ``use``-th time that it is passed."""
        return T.call_extern("handle", "tilebit::await_stage", T.address_of(barrier), use & 1)

    def release(barrier: Any, thread: Any, condition: Any) -> Any:
        return T.call_extern("handle", plan.release, T.address_of(barrier), thread, condition)

    @T.macro
    def load_weights(halves, scales, zeros, Ws, Ss, Zs, coded, taken, n_block):
        for j in T.serial(steps):
            stage, rows = j % stages, n_block * slabs
            T.mbarrier_wait_parity(taken[stage], (j // stages & 1) ^ 1)
            T.tma_copy(halves[rows : rows + slabs, j * lines : (j + 1) * lines, 0:256], Ws[stage, :, :, :], barrier=coded[stage])
            T.tma_copy(scales[j : j + 1, n_block * bn : n_block * bn + bn], Ss[stage, 0:1, :], barrier=coded[stage])
            T.tma_copy(zeros[j : j + 1, n_block * bn : n_block * bn + bn], Zs[stage, 0:1, :], barrier=coded[stage])
            T.barrier_arrive(coded[stage])

    @T.macro
    def load_x(x, Xs, full, empty, top):
        for j in T.serial(steps):
            T.mbarrier_wait_parity(empty[j % stages], (j // stages & 1) ^ 1)
            T.tma_copy(x[top : top + bm, j * STEP : (j + 1) * STEP], Xs[j % stages, :, :], barrier=full[j % stages])
            T.barrier_arrive(full[j % stages])

    @T.macro
    def dequantize_steps(Ws, Ss, Zs, W, coded, taken, ready, read, thread):
        for j in T.serial(steps):
            wait(coded[j % stages], j // stages)
            wait(read[j % BUFFERS], j // BUFFERS + 1)
            T.call_extern(
                "handle", dequantize, T.address_of(W[j % BUFFERS, 0, 0]), T.address_of(Ws[j % stages, 0, 0, 0]),
                T.address_of(Ss[j % stages, 0, 0]), T.address_of(Zs[j % stages, 0, 0]), thread,
            )  # fmt: skip
            release(ready[j % BUFFERS], thread, 1)
            release(taken[j % stages], thread, 1)

    @T.macro
    def multiply(W, Xs, Y, full, empty, ready, read, thread):
        for j in T.serial(steps):
            wait(ready[j % BUFFERS], j // BUFFERS)
            wait(full[j % stages], j // stages)
            T.wgmma_gemm(
                W[j % BUFFERS, :, :], Xs[j % stages, :, :], Y, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=j == 0
            )
            T.wait_wgmma(1)  # the step before
            release(read[(j + BUFFERS - 1) % BUFFERS], thread, j)
            release(empty[(j + stages - 1) % stages], thread, j)

    @T.prim_func
    def main(
        x: T.Tensor((m, p.kx), workload.x_dtype),
        weight: T.Tensor((p.n_tiles, p.k_tiles, 512), "int32"),
        scales: T.Tensor((p.groups, p.n_pad), p.parameter_dtype),
        zeros: Zeros,
        row_scales: RowScales,
        token_scales: TokenScales,
        y: T.Tensor((m, p.columns), workload.dtype),
    ):
        with T.Kernel(p.n_pad // bn * T.ceildiv(m, bm), threads=first_warp + plan.consumers) as block:
            thread = T.get_thread_binding()
            after = p.after(scales=scales, row_scales=row_scales, token_scales=token_scales)
            halves = T.reshape(weight, p.halves(T))
            Xs = T.alloc_shared((stages, bm, STEP), workload.x_dtype)
            W = T.alloc_shared((BUFFERS, bn, STEP), workload.x_dtype)
            Ws = T.alloc_shared((stages, slabs, lines, 256), "int32")
            Ss, Zs = (T.alloc_shared((stages, p.stage_groups, bn), dtype) for dtype in (p.parameter_dtype, p.zero_dtype))
            numbers = T.alloc_shared((rules.number_bytes(workload, schedule) // 4,), "int32")
            staging = T.alloc_shared((columns * bn,), workload.dtype)
            coded, full = T.alloc_barrier([32] * stages), T.alloc_barrier([32] * stages)  # lanes of the warps that load
            taken, empty = T.alloc_barrier([DEQUANTIZERS // 32] * stages), T.alloc_barrier([schedule.num_warps] * stages)
            ready, read = T.alloc_barrier([DEQUANTIZERS // 32] * BUFFERS), T.alloc_barrier([schedule.num_warps] * BUFFERS)
            brought, wanted = T.alloc_barrier([64]), T.alloc_barrier([schedule.num_warps])  # what the tile's end needs
            Y = plan.alloc_sums(T, 0)
            T.import_source(device_source((*HEADERS, *codec_of(workload.format).headers, LEAVES)))
            T.disable_warp_group_reg_alloc()
            if thread < PRODUCERS:
                T.set_max_nreg(registers[0], 0)
                if thread < 32:
                    load_weights(halves, scales, zeros, Ws, Ss, Zs, coded, taken, ask("n_block", block, 0))
                elif thread < 64:
                    load_x(x, Xs, full, empty, ask("first_row", block, 0))
                elif thread < FIRST + 32:
                    bring(numbers, brought, wanted, addresses(T, after), block, thread, 0, 0)
            elif thread < first_warp:
                T.set_max_nreg(registers[1], 0)
                dequantize_steps(Ws, Ss, Zs, W, coded, taken, ready, read, thread - PRODUCERS)
            else:
                T.set_max_nreg(registers[2], 1)
                T.call_extern("handle", plan.keep, m, thread - first_warp)
                multiply(W, Xs, Y, full, empty, ready, read, thread - first_warp)
                T.wait_wgmma(0)
                wait(brought[0], 0)
                T.call_extern(
                    "handle", plan.finish(0), Y.access_ptr("r"), T.address_of(numbers[0]), T.address_of(staging[0]),
                    T.address_of(y[0, 0]), T.address_of(y[0, 0]), m, steps - 1, block, thread - first_warp, *addresses(T, after),
                )  # fmt: skip

    return main


RULE = Rule(
    NAME, NAME, arches=("sm_90a",), legal=legal, candidates=candidates, sources=lambda workload: (*sources_of(workload.format), LEAVES)
)
PROGRAM = TileProgram(name=NAME, compiler="tilelang", build=build, headers=HEADERS)
