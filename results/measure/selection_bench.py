"""What the programs of this folder measure with: the tuner as a user gets it, a scan of given
schedules, and a few timed side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from filelock import FileLock

from tilebit.autotune.measure import Timing, copies_needed, time_calls
from tilebit.autotune.problems.gemm import Problem, split_workspace
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate
from tilebit.autotune.provenance import now, package_versions, source_commit
from tilebit.autotune.search import searched
from tilebit.autotune.store import RecordStore
from tilebit.autotune.tune import TunedWorkload, tune
from tilebit.autotune.worker import DeviceWorker, Outcome
from tilebit.autotune.worker_process import launch
from tilebit.command.bench import process_fields
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.ranker import known_ranker
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool


class BudgetOver(Exception):
    """The time for measuring is over. What was recorded stays."""


@dataclass(slots=True, eq=False)
class Bench:
    """One device, its compilers, its measurer and the candidates' records. ``deadline`` is on
    ``time.monotonic``'s clock; methods that measure raise ``BudgetOver`` behind it. ``common`` are
    the fields that all rows of this process share."""

    target: Target
    pool: CompilePool
    worker: DeviceWorker
    store: RecordStore
    deadline: float | None
    common: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        ranker = known_ranker(self.target)
        self.common = {**process_fields(self.target), "op": "selection", "ranker": None if ranker is None else ranker.digest[:12]}

    def compile_ahead(self, workloads: Sequence[Workload]) -> None:
        """Put into the cache what will be measured of ``workloads`` without a scan: together they
        keep all cores busy, where one search's few candidates do not. What does not compile says so
        when it is needed."""
        ranker = known_ranker(self.target)
        wanted = [
            CompileRequest(schedule.program, workload, schedule, self.target)
            for workload in (w.bucketed() for w in workloads)
            for schedule in searched(workload, self.target, None, ranker) or []
        ]
        known = {record.key for record in self.store.records()}
        self.pool.compile([request for request in wanted if request.key not in known])

    def tuned(self, workload: Workload) -> tuple[TunedWorkload, TuningRecord]:
        """What the tuner, with its defaults, finds for ``workload``, and its choice. Raises
        ``RuntimeError`` when nothing works."""
        left = None if self.deadline is None else self.deadline - time.monotonic()
        if left is not None and left <= 0:
            raise BudgetOver
        found = tune(
            [workload], self.target, budget_s=left, store=self.store, compiler=self.pool, measurer=self.worker, progress=False,
            jobs=self.pool.jobs,
        ).results[0]  # fmt: skip
        if found.stopped == "budget":
            raise BudgetOver
        if found.best is None:
            raise RuntimeError(f"no schedule of {workload.title} works here ({found.failure}); `tilebit doctor` says what is missing")
        return found, found.best

    def scan(self, workload: Workload, schedules: Sequence[Schedule]) -> list[TuningRecord]:
        """A record of each of ``schedules`` on ``workload`` (its m is a bucket), those of the store
        first."""
        driver = self.common["driver"]
        known = {(r.workload, r.schedule, r.key, r.driver): r for r in self.store.records() if r.measured_on(self.target)}
        requests = {CompileRequest(s.program, workload, s, self.target): None for s in schedules}
        places = {request: (workload, request.schedule, request.key, driver) for request in requests}
        found = [known[place] for place in places.values() if place in known]
        for request, compiled in self._compiled([request for request, place in places.items() if place not in known]):
            if self.deadline is not None and time.monotonic() >= self.deadline:
                raise BudgetOver
            found.append(self._record(request, compiled))
        return found

    def side_by_side(self, choices: Sequence[tuple[Workload, Schedule]]) -> list[Timing]:
        """Each of ``choices``, verified, then timed in alternation; their times, in order. Raises
        ``RuntimeError`` for one that fails."""
        made = self.pool.compile([CompileRequest(schedule.program, workload, schedule, self.target) for workload, schedule in choices])
        with FileLock(self.worker.lock):  # one process measures on a device at a time
            problems = {workload: self._problems(workload) for workload, _ in choices}
            calls = {}
            for number, ((workload, _), kernel) in enumerate(zip(choices, made, strict=True)):
                if isinstance(kernel, CompileFailure):
                    raise RuntimeError(f"{kernel}, though it was compiled before; look for a full disk and run it again to continue")
                gate, copies = problems[workload]
                loaded, workspace = kernel.load(), split_workspace(workload, kernel.schedule, self.target, self.worker.device)
                verdict = gate.verify(partial(launch, loaded, workspace))
                if not verdict.ok:
                    raise RuntimeError(f"{kernel.schedule} is wrong on {workload.title}: {' '.join(verdict.reasons)}")
                named = [{**workspace, **p.named(p.outputs())} for p in copies]
                calls[str(number)] = [partial(loaded.run, *(tensors[name] for name in loaded.params)) for tensors in named]
            timings = time_calls(calls, self.worker.device, Random(0))
        return [timings[str(number)] for number in range(len(choices))]

    def _problems(self, workload: Workload) -> tuple[Gate, list[Problem]]:
        """What verifies kernels of ``workload``, and copies of a problem to time them on."""
        exact, random = (make(workload, 0, self.target.arch, self.worker.device) for make in (exact_problem, random_problem))
        copies = copies_needed(workload.bytes, self.target.l2)
        return Gate(exact, random), [random, *(random.copied() for _ in range(copies - 1))]

    def _compiled(self, requests: Sequence[CompileRequest]) -> Iterator[tuple[CompileRequest, Kernel | CompileFailure]]:
        """Requests and what became of them. On a GPU the next batch compiles while one is measured;
        on the CPU it would disturb it."""
        batches = [requests[start : start + self.pool.jobs] for start in range(0, len(requests), self.pool.jobs)]
        with ThreadPoolExecutor(1) as ahead:
            future = None
            for index, batch in enumerate(batches):
                made = future.result() if future is not None else self.pool.compile(batch)
                more = self.target.is_cuda and index + 1 < len(batches)
                future = ahead.submit(self.pool.compile, batches[index + 1]) if more else None
                yield from zip(batch, made, strict=True)

    def _record(self, request: CompileRequest, compiled: Kernel | CompileFailure) -> TuningRecord:
        """What one schedule of a scan came to, also in the store."""
        if isinstance(compiled, CompileFailure):
            if compiled.kind == "cache":
                raise RuntimeError(f"cannot compile: {'; '.join(compiled.sentences)}")
            status = "compile_timeout" if compiled.kind == "timeout" else "compile_error"
            outcome = Outcome(status, f"{compiled.kind}: {'; '.join(compiled.sentences)}")
        else:
            outcome = self.worker.measure(compiled.path, request.workload, request.schedule, self.target)
        t, o = self.target, outcome
        record = TuningRecord(
            request.workload, request.schedule, t.name, t.arch, t.units, o.status, o.us, o.us_p20, o.us_p80, o.rel_err, o.reason,
            request.key, self.common["driver"], package_versions(), now(), source_commit(),
        )  # fmt: skip
        self.store.append(record)
        return record
