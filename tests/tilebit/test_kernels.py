"""Finding a kernel: a schedule that does not pass the lint costs one attempt, once; a machine that cannot compile is an error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bad_file_cases import artifact
from door_cases import FORMATS, workload
from lanes import one_of_each

from tilebit.kernels import TRIES, KernelUnavailable, build
from tilebit.schedules.operations import candidates, estimate
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.select import refresh, select
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler import pool
from tilebit.tiles.compiler.cache import ArtifactCache, CacheError
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest

TARGET = target_from_name("sm_90a")
UNTUNED = target_from_name("sm_80")  # nothing is shipped for it
WORKLOAD = workload(FORMATS[0], 16, 4096, 4096)


@pytest.fixture
def attempts(monkeypatch, tmp_path):
    """Every request that reaches a compiler, and ``verdict``, which decides (None: it compiles) what becomes of one."""
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path))

    class Attempts(list):
        verdict, reason = staticmethod(lambda request: None), "it says so"

    seen = Attempts()

    class Pool:
        def __init__(self, jobs: int | None, cache: ArtifactCache, keep: bool = False):
            self.cache = cache

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def compile(self, requests, progress=None):
            seen.extend(requests)
            return [self.one(request) for request in requests]

        def one(self, request: CompileRequest):
            kind = seen.verdict(request)
            if kind is not None:
                return CompileFailure(request, kind, (f"because of {kind}: {seen.reason}",))
            artifact(self.cache.kernels / request.key, key=request.key, schedule=request.schedule.to_json())
            return self.cache.lookup(request.key)

    monkeypatch.setattr(pool, "CompilePool", Pool)
    return seen


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Writes the user's records, of what became of ``WORKLOAD``'s candidates on ``UNTUNED``, and returns them."""
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv("TILEBIT_RECORDS", str(path))

    def write(statuses: dict[int, str], every: str | None = None, **changes) -> list[TuningRecord]:
        found = []
        for i, s in enumerate(candidates(WORKLOAD, UNTUNED) or []):
            status = statuses.get(i, every)
            if status is not None:
                key, t = CompileRequest(s.program, WORKLOAD, s, UNTUNED).key, UNTUNED
                found.append(TuningRecord(WORKLOAD, s, t.name, t.arch, t.units, status=status, reason="3 elements differ.", key=key))
        found = [replace(r, **changes) for r in found]
        path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in found))
        refresh()
        return found

    yield write
    refresh()


def test_the_chosen_schedule_is_compiled_once(attempts):
    (kernel,) = build([WORKLOAD], TARGET)
    assert kernel.schedule == select(WORKLOAD, TARGET) and [r.schedule for r in attempts] == [kernel.schedule]
    (again,) = build([WORKLOAD], TARGET)
    assert again.key == kernel.key and len(attempts) == 1


def test_an_unfit_schedule_falls_back_and_is_remembered(attempts):
    chosen = select(WORKLOAD, TARGET)
    attempts.verdict = lambda request: "lint" if request.schedule == chosen else None
    (kernel,) = build([WORKLOAD], TARGET)
    assert kernel.schedule != chosen and [r.schedule for r in attempts] == [chosen, kernel.schedule]
    assert build([WORKLOAD], TARGET)[0].key == kernel.key
    assert len(attempts) == 2, "what is known to be unfit is not compiled again"
    (note,) = (ArtifactCache().root / "unfit").iterdir()
    assert "because of lint" in note.read_text()


def test_others_go_on_when_one_falls_back(attempts):
    other = workload(FORMATS[0], 1, 4096, 4096)
    chosen = select(WORKLOAD, TARGET)
    attempts.verdict = lambda request: "illegal" if request.schedule == chosen else None
    first, second = build([WORKLOAD, other], TARGET)
    assert first.schedule != chosen and second.schedule == select(other, TARGET) and len(attempts) == 3


def test_when_every_schedule_is_unfit(attempts):
    attempts.verdict = lambda request: "lint"
    with pytest.raises(KernelUnavailable, match=rf"none of the {TRIES} best schedules.*tilebit tune"):
        build([WORKLOAD], TARGET)
    assert len(attempts) == TRIES == len({r.schedule for r in attempts})


@pytest.mark.parametrize("kind", ["stub", "crash", "timeout", "cache", "nvcc", "build"])
def test_a_machine_that_cannot_compile_is_no_reason_to_try_others(attempts, kind):
    attempts.verdict, attempts.reason = lambda request: kind, "No space left on device" if kind in ("nvcc", "build") else "it says so"
    with pytest.raises(KernelUnavailable, match=rf"because of {kind}: {attempts.reason}.*tilebit doctor"):
        build([WORKLOAD], TARGET)
    assert len(attempts) == 1 and not (ArtifactCache().root / "unfit").exists()


@pytest.mark.parametrize("kind", ["nvcc", "build"])
def test_a_schedule_that_compilers_refuse_is_not_the_end(attempts, kind):
    """It may be the schedule's own fault, such as registers that ptxas does not find, or not: nothing is remembered."""
    chosen = select(WORKLOAD, TARGET)
    attempts.verdict = lambda request: kind if request.schedule == chosen else None
    (kernel,) = build([WORKLOAD], TARGET)
    assert kernel.schedule != chosen and [r.schedule for r in attempts] == [chosen, kernel.schedule]
    assert not (ArtifactCache().root / "unfit").exists()
    attempts.verdict = lambda request: kind
    with pytest.raises(KernelUnavailable, match=rf"because of {kind}.*tilebit doctor") as caught:
        build([workload(FORMATS[0], 16, 4096, 8192)], TARGET)
    assert len(attempts) == 2 + TRIES and str(attempts[2]) in str(caught.value), "the first is told of"


def test_without_a_compiler_a_fallback_in_the_cache_is_found(attempts, monkeypatch):
    chosen = select(WORKLOAD, TARGET)
    attempts.verdict = lambda request: "lint" if request.schedule == chosen else None
    (kernel,) = build([WORKLOAD], TARGET)
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    assert build([WORKLOAD], TARGET)[0].key == kernel.key
    with pytest.raises(KernelUnavailable, match="tilebit compile --n 64"):
        build([workload(FORMATS[0], 16, 64, 64)], TARGET)
    assert len(attempts) == 2


def test_what_failed_when_tuned_is_tried_last(attempts, tuned):
    options = candidates(WORKLOAD, UNTUNED) or []
    best = select(WORKLOAD, UNTUNED)
    failed = {i: "crash" for i, s in enumerate(options) if s not in options[5:7]}
    assert best not in options[5:7]
    tuned(failed)
    attempts.verdict = lambda request: "lint" if request.schedule in options[5:7] else None
    (kernel,) = build([WORKLOAD], UNTUNED)
    assert {r.schedule for r in attempts[:2]} == set(options[5:7]) and len(attempts) == 3
    assert attempts[2].schedule == kernel.schedule


ANY_FAILURE = ("compile_error", "compile_timeout", "corrupt", "crash", "hang", "error")


@pytest.mark.parametrize("status", one_of_each(ANY_FAILURE, lambda status: status.startswith("compile")))
def test_when_all_have_failed_a_call_still_runs(attempts, tuned, status):
    best = select(WORKLOAD, UNTUNED)
    tuned({}, every=status)
    (kernel,) = build([WORKLOAD], UNTUNED)
    assert kernel.schedule == best and len(attempts) == 1


def test_a_kernel_that_computed_wrong_results_is_never_used(attempts, tuned):
    (made,) = build([WORKLOAD], UNTUNED)  # as the tuner leaves it: in the cache
    records = tuned({}, every="wrong")
    assert made.schedule in [r.schedule for r in records]
    with pytest.raises(KernelUnavailable) as caught:
        build([WORKLOAD], UNTUNED)
    said = str(caught.value)
    assert f"{len(records)} computed wrong results when tuned on {UNTUNED.name} (3 elements differ.) and are never used" in said
    assert "`tilebit tune --n 4096 --k 4096 --m 16 " in said and "records.jsonl" in said and len(attempts) == 1

    records = tuned({9: "hang"}, every="wrong")
    assert build([WORKLOAD], UNTUNED)[0].schedule == records[9].schedule, "which may have been the machine's fault"

    *_, slower, slowest = sorted(range(len(records)), key=lambda i: estimate(WORKLOAD, records[i].schedule, UNTUNED).us)
    tuned({slower: "hang", slowest: "hang"}, every="wrong")
    attempts.verdict = lambda request: "lint" if request.schedule == records[slower].schedule else None
    assert build([WORKLOAD], UNTUNED)[0].schedule == records[slowest].schedule, f"behind more than {TRIES} faster ones that are wrong"


def test_what_was_wrong_for_some_rows_is_used_for_none(attempts, tuned):
    """One artifact serves every number of rows."""
    others = [WORKLOAD.with_m(m) for m in (9, 17, 64, 200)]
    chosen = [kernel.schedule for kernel in build(others, UNTUNED)]
    tuned({}, every="wrong")
    found = build(others, UNTUNED)
    known = {CompileRequest(s.program, WORKLOAD, s, UNTUNED).key for s in candidates(WORKLOAD, UNTUNED) or []}
    assert any(CompileRequest(s.program, WORKLOAD, s, UNTUNED).key in known for s in chosen), "some of them were chosen before"
    assert not any(kernel.key in known for kernel in found)


def test_without_a_cache_and_without_a_compiler_the_error_says_how_to_build(attempts, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheError):
        build([WORKLOAD], TARGET)
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    with pytest.raises(KernelUnavailable, match=r"(?s)tilebit compile --n 4096.*is no directory but a file"):
        build([WORKLOAD], TARGET)


def test_wrong_results_of_other_code_say_nothing(attempts, tuned):
    tuned({}, every="wrong", key="0" * 64)  # of other sources or compilers
    (kernel,) = build([WORKLOAD], UNTUNED)
    assert kernel.schedule == select(WORKLOAD, UNTUNED) and len(attempts) == 1
