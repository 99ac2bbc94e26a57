"""The rule of ``gemm_any``, the CUDA program for weights of bit planes and codebooks, see
``tiles/gemm/any.py``.

``block_n`` output channels and ``block_m`` rows of x a block; ``num_warps`` warps share k in steps
of STEP_K, with ``num_stages`` steps in flight each, planes to registers, x to shared memory;
``split_k`` blocks share an output tile through a workspace.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from ...layouts.planes import CUDA_TILE_K, CUDA_TILE_N
from ..schedule import Schedule
from ..target import Target
from .residence import crowding
from .rules import TICKETS
from .workload import Workload

PROGRAM = "gemm_any"
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a")
STEP_K = CUDA_TILE_K
BLOCK_N = (16, 32, 64)  # divisors of a tile of planes
BLOCK_M = (1, 2, 4, 8, 16)
MAX_WARPS, STAGES, MAX_SPLIT_K, MAX_MIN_BLOCKS = 16, (1, 4), 16, 8
PAIRED_BITS = 4  # codes of up to so many bits are looked up by twos
ENTRY = 256  # bytes of a table's entry: of 16 rows, for four lanes each; where there are two copies, of 32 rows
TWO_COPIES = (4,)  # bits of codes of whose tables there may be two copies
X_PADDED, MATRIX = 64, 8  # bytes behind a row of x where rows are fewer than a matrix has: a quarter of a warp meets no bank twice
STATIC_SMEM = 16  # the ticket
PADDED = 4  # floats behind a column of sums, as ``stream.sum_pitch`` has them
# What is tried.
WARPS, FEWER_WARPS, MOST_WARPS = (4, 8, 16), (1, 2), 32  # of a block; of an SM
SPLITS = (1, 2, 4, 8)
IN_FLIGHT = 72 << 10  # bytes of planes requested per SM
DEPTHS = 2  # of steps ahead
FULL = 0.9  # of the places of whole waves


def table_bytes(bits: int) -> int:
    """Bytes of a table: of pairs of codes, the second of which counts 16, of 16 rows; or of codes, of
    16 or 32."""
    last = (1 << bits) - 1
    return ENTRY * (last * 17 + 1 if bits <= PAIRED_BITS else last + 1)


def tables_bytes(workload: Workload, schedule: Schedule, target: Target, table: int = 0) -> int:
    """Bytes of a block's tables, of ``table`` bytes for 16 rows (0: as the program has them, whose tables
    of codes, and of two copies, are of 32 rows where there are as many)."""
    return schedule.block_n // 16 * table if table else _tables_bytes(workload, schedule, copies(workload, schedule, target))


def copies(workload: Workload, schedule: Schedule, target: Target) -> int:
    """Of a table: four, or two where those do not fit."""
    if workload.format.bits not in TWO_COPIES or schedule.block_n % 32:
        return 4
    four = _shared_bytes(schedule, _tables_bytes(workload, schedule, 4))
    return 2 if crowding(schedule, four + STATIC_SMEM, 0, target, "") else 4


def _tables_bytes(workload: Workload, schedule: Schedule, number: int) -> int:
    tiles, bits = schedule.block_n // 16, workload.format.bits
    together = 2 if tiles % 2 == 0 and (bits > PAIRED_BITS or number == 2) else 1
    return tiles // together * table_bytes(bits)


def plane_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of the planes of a warp's step."""
    return workload.format.bits * schedule.block_n * STEP_K // 8


def slot_bytes(schedule: Schedule) -> int:
    """Bytes of a slot of a warp's ring: x of a step."""
    return schedule.block_m * (STEP_K * 2 + (X_PADDED if schedule.block_m < MATRIX else 0))


def shared_bytes(workload: Workload, schedule: Schedule, target: Target, table: int = 0) -> int:
    """Bytes of shared memory of a block: tables and rings, whose place the warps' sums take.
    ``table``: as of ``tables_bytes``."""
    return _shared_bytes(schedule, tables_bytes(workload, schedule, target, table))


def _shared_bytes(schedule: Schedule, tables: int) -> int:
    s = schedule
    return max(tables + s.num_warps * s.num_stages * slot_bytes(s), s.num_warps * s.block_m * (s.block_n + PADDED) * 4)


def steps(workload: Workload) -> int:
    """Steps that cover k."""
    return -(-workload.k // STEP_K)


def any_legal(workload: Workload, schedule: Schedule, target: Target, table: int = 0) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target``; empty: it can. ``table``: as of
    ``tables_bytes``."""
    s, reasons = schedule, []
    for field, accepted in (("block_n", BLOCK_N), ("block_m", BLOCK_M)):
        if getattr(s, field) not in accepted:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {', '.join(map(str, accepted))}.")
    for field, low, high in (
        ("num_warps", 1, MAX_WARPS),
        ("num_stages", *STAGES),
        ("split_k", 1, MAX_SPLIT_K),
        ("min_blocks", 1, MAX_MIN_BLOCKS),
    ):
        if not low <= getattr(s, field) <= high:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {low} to {high}.")
    if reasons:
        return reasons
    if s.split_k > steps(workload):
        reasons.append(f"split_k is {s.split_k}, but k {workload.k} has {steps(workload)} steps of {STEP_K}: a share would be empty.")
    tiles = -(-workload.n // CUDA_TILE_N) * CUDA_TILE_N // s.block_n * -(-max(workload.m, 1) // s.block_m)
    if s.split_k > 1 and tiles > TICKETS:
        reasons.append(f"split_k is {s.split_k} of {tiles} tiles; accepted: at most {TICKETS} tiles, or no split.")
    smem = shared_bytes(workload, s, target, table) + STATIC_SMEM
    reasons += crowding(s, smem, s.num_warps * 32, target, "num_stages, num_warps, min_blocks or a smaller block_n")
    needed, share = registers_needed(workload, s), target.REGISTERS_PER_SM // (s.min_blocks * s.num_warps * 32) // 8 * 8
    if needed > min(share, 255):
        reasons.append(f"a thread needs about {needed} registers, {min(share, 255)} are free; use fewer num_warps or min_blocks.")
    return reasons


def keeps_codebooks(workload: Workload, schedule: Schedule) -> bool:
    """Whether some codes are looked up in registers, which hold codebooks of 8 numbers."""
    return workload.format.bits == 3 and schedule.block_m < 8


def registers_needed(workload: Workload, schedule: Schedule) -> int:
    """Registers of a thread, about: sums, planes, codes, x, codebooks and addresses."""
    s, bits, tiles = schedule, workload.format.bits, schedule.block_n // 16
    columns = max(1, s.block_m // 8)
    x = (32 if tiles > 1 else 4) * columns  # for several tiles of rows all of a step's
    kept = 4 + 8 * tiles if keeps_codebooks(workload, s) else 0
    return tiles * (columns * 4 + s.num_stages * bits * 4) + (8 if bits <= PAIRED_BITS else 24) + x + kept + 24


def any_candidates(workload: Workload, target: Target, table: int = 0) -> list[Schedule]:
    """Legal schedules worth trying, the most promising first: of the blocks that fit, those that
    fill the SMs' places, as many steps ahead as keep IN_FLIGHT bytes of planes on their way to an SM,
    or one less; of few warps where shared memory holds no more. ``table``: as of ``tables_bytes``."""
    return _of_warps(WARPS, workload, target, table) or _of_warps(FEWER_WARPS, workload, target, table)


def _of_warps(numbers: tuple[int, ...], workload: Workload, target: Target, table: int) -> list[Schedule]:
    """``any_candidates`` of so many warps a block."""
    block_m = next((b for b in BLOCK_M if b >= workload.m), BLOCK_M[-1])
    n_pad = -(-workload.n // CUDA_TILE_N) * CUDA_TILE_N
    found: list[tuple[float, int, Schedule]] = []
    for block_n, min_blocks, warps, split_k in product(BLOCK_N, range(1, MAX_MIN_BLOCKS + 1), numbers, SPLITS):
        base = Schedule(PROGRAM, block_n, block_m, 1, STAGES[0], warps, split_k, min_blocks)
        blocks, places = n_pad // block_n * -(-max(workload.m, 1) // block_m) * split_k, target.units * min_blocks
        split_for_nothing = split_k > 1 and (blocks // split_k >= target.units or steps(workload) < split_k * warps)
        if warps * min_blocks > MOST_WARPS or split_for_nothing or (warps > numbers[0] and steps(workload) < warps):
            continue
        wanted = round(IN_FLIGHT / (min_blocks * warps * plane_bytes(workload, base)))
        turns = -(-steps(workload) // (split_k * warps))
        deepest = max(1, min(wanted, turns, STAGES[1]))
        depths = (replace(base, num_stages=depth) for depth in range(deepest, 0, -1))
        fitting = [s for s in depths if not any_legal(workload, s, target, table)]
        full = min(blocks / (-(-blocks // places) * places), FULL)
        found += [(full, warps * min_blocks, s) for s in fitting[:DEPTHS]]
    # Tables are filled once a block, and x is read: wide blocks, where the grid is full.
    found.sort(key=lambda one: (-one[0], one[2].split_k, -one[1], -one[2].block_n))
    return [schedule for _, _, schedule in found]
