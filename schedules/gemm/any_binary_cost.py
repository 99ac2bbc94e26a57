"""The analytic model of ``gemm_any_binary``: how long a schedule should take, from counted instructions.

One warp and step of 256 k of 16 rows are three products for each set of planes, six cycles each,
and between them what makes their operands: both share the way to the registers, and nothing hides
one behind the other. Constants that say "fitted" are of 134 measurements on an H200, seven shapes, 3
and 4 bits: it errs by 5 %.
"""

from __future__ import annotations

from math import ceil

from ..rule import Estimate
from ..schedule import Schedule
from ..target import Target
from .any import steps
from .any_binary import BITS_OF_X, block_tiles, blocks, fill, shares, slot_bytes
from .cost import KNEE_BYTES, LANES, STREAM_BURST
from .workload import Workload

PRODUCT_CYCLES = 6.0  # of a scheduler
OTHER_CYCLES = 1.15  # of another instruction; fitted
SCHEDULERS = 4  # of an SM
SELECTED = {2: 8, 3: 24, 4: 60}  # instructions that rotate planes and make sets of them
STEP_INSTRUCTIONS = 100  # as many take as long as a step's copies, loads and addresses, and waiting for these; fitted
END_INSTRUCTIONS = {2: 130, 3: 250, 4: 520}  # of a tile: codebooks, counts to sums
X_INSTRUCTIONS = 340  # as many take as long as 256 numbers do to become bits; fitted
LAUNCH_US = 2.4  # with x and first planes; fitted
NORM = 3.5  # how little loading and computing hinder each other; fitted


def any_binary_estimate(workload: Workload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones."""
    w, s, bits, clock = workload, schedule, workload.format.bits, target.dequant_gops / target.units / LANES
    tiles, there = block_tiles(w, s), blocks(w, s, target)
    turns, own, rows = ceil(tiles / there), ceil(steps(w) / shares(s)), max(1, w.m)  # turns of a block, steps of a warp for a tile
    utilization = fill(w, s, target)

    step = ((1 << bits) - 1) * BITS_OF_X // 8 * PRODUCT_CYCLES + (SELECTED[bits] + STEP_INSTRUCTIONS) * OTHER_CYCLES
    ends, x = END_INSTRUCTIONS[bits] * OTHER_CYCLES, ceil(steps(w) / s.num_warps) * X_INSTRUCTIONS * OTHER_CYCLES
    compute = rows * (turns * (own * step + ends) + x) * ceil(s.num_warps / SCHEDULERS) / (clock * 1e3)

    in_flight = s.num_warps * min(s.num_stages - 1, turns * own) * slot_bytes(bits)
    flow = min(1.0, (in_flight / KNEE_BYTES) ** 0.5) * min(1.0, utilization * STREAM_BURST)
    load = rows * w.weight_bytes / (target.read_gbps * 1e3) / flow
    us = LAUNCH_US + (load**NORM + compute**NORM) ** (1 / NORM)
    return Estimate(us, 1, load, compute, 0.0, 0.0, 0.0, LAUNCH_US, turns, utilization)
