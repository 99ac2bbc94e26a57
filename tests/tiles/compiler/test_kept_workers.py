"""A pool's worker that serves the next pool: only where it is what a new one would be, and not for ever."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from sample import faulty

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import cpu_target
from tilebit.tiles.compiler import kept_workers
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool


@pytest.fixture(autouse=True)
def none_is_kept() -> Iterator[None]:
    kept_workers.end_all()
    yield
    kept_workers.end_all()


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def process_of(cache: ArtifactCache, fault: int = faulty.RAISE, keep: bool = True) -> str:
    """The process that answered one request of a pool of its own."""
    request = CompileRequest("sample.faulty", Workload(1, fault, 64), Schedule("sample.faulty", 32, 1, 32), cpu_target())
    with CompilePool(jobs=1, cache=cache, keep=keep) as pool:
        (failure,) = pool.compile([request])
    assert isinstance(failure, CompileFailure)
    return str(failure).rsplit("process ", 1)[-1]


def lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


def test_the_next_pool_has_it(cache: ArtifactCache) -> None:
    first = process_of(cache)
    assert lives(first) and process_of(cache) == first


def test_other_pools_neither_take_nor_keep(cache: ArtifactCache) -> None:
    first, other = process_of(cache), process_of(cache, keep=False)
    assert other != first and lives(first) and not lives(other)


def test_another_environment_path_or_folder_has_its_own(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = [process_of(cache)]
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    processes.append(process_of(cache))
    monkeypatch.syspath_prepend(tmp_path)
    processes.append(process_of(cache))
    monkeypatch.chdir(tmp_path)
    processes.append(process_of(cache))
    assert len(set(processes)) == 4 and [lives(process) for process in processes] == [False, False, False, True]


@pytest.mark.slow
def test_it_serves_another_cache_and_writes_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each kernel is published in its own pool's cache, whichever the worker was started for; what no worker reads makes no other one."""
    pytest.importorskip("tvm_ffi")
    if find_spec("tvm") is None:
        pytest.skip("needs apache-tvm, which compiles for the CPU: pip install tilebit[compile]")
    target = cpu_target()
    workload = Workload(1, 64, 64)
    request = CompileRequest("gemm_cpu", workload, (candidates(workload, target) or [])[0], target)
    processes = []
    for name in ("one", "another"):
        monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path / name))
        monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / f"{name}.jsonl"))
        with CompilePool(jobs=1, cache=ArtifactCache(tmp_path / name), keep=True) as pool:
            (kernel,) = pool.compile([request])
            processes += [worker.process.pid for worker in pool.workers]
        assert isinstance(kernel, Kernel), kernel
        assert kernel.path.is_relative_to(tmp_path / name) and (kernel.path / "kernel.so").exists()
    assert len(processes) == 2 and len(set(processes)) == 1


def test_one_that_died_or_crashed_is_replaced(cache: ArtifactCache) -> None:
    first = process_of(cache)
    os.kill(int(first), signal.SIGKILL)
    os.waitid(os.P_PID, int(first), os.WEXITED | os.WNOWAIT)  # all its threads have ended; the pool is to find out
    second = process_of(cache)
    assert second != first
    process_of(cache, faulty.SEGFAULT)  # takes the worker with it
    assert not lives(second) and process_of(cache) != second


def test_it_ends_when_nobody_asks(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_workers, "SECONDS", 0.05)
    first, deadline = process_of(cache), time.monotonic() + 60
    while lives(first) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(first)
