"""A worker process that outlives its pool for a while: whoever compiles one kernel after another,
each at its first call, starts the compiler once (seconds each time otherwise).

A kept worker serves only what its own start would have: the same environment, search path and
folder; requests name their cache. One of each compiler is kept; it ends with this process, or after
``SECONDS`` in which nobody asked for it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Protocol

SECONDS = 60.0
UNREAD = ("TILEBIT_CACHE", "TILEBIT_RECORDS", "PYTEST_")  # beginnings of what no worker reads: pytest notes each test there


class Worker(Protocol):
    """What is asked of a worker here."""

    compiler: str
    surroundings: object

    @property
    def lives(self) -> bool: ...

    def end(self) -> int | None: ...


_kept: dict[str, tuple[Worker, threading.Timer]] = {}
_lock = threading.Lock()


def surroundings() -> tuple[object, ...]:
    """All that a worker has from the process that starts it, and reads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(UNREAD)}
    return environment, list(sys.path), os.getcwd()


def keep(worker: Worker) -> bool:
    """Keep an idle worker, unless there is one of its compiler already."""
    with _lock:
        if worker.compiler in _kept:
            return False
        timer = threading.Timer(SECONDS, _expire, (worker,))
        timer.daemon = True
        _kept[worker.compiler] = worker, timer
        timer.start()
        return True


def take(compiler: str, wanted: object) -> Worker | None:
    """The kept worker of this compiler, which belongs to the caller then; None where there is none
    that has these surroundings and lives."""
    with _lock:
        worker, timer = _kept.pop(compiler, (None, None))
    if worker is None or timer is None:
        return None
    timer.cancel()
    if worker.surroundings == wanted and worker.lives:
        return worker
    worker.end()
    return None


def _expire(worker: Worker) -> None:
    with _lock:
        if _kept.get(worker.compiler, (None,))[0] is not worker:
            return
        del _kept[worker.compiler]
    worker.end()


@atexit.register
def end_all() -> None:
    with _lock:
        kept = list(_kept.values())
        _kept.clear()
    for worker, timer in kept:
        timer.cancel()
        worker.end()


def _forget() -> None:
    """In a forked child: they are the parent's, one of whose threads may hold the lock."""
    global _lock
    _kept.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)
