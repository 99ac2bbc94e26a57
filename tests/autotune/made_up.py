"""A made-up GPU: its times are the analytic model's, bent by rules it does not know, for a ranker to learn."""

from __future__ import annotations

from math import log2

from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.ranker import kind
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name

DEVICE = target_from_name("sm_90a")
SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336))
WORKLOADS = tuple(Workload(m, n, k) for n, k in SHAPES for m in (1, 8, 16, 32, 256))


def made_up_us(workload: Workload, schedule: Schedule, target: Target = DEVICE) -> float:
    """Narrow tiles and single blocks are faster here than the model says, splits slower."""
    bend = (
        0.25 * log2(schedule.block_n / 64)
        + 0.3 * (schedule.min_blocks > 1)
        + 0.2 * log2(schedule.split_k)
        - 0.1 * (schedule.num_stages > 4)
    )
    return estimate(workload, schedule, target).us * 2.0**bend


def made_up_records(workloads=WORKLOADS, target: Target = DEVICE) -> list[TuningRecord]:
    """Records of every second candidate of each kind."""
    found = []
    for w in workloads:
        kinds: dict[str, list[Schedule]] = {}
        for s in candidates(w, target) or []:
            kinds.setdefault(kind(w, s), []).append(s)
        measured = [s for schedules in kinds.values() for s in schedules[::2]]
        found += [TuningRecord(w, s, target.name, target.arch, target.units, us=made_up_us(w, s, target)) for s in measured]
    return found
