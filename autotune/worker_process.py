"""The measuring process: reads jobs as JSON lines from standard input; loads, verifies and times
one kernel after another; answers in JSON lines.

It is expected to die: a kernel may hang, fault or poison its CUDA context. Whoever started it
(``worker.py``) notices and starts another.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from ..runtime import CorruptArtifact, LoadedKernel, load_kernel
from ..schedules.operations import workload_from_json
from ..schedules.records import WRONG
from ..schedules.rule import AnyWorkload
from ..schedules.schedule import Schedule
from ..schedules.target import Target
from .measure import Timing, copies_needed, time_calls
from .problems import AnyGate, Problem, gate_of
from .problems.gemm import split_workspace, strayed

Runner = tuple[LoadedKernel, dict[str, Tensor]]  # a kernel and its workspace
MOST_COPIES = 4096  # of a problem
COPY_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}  # of all copies together
_PR_SET_PDEATHSIG = 1


def main(device: str, lock: str, parent: int) -> None:
    """A measuring process's whole life."""
    _die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # crashes are expected: no dump of gigabytes, nor (as 0 allows) a program that gets it
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a kernel prints must not end up between two answers

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    bench = _Bench(device)
    answer(event="ready", pid=os.getpid())
    for line in sys.stdin:
        job = json.loads(line)
        with FileLock(lock):  # one process measures on a device at a time
            result = bench.run(job, lambda: answer(event="started"))
        answer(event="done", **result)
        if result["fatal"]:
            os._exit(0)  # the context is lost and would fail every later kernel


class _Bench:
    """Keeps the problems and references of the last workload: consecutive candidates share them."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._gate: tuple[tuple[AnyWorkload, str, int], AnyGate] | None = None

    def run(self, job: dict[str, Any], started: Callable[[], None]) -> dict[str, Any]:
        """Verify the job's kernels and time the right ones in alternation. ``started`` is called
        when everything but the kernels is ready: from there a hang is a kernel's. Returns the
        fields of an ``Outcome`` of each, and whether the device's context is lost."""
        workload, target = workload_from_json(job["workload"]), Target.from_json(job["target"])
        results: list[dict[str, Any]] = [{} for _ in job["kernels"]]
        ready: dict[str, Runner] = {}
        try:
            gate = self._gate_for(workload, target.arch, job["seed"])
            started()
            for i, (path, schedule) in enumerate(zip(job["kernels"], job["schedules"], strict=True)):
                kernel = load_kernel(path)
                workspace = split_workspace(workload, Schedule.from_json(schedule), target, self.device)
                verdict = gate.verify(partial(launch, kernel, workspace))
                if verdict.ok and strayed(workspace):
                    results[i] = {"status": WRONG, "reason": "The kernel writes behind its workspace."}
                elif verdict.ok:
                    ready[str(i)] = kernel, workspace
                    results[i] = {"status": "ok", "rel_err": verdict.rel_err}
                else:
                    results[i] = {"status": WRONG, "reason": " ".join(verdict.reasons)}
            if ready:
                for name, timing in self._time(ready, gate.random, target).items():
                    results[int(name)] |= {"us": timing.us, "us_p20": timing.us_p20, "us_p80": timing.us_p80}
        except CorruptArtifact as error:
            return _failed(results, "corrupt", str(error))
        except Exception as error:  # a kernel's own check, or CUDA's
            cuda = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
            return _failed(results, "crash" if cuda else "error", f"{type(error).__name__}: {error}", fatal=cuda)
        return {"results": results, "fatal": False}

    def _gate_for(self, workload: AnyWorkload, arch: str, seed: int) -> AnyGate:
        key = (workload, arch, seed)
        if self._gate is None or self._gate[0] != key:
            self._gate = None  # free the old one first
            self._gate = (key, gate_of(workload, seed, arch, self.device))
        return self._gate[1]

    def _time(self, ready: dict[str, Runner], problem: Problem, target: Target) -> dict[str, Timing]:
        # What a call touches may be less than what a problem holds: a cache has pages that no
        # sequence owns.
        held = sum(tensor.nbytes for tensor in problem.operands.values())
        most = COPY_BYTES[self.device.partition(":")[0]] // max(held, 1)
        copies = max(1, min(copies_needed(problem.workload.bytes, target.l2), MOST_COPIES, most))
        named = [p.named(p.outputs()) for p in (problem, *(problem.copied() for _ in range(copies - 1)))]
        calls = {
            name: [partial(kernel.run, *_arguments(kernel, {**workspace, **tensors})) for tensors in named]
            for name, (kernel, workspace) in ready.items()
        }
        return time_calls(calls, self.device)


def launch(kernel: LoadedKernel, workspace: dict[str, Tensor], problem: Any, outputs: Any) -> None:
    """Run a loaded kernel on ``problem`` into ``outputs``, both of one operation: of a ``Problem``
    its first ``len(outputs)`` rows into that y, of an ``AttentionProblem`` into tensors by name.
    ``workspace`` is what ``split_workspace`` gives."""
    kernel.run(*_arguments(kernel, {**workspace, **problem.named(outputs)}))


def _arguments(kernel: LoadedKernel, named: dict[str, Tensor]) -> list[Tensor]:
    """The kernel's tensors in the order of its manifest; a GEMM's x gets the zero columns that a
    kernel reads beyond k (CUDA: rows of whole 16 bytes)."""
    missing = [name for name in kernel.params if name not in named]
    if missing:
        raise ValueError(
            f"the kernel takes {', '.join(missing)}, which this workload does not have; its manifest and workload do not belong together"
        )
    if "x" in named:
        wanted, x = next(p["shape"] for p in kernel.manifest["params"] if p["name"] == "x"), named["x"]
        if len(wanted) == x.ndim == 2 and isinstance(wanted[1], int) and x.shape[1] < wanted[1]:
            named["x"] = torch.nn.functional.pad(x, (0, wanted[1] - x.shape[1]))
    return [named[name] for name in kernel.params]


def _failed(results: list[dict[str, Any]], status: str, reason: str, fatal: bool = False) -> dict[str, Any]:
    """What is said when a job ends early: of kernels that are wrong that, of all others why it
    ended."""
    return {"results": [r if r.get("status") == WRONG else {"status": status, "reason": reason} for r in results], "fatal": fatal}


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, even in the middle of a kernel that
    hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)
