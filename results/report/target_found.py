"""What the rows say of a target: its figure over all of its points, the worst of them, and the points that no
process has measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .markdown import short_commit
from .problems import geometric_mean, newest_beside
from .target_times import Time, times_of
from .targets import FAST, OVER, Target, Where

Place = tuple[Where, int]
Process = dict[tuple[str, int], Time]  # by series and m
Processes = dict[Where, dict[str, Process]]  # by run, the newest last


@dataclass(frozen=True, slots=True)
class Point:
    """A target's figure at a place; ``beside``: the series that gave it, "" where it is a time alone."""

    place: Place
    figure: float
    beside: str
    commit: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """``target`` on ``gpu``: a point of each place that was measured, and the other places."""

    target: Target
    gpu: str
    points: tuple[Point, ...]
    missing: tuple[Place, ...]

    @property
    def at_least(self) -> bool:
        return self.target.figure == FAST

    @property
    def worst(self) -> Point:
        """Of one or more points."""
        return _worst(self.target, self.points)

    @property
    def figure(self) -> float | None:
        """What is held against the target, of the points that there are; None without any."""
        if not self.points:
            return None
        return self.worst.figure if self.target.every else geometric_mean(point.figure for point in self.points)

    def keeps(self, bar: float | None) -> bool:
        """Whether the figure, of the points that there are, keeps ``bar``; none does without points, nor is one kept that is None."""
        figure = self.figure
        if bar is None or figure is None:
            return False
        return figure >= bar if self.at_least else figure <= bar

    @property
    def met(self) -> bool:
        """Whether every place was measured and the figure keeps what is asked."""
        return not self.missing and self.keeps(self.target.asked)

    @property
    def short(self) -> float:
        """The share by which the figure, of one or more points, is on the wrong side of what is asked."""
        figure, asked = self.figure, self.target.asked
        assert figure is not None, "there are no points"
        return 1 - figure / asked if self.at_least else figure / asked - 1

    @property
    def commits(self) -> list[str]:
        """Short commits of tilebit's rows."""
        return sorted({short_commit(point.commit) or "unknown" for point in self.points})


def found_of(targets: Iterable[Target], rows: Path) -> list[Found]:
    """Each target on each of its devices, from the rows of all studies under ``rows``. Raises ``ValueError``
    for a row that cannot be read."""
    held: dict[str, dict[str, Processes]] = {}  # by study and device
    found = []
    for target in targets:
        if target.study not in held:
            held[target.study] = _processes(times_of(target.study, rows))
        found += [_found(target, gpu, held[target.study].get(gpu, {})) for gpu in target.gpus]
    return found


def _processes(times: Iterable[Time]) -> dict[str, Processes]:
    """By device; of what a process timed twice, the later time."""
    devices: dict[str, Processes] = {}
    for time in times:
        runs = devices.setdefault(time.gpu, {}).setdefault(time.where, {})
        runs.setdefault(time.run, {})[time.series, time.m] = time
    return devices


def _found(target: Target, gpu: str, processes: Processes) -> Found:
    points, missing = [], []
    for where in target.where:
        runs = list(processes.get(where, {}).values())
        for m in target.ms:
            if found := list(_points(target, where, m, runs)):
                points.append(_worst(target, found))
            else:
                missing.append((where, m))
    return Found(target, gpu, tuple(points), tuple(missing))


def _worst(target: Target, points: Iterable[Point]) -> Point:
    pick = min if target.figure == FAST else max
    return pick(points, key=lambda point: point.figure)


def _points(target: Target, where: Where, m: int, runs: list[Process]) -> Iterator[Point]:
    """The figure beside each of the others, by the newest process that timed both; none when one of them is missing."""
    ours, against = (target.ours, m), target.against
    if against is None:
        if timed := [run[ours] for run in runs if ours in run]:
            yield Point((where, m), timed[-1].us / 1e3, "", timed[-1].commit)
        return
    if against.elsewhere:
        runs = [{key: time for run in runs for key, time in run.items()}]
    pairs = newest_beside(runs, ours)
    others = [(series, against.m or m) for series in against.series]
    if any(other not in pairs for other in others):
        return
    for other in others:
        own, theirs = pairs[other]
        ratio = theirs.us / own.us if target.figure == FAST else own.us / theirs.us
        yield Point((where, m), ratio / (OVER[target.over](where, m) if target.over else 1.0), theirs.series, own.commit)
