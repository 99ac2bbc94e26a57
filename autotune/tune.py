"""The tuner: candidates, ranked, compiled, verified, measured, recorded.

Every candidate that was tried leaves a record, also a failed one, and a run looks up its candidates
among the records before it does anything: so an interrupted run continues where it stopped and
measures nothing twice. A record counts while artifact, workload, device and driver are the same.
A fault of the machine (no compiler, a full disk, no memory) is no candidate's: it ends the run
without a record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Protocol

from ..schedules.operations import AnyWorkload, alone
from ..schedules.ranker import known_ranker
from ..schedules.records import WRONG, TuningRecord
from ..schedules.schedule import Schedule
from ..schedules.select import refresh
from ..schedules.target import Target, detect_target, driver_version
from ..tiles.compiler.cache import ArtifactCache
from ..tiles.compiler.compile import CompileFailure, CompileRequest
from ..tiles.compiler.kernel import Kernel
from ..tiles.compiler.pool import CompilePool
from .failures import MOST_WORDS, expect_no_fault, of_compiling
from .progress import TuningBar
from .provenance import now, package_versions, source_commit
from .search import Patience, searched
from .store import RecordStore
from .worker import DeviceWorker, Outcome

PATIENCE = 12  # measurements in a row without progress that end a workload's search
# The fastest of a search, up to so many times as slow as the best, are timed once more in
# alternation: one by one each met its own clocks (28672 x 4096, m = 1024, H200: the winner by 3 %
# of such times was 3.5 % behind the second, side by side). A board that is kept busy clocks lower
# and all are slower then, by 3 % in the median and 16 % at most (49 workloads, H200). What is
# recorded is therefore brought back to the level of the search: else one that was not among them
# wins with the time that it had alone (15 of those 49 workloads).
FINALISTS, FINALIST_WITHIN = 4, 1.08


class Compiler(Protocol):
    """Makes kernels of requests, in order; a failed one becomes a ``CompileFailure``."""

    def compile(self, requests: Sequence[CompileRequest]) -> list[Kernel | CompileFailure]: ...


class Measurer(Protocol):
    """Verifies and times kernel directories: one, or some of one workload in alternation."""

    def measure(self, kernel: Path, workload: AnyWorkload, schedule: Schedule, target: Target, /) -> Outcome: ...

    def compare(
        self, kernels: Sequence[Path], workload: AnyWorkload, schedules: Sequence[Schedule], target: Target, /
    ) -> list[Outcome]: ...


@dataclass(frozen=True, slots=True)
class TunedWorkload:
    """What tuning one workload came to.

    ``best`` is its fastest record (None: nothing worked); of its candidates ``measured`` were tried
    now, ``reused`` were known, and ``failed`` of those two have no time; ``left`` were not tried.
    ``stopped`` says why: "done" (all were tried), "patience" or "budget". ``failure`` is what
    became of the most promising one that failed, its status and reason; empty when none did.
    """

    workload: AnyWorkload
    best: TuningRecord | None
    measured: int
    reused: int
    failed: int
    left: int
    stopped: str
    failure: str


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The results of one ``tune`` call, in the order of its workloads, and the seconds it took."""

    results: tuple[TunedWorkload, ...]
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether every workload has a working schedule and none ran out of budget."""
        return all(r.best is not None and r.stopped != "budget" for r in self.results)


def tune(
    workloads: Iterable[AnyWorkload],
    target: Target,
    *,
    budget_s: float | None = None,
    store: RecordStore | None = None,
    cache: ArtifactCache | None = None,
    compiler: Compiler | None = None,
    measurer: Measurer | None = None,
    progress: bool = True,
    jobs: int | None = None,
    max_candidates: int | None = None,
    patience: int = PATIENCE,
) -> TuneReport:
    """Measure the most promising schedules of each workload (sizes count as their buckets) and
    record them in ``store`` (default: the user's records).

    ``max_candidates`` are tried per workload; by default as many as ``search.places`` allows: fewer
    where a ranker orders them. What ``select`` gives without these measurements is the first of
    them. ``budget_s`` seconds are shared evenly among the workloads still to come; a candidate in
    flight is finished, and of a workload whose turn comes before they are over the first is measured,
    even if its share was shorter than compiling it takes. ``jobs`` compile at once. ``compiler`` and ``measurer`` default to a
    ``CompilePool`` on ``cache`` and a ``DeviceWorker`` on this machine's device. ``progress`` shows
    a bar on a terminal. Raises ``ValueError`` for arguments or a target that cannot be tuned here, and
    for ``dependent`` workloads, which are timed in a model's step (``tilebit.transformers.tune``);
    ``TuneError``, ``StoreError`` or ``WorkerError`` when it cannot go on."""
    todo = list(dict.fromkeys(w.bucketed() for w in workloads))
    in_steps = [w.title for w in todo if alone(w) is not w]
    if in_steps:
        raise ValueError(
            f"{', '.join(in_steps)}: a dependent product is timed in a model's step (tilebit tune --model); accepted: the product alone"
        )
    if (max_candidates is not None and max_candidates < 1) or patience < 1 or (budget_s is not None and budget_s <= 0):
        raise ValueError(
            f"max_candidates {max_candidates}, patience {patience}, budget_s {budget_s}; "
            "accepted: numbers above 0 (max_candidates and budget_s also None)"
        )
    begin = time.monotonic()
    results = []
    with ExitStack() as stack:
        cache = cache or ArtifactCache()
        if measurer is None:
            measurer = stack.enter_context(DeviceWorker(_device(target), cache.root / "locks"))
        if compiler is None:
            compiler = stack.enter_context(CompilePool(jobs=jobs, cache=cache, keep=True))
        bar = stack.enter_context(TuningBar(progress))
        ahead = stack.enter_context(ThreadPoolExecutor(1)) if target.is_cuda else None
        run = _Run(target, store or RecordStore(), compiler, measurer, bar, ahead, jobs or os.cpu_count() or 1, max_candidates, patience)
        end = inf if budget_s is None else begin + budget_s
        for position, workload in enumerate(todo):
            present = time.monotonic()
            share = max(0.0, end - present) / (len(todo) - position)
            results.append(run.tune(workload, todo[position + 1 : position + 2], present + share, end))
    refresh()
    return TuneReport(tuple(results), time.monotonic() - begin)


def _device(target: Target) -> str:
    """The torch device that ``target`` describes; raises ``ValueError`` when this machine has none."""
    here = detect_target("cpu" if target.arch == "cpu" else None)
    said = [f"{t.arch} ({t.name}, {t.units} {'SMs' if t.is_cuda else 'cores'})" for t in (target, here)]
    if said[0] != said[1] or not set(target.features) <= set(here.features):
        raise ValueError(
            f"target is {said[0]} and this machine's device is {said[1]}; "
            "accepted: a target that is here. To tune another one, run the tuner on its machine"
        )
    return "cpu" if target.arch == "cpu" else "cuda:0"


_Batch = list[tuple[CompileRequest, TuningRecord | None]]
_Compiled = dict[Schedule, Kernel | CompileFailure]


class _Run:
    """One tuning run: what does not change from workload to workload, and the records so far."""

    def __init__(
        self,
        target: Target,
        store: RecordStore,
        compiler: Compiler,
        measurer: Measurer,
        bar: TuningBar,
        ahead: Executor | None,
        batch: int,
        max_candidates: int | None,
        patience: int,
    ) -> None:
        self.target, self.store, self.compiler, self.measurer, self.bar = target, store, compiler, measurer, bar
        self.ahead, self.batch, self.max_candidates, self.patience = ahead, batch, max_candidates, patience
        # What is found and first compiled for a workload while the one before is measured.
        self.started: dict[AnyWorkload, tuple[Future[list[Schedule]], Future[_Compiled]]] = {}
        self.ranker = known_ranker(target)
        self.kernels: dict[Schedule, Kernel] = {}  # of the workload that is searched, measured now
        self.driver = driver_version() if target.is_cuda else None
        self.known = {(r.workload, r.schedule, r.key, r.driver): r for r in store.records() if r.measured_on(target) and not r.of_machine}

    def tune(self, workload: AnyWorkload, following: list[AnyWorkload], deadline: float, end: float) -> TunedWorkload:
        """Search one workload until its candidates, its patience or its time are used up: its share
        until ``deadline``, before it has a measurement all until ``end``; the first batch of the
        ``following`` one, if any, compiles as soon as the last of this one is."""
        found, first = self.started.pop(workload, (None, None))
        schedules = self._searched(workload) if found is None else found.result()
        self.bar.begin(workload, len(schedules))
        patience, records = Patience(self.patience), []
        self.kernels.clear()
        measured, stopped = 0, "done"
        for request, known, compiled in self._prepared(workload, schedules, first, following, deadline, end):
            if known is None:
                if time.monotonic() >= (deadline if records else end):
                    stopped = "budget"
                    break
                known = self._record(request, compiled)
                measured += 1
            records.append(known)
            patience.add(known.us if known.ok else None)
            self.bar.step(patience.best)
            if patience.exhausted and len(records) < len(schedules):
                stopped = "patience"
                break
        self.bar.skip(len(schedules) - len(records))
        if measured:
            records = self._run_off(workload, records)
        working, failed = [r for r in records if r.ok], [r for r in records if not r.ok]
        return TunedWorkload(
            workload,
            best=min(working, key=lambda r: r.us or 0.0, default=None),
            measured=measured,
            reused=len(records) - measured,
            failed=len(failed),
            left=len(schedules) - len(records),
            stopped=stopped,
            failure=f"{failed[0].status}: {failed[0].reason}" if failed else "",
        )

    def _run_off(self, workload: AnyWorkload, records: list[TuningRecord]) -> list[TuningRecord]:
        """``records`` with the times of the fastest few replaced by those that they reach in
        alternation, divided by how much slower the median of them is there, which are recorded,
        too; so is one that is wrong this time. What ends the process may be any one's fault: then
        all keep their times."""
        working = sorted((r for r in records if r.ok and r.us is not None), key=lambda r: r.us or 0.0)
        near = [r for r in working[:FINALISTS] if (r.us or 0.0) <= FINALIST_WITHIN * (working[0].us or 0.0)]
        missing = [r for r in near if r.schedule not in self.kernels]  # of an earlier run
        requests = [CompileRequest(r.schedule.program, workload, r.schedule, self.target) for r in missing]
        made = self.compiler.compile(requests) if self.ahead is None else self.ahead.submit(self.compiler.compile, requests).result()
        for r, kernel in zip(missing, made, strict=True):
            if isinstance(kernel, CompileFailure):
                expect_no_fault(workload, r.schedule, of_compiling(kernel))
        kernels = {**self.kernels, **{r.schedule: kernel for r, kernel in zip(missing, made, strict=True) if isinstance(kernel, Kernel)}}
        pairs = [(r, kernels[r.schedule]) for r in near if r.schedule in kernels]
        if len(pairs) < 2:
            return records
        outcomes = self.measurer.compare([k.path for _, k in pairs], workload, [r.schedule for r, _ in pairs], self.target)
        for (r, _), outcome in zip(pairs, outcomes, strict=True):
            expect_no_fault(workload, r.schedule, outcome)
        slower = median([o.us / r.us for (r, _), o in zip(pairs, outcomes, strict=True) if o.us and r.us] or [1.0])
        again = {}
        for (r, _), o in zip(pairs, outcomes, strict=True):
            if o.status in ("ok", WRONG):
                us, us_p20, us_p80 = (value and value / slower for value in (o.us, o.us_p20, o.us_p80))
                fields = {"status": o.status, "reason": o.reason, "us": us, "us_p20": us_p20, "us_p80": us_p80, "rel_err": o.rel_err}
                again[r.schedule] = replace(r, **fields, date=now(), commit=source_commit())
                self._keep(again[r.schedule])
        return [again.get(r.schedule, r) for r in records]

    def _searched(self, workload: AnyWorkload) -> list[Schedule]:
        schedules = searched(workload, self.target, self.max_candidates, self.ranker)
        if not schedules:
            raise ValueError(
                f"no program has candidates for {workload!r} on {self.target.arch} ({self.target.name}, features {self.target.features})"
            )
        return schedules

    def _batches(self, workload: AnyWorkload, schedules: list[Schedule]) -> list[_Batch]:
        """What is compiled at once: requests with their known records, in order."""
        requests = [CompileRequest(s.program, workload, s, self.target) for s in schedules]
        pairs = [(r, self.known.get((workload, r.schedule, r.key, self.driver))) for r in requests]
        return [pairs[start : start + self.batch] for start in range(0, len(pairs), self.batch)]

    def _compiled(self, batch: _Batch, until: float = inf) -> _Compiled:
        """What becomes of the requests of ``batch`` that have no record; nothing once it is late."""
        missing = [request for request, record in batch if record is None]
        made = self.compiler.compile(missing) if missing and time.monotonic() < until else []
        return {request.schedule: kernel for request, kernel in zip(missing, made, strict=False)}

    def _at_once(self, batch: _Batch, until: float) -> _Compiled:
        """``_compiled``, behind what compiles ahead: a search that ended early may have left some on its way, and
        a compiler does one thing at a time."""
        return self._compiled(batch, until) if self.ahead is None else self.ahead.submit(self._compiled, batch, until).result()

    def _start(self, workload: AnyWorkload, ahead: Executor) -> None:
        found = ahead.submit(self._searched, workload)
        first = ahead.submit(lambda: self._compiled(self._batches(workload, found.result())[0]))
        self.started[workload] = found, first

    def _prepared(
        self,
        workload: AnyWorkload,
        schedules: list[Schedule],
        first: Future[_Compiled] | None,
        following: list[AnyWorkload],
        deadline: float,
        end: float,
    ) -> Iterator[tuple[CompileRequest, TuningRecord | None, Kernel | CompileFailure | None]]:
        """(request, known record, else what became of compiling it), a batch at a time. On a GPU
        what comes next compiles while a batch is measured: the next batch, after the last one the
        first of the following workload. On the CPU it would disturb the measurement."""
        batches = self._batches(workload, schedules)
        future = first
        for index, batch in enumerate(batches):
            made = self._at_once(batch, deadline if index else end) if future is None else future.result()
            future = None
            if self.ahead is not None:
                if index + 1 < len(batches):
                    future = self.ahead.submit(self._compiled, batches[index + 1], deadline)
                else:
                    for workload in following:
                        self._start(workload, self.ahead)
            for request, record in batch:
                yield request, record, made.get(request.schedule)

    def _record(self, request: CompileRequest, compiled: Kernel | CompileFailure | None) -> TuningRecord:
        """Measure what was compiled and append the record, also of a failure."""
        if isinstance(compiled, CompileFailure):
            outcome = of_compiling(compiled)
        else:
            assert compiled is not None
            outcome = self.measurer.measure(compiled.path, request.workload, request.schedule, self.target)
            self.kernels[request.schedule] = compiled
        expect_no_fault(request.workload, request.schedule, outcome)
        record = TuningRecord(
            workload=request.workload,
            schedule=request.schedule,
            gpu=self.target.name,
            arch=self.target.arch,
            units=self.target.units,
            status=outcome.status,
            us=outcome.us,
            us_p20=outcome.us_p20,
            us_p80=outcome.us_p80,
            rel_err=outcome.rel_err,
            reason=outcome.reason[:MOST_WORDS],
            key=request.key,
            driver=self.driver,
            versions=package_versions(),
            date=now(),
            commit=source_commit(),
        )
        self._keep(record)
        return record

    def _keep(self, record: TuningRecord) -> None:
        self.store.append(record)
        self.known[record.workload, record.schedule, record.key, record.driver] = record
