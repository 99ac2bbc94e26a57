"""The rule of the CPU program for weights of bit planes and codebooks.

A schedule's fields mean: ``block_n`` output channels of one task (a multiple of 32), ``block_m``
rows of x that share one decoded vector of weights, ``split_k`` independent sets of sums (they hide
latency at small m), ``num_warps`` threads. The others do not apply and keep their defaults.
"""

from __future__ import annotations

from itertools import product

from ..schedule import Schedule
from ..target import Target
from .cpu import THREADS_MAX, TILE, grid_reasons
from .workload import Workload

PROGRAM = "gemm_any_cpu"
MOST_SUMS = 8  # vectors of sums, of 16 registers: the others hold codes, numbers, and what tables they can
SPLITS = (1, 2, 4)


def any_legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot be built for ``workload`` on ``target``: sentences, empty when it
    can."""
    reasons = []
    if "avx2" not in target.features:
        return [f"target {target.arch} has features {target.features}; {PROGRAM} needs 'avx2'"]
    if schedule.split_k not in SPLITS:
        reasons.append(f"split_k is {schedule.split_k}; accepted: {', '.join(map(str, SPLITS))} sets of sums")
    elif schedule.block_m < 1 or schedule.block_m * schedule.split_k > MOST_SUMS:
        reasons.append(f"block_m {schedule.block_m} x split_k {schedule.split_k}; accepted: 1 to {MOST_SUMS} vectors of sums")
    return reasons + grid_reasons(workload, schedule)


def any_candidates(workload: Workload, target: Target) -> list[Schedule]:
    """Legal schedules worth trying, the most promising first."""
    rows, threads = max(workload.m, 1), min(max(1, target.units), THREADS_MAX)
    # Each block of rows decodes the weight once: the fewest blocks, and then the fewest rows.
    blocks = sorted(range(1, min(rows, MOST_SUMS) + 1), key=lambda b: (-(-rows // b), b))[:3]
    # Long streams of weights, but enough tasks that no thread waits for another.
    block_ns = [b for b in (4 * TILE, 2 * TILE) if workload.n >= 8 * threads * b] + [TILE]
    found = [
        Schedule(PROGRAM, block_n, block_m, 1, num_warps=threads, split_k=split)
        for block_m, block_n, split in product(blocks, block_ns, SPLITS[::-1])
    ]
    return [schedule for schedule in found if not any_legal(workload, schedule, target)]
