"""The isolated measurer: one child process per device, which may hang, fault or be killed at the
cost of the candidate it was busy with."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schedules.operations import AnyWorkload
from ..schedules.schedule import Schedule
from ..schedules.target import Target
from .contention import OwnTime

START_SECONDS = 300.0  # importing torch on a busy machine
TURN_SECONDS = 3600.0  # other tuners on this device, and computing the references of a large workload
END_SECONDS = 120.0  # a killed process whose kernel hangs lives until its driver lets it go
STDERR_TAIL = 1000
POLL_SECONDS = 0.5  # between two looks at what time the child has had
PATIENCE = 10  # a child that gets no core at all counts as one that hangs after so many times its timeout
# Signals that come from outside (the OOM killer, an operator): the candidate gets a second chance.
FOREIGN_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WorkerError(RuntimeError):
    """No measuring process can be had; it is not a candidate's fault."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one kernel: ``status`` as in ``schedules.records.STATUSES``, times in
    microseconds when it is "ok", else a ``reason``."""

    status: str
    reason: str = ""
    us: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    rel_err: float | None = None


class _Died(Exception):
    """The child ended; ``status`` is its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class DeviceWorker:
    """Verifies and times kernels on ``device`` ("cpu", "cuda:0") in a child process that lives as
    long as it behaves.

    ``timeout`` is what one kernel's verification and timing may take, in seconds of the child's own
    time: those in which other processes had its cores do not count. Kernels are measured by one
    process per device at a time: all workers of this user take turns through a lock file in
    ``lock_dir``. Use it in a ``with`` statement, from one thread: the child is killed when the
    thread that started it ends."""

    def __init__(self, device: str, lock_dir: str | os.PathLike[str], timeout: float = 120.0, seed: int = 0) -> None:
        self.device, self.timeout, self.seed = device, timeout, seed
        self.lock = Path(lock_dir) / f"measuring-{device.replace(':', '-')}.lock"
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._stderr: Any = None

    def __enter__(self) -> DeviceWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is none."""
        return None if self._process is None else self._process.pid

    def measure(self, kernel: str | os.PathLike[str], workload: AnyWorkload, schedule: Schedule, target: Target) -> Outcome:
        """Verify and time the kernel directory ``kernel``. Never raises for what a kernel does;
        ``WorkerError`` when no child can be started."""
        return self.compare([kernel], workload, [schedule], target)[0]

    def compare(
        self, kernels: Sequence[str | os.PathLike[str]], workload: AnyWorkload, schedules: Sequence[Schedule], target: Target
    ) -> list[Outcome]:
        """Verify kernel directories of one workload, then time those that are right in alternation.
        Raises as ``measure`` does; what ends the child is the outcome of all."""
        job = {
            "kernels": [str(kernel) for kernel in kernels],
            "workload": workload.to_json(),
            "schedules": [schedule.to_json() for schedule in schedules],
            "target": target.to_json(),
            "seed": self.seed,
        }
        for last_chance in (False, True):
            try:
                return self._run(job)
            except _Died as death:
                _, words = self._end()
                if -death.status in FOREIGN_SIGNALS and not last_chance:
                    continue
                return [_crash(death.status, words)] * len(kernels)
            except TimeoutError:
                status, words = self._end()
                if status != -signal.SIGKILL:  # it was dying of its own fault already, which takes its time
                    return [_crash(status, words)] * len(kernels)
                return [Outcome("hang", f"it had not finished after {self.timeout * len(kernels):g} s and was ended")] * len(kernels)
        raise AssertionError("unreachable: the second turn returns")

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._end()

    def _run(self, job: dict[str, Any]) -> list[Outcome]:
        self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise _Died(self._process.wait()) from None
        try:
            answer = self._answer(TURN_SECONDS)
        except TimeoutError:
            self._end()
            raise WorkerError(f"{self.device} was not free within {TURN_SECONDS:g} s; another process holds {self.lock}") from None
        if answer["event"] == "started":
            answer = self._answer(self.timeout * len(job["kernels"]), OwnTime(self._process.pid))
        if answer["fatal"]:
            self._end()
        return [Outcome(**result) for result in answer["results"]]

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        try:
            self.lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise WorkerError(f"cannot create {self.lock.parent} ({error.strerror}); accepted: a directory that can be written") from None
        path = [entry or os.getcwd() for entry in sys.path]  # the caller's own search order
        arguments = f"{self.device!r}, {str(self.lock)!r}, {os.getpid()}"
        code = f"import sys; sys.path[:] = {path!r}; from tilebit.autotune.worker_process import main; main({arguments})"
        self._received = b""
        try:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the child
            command = [sys.executable, "-c", code]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr)
        except OSError as error:
            raise WorkerError(f"the measuring process for {self.device} did not start ({error}); nothing was recorded") from None
        try:
            self._answer(START_SECONDS)
        except (_Died, TimeoutError) as error:
            _, words = self._end()
            raise WorkerError(f"the measuring process for {self.device} did not start ({error!r}): {words}") from None

    def _answer(self, timeout: float, own: OwnTime | None = None) -> dict[str, Any]:
        """The child's next answer. Raises ``_Died``, or ``TimeoutError`` when there is none within
        ``timeout`` seconds: of its ``own`` time where that is given, at most ``PATIENCE`` times as
        many by the clock."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + timeout * (1 if own is None else PATIENCE)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                left = deadline - time.monotonic()
                if own is not None:
                    left = min(left, timeout - own.seconds())
                if not selector.select(max(0.0, min(left, POLL_SECONDS))):
                    if left > 0:
                        continue
                    raise TimeoutError
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise _Died(self._process.wait())
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _end(self) -> tuple[int, str]:
        """Kill the child if it lives; returns its exit status and the end of what it wrote to
        standard error."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            message = (
                f"process {self._process.pid} does not end: the driver of {self.device} holds it; reset the device or restart the machine"
            )
            self._process = None
            raise WorkerError(message) from None
        with suppress(OSError):  # unsent bytes for a dead process
            self._process.stdin.close()
        self._process.stdout.close()
        self._stderr.seek(0)
        words = self._stderr.read()[-STDERR_TAIL:].decode(errors="replace").strip()
        self._stderr.close()
        self._process = None
        return status, words


def _crash(status: int, words: str) -> Outcome:
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return Outcome("crash", f"the measuring process {how}" + (f": {words}" if words else ""))
