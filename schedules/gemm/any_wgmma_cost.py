"""The analytic model of ``gemm_any_wgmma``: how long a schedule should take.

Counted in cycles of an SM for 16 k. Either all of its blocks keep it busy: look-ups and products of
each 64 channels, and x, which is brought, put in order and read; or one block's warps wait for their
own: a look-up, then a product. The numbers are fitted to 803 measurements on an H100, seven shapes, 3
to 8 bits, 16 to 4096 rows: it errs by 7 %.
"""

from __future__ import annotations

from ...layouts.planes import CUDA_TILE_N
from ..rule import Estimate
from ..schedule import Schedule
from ..target import Target
from .any import steps
from .cost import LANES
from .workload import Workload

LOOK_UPS = {3: 23.0, 4: 45.0, 5: 54.0, 6: 74.0, 7: 128.0, 8: 128.0}  # cycles, of 64 channels: in registers, own banks, shared ones
PRODUCTS = 0.41  # cycles of 64 channels and a row of x
X = 0.5  # of a row of x
WAITING, WAITING_ROW, WAITING_LOOK_UP = 62.0, 0.65, 0.6  # of a warp: for all, for a row of x, of the look-ups' cycles
OTHER = 0.25  # of the shorter of the two, which the longer does not hide
ENDS_US = 3.6  # of a wave: its tables and first slots, its columns of y
SPLIT_US, ADDED_US = 2.0, 0.0046  # of parts of k: for all, of each row of x, 64 channels and part


def any_wgmma_estimate(workload: Workload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones."""
    w, s, clock = workload, schedule, target.dequant_gops / target.units / LANES
    groups = s.block_n // CUDA_TILE_N
    blocks = -(-w.n // CUDA_TILE_N) * CUDA_TILE_N // s.block_n * -(-max(w.m, 1) // s.block_m) * s.split_k
    busiest = -(-blocks // target.units)
    resident = min(s.min_blocks, busiest)
    waves, utilization = -(-busiest // resident), blocks / (busiest * target.units)

    look_ups, rows = LOOK_UPS[w.format.bits], s.block_m
    busy = resident * (groups * (look_ups + PRODUCTS * rows) + X * rows)
    waiting = WAITING + WAITING_ROW * rows + WAITING_LOOK_UP * look_ups
    cycles = max(busy, waiting) + OTHER * min(busy, waiting)
    compute = waves * -(-steps(w) // s.split_k) * 16 * cycles / (clock * 1e3)
    load = w.weight_bytes / (target.read_gbps * 1e3)
    ends = waves * ENDS_US
    split = SPLIT_US + ADDED_US * s.split_k * rows * groups if s.split_k > 1 else 0.0
    return Estimate(max(load, compute) + ends + split, 1, load, compute, 0.0, ends, split, 0.0, waves, utilization)
