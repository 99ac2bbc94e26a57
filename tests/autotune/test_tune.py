"""The tuner with real processes: every fault costs its candidate only, and an interrupted run continues without measuring anything
twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilebit.autotune import search
from tilebit.autotune import tune as tuning
from tilebit.autotune.failures import TuneError
from tilebit.autotune.search import searched
from tilebit.autotune.store import RecordStore, StoreError
from tilebit.autotune.tune import tune
from tilebit.autotune.worker import DeviceWorker, Outcome
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose
from tilebit.schedules.target import Target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest
from tilebit.tiles.compiler.pool import CompilePool

from . import faulty_program
from .faulty_kernels import BEHAVIOURS, publish_kernel

CPU = Target("cpu", "test cpu", 2, 0, 0, 1 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
WORKLOAD = Workload(2, 48, 96, QuantFormat(4, 32))
COMPILE_TIMEOUT = 8.0
MANY = [Schedule("gemm_cpu", 32 * i, 1, 32, num_warps=2) for i in range(1, 17)]


@pytest.fixture(autouse=True)
def many_candidates(monkeypatch) -> None:
    """Enough candidates for these tests, whatever the CPU's rule finds worth trying."""
    monkeypatch.setattr(search, "candidates", lambda workload, target: MANY if target.features else None)


class FaultyCompiler:
    """Kernels of a plain C GEMM that behave as ``plan[schedule]`` says ("right" unless planned); compile faults happen in a real compile
    pool."""

    def __init__(self, cache: ArtifactCache, plan: dict[Schedule, str] | None = None, pool: CompilePool | None = None) -> None:
        self.cache, self.plan, self.pool = cache, plan or {}, pool
        self.compiled: list[Schedule] = []

    def compile(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request: CompileRequest):
        self.compiled.append(request.schedule)
        behaviour = self.plan.get(request.schedule, "right")
        if behaviour in BEHAVIOURS:
            return publish_kernel(request, self.cache, behaviour, mark=self.cache.root / "killed")
        assert self.pool is not None
        schedule = replace(request.schedule, program=faulty_program.NAME, raster=faulty_program.FAULTS[behaviour])
        (failure,) = self.pool.compile([CompileRequest(faulty_program.NAME, request.workload, schedule, request.target)])
        assert isinstance(failure, CompileFailure)
        return CompileFailure(request, failure.kind, failure.sentences)


class TearingMeasurer:
    """Measures, and after its second measurement tears the record file as a dying writer would."""

    def __init__(self, worker: DeviceWorker, path: Path) -> None:
        self.worker, self.path, self.turns = worker, path, 0

    def measure(self, kernel, workload, schedule, target) -> Outcome:
        outcome = self.worker.measure(kernel, workload, schedule, target)
        self.turns += 1
        if self.turns == 3:
            with self.path.open("ab") as file:
                file.write(b'{"workload": {"op": "gemm", "m": 2, "n"')
        return outcome

    def compare(self, kernels, workload, schedules, target) -> list[Outcome]:
        return self.worker.compare(kernels, workload, schedules, target)


class Scripted:
    """A measurer without a device: times and failures by schedule; ``together`` are those of schedules side by side, where they differ."""

    def __init__(self, times: dict[Schedule, float], together: dict[Schedule, float] | None = None) -> None:
        self.times, self.together = times, together or {}
        self.seen: list[tuple[int, Schedule]] = []
        self.compared: list[list[Schedule]] = []

    def compare(self, kernels, workload, schedules, target) -> list[Outcome]:
        assert len(kernels) == len(schedules)
        self.compared.append(list(schedules))
        times = [self.together.get(s, self.times.get(s, 10.0)) for s in schedules]
        return [Outcome("ok", us=us, us_p20=us, us_p80=us, rel_err=1e-4) if us else Outcome("wrong", "scripted") for us in times]

    def measure(self, kernel, workload, schedule, target) -> Outcome:
        self.seen.append((workload.m, schedule))
        us = self.times.get(schedule, 10.0)
        return Outcome("ok", us=us, us_p20=us, us_p80=us, rel_err=1e-4) if us else Outcome("wrong", "scripted")


@pytest.fixture
def cache(tmp_path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


@pytest.fixture
def store(tmp_path) -> RecordStore:
    return RecordStore(tmp_path / "records.jsonl")


@pytest.mark.slow
def test_eight_faults_cost_eight_candidates(cache, store):
    schedules = searched(WORKLOAD, CPU, 12) or []
    faults = ["hang", "segfault", "wrong", "nan", "compile_raise", "compile_hang", "killed_once", "compile_crash"]  # and the torn record
    plan = dict(zip(schedules[1:], faults, strict=False))
    with CompilePool(jobs=1, cache=cache, timeout=COMPILE_TIMEOUT) as pool, DeviceWorker("cpu", cache.root / "locks", timeout=2) as worker:
        compiler = FaultyCompiler(cache, plan, pool)
        measurer = TearingMeasurer(worker, store.path)
        report = tune(
            [WORKLOAD], CPU, store=store, cache=cache, compiler=compiler, measurer=measurer, progress=False, max_candidates=12, patience=99
        )
        (result,) = report.results
        assert (result.measured, result.reused, result.left, result.stopped) == (12, 0, 0, "done") and report.complete
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the torn record has been healed
            records = {r.schedule: r for r in store.records()}
        status = {plan.get(s, "right"): records[s] for s in schedules}
        assert {name: r.status for name, r in status.items()} == {
            "right": "ok", "hang": "hang", "segfault": "crash", "wrong": "wrong", "nan": "wrong", "compile_raise": "compile_error",
            "compile_hang": "compile_timeout", "killed_once": "ok", "compile_crash": "compile_error",
        }  # fmt: skip
        assert "SIGSEGV" in status["segfault"].reason and "NaN" in status["nan"].reason
        assert "rejected this loop nest" in status["compile_raise"].reason and "status 70" in status["compile_crash"].reason
        assert result.failed == 7 and len(records) == 12
        assert store.torn_path.read_bytes() == b'{"workload": {"op": "gemm", "m": 2, "n"\n'
        assert result.best is not None and result.best.us == min(r.us for r in records.values() if r.us is not None)
        assert choose(WORKLOAD, CPU, store.records()).schedule == result.best.schedule

        compiler.compiled.clear()
        again = tune([WORKLOAD], CPU, store=store, compiler=compiler, measurer=measurer, progress=False, max_candidates=12, patience=99)
        assert (again.results[0].measured, again.results[0].reused, again.results[0].best) == (0, 12, result.best)
        assert compiler.compiled == [] and measurer.turns == 9, "three of twelve never reached the measurer"


# It compiles nothing: kernels are in the cache.
SCRIPT = """
import json, sys
sys.path[:] = {path!r}
from tilebit.autotune import search
from tilebit.autotune.store import RecordStore
from tilebit.autotune.tune import tune
from tilebit.autotune.worker import DeviceWorker
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.compiler.cache import ArtifactCache
many = [Schedule.from_json(s) for s in {schedules!r}]
search.candidates = lambda workload, target: many
cache, store = ArtifactCache({cache!r}), RecordStore({store!r})
class Compiled:
    def compile(self, requests): return [cache.lookup(request.key) for request in requests]
class Logged:
    def __init__(self, worker): self.worker = worker
    def measure(self, kernel, workload, schedule, target):
        with open({log!r}, "a") as file:
            file.write(json.dumps([workload.m, schedule.to_json()]) + "\\n")
        return self.worker.measure(kernel, workload, schedule, target)
    def compare(self, kernels, workload, schedules, target):
        return self.worker.compare(kernels, workload, schedules, target)
with DeviceWorker("cpu", cache.root / "locks", timeout=20) as worker:
    report = tune([Workload.from_json(w) for w in {workloads!r}], Target.from_json({target!r}), store=store, cache=cache,
                  compiler=Compiled(), measurer=Logged(worker), progress=False, max_candidates={each}, patience=99)
print(json.dumps([[r.measured, r.reused, r.left] for r in report.results]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kill -9 of a process tree")
def test_killed_run_resumes_without_measuring_twice(cache, store, tmp_path):
    """Killed while the first of two workloads is measured."""
    log, each = tmp_path / "log", 4
    workloads = [WORKLOAD.with_m(m) for m in (1, 2)]
    for workload in workloads:
        for schedule in searched(workload, CPU, each) or []:
            publish_kernel(CompileRequest(schedule.program, workload, schedule, CPU), cache)
    code = SCRIPT.format(
        path=sys.path, cache=str(cache.root), store=str(store.path), log=str(log), each=each, target=CPU.to_json(),
        workloads=[w.to_json() for w in workloads], schedules=[s.to_json() for s in MANY],
    )  # fmt: skip
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    while len(store.path.read_bytes().splitlines() if store.path.exists() else []) < 3:
        assert first.poll() is None, "the first run should be busy"
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    done = store.records()
    known = {(r.workload, r.schedule) for r in done}
    assert 3 <= len(known) < 2 * each

    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    results = json.loads(second.stdout)
    assert sum(r[1] for r in results) == len(known) and sum(r[0] for r in results) == 2 * each - len(known)
    assert store.records()[: len(done)] == done
    per_candidate = Counter((r.workload, r.schedule) for r in store.records())
    assert len(per_candidate) == 2 * each
    assert set(per_candidate.values()) <= {1, 2}, "measured once, and the fastest few once more side by side"
    begun = Counter(log.read_text().splitlines())
    twice = [line for line, count in begun.items() if count > 1]
    assert len(begun) == 2 * each and len(twice) <= 1, "only the candidate in flight when the run was killed may begin again"


def scripted(cache, store, times=None, workloads=(WORKLOAD,), **options):
    measurer = Scripted(times or {})
    compiler = FaultyCompiler(cache)
    report = tune(workloads, CPU, store=store, compiler=compiler, measurer=measurer, progress=False, **options)
    return report, measurer, compiler


def test_best_of_the_measured_is_reported_recorded_and_selected(cache, store):
    schedules = searched(WORKLOAD, CPU, 6) or []
    report, measurer, _ = scripted(cache, store, {schedules[4]: 3.0, schedules[0]: 0.0}, max_candidates=6)
    (result,) = report.results
    assert result.best is not None and (result.best.schedule, result.best.us) == (schedules[4], 3.0)
    assert (result.measured, result.failed, result.failure) == (6, 1, "wrong: scripted") and [s for _, s in measurer.seen] == schedules
    record = store.records()[4]
    assert record == result.best and record.key == CompileRequest("gemm_cpu", WORKLOAD, schedules[4], CPU).key
    assert record.versions["torch"] and record.date and (record.gpu, record.units, record.arch) == ("test cpu", 2, "cpu")


def test_the_fastest_few_are_timed_side_by_side(cache, store):
    """What counts, is recorded and is selected is what came of the run-off; a later run that measures nothing holds none."""
    schedules = searched(WORKLOAD, CPU, 6) or []
    times = dict(zip(schedules, (4.0, 4.25, 4.25, 5.0, 4.125, 0.0), strict=True))
    measurer = Scripted(times, {schedules[0]: 5.0, schedules[4]: 4.75, schedules[1]: 4.25, schedules[2]: 0.0})
    (result,) = tune(
        [WORKLOAD], CPU, store=store, compiler=FaultyCompiler(cache), measurer=measurer, progress=False, max_candidates=6
    ).results
    assert measurer.compared == [[schedules[i] for i in (0, 4, 1, 2)]], "5.0 is too slow to be among them"
    slower = 4.75 / 4.125  # the median of them, side by side
    assert result.best is not None and (result.best.schedule, result.best.us) == (schedules[1], 4.25 / slower)
    assert (result.measured, result.failed) == (6, 2), "one of them was right once, and is wrong now"
    last = {r.schedule: (r.status, r.us) for r in store.records()}
    found = [("ok", 5.0 / slower), ("ok", 4.25 / slower), ("wrong", None), ("ok", 5.0), ("ok", 4.75 / slower), ("wrong", None)]
    assert [last[s] for s in schedules] == found
    assert choose(WORKLOAD, CPU, store.records()).schedule == schedules[1]
    again, measurer, _ = scripted(cache, store, max_candidates=6)
    assert measurer.compared == [] and again.results[0].best == result.best


def test_one_that_was_not_in_the_run_off_does_not_win_by_it(cache, store):
    """All are slower side by side, where the device is kept busy: the fifth has only the time that it reached alone."""
    schedules = searched(WORKLOAD, CPU, 5) or []
    times = dict(zip(schedules, (4.0, 4.01, 4.02, 4.03, 4.04), strict=True))
    measurer = Scripted(times, dict(zip(schedules, (4.5, 4.4, 4.48, 4.46, 9.9), strict=True)))
    (result,) = tune(
        [WORKLOAD], CPU, store=store, compiler=FaultyCompiler(cache), measurer=measurer, progress=False, max_candidates=5
    ).results
    assert measurer.compared == [schedules[:4]] and result.best is not None and result.best.schedule == schedules[1]
    assert choose(WORKLOAD, CPU, store.records()).schedule == schedules[1]


def test_a_run_off_that_ends_the_process_changes_nothing(cache, store):
    class Fragile(Scripted):
        def compare(self, kernels, workload, schedules, target) -> list[Outcome]:
            return [Outcome("crash", "scripted")] * len(kernels)

    (result,) = tune(
        [WORKLOAD], CPU, store=store, compiler=FaultyCompiler(cache), measurer=Fragile({}), progress=False, max_candidates=3
    ).results
    assert (result.measured, result.failed, len(store.records())) == (3, 0, 3) and all(r.us == 10.0 for r in store.records())


def test_m_is_tuned_as_it_is_and_once(cache, store):
    report, measurer, _ = scripted(cache, store, workloads=[WORKLOAD.with_m(m) for m in (3, 4, 3, 300)], max_candidates=2)
    assert [r.workload.to_json()["m"] for r in report.results] == [3, 4, 300] and [m for m, _ in measurer.seen] == [3, 3, 4, 4, 300, 300]


def test_products_in_steps_are_refused(cache, store):
    dependent = replace(WORKLOAD, dependent=True)
    with pytest.raises(ValueError, match=r"dependent: a dependent product is timed in a model's step \(tilebit tune --model\)"):
        scripted(cache, store, workloads=[WORKLOAD, dependent])
    assert not store.records()


def test_patience_ends_a_search_and_resumes_to_the_same_end(cache, store):
    report, measurer, _ = scripted(cache, store, max_candidates=10, patience=3, jobs=1)
    assert report.results[0].stopped == "patience" and len(measurer.seen) == 4 and report.results[0].left == 6
    again, measurer, compiler = scripted(cache, store, max_candidates=10, patience=3, jobs=1)
    assert not measurer.seen and not compiler.compiled and (again.results[0].reused, again.results[0].failure) == (4, "")


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_budget_is_kept_and_shared(cache, store, monkeypatch):
    """By a clock that only measurements move: a quarter of a second each, and half of two seconds for either workload."""

    class Slow(Scripted):
        def measure(self, kernel, workload, schedule, target) -> Outcome:
            clock.now += 0.25
            return super().measure(kernel, workload, schedule, target)

    monkeypatch.setattr(tuning, "time", clock := Clock())
    slow = Slow({})
    workloads = [WORKLOAD.with_m(m) for m in (1, 2)]
    report = tune(workloads, CPU, store=store, compiler=FaultyCompiler(cache), measurer=slow, progress=False, budget_s=2.0, patience=99)
    assert report.seconds == clock.now == 2.0 and not report.complete
    assert [(r.stopped, r.measured, r.left) for r in report.results] == [("budget", 4, 12)] * 2, "the second workload had its share"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_share_shorter_than_compiling_takes_is_not_lost(cache, store, monkeypatch, ahead: bool):
    """Of eight workloads half a second each, where compiling takes one: as many as there is time for get a measurement each, and no
    other is compiled for. With one that compiles ahead, as on a GPU, too."""

    class Slow(Scripted):
        def measure(self, kernel, workload, schedule, target) -> Outcome:
            clock.now += 0.25
            return super().measure(kernel, workload, schedule, target)

    class SlowCompiler(FaultyCompiler):
        def compile(self, requests):
            clock.now += 1.0 if requests else 0.0
            return super().compile(requests)

    class AtOnce:
        """Runs what it is given when it is given."""

        def submit(self, call, *given) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(call(*given))
            return future

    monkeypatch.setattr(tuning, "time", clock := Clock())
    compiler, slow = SlowCompiler(cache), Slow({})
    if ahead:
        real = tuning._Run.__init__
        monkeypatch.setattr(tuning._Run, "__init__", lambda run, *given: (real(run, *given), setattr(run, "ahead", AtOnce()))[0])
    workloads = [WORKLOAD.with_m(m) for m in range(1, 9)]
    report = tune(workloads, CPU, store=store, compiler=compiler, measurer=slow, progress=False, budget_s=4.0, patience=99, jobs=2)
    measured = [r.measured for r in report.results]
    assert measured == [1, 1, 1] + [0] * 5 and [r.best is not None for r in report.results] == [bool(count) for count in measured]
    assert {r.stopped for r in report.results} == {"budget"} and not report.complete and len(store.records()) == 3
    assert report.seconds <= 4.0 + 1.25, "one that is in flight is finished"


def test_a_search_that_ends_early_shares_no_compiler_with_the_next(cache, store, monkeypatch):
    """What it had started to compile ahead is on its way when the next one asks: a pool that two ask at once would mix up answers."""
    busy = threading.Lock()

    class OneAtATime(FaultyCompiler):
        def compile(self, requests):
            assert busy.acquire(blocking=False), "two at once"
            try:
                time.sleep(0.2 if requests else 0.0)
                return super().compile(requests)
            finally:
                busy.release()

    workloads = [WORKLOAD.with_m(m) for m in (1, 2)]
    given = {"store": store, "measurer": Scripted({}), "progress": False, "patience": 1, "jobs": 2}
    tune(workloads[:1], CPU, compiler=FaultyCompiler(cache), max_candidates=2, **given)
    real = tuning._Run.__init__
    with ThreadPoolExecutor(1) as ahead:
        monkeypatch.setattr(tuning._Run, "__init__", lambda run, *given: (real(run, *given), setattr(run, "ahead", ahead))[0])
        report = tune(workloads, CPU, compiler=OneAtATime(cache), max_candidates=6, **given)
    assert [(r.stopped, r.measured, r.reused) for r in report.results] == [("patience", 0, 2), ("patience", 2, 0)]


def test_another_artifact_or_driver_is_measured_again(cache, store):
    scripted(cache, store, max_candidates=2)
    first, second = store.records()[:2]
    store.path.write_text(
        json.dumps(replace(first, key="0" * 64).to_json()) + "\n" + json.dumps(replace(second, driver="1.2").to_json()) + "\n"
    )
    report, _, _ = scripted(cache, store, max_candidates=2)
    assert (report.results[0].measured, report.results[0].reused) == (2, 0)


def test_a_record_of_another_device_does_not_count(cache, store):
    scripted(cache, store, max_candidates=2)
    store.path.write_text("".join(json.dumps(replace(r, gpu="other cpu").to_json()) + "\n" for r in store.records()))
    report, _, _ = scripted(cache, store, max_candidates=2)
    assert report.results[0].measured == 2


def test_full_disk_stops_the_run_and_keeps_its_records(cache, store, monkeypatch):
    append, turns = RecordStore.append, []

    def full_after_two(self: RecordStore, record: TuningRecord) -> None:
        turns.append(1)
        if len(turns) > 2:
            raise StoreError(f"{self.path}: the record was not written (the disk is full)")
        append(self, record)

    with monkeypatch.context() as full, pytest.raises(StoreError, match="disk is full"):
        full.setattr(RecordStore, "append", full_after_two)
        scripted(cache, store, max_candidates=4)
    assert len(store.records()) == 2
    report, _, _ = scripted(cache, store, max_candidates=4)
    assert (report.results[0].reused, report.results[0].measured) == (2, 2)


def test_a_full_cache_is_no_candidates_fault(cache, store):
    class Full(FaultyCompiler):
        def one(self, request):
            return CompileFailure(request, "cache", ("the disk that holds the cache is full",))

    with pytest.raises(TuneError, match="the disk that holds the cache is full"):
        tune([WORKLOAD], CPU, store=store, compiler=Full(cache), measurer=Scripted({}), progress=False)
    assert store.records() == []


def test_callers_mistakes(cache, store):
    with pytest.raises(ValueError, match="max_candidates 0"):
        scripted(cache, store, max_candidates=0)
    with pytest.raises(ValueError, match="budget_s -1"):
        scripted(cache, store, budget_s=-1)
    with pytest.raises(ValueError, match="no program has candidates"):
        tune([WORKLOAD], replace(CPU, features=()), store=store, compiler=FaultyCompiler(cache), measurer=Scripted({}), progress=False)
    with pytest.raises(ValueError, match=r"target is sm_80 .*accepted: a target that is here"):
        tune([WORKLOAD], target_from_name("sm_80"), store=store, cache=cache, progress=False)
    for elsewhere in (replace(CPU, name="Somebody Else's CPU"), replace(CPU, units=CPU.units + 1), replace(CPU, features=("avx1024",))):
        with pytest.raises(ValueError, match=r"target is cpu .*this machine's device is cpu .*accepted: a target that is here"):
            tune([WORKLOAD], elsewhere, store=store, cache=cache, progress=False)
    assert store.records() == []


def test_a_gpu_is_not_kept_waiting_for_the_next_workloads_first_kernels(cache, store, monkeypatch):
    """While the last batch of a workload is measured, the first of the next one compiles."""
    monkeypatch.setattr(tuning, "driver_version", lambda: "1.0")
    monkeypatch.setattr(tuning, "searched", lambda workload, target, most, ranker: MANY[:most])
    monkeypatch.setattr(tuning, "CompileRequest", lambda program, w, schedule, target: CompileRequest(program, w, schedule, CPU))
    begun = {m: threading.Event() for m in (1, 2, 4)}

    class Noting(FaultyCompiler):
        def compile(self, requests):
            for request in requests:
                begun[request.workload.m].set()
            return super().compile(requests)

    class Waiting(Scripted):
        def measure(self, kernel, workload, schedule, target) -> Outcome:
            after = workload.m * 2
            if len([m for m, _ in self.seen if m == workload.m]) == 4:  # of the last batch
                assert after not in begun or begun[after].wait(60), "the next workload's kernels were not begun"
            return super().measure(kernel, workload, schedule, target)

    gpu, measurer, compiler = replace(CPU, arch="sm_90a"), Waiting({}), Noting(cache)
    workloads = [WORKLOAD.with_m(m) for m in begun]
    report = tune(workloads, gpu, store=store, compiler=compiler, measurer=measurer, progress=False, jobs=4, max_candidates=6)
    assert [(r.measured, r.failed, r.stopped) for r in report.results] == [(6, 0, "done")] * 3
    assert len(compiler.compiled) == 18, "each was compiled once"
    assert [m for m, _ in measurer.seen] == [m for m in begun for _ in range(6)]
