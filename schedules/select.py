"""Choosing a schedule: the tuned one; else that of a tuned twin (the same shape in other numbers);
else the learned ranker's best; without a ranker the nearest tuned one that is legal and not
expected to be slow here, or the analytic model's best. And saying why. A schedule that failed when
it was tuned is chosen only where all have.

A GEMM's kernels take any number of rows, and a shape has few of them: its portfolio
(``portfolio.py``). They are the tuned ones and what is chosen so for numbers of rows between; each
m is served by the one that is expected to take the least time, as far as measured points say.

A product in a model's step (``dependent``) first asks the records that were made in steps, of itself
and of twins, then what the product by itself would take; nothing else asks those of steps.

The order was decided on the shipped records, each workload left out in turn
(``autotune/regret.py``): the ranker's choice is nearer to the best than the nearest record's, so
that neighbours' schedules only join its candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from .neighbours import Known, neighbours, speaks_in_steps
from .operations import AnyWorkload, Estimate, alone, candidates, estimate, legal, operation, unserved
from .portfolio import Portfolio, borders, calibrated, table, with_points
from .ranker import Ranker, forget_rankers, known_ranker, user_model_path
from .records import WRONG, TuningRecord, settled, shipped_records, user_records
from .remembered import forget, keep, recall
from .schedule import Schedule
from .target import Target

# A neighbour's schedule is taken over unless the model expects it to be this much slower here than
# its own best: a tile tuned for 16 rows reads the weight twice for 32.
NEAR_ENOUGH = 1.2
Found = TypeVar("Found")
_candidates = lru_cache(maxsize=1024)(candidates)  # asked again and again of one workload; nobody changes the list


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule and where it came from: ``source`` is "tuned", "nearest", "ranker", "model", or
    "failed" where every candidate failed when it was tuned (then the analytic model's best, of
    those that did not compute wrong results if there are any). ``record`` belongs to the first two
    and the last, ``distance`` to the first two, ``predicted_us`` to the ranker's."""

    schedule: Schedule
    source: str
    record: TuningRecord | None = None
    distance: float = 0.0
    predicted_us: float | None = None

    def to_json(self) -> dict[str, Any]:
        record = None if self.record is None else self.record.to_json()
        return {"schedule": self.schedule.to_json(), "source": self.source, "record": record, "distance": self.distance,
                "predicted_us": self.predicted_us}  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> Choice:
        """The inverse of ``to_json``. Raises ``KeyError``, ``TypeError`` and ``ValueError`` for what is none."""
        record = None if data["record"] is None else TuningRecord.from_json(data["record"])
        return cls(Schedule.from_json(data["schedule"]), data["source"], record, data["distance"], data["predicted_us"])


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``explain``: a schedule, what the analytic model expects, what the ranker
    predicts in microseconds (None: there is no ranker for this workload, or the schedule is
    illegal), why it is illegal (empty: legal), what was measured here, and the verdict in words."""

    schedule: Schedule
    estimate: Estimate
    predicted_us: float | None
    illegal: tuple[str, ...]
    record: TuningRecord | None
    chosen: bool
    why: str


def select(workload: AnyWorkload, target: Target, records: Sequence[TuningRecord] | None = None, ranker: Ranker | None = None) -> Schedule:
    """The schedule to use for ``workload`` on ``target``: of a GEMM the one of its shape's
    portfolio that serves its m, of attention that of its bucket of sizes.

    ``records`` and ``ranker`` default to the shipped and the user's, read once per process
    (``refresh`` reads them again); choices among them are cached. Where ``records`` are given,
    nothing but them and the given ``ranker`` counts. Raises ``ValueError`` when no program can
    serve the workload on this target.
    """
    return choose(workload, target, records, ranker).schedule


def choose(workload: AnyWorkload, target: Target, records: Sequence[TuningRecord] | None = None, ranker: Ranker | None = None) -> Choice:
    """``select`` with its source. Where ``records`` are given, the choice for exactly these sizes,
    without a portfolio."""
    workload = workload.bucketed()
    if records is None and ranker is None:
        return _cached_choice(workload, target)
    known, ranker = _known(target, records, ranker)
    return _choose(workload, target, known, ranker)


def portfolio(workload: AnyWorkload, target: Target) -> Portfolio | None:
    """The few kernels that serve every m of the workload's shape on ``target``, whatever its own m
    is; made once per process. None for operations without portfolios. Raises ``ValueError`` when no
    program can serve the shape."""
    return _cached_portfolio(_shape(workload), target)[0] if operation(workload.op).proposed else None


def refresh() -> None:
    """Forget cached records, rankers and choices, so that the next ``select`` sees what was tuned
    and trained since."""
    _known_records.cache_clear()
    _own_records.cache_clear()
    wrong_artifacts.cache_clear()
    forget_rankers()
    _cached_choice.cache_clear()
    _cached_exact.cache_clear()
    _cached_portfolio.cache_clear()
    forget()


def explain(
    workload: AnyWorkload, target: Target, records: Sequence[TuningRecord] | None = None, ranker: Ranker | None = None
) -> list[Row]:
    """Every candidate, and every schedule measured for this workload here, with why it was chosen
    or lost; the chosen first, then by measured, predicted or estimated time."""
    workload = workload.bucketed()
    default = records is None and ranker is None
    known, ranker = _known(target, records, ranker)
    choice = _cached_choice(workload, target) if default else _choose(workload, target, known, ranker)
    measured = {r.schedule: r for r in known.here(workload, target)}
    options = candidates(workload, target) or []
    illegal = {s: tuple(legal(workload, s, target)) for s in dict.fromkeys([choice.schedule, *measured, *options])}
    predicted: dict[Schedule, float] = {}
    if ranker is not None and ranker.serves(workload, options):
        judged = [s for s, reasons in illegal.items() if not reasons and ranker.serves(workload, [s])]
        predicted = dict(zip(judged, ranker.predict(workload, judged, target), strict=True))
    rows = [_row(workload, target, s, illegal[s], predicted.get(s), measured.get(s), choice) for s in illegal]
    return sorted(rows, key=lambda r: (not r.chosen, bool(r.illegal), r.record is None or not r.record.ok, _time(r)))


@lru_cache(maxsize=8)
def _known_records(arch: str) -> Known:
    """Those of one architecture: others' say nothing about it."""
    return Known.among(settled(shipped_records(arch), _own_records()))


@lru_cache(maxsize=64)
def wrong_artifacts(target: Target) -> Mapping[str, TuningRecord]:
    """By key what computed wrong results on a device like ``target``, whatever sizes it was tuned
    for: one artifact serves others, too. A key covers sources and compilers: what they were then
    says nothing of new ones."""
    found = (r for there in _known_records(target.arch).of.values() for r in there)
    return {r.key: r for r in found if r.status == WRONG and r.key and r.measured_on(target)}


@lru_cache(maxsize=1)
def _own_records() -> list[TuningRecord]:
    return user_records()


def _known(target: Target, records: Sequence[TuningRecord] | None, ranker: Ranker | None) -> tuple[Known, Ranker | None]:
    """The records and the ranker that count."""
    if records is not None:
        return Known.among(records), ranker
    return _known_records(target.arch), ranker or known_ranker(target)


@lru_cache(maxsize=65536)
def _cached_exact(workload: AnyWorkload, target: Target) -> Choice:
    """Without a portfolio."""
    return _choose(workload, target, _known_records(target.arch), known_ranker(target))


@lru_cache(maxsize=65536)
def _cached_choice(workload: AnyWorkload, target: Target) -> Choice:
    choice = _recalled("choice", workload, target, Choice.from_json, lambda found: [found.schedule])
    if choice is None:
        choice = _new_choice(workload, target)
        keep("choice", workload, target, choice.to_json())
    return choice


def _recalled(
    what: str, workload: AnyWorkload, target: Target, read: Callable[[Any], Found], schedules: Callable[[Found], Iterable[Schedule]]
) -> Found | None:
    """What an earlier process found; None: nothing, or nothing that is whole, legal and of this package's
    programs. The user's own files are read as well, which says what is wrong with them in every process."""
    data = recall(what, workload, target)
    if data is not None:
        _own_records()
        if Path(user_model_path(target.arch)).is_file():
            known_ranker(target)
    try:
        found = None if data is None else read(data)
    except (KeyError, TypeError, ValueError):
        return None
    wrong = found is not None and any("." in s.program or legal(workload, s, target) for s in set(schedules(found)))
    return None if wrong else found


def _new_choice(workload: AnyWorkload, target: Target) -> Choice:
    exact = _cached_exact(workload, target)
    if not operation(workload.op).proposed:
        return exact
    shape, tuned = _cached_portfolio(_shape(workload), target)
    m: int = workload.m  # pyright: ignore[reportAttributeAccessIssue]  what has a portfolio has an m
    if m in tuned:  # what was measured decides
        return exact
    index = shape.index(m)
    return exact if shape.serving[index] == exact.schedule else Choice(shape.serving[index], "portfolio", predicted_us=shape.us[index])


@lru_cache(maxsize=1024)
def _cached_portfolio(static: AnyWorkload, target: Target) -> tuple[Portfolio, frozenset[int]]:
    """The portfolio of a ``_shape``, and the numbers of rows at which the shape or a twin was tuned,
    here or on a sibling of this device."""
    remembered = _recalled("portfolio", static, target, _portfolio_from_json, lambda found: found[0].serving)
    if remembered is None:
        remembered = _new_portfolio(static, target)
        found, tuned = remembered
        keep("portfolio", static, target, {**found.to_json(), "tuned": sorted(tuned)})
    return remembered


def _portfolio_from_json(data: Any) -> tuple[Portfolio, frozenset[int]]:
    return Portfolio.from_json(data), frozenset(data["tuned"])


def _new_portfolio(static: AnyWorkload, target: Target) -> tuple[Portfolio, frozenset[int]]:
    if alone(static) is not static:
        return _portfolio_in_steps(static, target)
    records, ranker = _known_records(target.arch), known_ranker(target)
    measured: dict[Schedule, dict[int, float]] = {}
    tuned: dict[int, Schedule] = {}
    failed: set[Schedule] = set()
    with_rows = cache(lambda m: replace(static, m=m))  # thousands of records are of a few dozen m
    twins = operation(static.op).twins
    for there, found in records.of.items():
        if there.op != static.op or found[0].dependent:
            continue
        m: int = there.m  # pyright: ignore[reportAttributeAccessIssue]
        here = with_rows(m)
        if not twins(there, here):
            continue
        for r in (r for r in found if r.measured_on_sibling(target)):
            if m not in tuned:
                tuned[m] = _cached_exact(here, target).schedule
            own = r.measured_on(target)
            if not r.ok and own:
                failed.add(r.schedule)
            elif r.us is not None and not legal(here, r.schedule, target):
                points = measured.setdefault(r.schedule, {})
                points[m] = r.us if own and there == here else points.get(m, r.us)  # a twin's time where there is no own
    proposed = [replace(static, m=m) for m in operation(static.op).proposed if m not in tuned]
    chosen = [_cached_exact(w, target).schedule for w in proposed]
    schedules = list(dict.fromkeys([*(tuned[m] for m in sorted(tuned)), *chosen]))
    # What failed competes nowhere; it stays where nothing else is left.
    competing = [s for s in schedules if s not in failed or s in measured] or schedules

    asked = sorted({*borders(competing), *tuned})
    at = [replace(static, m=m) for m in asked]
    pairs = [(workload, s) for s in schedules for workload in at]
    if ranker is not None and ranker.serves(static, schedules):
        times = ranker.predict_pairs(pairs, target)
    else:
        times = [estimate(w, s, target).us for w, s in pairs]
    known = {(s, w.m): us for (w, s), us in zip(pairs, times, strict=True)}  # pyright: ignore[reportAttributeAccessIssue]
    points = {s: {m: us for m, us in measured[s].items() if (s, m) in known} for s in schedules if s in measured}
    return table(competing, calibrated(lambda s, m: known[s, m], points), tuned), frozenset(tuned)


def _portfolio_in_steps(shape: AnyWorkload, target: Target) -> tuple[Portfolio, frozenset[int]]:
    """Of a dependent shape: that of the product by itself, but for the numbers of rows that records of
    steps tell of."""
    itself, tuned = _cached_portfolio(alone(shape), target)
    timed: dict[int, tuple[Schedule, float]] = {}
    for there, found in _known_records(target.arch).of.items():
        if not found[0].dependent or not any(r.ok and r.measured_on_sibling(target) for r in found):
            continue
        m: int = there.m  # pyright: ignore[reportAttributeAccessIssue]  what is dependent is a product
        here = replace(shape, m=m)
        if speaks_in_steps(there, here):
            choice = _cached_exact(here, target)
            us = choice.record.us if choice.record is not None else choice.predicted_us
            timed[m] = choice.schedule, itself.us[itself.index(m)] if us is None else us
    return with_points(itself, timed), tuned | timed.keys()


def _shape(workload: AnyWorkload) -> AnyWorkload:
    """What workloads with one portfolio have in common: a kernel, and whether it is launched in steps."""
    return workload.static() if alone(workload) is workload else replace(workload.static(), dependent=True)


def _is_twin(record: TuningRecord, workload: AnyWorkload, target: Target) -> bool:
    """Whether a record was measured here or on a sibling for just this workload, or for the same
    shape in other numbers. It says more than the ranker: for 28672 x 4096 at m = 16 the ranker's
    choice took 25.8 us on an H100, an H200's tuned one 23.5."""
    alike = record.workload.op == workload.op and record.measured_on_sibling(target)
    return alike and operation(workload.op).twins(record.workload, workload)


def _choose(workload: AnyWorkload, target: Target, records: Known, ranker: Ranker | None) -> Choice:
    failed = {r.schedule: r for r in records.here(workload, target) if not r.ok}
    works = cache(lambda schedule: schedule not in failed and not legal(workload, schedule, target))  # many records are of one schedule
    expected = cache(lambda schedule: estimate(workload, schedule, target).us)
    found = neighbours(workload, target, records)
    first = next((pair for pair in found if works(pair[1].schedule)), None)
    if first is not None and first[0] == 0:
        return Choice(first[1].schedule, "tuned", first[1])
    near = [(d, r) for d, r in found if works(r.schedule)]
    options = _candidates(workload, target) or []
    served = ranker is not None and ranker.serves(workload, options)
    taken_over = [(d, r) for d, r in near if not served or _is_twin(r, workload, target)]
    if taken_over:
        bound = NEAR_ENOUGH * min(map(expected, options), default=inf)
        for d, record in taken_over:
            if expected(record.schedule) <= bound:
                return Choice(record.schedule, "nearest", record, d)
    if not options:
        raise ValueError(unserved(workload, target))
    usable = [s for s in options if s not in failed]
    if ranker is not None and served:
        of_others = dict.fromkeys(r.schedule for _, r in near)
        judged = list(dict.fromkeys([*usable, *(s for s in of_others if ranker.serves(workload, [s]))]))
        if judged:
            us, schedule = min(zip(ranker.predict(workload, judged, target), judged, strict=True), key=lambda pair: pair[0])
            return Choice(schedule, "ranker", predicted_us=us)
    if usable:
        return Choice(min(usable, key=expected), "model")
    if near:  # slow here, as far as the model knows; but it works
        d, record = near[0]
        return Choice(record.schedule, "nearest", record, d)
    schedule = min(options, key=lambda s: (failed[s].status == WRONG, expected(s)))
    return Choice(schedule, "failed", failed[schedule])


def _row(
    workload: AnyWorkload,
    target: Target,
    schedule: Schedule,
    illegal: tuple[str, ...],
    predicted: float | None,
    record: TuningRecord | None,
    choice: Choice,
) -> Row:
    expected = estimate(workload, schedule, target)
    chosen = schedule == choice.schedule
    if chosen:
        why = _why_chosen(choice)
    elif illegal:
        why = f"illegal: {illegal[0]}"
    elif record is not None and not record.ok:
        why = _how_failed(record)
    elif record is not None and record.us is not None:
        best = choice.record.us if choice.record is not None else None
        beside = f", the chosen one {best:.2f} us" if best is not None and choice.source == "tuned" else ""
        why = f"measured {record.us:.2f} us{_where(record)}{beside}"
    elif choice.source == "model":
        why = f"estimated {expected.us:.2f} us, the chosen one {estimate(workload, choice.schedule, target).us:.2f} us"
    elif predicted is not None and choice.predicted_us is not None:
        why = f"predicted {predicted:.2f} us, the chosen one {choice.predicted_us:.2f} us"
    else:
        why = "not measured here; a tuned schedule goes before predictions and estimates"
    return Row(schedule, expected, predicted, illegal, record, chosen, why)


def _why_chosen(choice: Choice) -> str:
    if choice.source == "portfolio":
        return f"chosen: of the kernels that serve this shape the one for this m, expected {choice.predicted_us:.2f} us"
    if choice.predicted_us is not None:
        return f"chosen: the ranker's best, predicted {choice.predicted_us:.2f} us; this workload is not tuned (run the tuner to measure)"
    if choice.record is None:
        return "chosen: the cost model's best; nothing near enough is tuned (run the tuner to measure)"
    if choice.source == "failed":
        return f"chosen, though every candidate failed, as the cost model's best of them; {_how_failed(choice.record)}"
    us = f"{choice.record.us:.2f} us"
    if choice.source == "tuned":
        return f"chosen: the fastest measured here, {us}{_where(choice.record)}"
    w = choice.record.workload
    there = f"{w.title} {w.dtype} on {choice.record.gpu}; distance {choice.distance:.2f}"
    return f"chosen: the fastest of the nearest tuned workload ({there}), {us} there"


def _where(record: TuningRecord) -> str:
    return " in a model's step" if record.dependent else ""


def _how_failed(record: TuningRecord) -> str:
    return f"failed when tuned: {record.status}" + (f" ({record.reason})" if record.reason else "")


def _time(row: Row) -> float:
    if row.record is not None and row.record.us is not None:
        return row.record.us
    return row.predicted_us if row.predicted_us is not None else row.estimate.us
