"""The isolated measurer, with real processes and real misbehaving libraries: each costs its candidate only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lanes import one_of_each

from tilebit.autotune.worker import DeviceWorker, WorkerError
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest

from .faulty_kernels import publish_kernel

CPU = Target("cpu", "test cpu", 2, 0, 0, 1 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
WORKLOAD = Workload(2, 48, 96, QuantFormat(4, 32))
SCHEDULES = [Schedule("gemm_cpu", 32 * i, 1, 32, num_warps=2) for i in range(1, 14)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> ArtifactCache:
    return ArtifactCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def worker(cache):
    with DeviceWorker("cpu", cache.root / "locks", timeout=2) as worker:
        yield worker


def publish(cache: ArtifactCache, index: int, behaviour: str, **more) -> Path:
    return publish_kernel(CompileRequest("gemm_cpu", WORKLOAD, SCHEDULES[index], CPU), cache, behaviour, **more).path


def measure(worker: DeviceWorker, kernel: Path, index: int = 0):
    return worker.measure(kernel, WORKLOAD, SCHEDULES[index], CPU)


def test_a_right_kernel_is_timed(worker, cache):
    outcome = measure(worker, publish(cache, 0, "right"))
    assert (outcome.status, outcome.reason) == ("ok", "")
    assert outcome.us and outcome.us_p20 and outcome.us_p80 and outcome.rel_err
    assert 0 < outcome.us_p20 <= outcome.us <= outcome.us_p80 < 1e6
    assert 0 < outcome.rel_err < 1e-3


@pytest.mark.slow
def test_right_kernels_are_timed_side_by_side(worker, tmp_path):
    """One that is wrong costs the others nothing; one that ends the process all."""
    cache = ArtifactCache(tmp_path)
    slow, fast = publish(cache, 6, "right", microseconds=2_000), publish(cache, 7, "right", microseconds=100)
    order, wrong = [SCHEDULES[i] for i in (6, 1, 7)], publish(cache, 1, "wrong")
    outcomes = worker.compare([slow, wrong, fast], WORKLOAD, order, CPU)
    assert [o.status for o in outcomes] == ["ok", "wrong", "ok"] and "ok" not in outcomes[1].reason
    assert outcomes[1].us is None and outcomes[0].us > 2_000 and outcomes[2].us > 100
    assert outcomes[0].us > outcomes[2].us, "100 us stay below 2 ms on a machine that is busy, too"
    outcomes = worker.compare([fast, publish(cache, 2, "segfault")], WORKLOAD, [SCHEDULES[7], SCHEDULES[2]], CPU)
    assert [o.status for o in outcomes] == ["crash", "crash"] and "SIGSEGV" in outcomes[0].reason


def test_the_process_survives_good_and_wrong_kernels(worker, cache):
    measure(worker, publish(cache, 0, "right"))
    pid = worker.pid
    assert measure(worker, publish(cache, 1, "wrong")).status == "wrong"
    assert measure(worker, publish(cache, 0, "right")).status == "ok"
    assert worker.pid == pid and pid is not None


FAULTS = [
    (1, "wrong", "wrong", r"m = 2: 1 of 96 elements are wrong; the first at \[1, 24\]"),
    (2, "nan", "wrong", r"1 of them NaN"),
    (3, "stray", "wrong", r"1 elements after the output were written, the nearest 1 from it"),
    (4, "unstable", "wrong", r"two runs on the same input differ"),
    (5, "raise", "error", r"x must be contiguous"),
    (6, "segfault", "crash", r"SIGSEGV"),
    (7, "abort", "crash", r"SIGABRT: .*heap corruption"),
    (8, "hang", "hang", r"had not finished after 2 s"),
    (9, "killed", "crash", r"SIGKILL"),
]


@pytest.mark.parametrize(
    ("index", "behaviour", "status", "reason"), one_of_each(FAULTS, lambda fault: fault[2], several=True), ids=[f[1] for f in FAULTS]
)
def test_a_fault_costs_its_candidate_only(worker, cache, index, behaviour, status, reason):
    import re

    outcome = measure(worker, publish(cache, index, behaviour), index)
    assert outcome.status == status and re.search(reason, outcome.reason, re.DOTALL), outcome
    assert outcome.us is None
    assert measure(worker, publish(cache, 0, "right")).status == "ok", "the next candidate is measured as if nothing had been"


def test_what_has_died_is_a_crash_however_long_it_took(worker, cache, monkeypatch):
    """The end of a process takes its time on a busy machine: the deadline passes before its pipe is closed."""
    answer = DeviceWorker._answer

    def late(self, timeout, own=None):
        if own is None:  # ready, or started
            return answer(self, timeout, own)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        raise TimeoutError

    monkeypatch.setattr(DeviceWorker, "_answer", late)
    outcome = measure(worker, publish(cache, 6, "segfault"), 6)
    assert outcome.status == "crash" and "SIGSEGV" in outcome.reason


def test_output_of_a_kernel_does_not_reach_the_protocol(worker, cache):
    assert measure(worker, publish(cache, 10, "print"), 10).status == "ok"


@pytest.mark.slow
def test_a_process_killed_from_outside_gets_a_second_chance(worker, cache, tmp_path):
    outcome = measure(worker, publish(cache, 11, "killed_once", mark=tmp_path / "mark"), 11)
    assert outcome.status == "ok" and (tmp_path / "mark").exists()


def test_a_corrupted_library_is_never_opened(worker, cache):
    kernel = publish(cache, 12, "right")
    library = kernel / "kernel.so"
    library.write_bytes(library.read_bytes()[:-100])
    outcome = measure(worker, kernel, 12)
    assert outcome.status == "corrupt" and "kernel.so has" in outcome.reason


def test_a_kernel_for_other_operands_is_an_error(worker, cache):
    outcome = worker.measure(publish(cache, 0, "right"), Workload(2, 64, 96, QuantFormat(4, 32)), SCHEDULES[0], CPU)
    assert outcome.status == "ok", "the C kernel reads its sizes from its operands"
    asymmetric = Workload(2, 48, 96, QuantFormat(4, 32, symmetric=False))
    assert worker.measure(publish(cache, 0, "right"), asymmetric, SCHEDULES[0], CPU).status == "wrong"


@pytest.mark.slow
def test_one_device_measures_for_one_process_at_a_time(cache):
    """While another process holds the device, a job waits, and its own timeout does not run."""
    from filelock import FileLock

    with DeviceWorker("cpu", cache.root / "elsewhere", timeout=1.5) as worker:
        assert measure(worker, publish(cache, 0, "right")).status == "ok"
        lock = FileLock(worker.lock, thread_local=False)
        lock.acquire()
        begin = time.monotonic()
        threading.Timer(2.0, lock.release).start()
        assert measure(worker, publish(cache, 0, "right")).status == "ok"
        assert time.monotonic() - begin >= 2.0


def test_no_process_no_measurement(cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with DeviceWorker("cpu", cache.root / "locks") as worker, pytest.raises(WorkerError, match="did not start"):
        measure(worker, publish(cache, 0, "right"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_a_hanging_kernel_dies_with_its_tuner(cache, tmp_path):
    """kill -9 of the tuning process in the middle of a hang leaves no process behind."""
    kernel = publish(cache, 8, "hang")
    script = tmp_path / "tuner.py"
    script.write_text(
        "import sys, threading, time\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from tilebit.autotune.worker import DeviceWorker\n"
        "from tilebit.schedules.gemm.workload import Workload\n"
        "from tilebit.schedules.schedule import Schedule\n"
        "from tilebit.schedules.target import Target\n"
        f"w = DeviceWorker('cpu', {str(cache.root / 'orphans')!r}, timeout=600)\n"
        "def show():\n"
        "    while w.pid is None: time.sleep(0.05)\n"
        "    print(w.pid, flush=True)\n"
        "threading.Thread(target=show, daemon=True).start()\n"
        f"workload, schedule = Workload.from_json({WORKLOAD.to_json()!r}), Schedule.from_json({SCHEDULES[8].to_json()!r})\n"
        f"w.measure({str(kernel)!r}, workload, schedule, Target.from_json({CPU.to_json()!r}))\n"
    )
    tuner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert tuner.stdout is not None
    child = int(tuner.stdout.readline())
    time.sleep(1.0)
    os.kill(tuner.pid, signal.SIGKILL)
    tuner.wait()
    tuner.stdout.close()
    for _ in range(1000):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[-1][:3]:
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail(f"the measuring process {child} outlived its tuner")
