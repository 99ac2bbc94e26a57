"""A shape's portfolio: a few kernels that together serve every m, and where one hands over to the
next.

Of each kernel a time is known as a function of m: what was measured, and between and beyond that
the expected time (a ranker's or the analytic model's), multiplied by how much longer than expected
its neighbouring measurements took. Expected times are steps: they change where a kernel's number of
row tiles does, so a table has borders there, and between them one kernel, the one with the least
time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from types import MappingProxyType
from typing import Any

from .schedule import Schedule

MOST_KERNELS = 12  # an m between two borders finds a kernel of its size; the usual m of a server need six to eight of them
MOST_TILES = 16  # row tiles of a kernel up to which each further one is a border of the table; the last m of a table is at its largest's

# microseconds expected of a schedule at m rows
Expected = Callable[[Schedule, int], float]


@dataclass(frozen=True, slots=True)
class Portfolio:
    """``serving[i]`` serves every m up to ``bounds[i]`` that ``serving[i - 1]`` does not, and in
    ``us[i]`` microseconds at the bound, as far as is known; the last one also serves every larger
    m. No two neighbours are equal."""

    bounds: tuple[int, ...]
    serving: tuple[Schedule, ...]
    us: tuple[float, ...]

    def at(self, m: int) -> Schedule:
        """The schedule for ``m`` >= 1 rows."""
        return self.serving[self.index(m)]

    def index(self, m: int) -> int:
        """Which part of the table ``m`` falls into."""
        return min(bisect_left(self.bounds, m), len(self.bounds) - 1)

    def to_json(self) -> dict[str, Any]:
        return {"bounds": self.bounds, "serving": [schedule.to_json() for schedule in self.serving], "us": self.us}

    @classmethod
    def from_json(cls, data: Any) -> Portfolio:
        """The inverse of ``to_json``. Raises ``KeyError``, ``TypeError`` and ``ValueError`` for what is none."""
        found = cls(tuple(data["bounds"]), tuple(map(Schedule.from_json, data["serving"])), tuple(data["us"]))
        if not len(found.bounds) == len(found.serving) == len(found.us) > 0:
            raise ValueError(
                f"{len(found.bounds)} bounds, {len(found.serving)} schedules, {len(found.us)} times; accepted: as many, and some"
            )
        return found

    @property
    def kernels(self) -> tuple[Schedule, ...]:
        """Every schedule of the table once, in the order of m."""
        return tuple(dict.fromkeys(self.serving))


def calibrated(expected: Expected, measured: Mapping[Schedule, Mapping[int, float]]) -> Expected:
    """``expected``, but as slow as ``measured`` (microseconds by m) says: the ratio of measured and
    expected time, interpolated in log m and constant outside, is applied, and no m takes longer
    than was measured for a larger one. A schedule without measurements takes the median of the
    ratios of those that have some."""
    ratios = {s: sorted((log(m), log(us / expected(s, m))) for m, us in points.items()) for s, points in measured.items() if points}
    all_ratios = sorted(r for points in ratios.values() for _, r in points)
    usual = all_ratios[len(all_ratios) // 2] if all_ratios else 0.0

    def time(schedule: Schedule, m: int) -> float:
        points = ratios.get(schedule)
        most = min((us for larger, us in measured.get(schedule, {}).items() if larger >= m), default=inf)
        return min(most, expected(schedule, m) * exp(_interpolated(points, log(m)) if points else usual))

    return time


def borders(schedules: Iterable[Schedule]) -> list[int]:
    """The largest m of each number of row tiles of each schedule, ascending."""
    return sorted({s.block_m * tiles for s in schedules for tiles in range(1, MOST_TILES + 1)})


def table(schedules: Sequence[Schedule], expected: Expected, tuned: Mapping[int, Schedule] = MappingProxyType({})) -> Portfolio:
    """The portfolio of at most ``MOST_KERNELS`` of ``schedules`` by their ``expected`` times; of
    equally fast ones the first is taken. Where m is ``tuned``, the schedule given there serves it,
    whatever is expected, besides those; if it is none of ``schedules``, it serves nothing else.

    While there are too many, the one goes whose loss costs least: the sum over the table of how
    much longer the next best takes. Raises ``ValueError`` without schedules."""
    kept = list(dict.fromkeys(schedules))
    if not kept:
        raise ValueError("a portfolio of no schedules; accepted: at least one")
    bounds = sorted({*borders(kept), *tuned})
    us = {s: [expected(s, m) for m in bounds] for s in kept}
    least = [min(times) for times in zip(*(us[s] for s in kept), strict=True)]
    kept = [s for s in kept if any(time <= fastest for time, fastest in zip(us[s], least, strict=True))]
    while len(kept) > MOST_KERNELS:
        losses = _losses(kept, us, bounds)
        kept.remove(min(kept, key=losses.__getitem__))
    offered = set(us)
    us |= {s: [expected(s, m) for m in bounds] for s in tuned.values() if s not in us}
    competing = list(dict.fromkeys([*kept, *(s for s in tuned.values() if s in offered)]))
    best = [tuned.get(m) or min(competing, key=lambda s: us[s][i]) for i, m in enumerate(bounds)]
    last = [i for i in range(len(bounds)) if i + 1 == len(bounds) or best[i + 1] != best[i]]
    return Portfolio(tuple(bounds[i] for i in last), tuple(best[i] for i in last), tuple(us[best[i]][i] for i in last))


def with_points(shape: Portfolio, points: Mapping[int, tuple[Schedule, float]]) -> Portfolio:
    """``shape``, but at just the m of ``points`` the schedule given there serves, in as many
    microseconds."""
    last = shape.bounds[-1]
    bounds = sorted({*shape.bounds, *points, *(m - 1 for m in points if m > 1), *(m + 1 for m in points if m >= last)})
    serving = [points[m][0] if m in points else shape.at(m) for m in bounds]
    us = [points[m][1] if m in points else shape.us[shape.index(m)] for m in bounds]
    kept = [i for i in range(len(bounds)) if i + 1 == len(bounds) or serving[i + 1] != serving[i]]
    return Portfolio(tuple(bounds[i] for i in kept), tuple(serving[i] for i in kept), tuple(us[i] for i in kept))


def _losses(kept: Sequence[Schedule], us: Mapping[Schedule, Sequence[float]], bounds: Sequence[int]) -> dict[Schedule, float]:
    """What is lost without each of ``kept``: the logarithm of the slowdown, over log m, wherever it
    is the fastest."""
    losses, before = [0.0] * len(kept), 0
    times = [us[s] for s in kept]
    for i, bound in enumerate(bounds):
        fastest, second = sorted(range(len(kept)), key=lambda j: times[j][i])[:2]
        losses[fastest] += log(times[second][i] / times[fastest][i]) * log((bound + 1) / (before + 1))
        before = bound
    return dict(zip(kept, losses, strict=True))


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The line through ``points`` (ascending in x) at ``x``; outside them the nearest one's value."""
    after = bisect_left(points, (x,))
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
