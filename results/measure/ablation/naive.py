"""The obvious TileLang W4A16 GEMM, as TileLang's own dequantize-GEMM examples do it: what the
induced packing is measured against.

    y[m, n] = sum_k x[m, k] * w[n, k],   w = (q - z) * s

Eight nibbles of a row's neighbouring k lie in one word, as anyone would store them. A block copies
a tile of x and of packed words to shared memory, unpacks the words in ``T.Parallel`` into a 16-bit
tile in shared memory, and multiplies with ``T.gemm``: every weight is written to shared memory and
read back, and every nibble is picked by a shift of its own. It is no program of the library (its
name is this module's path), but it goes through the library's compile pool, gate and clock.
"""
# pyright: reportInvalidTypeForm=false
# The annotations of a TileLang program are no types.

from itertools import product
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.problems.gemm import Problem, unpack_tiles
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operands import Operand
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.program import TileProgram

NAME = "results.measure.ablation.naive"
NIBBLES = 8  # codes of a packed word
BLOCK_N, BLOCK_M, BLOCK_K = (64, 128, 256), (16, 32, 64, 128), (32, 64, 128)
STAGES, WARPS = (1, 4), (4, 8)


def legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why this program cannot serve ``workload`` with ``schedule``; empty: it can. Whole tiles
    along n and k only."""
    s, reasons = schedule, []
    format = workload.format
    if format != QuantFormat(4, format.group_size, False) or format.group_size < 1 or workload.bias:
        reasons.append(f"the workload is {format.name}, bias {workload.bias}; accepted: 4 bits in groups with zero points, no bias.")
        return reasons
    for field, accepted in (("block_n", BLOCK_N), ("block_m", BLOCK_M), ("block_k", BLOCK_K), ("num_warps", WARPS)):
        if getattr(s, field) not in accepted:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {', '.join(map(str, accepted))}.")
    if not STAGES[0] <= s.num_stages <= STAGES[1]:
        reasons.append(f"num_stages is {s.num_stages}; accepted: {STAGES[0]} to {STAGES[1]}.")
    if s != Schedule(s.program, s.block_n, s.block_m, s.block_k, s.num_stages, s.num_warps):
        reasons.append(f"{s} sets more than the tile, num_stages and num_warps; accepted: these (this program has nothing else).")
    if workload.n % s.block_n or workload.k % s.block_k:
        reasons.append(f"n {workload.n} and k {workload.k} are not multiples of block_n {s.block_n} and block_k {s.block_k}.")
    if format.group_size % s.block_k and s.block_k % format.group_size:
        reasons.append(f"block_k is {s.block_k}; accepted: a multiple or a divisor of group_size {format.group_size}.")
    smem = shared_memory(s, target)
    if smem > target.smem:
        reasons.append(f"a block needs {smem} bytes of shared memory, {target.smem} are there; use fewer num_stages or a smaller tile.")
    return reasons


def shared_memory(schedule: Schedule, target: Target) -> int:
    """Bytes of a block: x and packed words of every stage, and the unpacked tile: once, or, where
    TileLang specializes warps, for every stage too, and 1 KiB of barriers."""
    s = schedule
    loaded, unpacked = s.block_m * s.block_k * 2 + s.block_n * s.block_k // 2, s.block_n * s.block_k * 2
    return s.num_stages * (loaded + unpacked) + 1024 if target.arch == "sm_90a" else s.num_stages * loaded + unpacked


def candidates(workload: Workload, target: Target) -> list[Schedule]:
    """Legal schedules worth measuring: the smallest block_m that covers m and its half, pipelines
    of two and four stages."""
    fitting = next((b for b in BLOCK_M if b >= workload.m), BLOCK_M[-1])
    block_ms = [fitting, fitting // 2] if fitting >= 64 else [fitting]
    grid = product(block_ms, (64, 128), (64, 128), (2, 4))
    found = [Schedule(NAME, n, m, k, stages, 8 if n * m > 64 * 64 else 4) for m, n, k, stages in grid]
    return [s for s in found if not legal(workload, s, target)]


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc: x ``[m, k]``, weight int32 ``[n, k / 8]`` (nibble j of word w: k = 8 w + j),
    scales and zeros ``[groups, n]``, y ``[m, n]``. m is dynamic."""
    import tilelang.language

    T: Any = tilelang.language  # its declared types are those of the tree it builds, not of the text that builds it
    n, k, dtype, group = workload.n, workload.k, workload.dtype, workload.format.group_size
    bn, bm, bk = schedule.block_n, schedule.block_m, schedule.block_k
    m = T.dynamic("m")

    @T.prim_func
    def main(
        x: T.Tensor((m, k), dtype),
        weight: T.Tensor((n, k // NIBBLES), "int32"),
        scales: T.Tensor((k // group, n), dtype),
        zeros: T.Tensor((k // group, n), dtype),
        y: T.Tensor((m, n), dtype),
    ):
        with T.Kernel(n // bn, T.ceildiv(m, bm), threads=schedule.num_warps * 32) as (bx, by):
            Xs = T.alloc_shared((bm, bk), dtype)
            Qs = T.alloc_shared((bn, bk // NIBBLES), "int32")
            Ws = T.alloc_shared((bn, bk), dtype)
            Y = T.alloc_fragment((bm, bn), "float32")
            T.clear(Y)
            for step in T.Pipelined(k // bk, num_stages=schedule.num_stages):
                T.copy(x[by * bm, step * bk], Xs)
                T.copy(weight[bx * bn, step * (bk // NIBBLES)], Qs)
                for i, j in T.Parallel(bn, bk):
                    g = (step * bk + j) // group
                    code = (Qs[i, j // NIBBLES] >> (j % NIBBLES * 4)) & 15
                    Ws[i, j] = (code.astype(dtype) - zeros[g, bx * bn + i]) * scales[g, bx * bn + i]
                T.gemm(Xs, Ws, Y, transpose_B=True)
            T.copy(Y, y[by * bm, bx * bn])

    return main


def plain_operands(problem: Problem) -> dict[str, Tensor]:
    """The operands of ``problem``, repacked as this program reads them (same device)."""
    w = problem.workload
    codes = unpack_tiles(problem.operands["weight"], problem.layout)[: w.n, : w.k]
    words = torch.zeros(w.n, w.k // NIBBLES, dtype=torch.int32, device=codes.device)
    for nibble in range(NIBBLES):
        words |= codes[:, nibble::NIBBLES].to(torch.int32) << 4 * nibble
    parameters = {name: problem.operands[name][:, : w.n].contiguous() for name in ("scales", "zeros")}
    return {"weight": words, **parameters}


def _operands(workload: Workload, arch: str) -> tuple[Operand, ...]:
    """As ``build`` takes them: nibbles in the order of k, nothing padded."""
    n, k, dtype = workload.n, workload.k, workload.dtype
    groups = (k // workload.format.group_size, n)
    return (
        Operand("x", dtype, ("m", k)), Operand("weight", "int32", (n, k // NIBBLES)), Operand("scales", dtype, groups),
        Operand("zeros", dtype, groups), Operand("y", dtype, ("m", n), written=True, read=False),
    )  # fmt: skip


RULE = Rule(NAME, NAME, arches=("sm_80", "sm_86", "sm_89", "sm_90a"), legal=legal, operands=_operands)
PROGRAM = TileProgram(
    name=NAME,
    compiler="tilelang",
    build=build,
)
