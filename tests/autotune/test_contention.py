"""What other processes take, with real ones: shares are compared, not times."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tilebit.autotune.contention import Others, OwnTime

SECONDS = 2.0
COUNTS_WAITS = Path("/proc/self/schedstat").exists()


@contextmanager
def process(code: str) -> Iterator[int]:
    """The id of a process that has begun to run ``code``."""
    started = subprocess.Popen([sys.executable, "-c", "print(flush=True)\n" + code], stdout=subprocess.PIPE)
    assert started.stdout is not None
    try:
        started.stdout.readline()
        yield started.pid
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


def share(pid: int) -> float:
    """The process's own time, of a while in which it is asked ten times."""
    own, begin = OwnTime(pid), time.monotonic()
    for _ in range(10):
        time.sleep(SECONDS / 10)
        own.seconds()
    return own.seconds() / (time.monotonic() - begin)


@pytest.mark.skipif(not COUNTS_WAITS, reason="this system does not count how long a process waits for a core")
def test_waiting_for_a_core_does_not_count() -> None:
    """Two processes that compute without end, on one core."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with process(spin) as one, process(spin):
        assert share(one) < 0.8


def test_sleeping_counts() -> None:
    """A kernel that waits for what never comes is a hang, however idle it is."""
    with process("import time; time.sleep(3600)") as idle:
        assert share(idle) > 0.8


def test_where_waits_are_not_counted_all_seconds_count(tmp_path: Path) -> None:
    own, begin = OwnTime(os.getpid()), time.monotonic()
    own._tasks = tmp_path / "no such folder"
    time.sleep(0.1)
    assert 0.1 <= own.seconds() <= time.monotonic() - begin + 0.1


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not say how busy its cores are")
def test_what_others_have_of_the_cores() -> None:
    """A process that computes without end has more of its core than what only sleeps leaves to itself."""
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    try:
        with process("while True: pass"):  # inherits the only core
            others = Others()
            time.sleep(SECONDS)
            busy = others.share()
        assert busy is not None and busy > 0.5
        others, begin = Others(), time.process_time()
        while time.process_time() - begin < SECONDS / 4:
            pass
        share = others.share()
        assert share is not None and 0 <= share <= 0.95, "what this process computes itself is not another's"
    finally:
        os.sched_setaffinity(0, before)
