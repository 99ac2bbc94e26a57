"""Compile in worker processes: one compiler per process, a timeout per request, and a crash costs
only its request.

A worker is a fresh interpreter that runs ``pool_worker.py``. It imports nothing of the caller's
main program, so scripts need no ``if __name__ == "__main__"`` guard, and TileLang's and
apache-tvm's copies of TVM never meet in one process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..programs import program
from . import kept_workers
from .cache import ArtifactCache
from .kernel import Kernel
from .request import CompileFailure, CompileRequest

TIMEOUT_SECONDS = 300.0
START_SECONDS = 300.0  # of a worker, before the time of its first request begins
DEATH_SECONDS = 30.0  # a worker that has closed its pipe is dying, which takes a busy machine a while
STDERR_TAIL = 2000  # characters of a dead worker's last words that a failure quotes
HEADER = struct.Struct("<Q")
READY = HEADER.pack(0)  # what a worker says when it has started: an answer of no bytes

Progress = Callable[[int, int, "Kernel | CompileFailure"], None]


class _Worker:
    """One worker process, its pipes and the request it is busy with."""

    def __init__(self, compiler: str) -> None:
        self.compiler = compiler
        self.surroundings: object = kept_workers.surroundings()
        self.ready = False
        self.job: int | None = None
        self.timeout = 0.0
        self.deadline = 0.0
        self.received = b""
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        path = [entry or os.getcwd() for entry in sys.path]  # the caller's own search order
        start = f"import sys; sys.path[:] = {path!r}; from tilebit.tiles.compiler.pool_worker import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            start_new_session=True,  # so that a timeout ends nvcc and its children too
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout

    def send(self, job: int, request: CompileRequest, cache_root: str, timeout: float) -> None:
        data = pickle.dumps((cache_root, request))
        self.job, self.timeout = job, timeout
        self.deadline = time.monotonic() + (timeout if self.ready else START_SECONDS)
        self.input.write(HEADER.pack(len(data)) + data)
        self.input.flush()

    def receive(self) -> Any:
        """A complete answer, None while there is none, or EOFError when the process has ended."""
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            raise EOFError
        self.received += data
        if not self.ready and self.received.startswith(READY):
            self.ready, self.received = True, self.received[len(READY) :]
            self.deadline = time.monotonic() + self.timeout
        if len(self.received) < HEADER.size or len(self.received) < HEADER.size + HEADER.unpack_from(self.received)[0]:
            return None
        answer, self.received = self.received[HEADER.size :], b""
        return pickle.loads(answer)

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        self.stderr.seek(0)
        return self.stderr.read()[-STDERR_TAIL:].decode(errors="replace").strip()

    def end(self) -> int | None:
        """Kill the process group and close the pipes; returns the exit status it had or got."""
        for pipe in (self.input, self.output):
            with contextlib.suppress(OSError):  # a pipe to a dead process
                pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.stderr.close()
        return status


class CompilePool:
    """Up to ``jobs`` worker processes that turn requests into kernels of ``cache``; they start on
    demand and stay warm until ``close()``.

    ``timeout`` is the time one request may take, in seconds (without its worker's start). ``keep``:
    one worker stays for the next such pool (``kept_workers.py``). Use it in a ``with`` statement.
    """

    def __init__(
        self, jobs: int | None = None, cache: ArtifactCache | None = None, timeout: float = TIMEOUT_SECONDS, keep: bool = False
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.jobs = cores if jobs is None else jobs
        if self.jobs < 1:
            raise ValueError(f"jobs is {jobs}; accepted: at least 1")
        self.cache = cache or ArtifactCache()
        self.cache.remove_stale()
        self.timeout, self.keep = timeout, keep
        self.workers: list[_Worker] = []

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, or all but an idle one."""
        while self.workers:
            worker = self.workers.pop()
            if not (self.keep and worker.ready and worker.job is None and worker.lives and kept_workers.keep(worker)):
                worker.end()

    def compile(self, requests: Sequence[CompileRequest], progress: Progress | None = None) -> list[Kernel | CompileFailure]:
        """One result per request, in order; a failed request is a ``CompileFailure`` there.
        ``progress(done, total, result)`` is called as each arrives."""
        results: list[Kernel | CompileFailure | None] = [None] * len(requests)
        waiting: deque[int] = deque()
        first: dict[str, int] = {}  # equal requests are compiled once
        twins: dict[int, list[int]] = {}
        done = 0

        def finish(job: int, result: Kernel | CompileFailure) -> None:
            nonlocal done
            for index in (job, *twins.get(job, ())):
                results[index] = result
                done += 1
                if progress is not None:
                    progress(done, len(requests), result)

        for index, request in enumerate(requests):
            key = request.key
            if key in first:
                twins.setdefault(first[key], []).append(index)
            else:
                first[key] = index
                waiting.append(index)
        for job in list(waiting):
            found = self.cache.lookup(requests[job].key)
            if found is not None:
                waiting.remove(job)
                finish(job, found)
        try:
            while waiting or any(worker.job is not None for worker in self.workers):
                self._assign(requests, waiting, finish)
                self._collect(requests, finish)
        except BaseException:
            self.keep = False  # an interrupted pool has half-read answers: its workers are not reused
            self.close()
            raise
        return [result for result in results if result is not None]

    def _assign(
        self, requests: Sequence[CompileRequest], waiting: deque[int], finish: Callable[[int, Kernel | CompileFailure], None]
    ) -> None:
        """Give waiting requests to idle workers; a worker of the other compiler is replaced only
        when no place is free."""
        for job in list(waiting):
            compiler = program(requests[job].program).compiler
            idle = [w for w in self.workers if w.job is None]
            worker = next((w for w in idle if w.compiler == compiler), None)
            if worker is None:
                if len(self.workers) >= self.jobs:
                    if not idle:
                        break
                    self.workers.remove(idle[0])
                    idle[0].end()
                try:
                    worker = self._new(compiler)
                except OSError as error:
                    waiting.remove(job)
                    finish(job, CompileFailure(requests[job], "crash", (f"the compiler's process did not start: {error}",)))
                    continue
                self.workers.append(worker)
            waiting.remove(job)
            try:
                worker.send(job, requests[job], str(self.cache.root), self.timeout)
            except OSError:  # it died while idle
                self._bury(worker, requests, finish)

    def _new(self, compiler: str) -> _Worker:
        kept = kept_workers.take(compiler, kept_workers.surroundings()) if self.keep else None
        return kept if isinstance(kept, _Worker) else _Worker(compiler)

    def _collect(self, requests: Sequence[CompileRequest], finish: Callable[[int, Kernel | CompileFailure], None]) -> None:
        """Wait for an answer, a death or the next deadline."""
        busy = [w for w in self.workers if w.job is not None]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            ready = selector.select(max(0.0, min(w.deadline for w in busy) - time.monotonic()))
        for event, _ in ready:
            worker = event.data
            try:
                answer = worker.receive()
            except (EOFError, OSError, pickle.UnpicklingError):
                self._bury(worker, requests, finish)
                continue
            if answer is not None:
                job, worker.job = worker.job, None
                finish(job, answer)
        for worker in busy:
            if worker.job is not None and worker in self.workers and time.monotonic() >= worker.deadline:
                job = worker.job
                self.workers.remove(worker)
                worker.end()
                sentence = f"it took longer than {self.timeout:g} s and was ended; raise the pool's timeout or choose a smaller tile"
                finish(job, CompileFailure(requests[job], "timeout", (sentence,)))

    def _bury(self, worker: _Worker, requests: Sequence[CompileRequest], finish: Callable[[int, Kernel | CompileFailure], None]) -> None:
        assert worker.job is not None
        job = worker.job
        self.workers.remove(worker)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=DEATH_SECONDS)
        words, status = worker.last_words(), worker.end()
        ended = "ended" if worker.ready else "did not start: it ended"
        sentences = (f"the compiler's process {ended} with status {status}", *([f"its last words: {words}"] if words else []))
        finish(job, CompileFailure(requests[job], "crash", sentences))
