"""The attention rules: what each program accepts on each target, and the schedules worth trying for
a workload.

Decode (``attention_decode_bulk`` on sm_90a, ``attention_decode`` on sm_80 and later): see
``decode.py``. The others, append, pack, gather and prefill, are here, with the CPU's.

``attention_prefill`` (sm_90a, wgmma), ``attention_prefill_mma`` (sm_80 and later): a block of
``num_warps`` warps holds ``block_m`` rows of queries of one head and streams keys and values by
``block_n`` rows through ``num_stages`` stages of each; ``block_k`` is the head's width.
``attention_append``, ``attention_pack``, ``attention_gather``: a block moves groups of ``block_n``
tokens of one kv head. On a CPU the parallel loop runs over sequences and kv heads (gather: over
groups, pack: over layers, too, prefill: over rows of queries), and a task works on ``block_n``
tokens at a time; ``num_warps`` threads share the tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...layouts.kv import GRANULE, RESIDUAL
from ..gemm.rules import WGMMA_SPARE
from ..schedule import Schedule
from ..target import Target
from .decode import field_reasons, resource_reasons
from .workload import AttentionWorkload

GPUS = ("sm_80", "sm_86", "sm_89", "sm_90a")
MOVERS = {op: f"attention_{op}" for op in ("append", "pack", "gather")}
MOVER_WARPS = {"append": (8, 16), "pack": (8,), "gather": (4, 8)}
WIDEST_APART = 128  # channels of a head whose keys and values find room in shared memory side by side
WGMMA, MMA = "attention_prefill", "attention_prefill_mma"
LOADING_WARPS = 4  # of a block of the program with wgmma, beside the computing ones
LOADING_REGISTERS = 24  # of a loading thread: the fewest that setmaxnreg knows
MOST_REGISTERS = 240  # of a computing thread of that program, in setmaxnreg's steps of 8
WARP_ROWS = 16  # of queries that a warp of a prefill program holds
CPU_THREADS_MAX = 512
CPU_STEPS = (GRANULE, 32, 64, RESIDUAL)
CPU_ISAS = ("avx512", "avx2")


@dataclass(frozen=True, slots=True)
class _PrefillRule:
    """``spare_registers`` is what running maxima, sums and addresses take of a computing thread's,
    ``cap_registers`` what a soft cap takes besides (fewer: schedules spill, compiled for sm_90a),
    ``fixed_smem`` bytes of barriers and alignment."""

    block_m: tuple[int, ...]
    block_n: tuple[int, ...]
    stages: tuple[int, int]
    spare_registers: int
    cap_registers: int
    fixed_smem: int


_PREFILL = {
    WGMMA: _PrefillRule((64, 128, 192), (64, 80, 96, 128, 176), (1, 4), 40, 8, 1024),
    MMA: _PrefillRule((64, 128), (32, 64, 128), (1, 4), 72, 0, 256),
}
# What is tried: (block_m, block_n, num_stages), the likely winner first.
_PREFILL_TILES = {
    WGMMA: ((128, 128, 2), (128, 176, 2), (128, 80, 2), (128, 64, 2), (128, 64, 3), (192, 128, 2), (64, 64, 2)),
    MMA: ((128, 64, 2), (128, 32, 2), (64, 64, 2), (64, 32, 2), (128, 64, 1), (64, 64, 1), (64, 32, 1)),
}  # fmt: skip


def prefill_candidates(program: str, workload: AttentionWorkload, target: Target) -> list[Schedule]:
    """Legal schedules worth measuring, no tile that is half empty."""
    tiles = [
        Schedule(program, block_n, block_m, workload.head_dim, stages, block_m // WARP_ROWS)
        for block_m, block_n, stages in _PREFILL_TILES[program]
    ]
    return [s for s in tiles if s.block_m < max(2 * workload.q_len, 128) and not prefill_legal(workload, s, target)]


def mover_candidates(workload: AttentionWorkload, target: Target) -> list[Schedule]:
    """Schedules of append, pack and gather worth measuring."""
    found = [Schedule(MOVERS[workload.op], RESIDUAL, 1, workload.head_dim, num_warps=warps) for warps in MOVER_WARPS[workload.op]]
    return [s for s in found if not mover_legal(workload, s, target)]


def cpu_candidates(workload: AttentionWorkload, target: Target) -> list[Schedule]:
    """Legal schedules of a CPU's programs worth measuring."""
    threads = min(max(1, target.units), CPU_THREADS_MAX)
    steps = CPU_STEPS if workload.op == "decode" else (RESIDUAL,)
    found = [Schedule(f"attention_{workload.op}_cpu", step, 1, workload.head_dim, num_warps=threads) for step in steps]
    return [s for s in found if not cpu_legal(workload, s, target)]


def prefill_shared_bytes(workload: AttentionWorkload, schedule: Schedule) -> int:
    """Shared memory of a block of a prefill program: the queries, whose place the output takes when
    it is stored, and the stages of keys and values."""
    s = schedule
    return 2 * workload.head_dim * (s.block_m + 2 * s.num_stages * s.block_n) + _PREFILL[s.program].fixed_smem


def tile_registers(workload: AttentionWorkload, schedule: Schedule) -> int:
    """Of a computing thread, whose warp holds 16 rows: fp32 outputs and scores, and the scores once
    more in 16 bits."""
    return workload.head_dim // 2 + schedule.block_n // 2 + schedule.block_n // 4


def launch_registers(schedule: Schedule) -> int:
    """Of every thread of the program with wgmma when its block starts: an even share, of
    ``min_blocks`` blocks an SM."""
    threads = (LOADING_WARPS + schedule.num_warps) * 32
    return min(255, Target.REGISTERS_PER_SM // (threads * schedule.min_blocks)) // 8 * 8


def prefill_registers(schedule: Schedule) -> tuple[int, int]:
    """(loading thread's, computing thread's) registers of the program with wgmma: the first give up
    most of what a launch gives to both, the others take it."""
    given = launch_registers(schedule) * (LOADING_WARPS + schedule.num_warps)
    free = given - LOADING_REGISTERS * LOADING_WARPS
    return LOADING_REGISTERS, min(MOST_REGISTERS, free // schedule.num_warps // 8 * 8)


def prefill_legal(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    s, rule = schedule, _PREFILL[schedule.program]
    reasons = field_reasons(
        workload, s, {"block_m": rule.block_m, "block_n": rule.block_n}, {"num_stages": rule.stages, "min_blocks": (1, 4)}
    )
    if s.num_warps * WARP_ROWS != s.block_m:
        reasons.append(f"num_warps is {s.num_warps}; accepted for block_m {s.block_m}: {s.block_m // WARP_ROWS} ({WARP_ROWS} rows a warp).")
    if reasons:
        return reasons
    needed = tile_registers(workload, s) + rule.spare_registers + (rule.cap_registers if workload.soft_cap else 0)
    smem = prefill_shared_bytes(workload, s)
    if s.program != WGMMA:
        return resource_reasons(s, target, smem, needed, 255)
    share, one = launch_registers(s), max(workload.head_dim, s.block_n) // 2 + WGMMA_SPARE
    if share < one:
        reasons.append(
            f"a launch gives a thread {share} registers, one wgmma of {max(workload.head_dim, s.block_n)} columns takes {one}; "
            "use fewer min_blocks or a smaller block_m."
        )
    return reasons + resource_reasons(s, target, smem, needed, prefill_registers(s)[1], extra_warps=LOADING_WARPS)


def mover_legal(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    sizes = {"block_m": (1,), "block_n": (RESIDUAL,), "num_warps": MOVER_WARPS[workload.op]}
    reasons = field_reasons(workload, schedule, sizes, {})
    if not reasons and workload.op == "append" and schedule.num_warps > MOVER_WARPS["append"][0] and workload.head_dim > WIDEST_APART:
        reasons.append(f"num_warps is {schedule.num_warps}; accepted for head_dim above {WIDEST_APART}: {MOVER_WARPS['append'][0]}.")
    return reasons


def cpu_legal(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    if not set(CPU_ISAS) & set(target.features):
        return [f"target {target.arch} has features {target.features}; the CPU programs need 'avx2' or 'avx512'."]
    return field_reasons(
        workload,
        schedule,
        {"block_m": (1,), "block_n": CPU_STEPS},
        {"num_warps": (1, CPU_THREADS_MAX)},
    )
