"""Choosing a schedule: the tuned one, else the nearest tuned one that is legal and not expected to be slow here, else the cost model's
best; and saying why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log2

from .cost import Estimate, estimate
from .records import TuningRecord, latest, shipped_records, user_records
from .rules.gemm import candidates, legal
from .schedule import Schedule
from .target import Target
from .workload import Workload, m_bucket

# A record further away than this says less than the cost model. One unit is a factor of two in n, k or m.
MAX_DISTANCE = 3.0
# A neighbour's schedule is taken over unless the model expects it to be this much slower here than its own best: a tile tuned for 16 rows
# reads the weight twice for 32.
NEAR_ENOUGH = 1.2
GOOD_THERE = 1.05  # and only one that was about the fastest of its own workload
OTHER_DTYPE = 0.25
OTHER_BIAS = 0.0625
OTHER_SYMMETRY = 0.25
OTHER_GROUP = 0.5
OTHER_NAME = 1.0  # another product of the same arch
OTHER_UNITS = 4.0  # per factor of two: splits and thread counts are made for the number of units


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule and where it came from: ``source`` is "tuned", "nearest" or "model"; ``record`` and ``distance`` belong to the first
    two."""

    schedule: Schedule
    source: str
    record: TuningRecord | None = None
    distance: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``explain``: a schedule, what the model expects, why it is illegal (empty: legal), what was measured here, and the
    verdict in words."""

    schedule: Schedule
    estimate: Estimate
    illegal: tuple[str, ...]
    record: TuningRecord | None
    chosen: bool
    why: str


def select(workload: Workload, target: Target, records: Sequence[TuningRecord] | None = None) -> Schedule:
    """The schedule to use for ``workload`` on ``target``; m counts as its m-bucket.

    ``records`` default to the shipped and the user's, read once per process (``refresh`` reads them again); choices among them are cached.
    Raises ``ValueError`` when no program can serve the workload on this target.
    """
    return choose(workload, target, records).schedule


def choose(workload: Workload, target: Target, records: Sequence[TuningRecord] | None = None) -> Choice:
    """``select`` with its source."""
    workload = workload.with_m(m_bucket(workload.m))
    return _cached_choice(workload, target) if records is None else _choose(workload, target, records)


def refresh() -> None:
    """Forget cached records and choices, so that the next ``select`` sees what was tuned since."""
    _known_records.cache_clear()
    _cached_choice.cache_clear()


def explain(workload: Workload, target: Target, records: Sequence[TuningRecord] | None = None) -> list[Row]:
    """Every candidate, and every schedule measured for this workload here, with why it was chosen or lost; the chosen first, then by
    measured or estimated time."""
    workload = workload.with_m(m_bucket(workload.m))
    known = _known_records() if records is None else records
    choice = _choose(workload, target, known)
    measured = {r.schedule: r for r in latest(known).values() if r.workload == workload and r.measured_on(target)}
    schedules: list[Schedule] = [choice.schedule, *measured, *(candidates(workload, target) or [])]
    rows = [_row(workload, target, s, measured.get(s), choice) for s in dict.fromkeys(schedules)]
    return sorted(rows, key=lambda r: (not r.chosen, bool(r.illegal), r.record is None or not r.record.ok, _time(r)))


def distance(record: TuningRecord, workload: Workload, target: Target) -> float | None:
    """How far a record's situation is from this one (0: the same); None when it says nothing about it (another arch or bit width)."""
    r, f, g = record.workload, record.workload.format, workload.format
    if record.arch != target.arch or f.bits != g.bits:
        return None
    shape = abs(log2(r.n / workload.n)) + abs(log2(r.k / workload.k)) + abs(log2(max(r.m, 1) / max(workload.m, 1)))
    device = OTHER_NAME * (record.gpu != target.name) + OTHER_UNITS * abs(log2(max(record.units, 1) / target.units))
    numbers = OTHER_DTYPE * (r.dtype != workload.dtype) + OTHER_BIAS * (r.bias != workload.bias)
    return shape + device + numbers + OTHER_SYMMETRY * (f.symmetric != g.symmetric) + OTHER_GROUP * (f.group_size != g.group_size)


@lru_cache(maxsize=1)
def _known_records() -> tuple[TuningRecord, ...]:
    return (*shipped_records(), *user_records())


@lru_cache(maxsize=65536)
def _cached_choice(workload: Workload, target: Target) -> Choice:
    return _choose(workload, target, _known_records())


def _choose(workload: Workload, target: Target, records: Sequence[TuningRecord]) -> Choice:
    current = latest(records).values()
    best: dict[tuple[Workload, str, int], float] = {}
    for r in current:
        if r.ok and r.us is not None:
            there = (r.workload, r.gpu, r.units)
            best[there] = min(r.us, best.get(there, inf))
    near = [
        (d, r)
        for r in current
        if r.ok and r.us is not None and (d := distance(r, workload, target)) is not None and d <= MAX_DISTANCE
        if d == 0 or r.us <= GOOD_THERE * best[r.workload, r.gpu, r.units]
    ]
    failed = {r.schedule for r in current if not r.ok and r.workload == workload and r.measured_on(target)}
    near.sort(key=lambda pair: (pair[0], pair[1].us or inf))
    options = candidates(workload, target)
    bound = NEAR_ENOUGH * min(estimate(workload, s, target).us for s in options) if options else inf
    for d, record in near:
        if record.schedule in failed or legal(workload, record.schedule, target):
            continue
        if d == 0:
            return Choice(record.schedule, "tuned", record, d)
        if estimate(workload, record.schedule, target).us <= bound:
            return Choice(record.schedule, "nearest", record, d)
    if not options:
        raise ValueError(
            f"no schedule for {workload!r} on {target.arch} ({target.name}); see `candidates` and `legal` in schedules/rules/gemm.py"
        )
    usable = [s for s in options if s not in failed] or options
    return Choice(min(usable, key=lambda s: estimate(workload, s, target).us), "model")


def _row(workload: Workload, target: Target, schedule: Schedule, record: TuningRecord | None, choice: Choice) -> Row:
    illegal = tuple(legal(workload, schedule, target))
    expected = estimate(workload, schedule, target)
    chosen = schedule == choice.schedule
    if chosen:
        why = _why_chosen(choice)
    elif illegal:
        why = f"illegal: {illegal[0]}"
    elif record is not None and not record.ok:
        why = f"failed when tuned: {record.status}" + (f" ({record.reason})" if record.reason else "")
    elif record is not None and record.us is not None:
        best = choice.record.us if choice.record is not None else None
        why = f"measured {record.us:.2f} us" + (f", the chosen one {best:.2f} us" if best is not None and choice.source == "tuned" else "")
    elif choice.source == "model":
        why = f"estimated {expected.us:.2f} us, the chosen one {estimate(workload, choice.schedule, target).us:.2f} us"
    else:
        why = "not measured here; a tuned schedule goes before estimates"
    return Row(schedule, expected, illegal, record, chosen, why)


def _why_chosen(choice: Choice) -> str:
    if choice.record is None:
        return "chosen: the cost model's best; nothing near enough is tuned (run the tuner to measure)"
    us = f"{choice.record.us:.2f} us"
    if choice.source == "tuned":
        return f"chosen: the fastest measured here, {us}"
    w = choice.record.workload
    there = f"m {w.m}, n {w.n}, k {w.k}, {w.format.name}, {w.dtype} on {choice.record.gpu}; distance {choice.distance:.2f}"
    return f"chosen: the fastest of the nearest tuned workload ({there}), {us} there"


def _time(row: Row) -> float:
    return row.record.us if row.record is not None and row.record.us is not None else row.estimate.us
