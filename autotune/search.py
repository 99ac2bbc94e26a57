"""Which candidates are measured, in which order, and when to stop."""

from __future__ import annotations

from math import ceil

from ..schedules.cost import estimate
from ..schedules.rules.gemm import candidates
from ..schedules.schedule import Schedule
from ..schedules.target import Target
from ..schedules.workload import Workload

SHARE = 0.25  # of the places that one tile shape may take before the others had theirs
IMPROVEMENT = 0.01  # a candidate faster by less than this counts as no progress


def shortlist(workload: Workload, target: Target, size: int) -> list[Schedule] | None:
    """At most ``size`` candidates by the cost model, fastest first; None when no program runs on ``target``.

    The model is least sure of differences between tile shapes, so no shape takes more than a quarter of the places unless too few others
    are left."""
    options = candidates(workload, target)
    if options is None:
        return None
    ranked = sorted(options, key=lambda s: estimate(workload, s, target).us)
    if len(ranked) <= size:
        return ranked
    taken: dict[tuple[int, int, int], int] = {}
    first, rest = [], []
    for schedule in ranked:
        shape = (schedule.block_n, schedule.block_m, schedule.num_warps)
        taken[shape] = taken.get(shape, 0) + 1
        (first if taken[shape] <= ceil(SHARE * size) else rest).append(schedule)
    chosen = set((first + rest)[:size])
    return [schedule for schedule in ranked if schedule in chosen]


class Patience:
    """Stops a search whose last ``limit`` measurements in a row brought no progress. Failed candidates (``us`` None) count like slow ones
    once something has worked."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.best: float | None = None
        self.fruitless = 0

    def add(self, us: float | None) -> None:
        """Take note of one candidate's time."""
        if us is not None and (self.best is None or us < self.best * (1 - IMPROVEMENT)):
            self.best, self.fruitless = us, 0
        elif self.best is not None:
            self.fruitless += 1

    @property
    def exhausted(self) -> bool:
        return self.fruitless >= self.limit
