"""The one process in which ``versions.py`` verifies and times the kernels of both trees: reads a
job as JSON from standard input, answers in JSON lines.

A kernel may hang or fault: whoever started this process (``measured``) notices, gives that point
up, and starts another for those left.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.measure import Timing, copies_needed, time_calls
from tilebit.autotune.problems import gate_of
from tilebit.autotune.worker_process import launch
from tilebit.runtime import LoadedKernel, load_kernel
from tilebit.schedules.operations import workload_from_json
from tilebit.schedules.target import Target, detect_target

from .versions_trees import BudgetOver

BEFORE, AFTER, AGAIN, FORCED = "before", "after", "again", "forced"
COMMAND = (sys.executable, "-m", "results.measure.versions_process")
BOUTS, MOST_BOUTS = 3, 7
AGREE = 0.01  # a kernel and its copy; while they do not, more bouts are timed
COPY_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}  # of all copies of a problem
POINT_SECONDS = 120.0  # that one point may take
START_SECONDS = 180.0  # and the process until its first
END_SECONDS = 30.0


def compared(bouts: Sequence[Mapping[str, Timing]]) -> dict[str, dict[str, Any]]:
    """Of each kernel the median over bouts of its time and its percentiles, the same of the time
    before over its own (above 1: faster than before), and the least and the most of that."""
    found = {}
    for name in bouts[0]:
        us, p20, p80 = (median(getattr(bout[name], field) for bout in bouts) for field in ("us", "us_p20", "us_p80"))
        ratios = [bout[BEFORE].us / bout[name].us for bout in bouts]
        found[name] = {"us": us, "us_p20": p20, "us_p80": p80, "ratio": median(ratios), "spread": [min(ratios), max(ratios)]}
    return found


def same_bits(a: Any, b: Any) -> bool:
    """Whether two calls wrote the same: a tensor, or tensors by name."""
    if isinstance(a, Tensor):
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return all(same_bits(a[name], b[name]) for name in a)


def point(job: Mapping[str, Any], target: Target, device: str) -> dict[str, Any]:
    """What is found out about one point: ``kernels`` as ``compared`` says, with ``rel_err`` and
    whether the outputs have the ``same_bits`` as those before, and the reasons why any were
    ``wrong``. Nothing is timed where the kernel before or after is."""
    workload = workload_from_json(job["workload"])
    gate = gate_of(workload, 0, target.arch, device)
    runs: dict[str, tuple[LoadedKernel, dict[str, Tensor]]] = {}
    wrong, errors, outputs = {}, {}, {}
    for name, made in job["kernels"].items():
        kernel, words = load_kernel(made["path"]), made["workspace_words"]
        runs[name] = kernel, {"workspace": torch.zeros(words, dtype=torch.int32, device=device)} if words else {}
        verdict = gate.verify(partial(launch, *runs[name]))
        if not verdict.ok:
            wrong[name] = " ".join(verdict.reasons)
            del runs[name]
            continue
        errors[name], outputs[name] = verdict.rel_err, gate.random.outputs()
        launch(*runs[name], gate.random, outputs[name])
    if BEFORE in wrong or AFTER in wrong:
        return {"wrong": wrong}
    equal = {name: same_bits(outputs[name], outputs[BEFORE]) for name in runs}
    held = sum(tensor.nbytes for tensor in gate.random.operands.values())
    most = COPY_BYTES["cuda" if target.is_cuda else "cpu"] // max(held, 1)
    copies = max(1, min(copies_needed(workload.bytes, target.l2), most))
    problems = [gate.random, *(gate.random.copied() for _ in range(copies - 1))]
    sets = [(problem, problem.outputs()) for problem in problems]
    calls = {name: [partial(launch, *run, *operands) for operands in sets] for name, run in runs.items()}
    bouts: list[dict[str, Timing]] = []
    orders = random.Random(0)
    while len(bouts) < BOUTS or (len(bouts) < MOST_BOUTS and abs(compared(bouts)[AGAIN]["ratio"] - 1) > AGREE):
        bouts.append(time_calls(calls, device, orders))
    kernels = {name: {**found, "rel_err": errors[name], "same_bits": equal[name]} for name, found in compared(bouts).items()}
    others = [bout[BEFORE].others or 0.0 for bout in bouts]
    return {"wrong": wrong, "kernels": kernels, "bouts": len(bouts), "others": None if target.is_cuda else max(others)}


def measured(points: Sequence[Mapping[str, Any]], device: str, deadline: float) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index, what was found) of each of ``points`` ({workload, kernels: {name: {path,
    workspace_words}}}), in order; {"failed": why} for one that ended the process or took longer
    than ``POINT_SECONDS``. Raises ``BudgetOver`` behind ``deadline``."""
    left = list(range(len(points)))
    while left:
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps({"device": device, "points": [points[index] for index in left]}))
            process.stdin.close()
            for found in _answers(process.stdout, len(left), deadline):
                yield left.pop(0), found
        finally:
            _end(process)
        if left:
            hung = "it hung and was ended" if process.returncode in (None, -signal.SIGKILL) else f"its status was {process.returncode}"
            yield left.pop(0), {"failed": f"the measuring process did not answer: {hung}; its own words are above"}


def _end(process: subprocess.Popen[str]) -> None:
    """Have it ended, if it has not by itself; one whose kernel hangs lives until the driver lets it
    go."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_SECONDS)


def _answers(lines: Iterable[str], expected: int, deadline: float) -> Iterator[dict[str, Any]]:
    """The answers as they come; ends early when the process ends or hangs."""
    said: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in lines:
            said.put(line)
        said.put(None)

    threading.Thread(target=read, daemon=True).start()
    patience = START_SECONDS
    for _ in range(expected):
        try:
            line = said.get(timeout=max(0.0, min(patience, deadline - time.monotonic())))
        except queue.Empty:
            if time.monotonic() >= deadline:
                raise BudgetOver from None
            return
        if line is None:
            return
        patience = POINT_SECONDS
        yield json.loads(line)


def main() -> None:
    """Answer one line for each point of the job."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a kernel prints must not end up between two answers
    job = json.load(sys.stdin)
    target = detect_target(job["device"])
    for each in job["points"]:
        said.write(json.dumps(point(each, target, job["device"])) + "\n")
        if target.is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
