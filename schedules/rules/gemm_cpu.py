"""The rule of the CPU GEMM program: which vector instructions a target has, which schedules it accepts and which are worth trying.

On a CPU a schedule's fields mean: ``block_n`` output channels of one task (a multiple of 32, the layout's tile), ``block_m`` rows of x that share
one decoded weight vector, ``block_k`` values of k in one unrolled step, ``split_k`` independent sets of accumulators (latency hiding at small m),
``num_warps`` threads. ``num_stages``, ``min_blocks`` and ``raster`` do not apply and keep their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Schedule
from ..target import Target
from ..workload import Workload

PROGRAM = "gemm_cpu"
TILE = 32  # rows and columns of one tile of the packed layout
BLOCK_N_MAX, BLOCK_K_MAX, THREADS_MAX = 512, 64, 512


@dataclass(frozen=True, slots=True)
class Isa:
    """A vector instruction set: ``lanes`` 32-bit lanes and ``registers`` vector registers, of which ``accumulators`` may hold sums
    without spilling (the others hold the weights being decoded, x, a mask or look-up table). ``bf16_dot``: vdpbf16ps (two products a lane)."""

    name: str
    lanes: int
    registers: int
    accumulators: int
    bf16_dot: bool = False


_ISAS = (
    ("avx512_bf16", Isa("avx512_bf16", 16, 32, 26, bf16_dot=True)),
    ("avx512", Isa("avx512", 16, 32, 26)),
    ("avx2", Isa("avx2", 8, 16, 12)),
)


def isa(target: Target) -> Isa | None:
    """The widest instruction set of ``target`` that the program has code for; None without one."""
    if "avx512_bf16" in target.features and "avx512" not in target.features:
        return None
    return next((found for feature, found in _ISAS if feature in target.features), None)


def accumulators(schedule: Schedule, vectors: Isa) -> int:
    """Vector registers that hold the sums of one 32-row tile."""
    return schedule.block_m * schedule.split_k * (TILE // vectors.lanes)


def cpu_legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot be built for ``workload`` on ``target``: sentences, empty when it can."""
    reasons = []
    if schedule.program != PROGRAM:
        reasons.append(f"program is {schedule.program!r}; this rule is {PROGRAM!r}'s")
    vectors = isa(target)
    if target.arch != "cpu" or vectors is None:
        return [*reasons, f"target {target.arch} has features {target.features}; the CPU program needs 'avx2' or 'avx512'"]
    if schedule.block_n < TILE or schedule.block_n % TILE or schedule.block_n > BLOCK_N_MAX:
        reasons.append(f"block_n is {schedule.block_n}; accepted: multiples of {TILE} from {TILE} to {BLOCK_N_MAX}")
    if schedule.block_k not in (TILE, BLOCK_K_MAX):
        reasons.append(f"block_k is {schedule.block_k}; accepted: {TILE}, {BLOCK_K_MAX}")
    elif workload.format.group_size > 0 and workload.format.group_size % schedule.block_k:
        reasons.append(f"block_k is {schedule.block_k}; it must divide the group size {workload.format.group_size}")
    if schedule.split_k not in (1, 2, 4):
        reasons.append(f"split_k is {schedule.split_k}; accepted: 1, 2, 4 sets of accumulators")
    if schedule.block_m < 1:
        reasons.append(f"block_m is {schedule.block_m}; accepted: at least 1")
    elif accumulators(schedule, vectors) > vectors.accumulators:
        reasons.append(
            f"block_m {schedule.block_m} x split_k {schedule.split_k} needs {accumulators(schedule, vectors)} accumulators; "
            f"{vectors.name} has registers for {vectors.accumulators}"
        )
    if not 1 <= schedule.num_warps <= THREADS_MAX:
        reasons.append(f"num_warps is {schedule.num_warps}; accepted: 1 to {THREADS_MAX} threads")
    for field in ("num_stages", "min_blocks"):
        if getattr(schedule, field) != 1:
            reasons.append(f"{field} is {getattr(schedule, field)}; accepted on a CPU: 1")
    if schedule.raster != 0:
        reasons.append(f"raster is {schedule.raster}; accepted on a CPU: 0")
    if (workload.n + TILE) * (workload.k + TILE) >= 1 << 31:
        reasons.append(f"n x k is {workload.n} x {workload.k}; the kernel's 32-bit indices hold fewer than 2^31 weights")
    return reasons


def cpu_candidates(workload: Workload, target: Target) -> list[Schedule]:
    """Legal schedules worth trying, the most promising first; empty on a CPU without vector instructions the program knows."""
    vectors = isa(target)
    if vectors is None:
        return []
    rows = max(workload.m, 1)
    # The largest block whose sums stay in registers decodes weights least often; one that wastes few padded rows computes least.
    largest = vectors.accumulators // (TILE // vectors.lanes)
    blocks = sorted(range(1, largest + 1), key=lambda b: (-(-rows // b) * (b + DECODE_COST), b))[:3]
    block_ns = (TILE, 2 * TILE) if rows <= largest else (4 * TILE, TILE, 8 * TILE)
    threads = max(1, target.units)
    found = []
    for block_m in blocks:
        for block_n in block_ns:
            for split_k in (4, 2, 1) if block_m <= 2 else (1,):
                for block_k in (TILE, BLOCK_K_MAX):
                    schedule = Schedule(PROGRAM, block_n, block_m, block_k, num_warps=threads, split_k=split_k)
                    if not cpu_legal(workload, schedule, target):
                        found.append(schedule)
    return found


# Cost of decoding a weight vector, in multiplications by one row of x (7 instructions of decoding for each 4 of dot product).
DECODE_COST = 1.75
