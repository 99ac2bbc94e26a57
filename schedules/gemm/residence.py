"""Whether the blocks that a schedule wants on an SM fit on one."""

from __future__ import annotations

from ..schedule import Schedule
from ..target import Target


def crowding(schedule: Schedule, smem: int, threads: int, target: Target, fewer: str) -> list[str]:
    """Why ``min_blocks`` blocks of ``threads`` threads and ``smem`` bytes of shared memory do not: sentences,
    empty when they do. ``fewer`` are the fields that would help."""
    blocks, reasons = schedule.min_blocks, []
    resident = blocks * (smem + target.BLOCK_SMEM)
    if resident > target.smem_per_sm or smem > target.smem:
        reasons.append(
            f"{blocks} blocks need {resident} bytes of an SM's shared memory, {target.smem_per_sm} are there; use fewer {fewer}."
        )
    if blocks * threads > target.threads_per_sm:
        reasons.append(f"{blocks} blocks have {blocks * threads} threads, an SM holds {target.threads_per_sm}.")
    return reasons
