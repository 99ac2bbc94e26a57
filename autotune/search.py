"""Which candidates are measured, in which order, and when to stop."""

from __future__ import annotations

from math import ceil

from ..schedules.operations import AnyWorkload, candidates
from ..schedules.ranker import Ranker, expected_us
from ..schedules.schedule import Schedule
from ..schedules.select import choose
from ..schedules.target import Target

MAX_PLACES = 40
# Of a workload's candidates that are measured when a ranker orders them. In 25 workloads measured
# on an H200, each left out in turn, the best of the ranker's first eight was the best of all that
# were measured; that of the analytic model's first eight up to 15 % slower.
RANKED_SHARE = 0.25
MIN_PLACES = 12
SHARE = 0.3  # of the places that one tile shape may take before the others had theirs: at large m, all orders of its tiles
IMPROVEMENT = 0.01  # a candidate faster by less than this counts as no progress


def places(options: int, ranked: bool) -> int:
    """How many of a workload's ``options`` candidates are measured; ``ranked``: a learned ranker
    has ordered them."""
    return min(MAX_PLACES, max(MIN_PLACES, ceil(RANKED_SHARE * options))) if ranked else MAX_PLACES


def shortlist(workload: AnyWorkload, target: Target, size: int | None = None, ranker: Ranker | None = None) -> list[Schedule] | None:
    """At most ``size`` candidates (None: ``places``) by ``ranker`` where it serves them, else by
    the analytic model, fastest first; None when no program runs on ``target``.

    The models are least sure of differences between tile shapes, so no shape takes more than SHARE
    of the places unless too few others are left."""
    options = candidates(workload, target)
    if options is None:
        return None
    if size is None:
        size = places(len(options), ranker is not None and ranker.serves(workload, options))
    us = dict(zip(options, expected_us(workload, options, target, ranker), strict=True))
    ranked = sorted(options, key=us.__getitem__)
    if len(ranked) <= size:
        return ranked
    taken: dict[tuple[str, int, int, int], int] = {}
    first, rest = [], []
    for schedule in ranked:
        shape = (schedule.program, schedule.block_n, schedule.block_m, schedule.num_warps)
        taken[shape] = taken.get(shape, 0) + 1
        (first if taken[shape] <= ceil(SHARE * size) else rest).append(schedule)
    chosen = set((first + rest)[:size])
    return [schedule for schedule in ranked if schedule in chosen]


def searched(workload: AnyWorkload, target: Target, size: int | None = None, ranker: Ranker | None = None) -> list[Schedule] | None:
    """What the tuner measures, in this order: what ``select`` would use untuned, then the
    ``shortlist``, whose last gives way if that is not of it. It can be a neighbour's, which no rule
    would try here (3456 x 1152, m = 48, H200: 5.3 us, where the best of the shortlist took 7.8)."""
    short = shortlist(workload, target, size, ranker)
    if not short:
        return short
    untuned = choose(workload, target)
    return short if untuned.source == "failed" else list(dict.fromkeys([untuned.schedule, *short]))[: len(short)]


class Patience:
    """Stops a search whose last ``limit`` measurements in a row brought no progress. Failed
    candidates (``us`` None) count like slow ones once something has worked."""

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
