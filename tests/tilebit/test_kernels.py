"""Finding a kernel: a schedule that does not pass the lint costs one attempt, once; a machine that cannot compile is an error."""

from __future__ import annotations

import pytest
from bad_file_cases import artifact
from door_cases import FORMATS, workload

from tilebit.kernels import TRIES, KernelUnavailable, build
from tilebit.schedules.select import select
from tilebit.schedules.target import target_from_name
from tilebit.tiles import pool
from tilebit.tiles.cache import ArtifactCache
from tilebit.tiles.compile import CompileFailure, CompileRequest

TARGET = target_from_name("sm_90a")
WORKLOAD = workload(FORMATS[0], 16, 4096, 4096)


@pytest.fixture
def attempts(monkeypatch, tmp_path):
    """Every request that reaches a compiler, and ``verdict``, which decides (None: it compiles) what becomes of one."""
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path))

    class Attempts(list):
        verdict = staticmethod(lambda request: None)

    seen = Attempts()

    class Pool:
        def __init__(self, jobs: int | None, cache: ArtifactCache):
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
                return CompileFailure(request, kind, (f"because of {kind}",))
            artifact(self.cache.kernels / request.key, key=request.key, schedule=request.schedule.to_json())
            return self.cache.lookup(request.key)

    monkeypatch.setattr(pool, "CompilePool", Pool)
    return seen


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


@pytest.mark.parametrize("kind", ["nvcc", "build", "stub", "crash", "timeout", "cache"])
def test_a_machine_that_cannot_compile_is_no_reason_to_try_others(attempts, kind):
    attempts.verdict = lambda request: kind
    with pytest.raises(KernelUnavailable, match=rf"because of {kind}.*tilebit doctor"):
        build([WORKLOAD], TARGET)
    assert len(attempts) == 1 and not (ArtifactCache().root / "unfit").exists()


def test_without_a_compiler_a_fallback_in_the_cache_is_found(attempts, monkeypatch):
    chosen = select(WORKLOAD, TARGET)
    attempts.verdict = lambda request: "lint" if request.schedule == chosen else None
    (kernel,) = build([WORKLOAD], TARGET)
    monkeypatch.setenv("TILEBIT_NO_COMPILE", "1")
    assert build([WORKLOAD], TARGET)[0].key == kernel.key
    with pytest.raises(KernelUnavailable, match="tilebit compile --n 64"):
        build([workload(FORMATS[0], 16, 64, 64)], TARGET)
    assert len(attempts) == 2
