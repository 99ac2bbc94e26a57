"""Variants of a product that compute the same numbers, beside one another: what the ablations of LiquidGEMM
and of group-wise sums share.

Every variant passes the gate of ``autotune.problems.verify`` first, and is the fastest of a few schedules.
One process times everything; the winners of a product are timed once more side by side, and only those
times are written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tilebit.autotune.measure import Timing, copies_needed, time_calls
from tilebit.autotune.problems.gemm import split_workspace
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate
from tilebit.command.bench import process_fields, write_rows
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.rules import WGMMA
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.records import shipped_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, detect_target
from tilebit.tiles.compiler.kernel import Kernel

from .compiled import compiled
from .gemm import folder_file, format_row

DEVICE = "cuda:0"
TRIED = 4  # schedules of a variant of gemm_wgmma


@dataclass(frozen=True, slots=True)
class Step:
    """A variant: a format whose codec has it, or a program."""

    number: int
    idea: str
    format: GemmFormat
    program: str = WGMMA.program


Drawn = Callable[[Workload, Target], dict[Step, list[Schedule]]]


def of_wgmma(workload: Workload, target: Target) -> list[Schedule]:
    """The schedules of ``gemm_wgmma`` that its variants try: tuned ones first, then the best estimates."""
    ours = [s for s in candidates(workload, target) or [] if s.program == WGMMA.program]
    tuned = sorted(
        (r for r in shipped_records() if r.ok and r.workload == workload and r.schedule.program == WGMMA.program and r.measured_on(target)),
        key=lambda r: r.us or 0.0,
    )
    rest = sorted(ours, key=lambda s: estimate(workload, s, target).us)
    return [*dict.fromkeys((*(r.schedule for r in tuned[: TRIED - 1]), *rest))][:TRIED]


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A step's kernel that passed the gate, and calls of it on operands in other places."""

    step: Step
    schedule: Schedule
    rel_err: float
    calls: list[partial[Any]]


def contenders(workload: Workload, target: Target, step: Step, made: Sequence[Kernel], gate: Gate) -> list[Contender]:
    """Those of ``made`` that pass ``gate``, of a workload of the step's format; what does not is named."""
    found = []
    problems = [gate.random, *(gate.random.copied() for _ in range(copies_needed(workload.bytes, target.l2) - 1))]
    for kernel in made:
        loaded, workspace = kernel.load(), split_workspace(workload, kernel.schedule, target, DEVICE)

        def call(problem: Any, y: Any, loaded: Any = loaded, workspace: Mapping[str, Any] = workspace) -> partial[Any]:
            named = {**problem.named(y), **workspace}
            return partial(loaded.run, *(named[name] for name in loaded.params))

        verdict = gate.verify(lambda problem, y, call=call: call(problem, y)())
        if verdict.ok and verdict.rel_err is not None:
            found.append(Contender(step, kernel.schedule, verdict.rel_err, [call(p, p.outputs()) for p in problems]))
        else:
            print(f"  wrong, left out: step {step.number}, {kernel.schedule}: {' '.join(verdict.reasons)}", flush=True)
    return found


def timed(found: Sequence[Contender]) -> list[Timing]:
    """Times side by side, in order."""
    timings = time_calls({str(i): c.calls for i, c in enumerate(found)}, DEVICE)
    return [timings[str(i)] for i in range(len(found))]


def winners(workload: Workload, target: Target, kernels: Mapping[Step, Sequence[Kernel]]) -> list[dict[str, Any]]:
    """The rows of one product, one a step with a working kernel."""
    best, tried = [], {}
    for step, made in kernels.items():
        posed = replace(workload, format=step.format)
        gate = Gate(*(make(posed, 0, target.arch, DEVICE) for make in (exact_problem, random_problem)))
        right = contenders(posed, target, step, made, gate)
        tried[step] = len(right)
        if right:
            times = timed(right)
            best.append(min(zip(right, times, strict=True), key=lambda pair: pair[1].us)[0])
    if not best:
        return []
    return [
        format_row("ablation", workload, c.step.number, c.step.idea, c.schedule, timing, c.rel_err, tried[c.step])
        for c, timing in zip(best, timed(best), strict=True)
    ]


def measure(doc: str | None, workloads: Sequence[Workload], drawn: Drawn, out: Path) -> None:
    """The command of an ablation, which ``doc`` describes: appends the rows of each workload to a file of
    the device in ``out``, or in the folder that the command line names. ``drawn``: the schedules that
    each step tries."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help="folder to append <device>.jsonl in")
    options = parser.parse_args()
    target = detect_target()
    if target.arch not in WGMMA.arches:
        parser.error(f"this machine's device is {target.name} ({target.arch}); accepted: an NVIDIA GPU, {', '.join(WGMMA.arches)}")
    common = process_fields(target)
    path = folder_file(options.out, target)
    kernels = compiled([(w, drawn(w, target)) for w in workloads], target, lambda w, step: replace(w, format=step.format))
    for workload, made in zip(workloads, kernels, strict=True):
        print(f"n {workload.n}, k {workload.k}, m {workload.m}", flush=True)
        rows = [{**common, **found} for found in winners(workload, target, made)]
        write_rows(path, rows)
        for r in rows:
            print(f"  {r['step']}  {r['us']:9.2f} us  {r['idea']}  ({r['tried']} tried)", flush=True)
