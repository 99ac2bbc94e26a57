"""The rule of ``gemm_any_wgmma``, the program of sm_90a for many rows of x and weights of bit planes
and codebooks, see ``tiles/gemm/any_wgmma.py``.

``block_n`` output channels by ``block_m`` rows of x a block, 16 channels a computing warp; ``block_k``
is the depth of a tile of planes, ``num_stages`` the slots of x of STAGE_K each. With ``stream_k`` blocks
take one tile after another and share those of a last wave, as of ``gemm_wgmma``. The two blocks of a
``cluster`` have the same channels and neighbouring rows of x: each looks up half of the channels'
weights, for both. The two blocks of ``split_k`` 2 are a cluster, too, and add up through its shared
memory; of 4, 6, ... clusters of two do so, which meet in a workspace; of 3, 5, ... all meet there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from ...layouts.planes import CUDA_TILE_N
from ..schedule import Schedule, in_turn
from ..target import Target, target_from_name
from .any import ENTRY, STEP_K, steps
from .residence import crowding
from .rules import (
    ANY_WGMMA,
    MAX_RASTER,
    WGMMA,
    WGMMA_SPARE,
    clustered_split,
    exchanged_split,
    handed_on,
    most_tiles,
    number_bytes,
    staged_columns,
)
from .workload import Workload

PROGRAM = ANY_WGMMA
ARCHES = ("sm_90a",)
HOPPER = target_from_name("sm_90a")
STAGE_K = 64
BLOCK_N, ROWS = (64, 128, 192, 256), 16  # ROWS: of a warp
ROW_STEP = 32  # of x
BLOCK_M = tuple(range(ROW_STEP, 257, ROW_STEP))
STAGES, MAX_SPLIT_K = (2, 8), 16
CROWDED_BLOCKS, CROWDED_M = 3, 64  # of an SM: blocks, and the most rows of x of their tiles (of 96 rows 3 bits spill)
CLUSTERS, CLUSTER_N = (1, 2), 128  # CLUSTER_N: of a cluster's tiles, of which a warpgroup looks up half
PRODUCERS, PRODUCER_REGISTERS = WGMMA.producer_threads, 24
LEAST_BITS = 3  # of codes
# By the bits of a code: so many of a lane's PAIRS pairs are looked up in registers (PERMUTED_TALL: in tiles
# of more than FOUR_M rows of x; PERMUTED_SHARED: in those of a cluster, which has few registers left;
# PERMUTED_CROWDED: where CROWDED_BLOCKS have an SM, whose look-ups in registers are the bottleneck), of so
# many of its two rows; the others in shared memory.
PAIRS, PERMUTED, KEPT_ROWS = 4, {3: 4, 4: 2, 5: 1}, {3: 2, 4: 2, 5: 1}
PERMUTED_TALL, PERMUTED_SHARED, PERMUTED_CROWDED = {**PERMUTED, 5: 2}, {**PERMUTED, 5: 0}, {**PERMUTED, 4: 1, 5: 0}
# Of up to so many bits tables in shared memory have four copies; of a bit more where a block looks up no more than
# so many rows; of two more where its tile has no more rows of x, either. Others have two.
FOUR_BITS, FOUR_N, FOUR_M = 6, 64, 128
HELD_STEPS, HELD_BITS = 2, 6  # steps of planes in shared memory, of up to so many bits; of wider ones where there is room, else one
SENT = 2  # places of a block for operands that the other of a cluster looks up
STATIC_SMEM = 512  # barriers, the order of tiles, the ticket; alignment
SPARE, CROWDED_SPARE = 28, 20  # registers of addresses, loop state and look-ups under way; of CROWDED_BLOCKS
LEAST_CLUSTER_M = 160  # of what is tried: lower tiles take as long one above the other
LEAST_ROWS = 17  # of x, from which on it is tried: for up to 16 gemm_any reads planes once, and was always faster
PAIRED_M, SPLIT_GAIN = 1024, 0.05  # of fewer rows two parts are always tried; what a further split must gain of `even`
RASTERS, RASTER_M = (0, 8), 1024
# What is tried: rows of x of tiles that need not cover all; (block_n, min_blocks).
USUAL_M = (64, 128, 192, 256)
TILES = ((128, 1), (256, 1), (64, 2), (192, 1), (128, 2), (64, 1), (64, CROWDED_BLOCKS))


def permuted(workload: Workload, schedule: Schedule) -> int:
    """Pairs of a lane's PAIRS that are looked up in registers (``device/codecs/any_operand.cuh``)."""
    s = schedule
    if s.cluster > 1:
        pairs = PERMUTED_SHARED
    elif s.min_blocks == CROWDED_BLOCKS:
        pairs = PERMUTED_CROWDED
    else:
        pairs = PERMUTED_TALL if s.block_m > FOUR_M else PERMUTED
    return pairs.get(workload.format.bits, 0)


def own_rows(schedule: Schedule) -> int:
    """Of the weight, that a block looks up."""
    return schedule.block_n // schedule.cluster


def copies(workload: Workload, schedule: Schedule) -> int:
    """Of a table in shared memory; 0: there is none."""
    bits, few = workload.format.bits, own_rows(schedule) <= FOUR_N
    small = few and (bits == FOUR_BITS + 1 or schedule.block_m <= FOUR_M)
    return 0 if permuted(workload, schedule) == PAIRS else 4 if bits <= FOUR_BITS or small else 2


def tables_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of a block's tables, each of two warps' rows for four copies, of four warps' for two."""
    each = copies(workload, schedule)
    return own_rows(schedule) * each // (8 * ROWS) * (ENTRY << workload.format.bits)


def kept_registers(workload: Workload, schedule: Schedule) -> int:
    """Of a computing thread, for codebooks of KEPT_ROWS rows, two numbers in each."""
    bits = workload.format.bits
    return KEPT_ROWS[bits] << bits - 1 if permuted(workload, schedule) else 0


def held_steps(workload: Workload, schedule: Schedule) -> int:
    """Steps whose planes have a place in shared memory."""
    fit = workload.format.bits <= HELD_BITS or not crowding(schedule, _shared_bytes(workload, schedule, HELD_STEPS), 0, HOPPER, "")
    return HELD_STEPS if fit else 1


def staged_bytes(schedule: Schedule) -> int:
    """Bytes of shared memory that columns pass through on their way to y. Blocks that share look-ups have no
    tables meanwhile: the place is the tables'. Blocks that share a tile store half of it each."""
    rows = schedule.block_m // (2 if exchanged_split(schedule) else 1)
    return schedule.block_n * staged_columns(rows) * 2


def sent_bytes(schedule: Schedule) -> int:
    """Bytes of shared memory that operands from the other block of a cluster pass through."""
    return SENT * own_rows(schedule) * STAGE_K * 2 if schedule.cluster > 1 else 0


def shared_bytes(workload: Workload, schedule: Schedule) -> int:
    """Bytes of shared memory of a block: tables, columns on their way to y, planes, operands of the other
    block, slots of x."""
    return _shared_bytes(workload, schedule, held_steps(workload, schedule))


def _shared_bytes(workload: Workload, schedule: Schedule, steps_held: int) -> int:
    s, kept = schedule, (tables_bytes(workload, schedule), staged_bytes(schedule))
    planes = steps_held * workload.format.bits * own_rows(s) * STEP_K // 8
    slots, numbers = s.num_stages * s.block_m * STAGE_K * 2, number_bytes(workload, s)
    return (max(kept) if s.cluster > 1 else sum(kept)) + planes + sent_bytes(s) + slots + numbers + STATIC_SMEM


def registers(schedule: Schedule) -> tuple[int, int]:
    """(A loading, a computing thread's) registers, out of the even share that a launch gives to
    both."""
    return handed_on(schedule, PRODUCER_REGISTERS)


def registers_needed(workload: Workload, schedule: Schedule) -> int:
    """Of a computing thread, about: sums, two operands of STAGE_K, planes, codes (half as many without a table), codebooks."""
    codes, spare = 16 if copies(workload, schedule) else 8, CROWDED_SPARE if schedule.min_blocks == CROWDED_BLOCKS else SPARE
    return schedule.block_m // 2 + 2 * STAGE_K // 4 + workload.format.bits * 4 + codes + kept_registers(workload, schedule) + spare


def any_wgmma_legal(workload: Workload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target``; empty: it can."""
    s, reasons = schedule, []
    if workload.format.bits < LEAST_BITS:
        reasons.append(f"codes have {workload.format.bits} bits; accepted: {LEAST_BITS} and more. Use gemm_any.")
    for field, accepted in (("block_n", BLOCK_N), ("block_m", BLOCK_M), ("block_k", (STEP_K,)), ("cluster", CLUSTERS)):
        if getattr(s, field) not in accepted:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {', '.join(map(str, accepted))}.")
    for field, low, high in (
        ("num_stages", *STAGES), ("split_k", 1, MAX_SPLIT_K), ("min_blocks", 1, CROWDED_BLOCKS), ("raster", 0, MAX_RASTER),
    ):  # fmt: skip
        if not low <= getattr(s, field) <= high:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {low} to {high}.")
    if reasons:
        return reasons
    if s.num_warps * ROWS != s.block_n:
        reasons.append(f"num_warps is {s.num_warps}; accepted with block_n {s.block_n}: {s.block_n // ROWS}, {ROWS} rows a warp.")
        return reasons
    n_pad = -(-workload.n // CUDA_TILE_N) * CUDA_TILE_N
    if n_pad % s.block_n:
        reasons.append(f"block_n is {s.block_n}; accepted for n {workload.n} (padded to {n_pad}): divisors of it.")
    if s.min_blocks == CROWDED_BLOCKS and s.block_m > CROWDED_M:
        reasons.append(f"min_blocks is {s.min_blocks} and block_m {s.block_m}; accepted: block_m up to {CROWDED_M}, or fewer min_blocks.")
    if s.stream_k and s.split_k > 1:
        reasons.append(f"stream_k goes with split_k {s.split_k}; accepted: split_k 1.")
    if s.cluster > 1 and s.split_k > 1:
        reasons.append(f"cluster is {s.cluster} and split_k {s.split_k}; accepted: one of them 1.")
    if s.cluster > 1 and s.block_n != CLUSTER_N:
        reasons.append(f"cluster is {s.cluster} and block_n {s.block_n}; accepted: block_n {CLUSTER_N}, or cluster 1.")
    if s.split_k > steps(workload):
        reasons.append(f"split_k is {s.split_k}, but k {workload.k} has {steps(workload)} steps of {STEP_K}: a share would be empty.")
    sent = s.block_n * s.block_m // 2 * 4  # what each block of a pair is sent: half a tile's sums
    if exchanged_split(s) and sent > s.num_stages * s.block_m * STAGE_K * 2:
        reasons.append(f"{sent} bytes of fp32 sums do not fit into the slots of x; use more num_stages.")
    tiles = -(-n_pad // s.block_n) * -(-max(workload.m, 1) // s.block_m)
    most = most_tiles(s)
    if s.split_k > 1 and not clustered_split(s) and tiles > most:
        reasons.append(f"split_k is {s.split_k} of {tiles} tiles; accepted: at most {most} tiles, split_k 2, or no split.")
    threads = s.num_warps * 32 + PRODUCERS
    reasons += crowding(s, shared_bytes(workload, s), threads, target, "num_stages, min_blocks or a smaller tile")
    threads *= s.min_blocks
    if threads > target.threads_per_sm:
        return reasons
    share, one = Target.REGISTERS_PER_SM // threads // 8 * 8, s.block_m // 2 + WGMMA_SPARE
    if share < one:
        reasons.append(f"a launch gives a thread {share} registers, one wgmma of {s.block_m} columns takes {one}; use a smaller tile.")
    needed, there = registers_needed(workload, s), registers(s)[1]
    if needed > there:
        reasons.append(f"a thread needs about {needed} registers, {there} are free; use a smaller block_m, block_n or min_blocks.")
    return reasons


def any_wgmma_candidates(workload: Workload, target: Target) -> list[Schedule]:
    """Legal schedules worth trying, tiles in turn: as many slots of x as fit, or those of a step; two
    parts of k, and few more that fill the SMs."""
    if workload.m < LEAST_ROWS:
        return []
    return in_turn([list(_of_tile(n, m, blocks, workload, target)) for n, m, blocks in _tiles(workload)])


def _tiles(workload: Workload) -> Iterator[tuple[int, int, int]]:
    """(block_n, block_m, min_blocks). Heights: the lowest that covers all rows by as few tiles as can be,
    the usual ones below, the lowest that covers them by one tile more."""
    fewest = -(-workload.m // BLOCK_M[-1])
    exact = [-(-workload.m // (ROW_STEP * count)) * ROW_STEP for count in range(fewest, fewest + 2)]
    heights = dict.fromkeys((*exact[:1], *(h for h in USUAL_M if h < workload.m), *exact[1:]))
    for height, (block_n, blocks) in product(heights, TILES):
        yield block_n, height, blocks


def _of_tile(block_n: int, block_m: int, min_blocks: int, workload: Workload, target: Target) -> Iterator[Schedule]:
    n_pad = -(-workload.n // CUDA_TILE_N) * CUDA_TILE_N
    tiles, places = -(-n_pad // block_n) * -(-workload.m // block_m), target.units * min_blocks
    best, always = 0.0, 2 if workload.m < PAIRED_M else 1
    for split_k in range(1, min(MAX_SPLIT_K, steps(workload), max(always, 2 * places // tiles)) + 1):
        blocks = tiles * split_k
        even = blocks / (-(-blocks // target.units) * target.units)  # 1: every SM gets as many as the busiest
        if split_k > always and even < best + SPLIT_GAIN:
            continue
        best = max(best, even)
        rasters = RASTERS if workload.m >= RASTER_M else RASTERS[:1]
        for raster, stream_k in product(rasters, (False, True) if split_k == 1 else (False,)):
            s = Schedule(PROGRAM, block_n, block_m, STEP_K, STAGES[1], block_n // ROWS, split_k, min_blocks, raster, stream_k)
            pairs = split_k == 1 and block_n == CLUSTER_N and min_blocks == 1 and workload.m > block_m >= LEAST_CLUSTER_M
            for cluster in CLUSTERS if pairs else CLUSTERS[:1]:
                yield from _deep(replace(s, cluster=cluster), workload, target)


def _deep(schedule: Schedule, workload: Workload, target: Target) -> Iterator[Schedule]:
    """With as many slots of x as fit, with as many beside HELD_STEPS, and with those of a step."""
    depths = [replace(schedule, num_stages=stages) for stages in range(STAGES[1], STAGES[0] - 1, -1)]
    deepest = next((i for i, deep in enumerate(depths) if not any_wgmma_legal(workload, deep, target)), len(depths))
    fit = depths[deepest:]  # of fewer slots all do
    yield from fit[:1]
    yield from islice((deep for deep in fit if held_steps(workload, deep) == HELD_STEPS), 1)
    yield from (deep for deep in fit[1:] if deep.num_stages == STEP_K // STAGE_K)
