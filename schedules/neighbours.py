"""What measurements say something about a workload: its own, its twins', and those of workloads near it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from .distance import MAX_DISTANCE, distance
from .operations import AnyWorkload, alone, operation
from .records import TuningRecord, latest
from .schedule import Schedule
from .target import Target

GOOD_THERE = 1.05  # of another workload counts what was about the fastest there
# Fields of a product's workload that say what is done beside it: what was measured in a step says
# nothing about twins that do other things there.
BESIDE = ("width", "residual", "gate", "norm")


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Records as choosing asks for them: ``of`` each workload the last of each schedule and device,
    and the ``good`` ones, which were about the fastest of their workload and device, one list for
    each two: those of an (arch, operation, class of numbers), as no others say anything about each
    other."""

    of: Mapping[AnyWorkload, Sequence[TuningRecord]]
    good: Mapping[tuple[str, str, str], Sequence[Sequence[TuningRecord]]]

    @classmethod
    def among(cls, records: Iterable[TuningRecord]) -> Known:
        of: dict[AnyWorkload, list[TuningRecord]] = {}
        for r in latest(records).values():
            of.setdefault(r.workload, []).append(r)
        good: dict[tuple[str, str, str], list[list[TuningRecord]]] = {}
        for workload, found in of.items():
            timed: dict[tuple[str, str, int], list[tuple[float, TuningRecord]]] = {}
            for r in found:
                if r.ok and r.us is not None:
                    timed.setdefault((r.arch, r.gpu, r.units), []).append((r.us, r))
            for (arch, _, _), pairs in timed.items():
                best = min(us for us, _ in pairs)
                good.setdefault((arch, workload.op, workload.kind), []).append([r for us, r in pairs if us <= GOOD_THERE * best])
        return cls(of, good)

    def here(self, workload: AnyWorkload, target: Target) -> list[TuningRecord]:
        """What was measured for ``workload`` on ``target``; of a dependent one also what was measured of
        it alone, but of schedules that were in steps."""
        records = (r for w in dict.fromkeys((alone(workload), workload)) for r in self.of.get(w, ()))
        return list({r.schedule: r for r in records if r.measured_on(target)}.values())


def neighbours(workload: AnyWorkload, target: Target, records: Known | Iterable[TuningRecord]) -> list[tuple[float, TuningRecord]]:
    """(distance, record) of what says something about ``workload`` on ``target``, the nearest and
    fastest first (of a dependent workload those in steps before the others): everything measured for
    it here, and of other workloads and devices what was about the fastest there; but of a schedule that
    was timed for it on a device not the time of a workload as near (gates in turn are at no distance
    from those in halves). Legality here is not asked."""
    known = records if isinstance(records, Known) else Known.among(records)
    near = [(0.0, r) for r in known.here(workload, target) if r.ok and r.us is not None]
    own = workload, alone(workload)
    for alike in known.good.get((target.arch, workload.op, workload.kind), ()):
        first = alike[0]
        if first.workload in own and first.measured_on(target):
            continue
        if first.dependent and not speaks_in_steps(first.workload, workload):
            continue
        d = distance(first, workload, target)
        if d is not None and d <= MAX_DISTANCE:
            near += [(d, r) for r in alike]
    timed = {_timing(r): d for d, r in near if r.workload in own}
    near = [(d, r) for d, r in near if r.workload in own or d > timed.get(_timing(r), -1.0)]
    return sorted(near, key=lambda pair: (pair[0], not pair[1].dependent, pair[1].us or inf))


def _timing(record: TuningRecord) -> tuple[Schedule, bool, str, int]:
    return record.schedule, record.dependent, record.gpu, record.units


def speaks_in_steps(there: AnyWorkload, here: AnyWorkload) -> bool:
    """Whether what was measured in steps for ``there`` speaks for ``here``: in steps, for itself and its
    twins that do the same beside."""
    twins = alone(here) is not here and there.op == here.op and operation(here.op).twins(there, here)
    return twins and all(getattr(there, name) == getattr(here, name) for name in BESIDE)
