"""The attention rules: what each program accepts on each target, and the schedules worth trying for a workload.

Decode (``attention_decode_bulk`` on sm_90a, ``attention_decode`` on sm_80 and later): see ``decode.py``. The others, append,
gather and prefill, are here, with the CPU's.

``attention_prefill`` (sm_90a, wgmma), ``attention_prefill_mma`` (sm_80 and later): a block of ``num_warps`` warps holds ``block_m`` rows of
queries of one head and streams keys and values by ``block_n`` rows through ``num_stages`` stages of each; ``block_k`` is the head's width.
``attention_append``, ``attention_gather``: a block moves one group of ``block_n`` tokens of one kv head.
On a CPU the parallel loop runs over sequences and kv heads (append, gather: over groups, prefill: over rows of queries), and a task works
on ``block_n`` tokens at a time; ``num_warps`` threads share the tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...layouts.kv import GRANULE, RESIDUAL
from ..gemm.rules import wgmma_registers
from ..schedule import Schedule
from ..target import Target
from .decode import ARCHES as DECODE_ARCHES
from .decode import (
    ASYNC,
    BULK,
    column_passes,
    decode_candidates,
    decode_legal,
    field_reasons,
    grid_blocks,
    resource_reasons,
    ring_bytes,
    shared_bytes,
    slot_bytes,
    workspace_words,
)
from .workload import AttentionWorkload

__all__ = [
    "ASYNC", "BULK", "PROGRAMS", "candidates", "column_passes", "grid_blocks", "legal", "prefill_shared_bytes", "programs_for",
    "ring_bytes", "shared_bytes", "slot_bytes", "workspace_words",
]  # fmt: skip

GPUS = ("sm_80", "sm_86", "sm_89", "sm_90a")
MOVERS = {"append": "attention_append", "gather": "attention_gather"}
MOVER_WARPS = {"append": (4,), "gather": (4, 8)}
WGMMA, MMA = "attention_prefill", "attention_prefill_mma"
WARP_ROWS = 16  # of queries that a warp of a prefill program holds
CPU_THREADS_MAX = 512
CPU_STEPS = (GRANULE, 32, 64, RESIDUAL)
CPU_ISAS = ("avx512", "avx2")

# Programs by op and what they run on, the preferred one of an arch first.
ARCHES: dict[str, dict[str, tuple[str, ...]]] = {
    "decode": {BULK: DECODE_ARCHES[BULK], ASYNC: DECODE_ARCHES[ASYNC], "attention_decode_cpu": ("cpu",)},
    "append": {MOVERS["append"]: GPUS, "attention_append_cpu": ("cpu",)},
    "gather": {MOVERS["gather"]: GPUS, "attention_gather_cpu": ("cpu",)},
    "prefill": {WGMMA: ("sm_90a",), MMA: GPUS, "attention_prefill_cpu": ("cpu",)},
}
PROGRAMS = tuple(name for programs in ARCHES.values() for name in programs)


@dataclass(frozen=True, slots=True)
class _PrefillRule:
    """``spare_registers`` is what running maxima, sums and addresses take of a computing thread's, ``fixed_smem`` bytes of barriers and
    alignment."""

    block_m: tuple[int, ...]
    block_n: tuple[int, ...]
    stages: tuple[int, int]
    spare_registers: int
    fixed_smem: int


_PREFILL = {
    WGMMA: _PrefillRule((64, 128, 192), (64, 80, 96, 128, 176), (1, 4), 32, 1024),
    MMA: _PrefillRule((64, 128), (32, 64, 128), (1, 4), 72, 256),
}
# What is tried: (block_m, block_n, num_stages), the likely winner first.
_PREFILL_TILES = {
    WGMMA: ((128, 128, 2), (128, 176, 2), (128, 80, 2), (128, 64, 2), (128, 64, 3), (192, 128, 2), (64, 64, 2)),
    MMA: ((128, 64, 2), (128, 32, 2), (64, 64, 2), (64, 32, 2), (128, 64, 1), (64, 64, 1), (64, 32, 1)),
}  # fmt: skip


def programs_for(op: str, arch: str) -> tuple[str, ...]:
    """The programs of ``op`` that run on ``arch``, the preferred one first; empty when there is none."""
    return tuple(name for name, arches in ARCHES[op].items() if arch in arches)


def legal(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target``, one sentence per reason; an empty list means that it can."""
    s, accepted = schedule, ARCHES[workload.op]
    if s.program not in accepted:
        return [f"program is {s.program!r}; accepted for {workload.op}: {', '.join(accepted)}."]
    if target.arch not in accepted[s.program]:
        return [f"{s.program} does not run on {target.arch}; accepted: {', '.join(accepted[s.program])}."]
    if target.arch == "cpu":
        return _cpu_legal(workload, s, target)
    if workload.op == "decode":
        return decode_legal(workload, s, target)
    return _prefill_legal(workload, s, target) if workload.op == "prefill" else _mover_legal(workload, s)


def candidates(workload: AttentionWorkload, target: Target) -> list[Schedule] | None:
    """Legal schedules worth measuring, without duplicates, always in the same order; None: no program runs there."""
    programs = programs_for(workload.op, target.arch)
    if not programs:
        return None
    if target.arch == "cpu":
        threads = min(max(1, target.units), CPU_THREADS_MAX)
        steps = CPU_STEPS if workload.op == "decode" else (RESIDUAL,)
        found = [Schedule(programs[0], step, 1, workload.head_dim, num_warps=threads) for step in steps]
    elif workload.op == "decode":
        found = decode_candidates(programs[0], workload, target)
    elif workload.op == "prefill":
        tiles = [
            Schedule(programs[0], block_n, block_m, workload.head_dim, stages, block_m // WARP_ROWS)
            for block_m, block_n, stages in _PREFILL_TILES[programs[0]]
        ]
        found = [s for s in tiles if s.block_m < max(2 * workload.q_len, 128)]  # no tile that is half empty
    else:
        found = [Schedule(programs[0], RESIDUAL, 1, workload.head_dim, num_warps=warps) for warps in MOVER_WARPS[workload.op]]
    return [s for s in found if not legal(workload, s, target)] or None


def prefill_shared_bytes(workload: AttentionWorkload, schedule: Schedule) -> int:
    """Shared memory of a block of a prefill program: the queries, whose place the output takes when it is stored, and the stages of keys
    and values."""
    s = schedule
    return 2 * workload.head_dim * (s.block_m + 2 * s.num_stages * s.block_n) + _PREFILL[s.program].fixed_smem


def _prefill_registers(workload: AttentionWorkload, schedule: Schedule) -> int:
    """Of a computing thread, whose warp holds 16 rows: fp32 outputs and scores, and the scores once more in 16 bits."""
    return workload.head_dim // 2 + schedule.block_n // 2 + schedule.block_n // 4


def _prefill_legal(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    s, rule = schedule, _PREFILL[schedule.program]
    reasons = field_reasons(
        workload, s, {"block_m": rule.block_m, "block_n": rule.block_n}, {"num_stages": rule.stages, "min_blocks": (1, 4)}
    )
    if s.num_warps * WARP_ROWS != s.block_m:
        reasons.append(f"num_warps is {s.num_warps}; accepted for block_m {s.block_m}: {s.block_m // WARP_ROWS} ({WARP_ROWS} rows a warp).")
    if reasons:
        return reasons
    needed, smem = _prefill_registers(workload, s) + rule.spare_registers, prefill_shared_bytes(workload, s)
    if s.program == WGMMA:  # its loading warpgroup gives registers to the others
        return resource_reasons(s, target, smem, needed, wgmma_registers(s)[1], extra_warps=4)
    return resource_reasons(s, target, smem, needed, 255)


def _mover_legal(workload: AttentionWorkload, schedule: Schedule) -> list[str]:
    sizes = {"block_m": (1,), "block_n": (RESIDUAL,), "num_warps": MOVER_WARPS[workload.op]}
    return field_reasons(workload, schedule, sizes, {"num_stages": (1, 1), "min_blocks": (1, 1)})


def _cpu_legal(workload: AttentionWorkload, schedule: Schedule, target: Target) -> list[str]:
    if not set(CPU_ISAS) & set(target.features):
        return [f"target {target.arch} has features {target.features}; the CPU programs need 'avx2' or 'avx512'."]
    return field_reasons(
        workload,
        schedule,
        {"block_m": (1,), "block_n": CPU_STEPS},
        {"num_stages": (1, 1), "min_blocks": (1, 1), "num_warps": (1, CPU_THREADS_MAX)},
    )
