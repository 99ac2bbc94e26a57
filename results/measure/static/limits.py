"""What a target allows and what memory wants: blocks that share an SM, bytes in flight, and the
rates that instructions are held against.

**Bytes in flight.** By Little's law a memory of rate R and latency L is kept busy by R * L bytes on their way. The latency is the one under
load, taken from the one measurement there is: on the H200 reads stop getting faster from ``cost.KNEE_BYTES`` = 64 KiB in flight per SM on,
which at its read rate is 1.8 us. (An idle memory answers in less than half of that.) The same latency is assumed for every target.

**Rates.** Four instructions a clock and SM can be issued, one by each scheduler; LOP3, SHF and PRMT go to a pipe that takes half as many
(CUDA C++ Programming Guide, "Arithmetic Instructions": 64 lanes a clock and SM). The clock is the one behind ``Target.dequant_gops``.
"""

from __future__ import annotations

from tilebit.layouts.formats import PER_CHANNEL
from tilebit.schedules.gemm import stream as gemm_stream
from tilebit.schedules.gemm.cost import KNEE_BYTES
from tilebit.schedules.gemm.rules import persistent
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name

REGISTER_UNIT = 256  # registers are given to warps in units of this many
SMEM_UNIT = 128
SCHEDULERS = 4  # of an SM, each with a quarter of its registers
ISSUE_SLOTS = SCHEDULERS  # warp instructions that an SM issues per clock
BIT_SLOTS = 2  # of which LOP3, SHF and PRMT may be
LANE_OPERATIONS = 128  # of `Target.dequant_gops` per SM and clock: 64 lanes of two halves


def blocks_per_sm(registers: int, smem: int, threads: int, target: Target) -> int:
    """Blocks of a kernel that fit on one SM, from its ``registers`` a thread, bytes of shared
    memory and threads a block."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = target.REGISTERS_PER_SM // SCHEDULERS // max(per_warp, 1) * SCHEDULERS // warps
    by_smem = target.smem_per_sm // (-(-(smem + target.BLOCK_SMEM) // SMEM_UNIT) * SMEM_UNIT)
    return min(by_registers, by_smem, target.threads_per_sm // 32 // warps, target.blocks_per_sm)


def grid_blocks(workload: Workload, schedule: Schedule, places: int) -> int:
    """Blocks of the launch; ``places`` is what the device holds at once, which a persistent grid
    is."""
    if persistent(schedule):
        return places
    tiles = -(-workload.n // schedule.block_n) * -(-max(workload.m, 1) // schedule.block_m)
    return tiles * schedule.split_k


def bytes_in_flight(workload: Workload, schedule: Schedule) -> int:
    """Most bytes of weights, scales and zero points that one block has requested and not yet
    received: every stage of its pipeline, just before the oldest arrives. x is left out: all blocks
    read the same, from the last cache.

    The small-m programs have a pipeline for each group of warps that share k."""
    s, f = schedule, workload.format
    pipelines = gemm_stream.rings(s) if s.program in gemm_stream.ARCHES else 1
    groups = 0 if f.group_size == PER_CHANNEL else -(-s.block_k // f.group_size)
    stage = s.block_n * s.block_k * f.bits // 8 + s.block_n * groups * (2 if f.symmetric else 4)
    steps = -(-workload.k // (s.block_k * s.split_k * pipelines))
    return pipelines * min(s.num_stages, steps) * stage


def bytes_needed(target: Target) -> float:
    """Bytes per SM that must be on their way to read at the target's full rate."""
    return latency_us() * target.read_gbps * 1e3 / target.units


def latency_us() -> float:
    """The assumed latency of memory under load, in microseconds."""
    measured = target_from_name("sm_90a")
    return KNEE_BYTES * measured.units / (measured.read_gbps * 1e3)


def clock_ghz(target: Target) -> float:
    return target.dequant_gops / (target.units * LANE_OPERATIONS)


def issue_us(instructions: float, target: Target, slots: int = ISSUE_SLOTS) -> float:
    """Microseconds in which all SMs together issue so many warp instructions, ``slots`` a clock
    each."""
    return instructions / (target.units * slots * clock_ghz(target) * 1e3)


def floor_us(workload: Workload, target: Target) -> float:
    """The longer of moving the workload's bytes once and computing its operations, at the target's
    rates."""
    return max(workload.bytes / (target.read_gbps * 1e3), workload.flops / (target.mma_tflops * 1e6))
