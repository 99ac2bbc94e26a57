"""Faults of the machine while tuning: they end the run, leave no record, and what was once recorded of them counts nowhere."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from lanes import one_of_each

from tilebit.autotune import grid, search
from tilebit.autotune.failures import TuneError
from tilebit.autotune.store import RecordStore
from tilebit.autotune.tune import tune
from tilebit.autotune.worker import Outcome
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.faults import machines_fault
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.records import STATUSES, TuningRecord, latest
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose, explain
from tilebit.schedules.target import Target, cpu_target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

CPU = Target("cpu", "test cpu", 2, 0, 0, 1 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
W = Workload(2, 48, 96, QuantFormat(4, 32))
OPTIONS = [Schedule("gemm_cpu", 32 * i, 1, 32, num_warps=2) for i in range(1, 5)]

# (status, reason) as they were recorded, or would be.
FAULTS = {
    "no C compiler": ("compile_error", "build: CpuCompileError: no C compiler: cc or gcc or clang is not on PATH; install gcc, or set CC"),
    "CC is none": ("compile_error", "build: CpuCompileError: no C compiler: CC=gcc-99 is not on PATH; install gcc"),
    "CC does nothing": ("compile_error", "build: CpuCompileError: /bin/false failed on cpu_launch.c: "),
    "no nvcc": ("compile_error", "nvcc: nvcc was not found in $CUDACXX, $CUDA_HOME/bin, $PATH, /usr/local/cuda or the wheel"),
    "an old nvcc": ("compile_error", "nvcc: nvcc (11.8) refused the source: nvcc fatal : Unsupported gpu architecture 'compute_90a'"),
    "no tvm": ("compile_error", "build: ModuleNotFoundError: No module named 'tvm'"),
    "a full disk": ("compile_error", "build: CpuCompileError: /usr/bin/cc failed: kernel.so: final link failed: No space left on device"),
    "a full disk in LLVM": ("compile_error", "crash: the compiler's process ended with status -6; its last words: No space left on device"),
    "a quota": ("compile_error", "build: OSError: [Errno 122] Disk quota exceeded"),
    "no temporary folder": ("compile_error", "nvcc: Cannot create temporary file in /nowhere/: No such file or directory"),
    "read only": ("compile_error", "build: OSError: [Errno 30] Read-only file system: 'kernel.ll'"),
    "compiler out of memory": ("compile_error", "nvcc: cc1plus: out of memory allocating 65536 bytes after a total of 2 bytes"),
    "compiler was killed": ("compile_error", "nvcc: c++: fatal error: Killed signal terminated program cc1plus"),
    "process was killed": ("compile_error", "crash: the compiler's process ended with status -9"),
    "no process": ("compile_error", "crash: the compiler's process did not start: [Errno 11] Resource temporarily unavailable"),
    "measuring was killed": ("crash", "the measuring process was ended by SIGKILL"),
    "measuring was ended": ("crash", "the measuring process was ended by SIGTERM: some words"),
    "GPU memory": ("error", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"),
    "memory": ("error", "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    "no GPU": ("crash", "AcceleratorError: CUDA error: no CUDA-capable device is detected"),
    "a busy GPU": ("crash", "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    "a broken GPU": ("crash", "AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
    "a damaged kernel": ("corrupt", "kernel.so has 5 bytes where the manifest says 9"),
}
OWN = {
    "a refused program": ("compile_error", "build: ValueError: the pass pipeline rejected this loop nest"),
    "refused source": ("compile_error", "nvcc: nvcc (13.0.88) refused the generated source for sm_90a:\nkernel.cu(3): error: expected a ;"),
    "an illegal schedule": ("compile_error", "illegal: block_n is 7; accepted: 32."),
    "lint": ("compile_error", "lint: error: 12 bytes of spills"),
    "a crash of the compiler": ("compile_error", "crash: the process ended with status -11; said: No such file or directory"),
    "too long": ("compile_timeout", "timeout: it took longer than 300 s and was ended"),
    "wrong": ("wrong", "1 element differs: out of memory, No space left on device"),
    "a hang": ("hang", "it had not finished after 120 s and was ended"),
    "a fault of the kernel": ("crash", "the measuring process was ended by SIGSEGV: could not open /etc/x: Permission denied"),
    "an illegal address": ("crash", "AcceleratorError: CUDA error: an illegal memory access was encountered"),
    "an error": ("error", "ValueError: the kernel takes lse, which this workload does not have"),
}


def status(name: str) -> str:
    return FAULTS[name][0]


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "candidates", lambda workload, target: OPTIONS)


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records.jsonl")


class Compiler:
    """Right kernels, but for the ``index``-th request, which fails so."""

    def __init__(self, index: int = -1, kind: str = "", words: str = "") -> None:
        self.index, self.kind, self.words, self.seen = index, kind, words, 0

    def compile(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request: CompileRequest):
        self.seen += 1
        if self.seen - 1 == self.index:
            return CompileFailure(request, self.kind, (self.words,))
        return Kernel(Path("a kernel"), {})


class Measurer:
    """Times by order, but for the ``index``-th, which fails so; ``beside`` is what becomes of all that are timed side by side."""

    def __init__(self, index: int = -1, outcome: Outcome | None = None, beside: Outcome | None = None) -> None:
        self.index, self.outcome, self.beside, self.seen = index, outcome, beside, 0

    def measure(self, kernel, workload, schedule, target) -> Outcome:
        self.seen += 1
        if self.seen - 1 == self.index and self.outcome is not None:
            return self.outcome
        return Outcome("ok", us=10.0 + self.seen, us_p20=1.0, us_p80=20.0, rel_err=1e-4)

    def compare(self, kernels, workload, schedules, target) -> list[Outcome]:
        return [self.beside or Outcome("ok", us=10.0, us_p20=1.0, us_p80=20.0, rel_err=1e-4) for _ in kernels]


def run(store: RecordStore, compiler, measurer=None, target: Target = CPU):
    (result,) = tune([W], target, store=store, compiler=compiler, measurer=measurer or Measurer(), progress=False, jobs=1).results
    return result


def test_faults_of_the_machine_are_told_by_their_words():
    assert not [name for name, failure in FAULTS.items() if not machines_fault(*failure)]
    assert not [name for name, failure in OWN.items() if machines_fault(*failure)]
    assert not machines_fault("ok", "No space left on device")
    assert {status for status, _ in (*FAULTS.values(), *OWN.values())} == {*STATUSES} - {"ok"}


@pytest.mark.parametrize("name", one_of_each([name for name, (status, _) in FAULTS.items() if status == "compile_error"], status))
def test_a_fault_while_compiling_ends_the_run_without_a_record(store: RecordStore, name: str):
    kind, _, words = FAULTS[name][1].partition(": ")
    with pytest.raises(TuneError, match=r"by a fault of this machine.*Nothing was recorded of it.*run the tuner again") as caught:
        run(store, Compiler(2, kind, words))
    assert words in str(caught.value)
    assert [r.ok for r in store.records()] == [True, True]
    again = run(store, Compiler())
    assert (again.reused, again.measured, again.failed) == (2, 2, 0)


@pytest.mark.parametrize("name", one_of_each([name for name, (status, _) in FAULTS.items() if status != "compile_error"], status))
def test_a_fault_while_measuring_ends_the_run_without_a_record(store: RecordStore, name: str):
    outcome = Outcome(*FAULTS[name])
    with pytest.raises(TuneError, match="by a fault of this machine") as caught:
        run(store, Compiler(), Measurer(1, outcome))
    assert outcome.reason in str(caught.value) and [r.ok for r in store.records()] == [True]
    with pytest.raises(TuneError, match="by a fault of this machine"):
        run(store, Compiler(), Measurer(beside=outcome))
    assert len(store.records()) == 4 and all(r.ok for r in store.records())


@pytest.mark.parametrize("name", one_of_each(list(OWN), lambda name: OWN[name][0]))
def test_a_failure_of_a_candidate_s_own_is_recorded(store: RecordStore, name: str):
    status, reason = OWN[name]
    kind, _, words = reason.partition(": ")
    compiler, measurer = Compiler(), Measurer(1, Outcome(status, reason))
    if status.startswith("compile"):
        compiler, measurer = Compiler(1, kind, words), Measurer()
    result = run(store, compiler, measurer)
    assert (result.measured, result.failed) == (4, 1)
    assert [(r.status, r.reason) for r in latest(store.records()).values() if not r.ok] == [(status, reason)]
    again = run(store, Compiler())
    assert (again.reused, again.failed) == (4, 1)


@pytest.mark.parametrize("name", one_of_each(list(FAULTS), status))
def test_recorded_faults_are_measured_again_and_are_no_tuning(store: RecordStore, name: str):
    """As an earlier version left them: "measured 0, known 4, failed 4" for ever."""
    status, reason = FAULTS[name]
    keys = [CompileRequest(s.program, W, s, CPU).key for s in OPTIONS]
    old = [
        TuningRecord(W, s, CPU.name, CPU.arch, CPU.units, status=status, reason=reason, key=key)
        for s, key in zip(OPTIONS, keys, strict=True)
    ]
    store.path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in old))
    result = run(store, Compiler())
    assert (result.measured, result.reused, result.failed) == (4, 0, 0)


@pytest.mark.parametrize("name", one_of_each(list(FAULTS), status))
def test_explain_and_select_take_no_notice_of_a_machine_s_fault(name: str):
    device, workload = target_from_name("sm_80"), Workload(16, 4096, 4096)
    every = candidates(workload, device) or []
    status, reason = FAULTS[name]
    failed = [TuningRecord(workload, s, device.name, device.arch, device.units, status=status, reason=reason) for s in every]
    assert choose(workload, device, failed) == choose(workload, device, [])
    assert explain(workload, device, failed) == explain(workload, device, [])
    timed = replace(failed[5], status="ok", us=5.0, reason="")
    assert choose(workload, device, [timed, *failed]).record == timed, "nor does one that came later hide a time"
    assert list(latest([timed, *failed]).values()) == [timed]


def test_a_grid_of_measurements_ends_likewise(store: RecordStore):
    made = {s: Kernel(Path("a kernel"), {}) for s in OPTIONS}
    worker = Measurer(beside=Outcome("error", "OutOfMemoryError: CUDA out of memory"))
    with pytest.raises(TuneError, match="by a fault of this machine"):
        grid.measure(W, {W.m: OPTIONS}, dict(made), CPU, worker, store, float("inf"))  # type: ignore[arg-type]
    assert store.records() == []


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Target:
    """This machine's CPU, with one candidate."""
    target = cpu_target()
    found = candidates(W, target)
    if not found:
        pytest.skip("needs a CPU with AVX2")
    monkeypatch.setattr(search, "candidates", lambda workload, target: found[:1])
    monkeypatch.delenv("CC", raising=False)
    return target


def compilers(folder: Path) -> dict[str, tuple[dict[str, str], str]]:
    """Surroundings in which nothing compiles, and what is said of them."""
    (folder / "empty").mkdir()
    full = folder / "full"
    full.write_text("#!/bin/sh\necho 'ld: final link failed: No space left on device' >&2; exit 1\n")
    full.chmod(0o755)
    return {
        "nothing on the path": ({"PATH": str(folder / "empty")}, "is not on PATH"),
        "one that does nothing": ({"CC": "/bin/false"}, "failed on cpu_launch"),
        "one that is not there": ({"CC": "gcc-of-nobody"}, "CC=gcc-of-nobody"),
        "a full disk": ({"CC": str(full)}, "No space left on device"),
    }


BROKEN = ["one that does nothing", "one that is not there", "a full disk"]


@pytest.mark.parametrize("name", ["nothing on the path", *(pytest.param(name, marks=pytest.mark.slow) for name in BROKEN)])
def test_a_machine_without_a_compiler(
    cache: ArtifactCache, store: RecordStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Target, name: str
):
    """With the real pool and its processes."""
    surroundings, words = compilers(tmp_path)[name]
    for variable, value in surroundings.items():
        monkeypatch.setenv(variable, value)
    with CompilePool(jobs=1, cache=cache) as pool, pytest.raises(TuneError, match=words):
        run(store, pool, target=here)
    assert store.records() == [] and cache.keys() == []


@pytest.mark.slow
def test_after_the_repair_it_is_measured(
    cache: ArtifactCache, store: RecordStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Target
):
    test_a_machine_without_a_compiler(cache, store, tmp_path, monkeypatch, here, "nothing on the path")
    monkeypatch.undo()
    monkeypatch.setattr(search, "candidates", lambda workload, target: (candidates(W, here) or [])[:1])
    with CompilePool(jobs=1, cache=cache) as pool:
        assert run(store, pool, target=here).measured == 1
    assert [r.ok for r in store.records()] == [True]


def test_no_place_for_a_process_s_words_is_the_machine_s_fault(cache: ArtifactCache, store: RecordStore, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tilebit.tiles.compiler.pool.tempfile.TemporaryFile", full)
    with CompilePool(jobs=1, cache=cache) as pool, pytest.raises(TuneError, match=r"did not start: .*No space left on device"):
        run(store, pool)
    assert store.records() == []
