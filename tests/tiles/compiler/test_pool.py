"""The compile pool: a request that hangs, crashes or raises costs only itself; results keep their order."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from sample import faulty

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import cpu_target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileFailure, CompilePool, CompileRequest, compile_kernel
from tilebit.tiles.compiler.kernel import Kernel


def bad(fault: int, k: int = 64) -> CompileRequest:
    return CompileRequest("sample.faulty", Workload(1, fault, k), Schedule("sample.faulty", 32, 1, 32), cpu_target())


def good(n: int = 64) -> CompileRequest:
    workload = Workload(1, n, 128)
    schedules = candidates(workload, cpu_target())
    assert schedules
    return CompileRequest(schedules[0].program, workload, schedules[0], cpu_target())


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def test_faults_cost_only_themselves_and_results_keep_their_order(cache: ArtifactCache) -> None:
    faults = (faulty.SEGFAULT, faulty.RAISE, faulty.EXIT, faulty.NOISE, faulty.ILLEGAL, faulty.SURPRISE)
    requests = [good(), *(bad(f) for f in faults), good(96)]
    seen: list[tuple[int, int]] = []
    with CompilePool(jobs=2, cache=cache, timeout=120) as pool:
        results = pool.compile(requests, lambda done, total, result: seen.append((done, total)))
    assert seen == [(i, len(requests)) for i in range(1, len(requests) + 1)]
    assert isinstance(results[0], Kernel) and isinstance(results[-1], Kernel)
    assert [r.manifest["workload"]["n"] for r in (results[0], results[-1])] == [64, 96]
    failures = [r for r in results[1:-1] if isinstance(r, CompileFailure)]
    assert [f.request for f in failures] == requests[1:-1]
    assert [f.kind for f in failures] == ["crash", "build", "crash", "build", "illegal", "crash"]
    texts = [str(f) for f in failures]
    assert "status -11" in texts[0] and "about to fall" in texts[0]
    assert "RuntimeError: cannot build n = 4" in texts[1]
    assert "status 7" in texts[2]
    assert failures[4].sentences == ("n is the number of illegality",)
    assert not list(cache.building.iterdir()) or cache.remove_stale(0)


@pytest.mark.slow
def test_a_hanging_request_is_ended_with_its_children(cache: ArtifactCache) -> None:
    with CompilePool(jobs=1, cache=cache, timeout=5) as pool:
        start = time.monotonic()
        hung, after = pool.compile([bad(faulty.HANG), bad(faulty.RAISE)])
        assert time.monotonic() - start >= 5
        assert isinstance(hung, CompileFailure) and hung.kind == "timeout" and "longer than 5 s" in str(hung)
        assert isinstance(after, CompileFailure) and after.kind == "build"


@pytest.mark.slow
def test_the_start_of_a_worker_is_not_its_requests_time(cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker imports for seconds where the machine is busy; here it takes twice what a request may."""
    popen = subprocess.Popen

    def slow(arguments: list[str], **options):
        return popen([*arguments[:-1], f"import time; time.sleep(6); {arguments[-1]}"], **options)

    monkeypatch.setattr(subprocess, "Popen", slow)
    with CompilePool(jobs=1, cache=cache, timeout=3) as pool:
        (failure,) = pool.compile([bad(faulty.RAISE)])
    assert isinstance(failure, CompileFailure) and failure.kind == "build"


def test_workers_stay_warm_and_close_ends_them(cache: ArtifactCache) -> None:
    with CompilePool(jobs=1, cache=cache) as pool:
        first, second = pool.compile([bad(faulty.RAISE), bad(faulty.RAISE, k=128)])
        (third,) = pool.compile([bad(faulty.RAISE, k=192)])
        processes = {str(f).rsplit("process ", 1)[1] for f in (first, second, third)}
        assert len(processes) == 1
        (worker,) = pool.workers
    assert worker.process.poll() is not None and not pool.workers


def test_a_worker_that_died_while_idle_is_replaced(cache: ArtifactCache) -> None:
    with CompilePool(jobs=1, cache=cache) as pool:
        pool.compile([bad(faulty.RAISE)])
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        pool.workers[0].process.wait()
        crashed = pool.compile([bad(faulty.RAISE, k=128)])[0]
        assert isinstance(crashed, CompileFailure) and crashed.kind in ("crash", "build")
        (alive,) = pool.compile([bad(faulty.RAISE, k=192)])
        assert isinstance(alive, CompileFailure) and alive.kind == "build"


def test_each_compiler_has_its_own_process(cache: ArtifactCache) -> None:
    """With one place, the worker of one compiler makes room for the other's."""
    tilelang = CompileRequest("sample.w4a16", Workload(1, 100, 128), Schedule("sample.w4a16", 128, 64, 64), target_from_name("sm_90a"))
    with CompilePool(jobs=1, cache=cache) as pool:
        results = pool.compile([bad(faulty.RAISE), tilelang, bad(faulty.RAISE, k=128)])
        assert [r.kind for r in results if isinstance(r, CompileFailure)] == ["build", "illegal", "build"]
        assert len(pool.workers) == 1


def test_equal_requests_are_compiled_once(cache: ArtifactCache) -> None:
    other_m = CompileRequest(good().program, replace(good().workload, m=33), good().schedule, good().target)
    with CompilePool(jobs=2, cache=cache) as pool:
        results = pool.compile([good(), good(), other_m])
        assert len(pool.workers) == 1
    assert len({r.path for r in results if isinstance(r, Kernel)}) == 1 and len(results) == 3
    assert len(cache.keys()) == 1


def test_cached_kernels_start_no_worker(cache: ArtifactCache) -> None:
    compile_kernel(good(), cache)
    with CompilePool(jobs=1, cache=cache) as pool:
        (kernel,) = pool.compile([good()])
        assert isinstance(kernel, Kernel) and not pool.workers


def test_compile_kernel_raises_the_failure(cache: ArtifactCache) -> None:
    with pytest.raises(CompileFailure, match="illegality") as caught:
        compile_kernel(bad(faulty.ILLEGAL), cache)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.request, again.kind, again.sentences) == (caught.value.request, caught.value.kind, caught.value.sentences)


def test_scripts_need_no_main_guard(tmp_path: Path) -> None:
    """A worker does not run the caller's main program again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.append({str(Path(__file__).parents[1])!r})\n"
        "print('once')\n"
        "from tilebit.schedules.schedule import Schedule\n"
        "from tilebit.schedules.target import cpu_target\n"
        "from tilebit.schedules.gemm.workload import Workload\n"
        "from tilebit.tiles.compiler.compile import CompilePool, CompileRequest\n"
        "from tilebit.tiles.compiler.cache import ArtifactCache\n"
        f"with CompilePool(1, ArtifactCache({str(tmp_path / 'cache')!r})) as pool:\n"
        "    asked = CompileRequest('sample.faulty', Workload(1, 4, 64), Schedule('sample.faulty', 32, 1, 32), cpu_target())\n"
        "    print(pool.compile([asked])[0].kind)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["once", "build"], done.stderr


def test_jobs_must_be_positive(cache: ArtifactCache) -> None:
    with pytest.raises(ValueError, match="jobs is 0; accepted: at least 1"):
        CompilePool(jobs=0, cache=cache)


def test_a_worker_of_tvm_waits_for_no_torch() -> None:
    """Which is there afterwards for whoever asks."""
    if find_spec("tvm") is None:
        pytest.skip("needs apache-tvm, which compiles for the CPU: pip install tilebit[compile]")
    code = """
import sys
from tilebit.tiles.compiler.pool_worker import _TvmWithoutTorch
sys.meta_path.insert(0, _TvmWithoutTorch())
import tvm.tirx
assert "torch" not in sys.modules
import torch
print(torch.zeros(1).tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[0.0]", done.stdout + done.stderr
