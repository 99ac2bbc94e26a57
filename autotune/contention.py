"""What other processes take of the machine: a hang is told from a busy machine by it, and a time
that says something from one that does not."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class OwnTime:
    """Seconds since it was made, less the time in which a thread of process ``pid`` was ready to
    run and other processes had the cores.

    A process that sleeps, waits for a device or computes uses its time; one that is kept from
    computing does not. Linux counts the waiting (``/proc/PID/task/*/schedstat``); where it does
    not, all seconds count. ``seconds()`` is to be asked often: of every interval between two calls
    the longest wait of any thread is left out, which is exact for one thread and close for a few
    that wait for one another. ``waited`` are the seconds left out, when ``seconds()`` was last asked."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._seconds = self.waited = 0.0
        self._last = time.monotonic()
        self._waited = self._waits()

    def seconds(self) -> float:
        """The process's own time so far."""
        waited, now = self._waits(), time.monotonic()
        interval, longest = now - self._last, max((waited[t] - self._waited.get(t, 0.0) for t in waited), default=0.0)
        self.waited += max(0.0, longest)
        self._seconds += max(0.0, interval - max(0.0, longest))
        self._last, self._waited = now, waited
        return self._seconds

    def _waits(self) -> dict[str, float]:
        """Of each thread, the seconds that it has waited for a core since it began."""
        waits = {}
        with suppress(OSError):  # the process has ended
            for task in self._tasks.iterdir():
                with suppress(OSError, IndexError, ValueError):  # the thread has ended, or this system does not count
                    waits[task.name] = int((task / "schedstat").read_bytes().split()[1]) / 1e9
        return waits


class Others:
    """The share of this process's cores that other processes have had since it was made."""

    def __init__(self) -> None:
        self._begin = _used()

    def share(self) -> float | None:
        """Between 0 and 1, None where the system does not say (other than Linux) or too little time
        has passed."""
        end = _used()
        if self._begin is None or end is None or end[1] <= self._begin[1]:
            return None
        others, whole = (after - before for before, after in zip(self._begin, end, strict=True))
        return min(1.0, max(0.0, others / whole))


def _used() -> tuple[float, float] | None:
    """(seconds that others computed on the cores that this process may use, seconds of all these
    cores), since some moment."""
    busy = idle = 0
    try:
        mine, tick = {f"cpu{core}" for core in os.sched_getaffinity(0)}, os.sysconf("SC_CLK_TCK")
        for line in Path("/proc/stat").read_text().splitlines():
            name, *counts = line.split()
            if name in mine:
                user, nice, system, unused, io_wait, irq, soft_irq, steal = map(int, counts[:8])
                busy += user + nice + system + irq + soft_irq + steal
                idle += unused + io_wait
    except (AttributeError, OSError, ValueError):
        return None
    own = os.times()
    return busy / tick - own.user - own.system, (busy + idle) / tick
