"""The analytic model of ``gemm_any``: how long a schedule should take, from counted instructions.

One warp and step of 256 k of 16 rows are 128 weights of each lane. Shared memory is busy longest:
64 loads of pairs of up to 4 bits, or 128 of single numbers, a cycle each; four for each load of 16
bytes a lane. Beside it byte permutations and selections, two a cycle. Constants that say "fitted"
are of 1,359 measurements at m = 1 and 8 on an H200, seven shapes, 3 to 8 bits: it errs by 13 %.
"""

from __future__ import annotations

from math import ceil, hypot

from ..rule import Estimate
from ..schedule import Schedule
from ..target import Target
from .any import ENTRY, PAIRED_BITS, STATIC_SMEM, copies, keeps_codebooks, plane_bytes, registers_needed, shared_bytes, steps, tables_bytes
from .cost import KNEE_BYTES, L2_SPEEDUP, LANES, STREAM_BURST
from .workload import Workload

LOOK_UPS = 64, 128  # loads from tables of a step of 16 rows: of pairs, of single numbers
SELECTIONS = 125, 300  # permutations, selections, rotations of it
KEPT = 16  # loads that are permutations of registers instead, where codebooks are kept
EXCHANGED = 80  # selections more, where two copies of a table make lanes exchange their rows
WIDE = 4  # cycles of 16 bytes a lane
STEP_CYCLES = 17  # of a step, beside; fitted
CHAIN_CYCLES = 530  # of 16 products, each of which waits for the one before and for look-ups: hidden by other warps; fitted
ALONE_US = 1.3  # a block's first planes, tables and sums, where it is alone on an SM; fitted
TOGETHER_US = 0.4  # and where others compute meanwhile; fitted
LAUNCH_US = 2.8  # with a grid's first planes; fitted
SPLIT_US = 3.1  # tickets and what blocks of a tile wait for; fitted


def resident_blocks(workload: Workload, schedule: Schedule, target: Target) -> int:
    """Blocks that an SM holds, whether they were asked for or not."""
    s, threads = schedule, schedule.num_warps * 32
    by_memory = target.smem_per_sm // (shared_bytes(workload, s, target) + STATIC_SMEM + target.BLOCK_SMEM)
    by_registers = target.REGISTERS_PER_SM // (threads * registers_needed(workload, s))
    return max(1, min(by_memory, by_registers, target.threads_per_sm // threads))


def any_estimate(workload: Workload, schedule: Schedule, target: Target) -> Estimate:
    """The model's expectation for ``schedule``; meant for legal ones."""
    w, s, bits, clock = workload, schedule, workload.format.bits, target.dequant_gops / target.units / LANES
    tiles, columns, m_blocks = s.block_n // 16, max(1, s.block_m // 8), ceil(max(w.m, 1) / s.block_m)
    rows = min(max(w.m, 1), s.block_m)
    blocks = ceil(w.n / s.block_n) * m_blocks * s.split_k
    busiest = ceil(blocks / target.units)
    resident = min(resident_blocks(w, s, target), busiest)
    waves, utilization = ceil(busiest / resident), blocks / (busiest * target.units)
    turns = ceil(ceil(steps(w) / s.split_k) / s.num_warps)
    short = (turns * s.num_warps * s.split_k / steps(w)) ** (1 / resident)  # in its last turn some warps have no step

    in_flight = resident * s.num_warps * min(s.num_stages, turns) * plane_bytes(w, s)
    flow = min(1.0, (in_flight / KNEE_BYTES) ** 0.5) * min(1.0, utilization * STREAM_BURST)
    x = ceil(w.n / s.block_n) * rows * m_blocks * w.k * 2
    load = (w.weight_bytes * (1 + (m_blocks - 1) / L2_SPEEDUP) + x / L2_SPEEDUP) / (target.read_gbps * 1e3) / flow

    paired, kept = bits <= PAIRED_BITS, keeps_codebooks(w, s)
    x_reads = 8 * columns * ceil(min(s.block_m, 8) / 2)  # once for all tiles of rows
    cycles = tiles * (LOOK_UPS[not paired] - KEPT * kept + WIDE * bits) + x_reads + WIDE * rows
    selections = SELECTIONS[not paired] + KEPT * kept + EXCHANGED * (copies(w, s, target) == 2)
    busy = (cycles, tiles * selections / 2, tiles * CHAIN_CYCLES / (resident * s.num_warps))
    cycles = max(busy) + STEP_CYCLES
    entries = tables_bytes(w, s, target) // ENTRY * 256 / 128  # cycles that it takes to store them
    compute = busiest * (steps(w) / s.split_k * cycles * short + entries) / (clock * 1e3)

    ends = busiest / resident * (ALONE_US if resident == 1 else TOGETHER_US)
    split = SPLIT_US if s.split_k > 1 else 0.0
    us = LAUNCH_US + ends + hypot(load, compute) + split
    return Estimate(us, 1, load, compute, 0.0, ends, split, LAUNCH_US, waves, utilization)
