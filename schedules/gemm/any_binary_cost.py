"""The analytic model of ``gemm_any_binary``: how long a schedule should take, from counted instructions.

One warp and step of 256 k of 16 rows are three products for each set of planes, six cycles each,
and between them what makes their operands, two cycles each: they share the way to the registers, and
nothing hides one behind the other. Constants that say "fitted" are of an H200's measurements.
"""

from __future__ import annotations

from math import ceil

from ..rule import Estimate
from ..schedule import Schedule
from ..target import Target
from .any import steps
from .any_binary import DIGITS, ROWS, block_tiles, blocks, groups, shares, slot_bytes
from .cost import KNEE_BYTES, LANES, STREAM_BURST
from .workload import Workload

PRODUCT_CYCLES, OTHER_CYCLES = 6.0, 2.0  # of a scheduler, of which an SM has four
SCHEDULERS = 4
SELECTED = {3: 24, 4: 60}  # instructions that rotate planes and make sets of them
STEP_INSTRUCTIONS = 24  # copies, loads, addresses
END_INSTRUCTIONS = {3: 250, 4: 520}  # of a tile: codebooks, counts to sums
X_INSTRUCTIONS = 170  # of 256 numbers
END_US = 0.15  # of a tile, what warps wait for each other; fitted
LAUNCH_US = 2.6  # with x, first planes, the last tile; fitted
NORM = 4.0  # how little loading and computing hinder each other; fitted


def any_binary_estimate(workload: Workload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones."""
    w, s, bits, clock = workload, schedule, workload.format.bits, target.dequant_gops / target.units / LANES
    tiles, there = block_tiles(w, s), blocks(w, s, target)
    turns, own = ceil(tiles / there), ceil(steps(w) / shares(s))  # of a block, of a warp for a tile
    busiest = ceil(there / target.units)  # blocks of an SM
    utilization = tiles * groups(s) * ROWS * steps(w) / (turns * busiest * target.units * s.block_n * own * shares(s))

    products = ((1 << bits) - 1) * DIGITS // 8
    step = products * PRODUCT_CYCLES + (SELECTED[bits] + STEP_INSTRUCTIONS) * OTHER_CYCLES
    of_warp = turns * (own * step + END_INSTRUCTIONS[bits] * OTHER_CYCLES) + ceil(steps(w) / s.num_warps) * X_INSTRUCTIONS * OTHER_CYCLES
    compute = max(1, w.m) * of_warp * ceil(busiest * s.num_warps / SCHEDULERS) / (clock * 1e3)

    in_flight = busiest * s.num_warps * min(s.num_stages - 1, turns * own) * slot_bytes(bits)
    flow = min(1.0, (in_flight / KNEE_BYTES) ** 0.5) * min(1.0, utilization * STREAM_BURST)
    load = max(1, w.m) * w.weight_bytes / (target.read_gbps * 1e3) / flow
    ends = max(1, w.m) * turns * END_US
    us = LAUNCH_US + ends + (load**NORM + compute**NORM) ** (1 / NORM)
    return Estimate(us, 1, load, compute, 0.0, ends, 0.0, LAUNCH_US, turns, min(1.0, utilization))
