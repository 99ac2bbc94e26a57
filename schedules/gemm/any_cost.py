"""The analytic model of ``gemm_any``: how long a schedule should take, from counted instructions.

One warp and step of 256 k of 16 rows are 128 look-ups of a weight by each lane. Counted in the code
of sm_90a: of up to 4 bits 64 loads of pairs with 64 byte permutations for their addresses and about
70 instructions that make codes; of more bits 128 loads, 192 permutations and about 250. A load of
16 bytes a lane takes shared memory four cycles, all others one. Nothing here is fitted yet.
"""

from __future__ import annotations

from math import ceil, hypot

from ..rule import Estimate
from ..schedule import Schedule
from ..target import Target
from .any import ENTRY, PAIRED_BITS, plane_bytes, steps, table_bytes
from .cost import ISSUE, KNEE_BYTES, L2_SPEEDUP, LANES, STREAM_BURST, STREAM_LAUNCH_US, STREAM_SPLIT_US
from .workload import Workload

LOOK_UPS = 64, 128  # loads from tables of a step of 16 rows: of pairs, of single codes
ISSUED = 215, 600  # instructions of it
SETUP = 250  # a warp's instructions before its first step and after its last
FILL = 24  # instructions for an entry of a table of each of a warp's lanes
WAVE_US = 1.6  # the first planes of a block, its tables and its sums, where no other block hides them
SHARED_US = 0.5  # and where one does


def any_estimate(workload: Workload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones."""
    w, s, bits, clock = workload, schedule, workload.format.bits, target.dequant_gops / target.units / LANES
    tiles, columns, m_blocks = s.block_n // 16, max(1, s.block_m // 8), -(-max(w.m, 1) // s.block_m)
    blocks = -(-w.n // s.block_n) * m_blocks * s.split_k
    places = target.units * s.min_blocks
    waves, busiest = -(-blocks // places), -(-blocks // target.units)
    utilization = blocks / (busiest * target.units)
    turns = ceil(ceil(steps(w) / s.split_k) / s.num_warps)
    full = steps(w) / s.split_k / (turns * s.num_warps)  # of the last turn some warps have no step

    in_flight = min(s.min_blocks, busiest) * s.num_warps * min(s.num_stages, turns) * plane_bytes(w, s)
    flow = min(1.0, (in_flight / KNEE_BYTES) ** 0.5) * min(1.0, utilization * full * STREAM_BURST)
    x = -(-w.n // s.block_n) * min(max(w.m, 1), s.block_m) * m_blocks * w.k * 2
    load = (w.weight_bytes * (1 + (m_blocks - 1) / L2_SPEEDUP) + x / L2_SPEEDUP) / (target.read_gbps * 1e3) / flow

    paired = bits <= PAIRED_BITS
    x_loads = 8 * columns * (1 if tiles > 1 and columns == 1 else tiles)
    wide = tiles * bits + x_loads + (bits * tiles + columns * 4) / 2  # read, and brought by the copies
    issued = tiles * ISSUED[not paired] + tiles * 16 * (columns - 1) + 2 * x_loads + 40
    entries = tiles * table_bytes(bits) / ENTRY * 16 / 32  # of a warp's lanes, one each
    of_block = s.num_warps * (turns * full * issued + SETUP) + entries * FILL
    shared = s.num_warps * turns * full * (tiles * LOOK_UPS[not paired] + 4 * wide) + 4 * entries
    compute = busiest * max(of_block / (4 * ISSUE), shared / ISSUE) / (clock * 1e3)

    ends = WAVE_US + (waves - 1) * (WAVE_US if s.min_blocks == 1 else SHARED_US)
    split = STREAM_SPLIT_US * s.split_k if s.split_k > 1 else 0.0
    us = STREAM_LAUNCH_US + ends + hypot(load, compute) + split
    return Estimate(us, 1, load, compute, 0.0, ends, split, STREAM_LAUNCH_US, waves, utilization)
