"""The analytic model of ``gemm_any_wgmma``: how long a schedule should take.

Counted in cycles of an SM for 16 k. Either all of its blocks keep it busy, with look-ups and products of
each 64 channels; or one block's warps wait for their own: a look-up, then a product. The numbers are
fitted to measurements on an H200, seven shapes, 3 to 8 bits, 32 to 4096 rows, those of 4, 7 and 8 bits, of
pairs of blocks and of parts of k later than the others: on 2,549 of them it errs by 6 %, and its choice took
1 % longer than the fastest, at most 27 %.
"""

from __future__ import annotations

from ...layouts.planes import CUDA_TILE_N
from ..rule import Estimate
from ..schedule import Schedule
from ..target import Target
from .any import STEP_K, steps
from .any_wgmma import STAGE_K
from .cost import LANES, spread
from .rules import clustered_split, paired_split
from .workload import Workload

LOOK_UPS = {3: 26.3, 4: 37.0, 5: 48.9, 6: 59.4, 7: 71.0, 8: 82.0}  # cycles, of 64 channels
SENDING = 35.0  # cycles, of 64 channels that the other block of a cluster looks up
PRODUCTS = 0.55  # cycles of 64 channels and a row of x
WAITING_ROW, WAITING_LOOK_UP = 0.29, 1.56  # of a warp: for a row of x, of the look-ups' cycles
SLOTS_US = 0.98  # of STEP_K: a block alone on its SM waits so long for x where slots hold no more than it reads at once
OTHER = 0.35  # of the shorter of the two, which the longer does not hide
HOT, HOT_US = 0.12, 3000.0  # what a kernel of so many microseconds and more takes longer: clocks fall
ENDS_US = 2.6  # of a tile: its tables and first slots, its columns of y
SHARED_US, SPLIT_US, ADDED_US = 6.3, 1.5, 0.008  # of tiles that blocks share, of parts of k; of each row of x, 64 channels and part
PAIRED_US, MEETING_US = 0.5, 2.5  # of two parts that a cluster adds up; of clusters that share a tile


def any_wgmma_estimate(workload: Workload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones."""
    w, s, clock = workload, schedule, target.dequant_gops / target.units / LANES
    groups, rows, look_ups = s.block_n // CUDA_TILE_N, s.block_m, LOOK_UPS[w.format.bits]
    tiles = -(-w.n // CUDA_TILE_N) * CUDA_TILE_N // s.block_n * -(-max(w.m, 1) // (rows * s.cluster)) * s.cluster
    grid = spread(tiles, steps(w), s, target)
    rounds = -(-grid.blocks // grid.resident)

    prepared = look_ups if s.cluster == 1 else (look_ups + SENDING) / s.cluster
    busy = grid.resident * groups * (prepared + PRODUCTS * rows)
    waiting = WAITING_ROW * rows + WAITING_LOOK_UP * look_ups
    cycles = max(busy, waiting) + OTHER * min(busy, waiting)
    compute = rounds * grid.steps * 16 * cycles / (clock * 1e3)
    if grid.resident == 1 and s.num_stages * STAGE_K <= STEP_K:
        compute = max(compute, rounds * grid.steps * SLOTS_US)
    compute *= 1 + HOT * min(1.0, compute / HOT_US)
    load = w.weight_bytes / (target.read_gbps * 1e3)
    ends = rounds * grid.ends * ENDS_US
    parts = s.split_k if s.split_k > 1 else int(grid.shared > 0)
    if clustered_split(s):
        split = PAIRED_US
    elif paired_split(s):
        split = PAIRED_US + MEETING_US + ADDED_US / 2 * (parts / 2) * (rows / 2) * groups  # of half a tile, from half as many blocks
    else:
        split = (SPLIT_US if s.split_k > 1 else SHARED_US) + ADDED_US * parts * rows * groups if parts else 0.0
    return Estimate(max(load, compute) + ends + split, 1, load, compute, 0.0, ends, split, 0.0, grid.waves, grid.utilization)
