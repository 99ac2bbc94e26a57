"""The rule of ``gemm_any_binary``, the CUDA program for one row of x and weights of bit planes and
codebooks of few bits, on binary tensor cores, see ``tiles/gemm/any_binary.py``.

``block_n`` output channels a block at a time, 16 a group of warps; the groups' ``num_warps`` warps
share k in steps of STEP_K, with ``num_stages`` steps of each in a ring. The grid is as many blocks
as the device has SMs.
"""

from __future__ import annotations

from itertools import product

from ...layouts.planes import CUDA_TILE_N
from ..schedule import Schedule
from ..target import Target
from .any import STEP_K, steps
from .stream import sum_pitch
from .workload import Workload

PROGRAM = "gemm_any_binary"
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a")
BITS = (2, 3, 4)  # sets of the planes of more bits are too many: their counts find no place in registers
ROWS = 16  # of a warp
BLOCK_N = tuple(range(ROWS, 129, ROWS))
MAX_WARPS, STAGES = 16, (2, 8)
BITS_OF_X = 24  # bits of x
STEP_OF_X = BITS_OF_X * STEP_K // 8  # bytes
REDUCED = 128  # bytes in which the block's warps agree on x's scale and sum: two words a warp
SPARE = 52  # registers of planes, operands, addresses
# What is tried.
WARPS = (8, 12)  # 6, 9 and 10 were never the fastest: an SM's four schedulers have unequally many
FULL = 0.75  # of the best share of the SMs' time
DEPTHS = (6, 4)


def slot_bytes(bits: int) -> int:
    """Bytes of a slot of a warp's ring: planes of 16 rows and STEP_K, codebooks of 16 rows."""
    return bits * ROWS * STEP_K // 8 + ROWS * 2 * (1 << bits)


def held(bits: int) -> int:
    """Registers of a step's planes and x."""
    return bits * ROWS // 4 + BITS_OF_X // 4


def groups(schedule: Schedule) -> int:
    """Groups of warps, 16 output channels each."""
    return schedule.block_n // ROWS


def shares(schedule: Schedule) -> int:
    """Warps of a group, which share k."""
    return schedule.num_warps // groups(schedule)


def sums_bytes(schedule: Schedule) -> int:
    """Bytes of a block's sums of one tile."""
    return shares(schedule) * sum_pitch(schedule) * 4


def x_at(schedule: Schedule) -> int:
    """Where x begins in shared memory, in bytes: behind two tiles' sums and REDUCED."""
    return 2 * sums_bytes(schedule) + REDUCED


def rings_at(workload: Workload, schedule: Schedule) -> int:
    """Where rings begin, in bytes."""
    return x_at(schedule) + steps(workload) * STEP_OF_X


def shared_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of shared memory of a block."""
    return rings_at(workload, schedule) + schedule.num_warps * schedule.num_stages * slot_bytes(workload.format.bits)


def registers_needed(workload: Workload) -> int:
    """Registers of a thread, about: counts of each set of planes, and what is under way."""
    return ((1 << workload.format.bits) - 1) * BITS_OF_X // 8 * 4 + SPARE


def block_tiles(workload: Workload, schedule: Schedule) -> int:
    """Tiles of ``block_n`` output channels."""
    return -(-workload.n // CUDA_TILE_N) * CUDA_TILE_N // schedule.block_n


def blocks(workload: Workload, schedule: Schedule, target: Target) -> int:
    """Blocks of a row of x."""
    return min(block_tiles(workload, schedule), target.units)


def binary_legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target``; empty: it can."""
    s, reasons = schedule, []
    if workload.format.bits not in BITS:
        reasons.append(f"codes have {workload.format.bits} bits; accepted: {', '.join(map(str, BITS))}. Use gemm_any.")
    for field, accepted in (("block_n", BLOCK_N), ("block_m", (1,))):
        if getattr(s, field) not in accepted:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {', '.join(map(str, accepted))}.")
    for field, low, high in (("num_warps", 1, MAX_WARPS), ("num_stages", *STAGES)):
        if not low <= getattr(s, field) <= high:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {low} to {high}.")
    if reasons:
        return reasons
    if s.num_warps % groups(s):
        return [f"num_warps is {s.num_warps}; accepted with block_n {s.block_n}: multiples of {groups(s)}, {ROWS} channels a warp."]
    n_pad = -(-workload.n // CUDA_TILE_N) * CUDA_TILE_N
    if n_pad % s.block_n:
        reasons.append(f"block_n is {s.block_n}; accepted for n {workload.n} (padded to {n_pad}): divisors of it.")
    if shares(s) > steps(workload):
        reasons.append(
            f"{shares(s)} warps share k, but k {workload.k} has {steps(workload)} steps of {STEP_K}; "
            "use fewer num_warps or a larger block_n."
        )
    smem = shared_bytes(workload, s)
    if smem > target.smem:
        reasons.append(f"a block needs {smem} bytes of shared memory, {target.smem} are there; use fewer num_stages or num_warps.")
    needed, share = registers_needed(workload), min(255, target.REGISTERS_PER_SM // (s.num_warps * 32) // 8 * 8)
    if needed > share:
        reasons.append(f"a thread needs about {needed} registers, {share} are free; use fewer num_warps.")
    return reasons


def binary_candidates(workload: Workload, target: Target) -> list[Schedule]:
    """Legal schedules worth trying for one row of x, those first whose tiles fill the SMs best: rings
    of six and of four steps, or as deep as fit."""
    if workload.m > 1 or workload.format.bits not in BITS:
        return []
    found: list[tuple[float, int, Schedule]] = []
    for block_n, warps, wanted in product(BLOCK_N, WARPS, DEPTHS):
        depths = (Schedule(PROGRAM, block_n, 1, 1, stages, warps) for stages in range(wanted, STAGES[0] - 1, -1))
        deepest = next((s for s in depths if not binary_legal(workload, s, target)), None)
        if deepest is not None:
            found.append((fill(workload, deepest, target), shares(deepest), deepest))
    best = max((full for full, *_ in found), default=0.0)
    found = [one for one in dict.fromkeys(found) if one[0] >= FULL * best]
    found.sort(key=lambda one: (-round(one[0], 2), one[1], -one[2].num_warps, -one[2].num_stages))
    return [schedule for *_, schedule in found]


def fill(workload: Workload, schedule: Schedule, target: Target) -> float:
    """The share of the SMs' time that tiles and steps fill, as all warps take equally many."""
    tiles, places = block_tiles(workload, schedule), target.units
    turns = -(-steps(workload) // shares(schedule)) * shares(schedule)
    return tiles / (-(-tiles // places) * places) * steps(workload) / turns
