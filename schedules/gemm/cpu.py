"""The rule of the CPU GEMM program: which vector instructions a target has, which schedules it
accepts and which are worth trying.

On a CPU a schedule's fields mean: ``block_n`` output channels of one task (a multiple of 32, the
layout's tile), ``block_m`` rows of x that share one decoded weight vector, ``block_k`` values of k
in one unrolled step, ``split_k`` independent sets of sums (they hide latency at small m),
``num_warps`` threads. ``num_stages``, ``min_blocks`` and ``raster`` do not apply and keep their
defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from ..schedule import Schedule
from ..target import Target
from .workload import Workload

PROGRAM = "gemm_cpu"
TILE = 32  # rows and columns of one tile of the packed layout
BLOCK_N_MAX, THREADS_MAX = 512, 512
BLOCK_K = (4, 8, 16, 32, 64)
DECODE_COST = 1.75  # of decoding a vector of weights, in multiplications by one row of x: 7 instructions for 4 products


@dataclass(frozen=True, slots=True)
class Isa:
    """A vector instruction set: ``registers`` vector registers of ``lanes`` 32-bit lanes, of which
    ``reserved`` hold a packed word, one x and the look-up table or four masks; ``bf16_dot``:
    vdpbf16ps, two products a lane; ``byte_dot``: vpdpbusd, four."""

    name: str
    lanes: int
    registers: int
    reserved: int
    bf16_dot: bool = False
    byte_dot: bool = False


_ISAS = (
    ("avx512_bf16", Isa("avx512_bf16", 16, 32, 3, bf16_dot=True, byte_dot=True)),
    ("avx512_vnni", Isa("avx512_vnni", 16, 32, 3, byte_dot=True)),
    ("avx512", Isa("avx512", 16, 32, 3)),
    ("avx_vnni", Isa("avx_vnni", 8, 16, 6, byte_dot=True)),
    ("avx2", Isa("avx2", 8, 16, 6)),
)


def isa(target: Target) -> Isa | None:
    """The widest instruction set of ``target`` that the program has code for; None without one."""
    features = set(target.features)
    if features & {"avx512_bf16", "avx512_vnni"} and "avx512" not in features:
        return None
    return next((found for feature, found in _ISAS if feature in target.features), None)


def vectors_per_pass(schedule: Schedule, vectors: Isa) -> int:
    """Vectors of a tile's 32 rows whose sums are in registers at once: all, or half if they are too
    many (a group is read twice then)."""
    every = TILE // vectors.lanes
    return every if every <= 2 or registers_used(schedule, vectors, every) <= vectors.registers else every // 2


def registers_used(schedule: Schedule, vectors: Isa, together: int) -> int:
    """Vector registers of the inner loop for ``together`` vectors of rows: their sums, their
    decoded weights and the reserved ones."""
    return together * (schedule.block_m * schedule.split_k + 1) + vectors.reserved


def grid_reasons(workload: Workload, schedule: Schedule) -> list[str]:
    """What is wrong with the tasks and threads of any CPU program's schedule."""
    reasons = []
    if schedule.block_n < TILE or schedule.block_n % TILE or schedule.block_n > BLOCK_N_MAX:
        reasons.append(f"block_n is {schedule.block_n}; accepted: multiples of {TILE} from {TILE} to {BLOCK_N_MAX}")
    if not 1 <= schedule.num_warps <= THREADS_MAX:
        reasons.append(f"num_warps is {schedule.num_warps}; accepted: 1 to {THREADS_MAX} threads")
    if (workload.n + TILE) * (workload.k + TILE) >= 1 << 31:
        reasons.append(f"n x k is {workload.n} x {workload.k}; the kernel's 32-bit indices hold fewer than 2^31 weights")
    return reasons


def cpu_legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot be built for ``workload`` on ``target``: sentences, empty when it
    can."""
    vectors, reasons = isa(target), []
    if vectors is None:
        return [f"target {target.arch} has features {target.features}; the CPU program needs 'avx2' or 'avx512'"]
    if schedule.block_k not in BLOCK_K:
        reasons.append(f"block_k is {schedule.block_k}; accepted: {', '.join(map(str, BLOCK_K))}")
    elif workload.format.group_size > 0 and workload.format.group_size % schedule.block_k:
        reasons.append(f"block_k is {schedule.block_k}; it must divide the group size {workload.format.group_size}")
    if schedule.split_k not in (1, 2, 4):
        reasons.append(f"split_k is {schedule.split_k}; accepted: 1, 2, 4 sets of accumulators")
    if schedule.block_m < 1:
        reasons.append(f"block_m is {schedule.block_m}; accepted: at least 1")
    elif (used := registers_used(schedule, vectors, vectors_per_pass(schedule, vectors))) > vectors.registers:
        sums = f"block_m {schedule.block_m} x split_k {schedule.split_k}"
        reasons.append(f"{sums} needs {used} vector registers; {vectors.name} has {vectors.registers}; choose a smaller product")
    return reasons + grid_reasons(workload, schedule)


def cpu_candidates(workload: Workload, target: Target) -> list[Schedule]:
    """Legal schedules worth trying, the most promising first; empty on a CPU without vector
    instructions the program knows."""
    vectors = isa(target)
    if vectors is None:
        return []
    rows = max(workload.m, 1)
    largest = max(b for b in range(1, vectors.registers) if _fits(b, 1, vectors))
    # Each pass over a weight multiplies it by ``b`` rows and decodes it once; the last block's
    # padding rows are multiplied too.
    blocks = sorted(range(1, min(rows, largest) + 1), key=lambda b: (-(-rows // b) * (b + DECODE_COST), b))[:3]
    # Few rows have few sums, and several sets of them hide a multiplication's latency; many rows
    # want short code, or sums leave registers.
    splits = {1: (4, 2, 1) if vectors.lanes == 16 else (1, 4, 2), 2: (2, 1) if vectors.lanes == 16 else (1, 2)}
    depths = (32, 64, 16) if rows <= 2 else (8, 4, 32)
    if workload.format.integer_sums:  # of a whole tile products are added up in 16 bits
        depths = (32, 16)
    threads = min(max(1, target.units), THREADS_MAX)
    # Long streams of weights, but enough tasks that no thread waits for another.
    block_ns = [b for b in (4 * TILE, 2 * TILE) if workload.n >= 8 * threads * b] + [TILE]
    tried = product(blocks, depths, block_ns)
    found = [
        Schedule(PROGRAM, block_n, block_m, depth, num_warps=threads, split_k=split)
        for block_m, depth, block_n in tried
        for split in splits.get(block_m, (1,))
    ]
    return [schedule for schedule in found if not cpu_legal(workload, schedule, target)]


def _fits(block_m: int, split_k: int, vectors: Isa) -> bool:
    schedule = Schedule(PROGRAM, TILE, block_m, TILE, split_k=split_k)
    return registers_used(schedule, vectors, vectors_per_pass(schedule, vectors)) <= vectors.registers
