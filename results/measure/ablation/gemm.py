"""What each idea is worth: ``python -m results.measure.ablation.gemm --out DIR`` times a
GEMM with one idea after another added (``steps.py``).

Each step is the fastest of a few schedules that use its idea and passed the gate of
``autotune.verify``. A step is left out where no schedule of the workload uses its idea, and is
slower than an earlier one where the idea does not pay. One process times everything; the winners of
a workload's steps are timed once more side by side, and only those times are written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tilebit.autotune.measure import Timing, copies_needed, time_calls
from tilebit.autotune.problems.gemm import Problem, split_workspace
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate
from tilebit.command.bench import process_fields, write_rows
from tilebit.layouts.formats import QuantFormat
from tilebit.runtime import LoadedKernel
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, detect_target, file_stem
from tilebit.tiles.compiler.kernel import Kernel

from ...report.rows import ROWS
from . import naive
from .compiled import Numbered, compiled
from .steps import DEPENDENT, drawn

DEVICE = "cuda:0"
FORMAT = QuantFormat(4, 128, False)
WORKLOADS = tuple(
    Workload(m, n, k, FORMAT)
    for n, k, m in ((14336, 4096, 1), (14336, 4096, 4096), (4096, 14336, 16), (28672, 4096, 64), (28672, 4096, 256))
)
Form = Callable[[Problem], dict[str, Tensor]]


class Idea(Numbered, Protocol):
    """A step of an ablation of products."""

    @property
    def idea(self) -> str: ...


Climbed = TypeVar("Climbed", bound=Idea)


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A loaded kernel of one step, and its workspace ({} where it takes none). ``dependent``:
    launched as a dependent of the call before."""

    step: int
    idea: str
    schedule: Schedule
    kernel: LoadedKernel
    workspace: dict[str, Tensor]
    dependent: bool = False

    def arguments(self, operands: Mapping[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        """The kernel's tensors in call order; ``operands`` are packed as its program reads them."""
        named = {**operands, **self.workspace, "x": x, "y": y}
        return [named[name] for name in self.kernel.params]

    @property
    def launch(self) -> Callable[..., Any]:
        return self.kernel.run_dependent if self.dependent else self.kernel.run


FORMS: dict[str, Form] = {naive.NAME: naive.plain_operands}


class Bench:
    """One workload on the GPU: its gate and rotating operands. ``forms``: how the programs that do not
    read the library's operands read them."""

    def __init__(self, workload: Workload, target: Target, seed: int = 0, forms: Mapping[str, Form] = FORMS) -> None:
        self.workload, self.target, self.forms = workload, target, forms
        exact, random = (make(workload, seed, target.arch, DEVICE) for make in (exact_problem, random_problem))
        self.gate = Gate(exact, random)
        copies = copies_needed(workload.bytes, target.l2)
        self.problems = [random, *(random.copied() for _ in range(copies - 1))]
        self._formed: dict[tuple[Form, int], dict[str, Tensor]] = {}  # of the gate's and this bench's problems, which live as long
        self.outputs = [torch.empty(workload.m, workload.n, dtype=random.x.dtype, device=DEVICE) for _ in self.problems]

    def contender(self, step: Idea, kernel: Kernel) -> Contender:
        loaded = kernel.load()
        takes_one = "workspace" in loaded.params
        workspace = split_workspace(self.workload, kernel.schedule, self.target, DEVICE) if takes_one else {}
        return Contender(step.number, step.idea, kernel.schedule, loaded, workspace)

    def verified(self, contender: Contender) -> float | None:
        """The contender's largest relative block error; None, and a line about why, when it is
        wrong."""
        verdict = self.gate.verify(lambda problem, y: contender.launch(*self._arguments(contender, problem, y)))
        if not verdict.ok:
            print(f"  wrong, left out: step {contender.step}, {contender.schedule}: {' '.join(verdict.reasons)}", flush=True)
            return None
        return verdict.rel_err

    def time(self, contenders: Sequence[Contender]) -> list[Timing]:
        """Times of ``contenders`` side by side, in order."""
        calls = {
            str(i): [partial(c.launch, *self._arguments(c, p, y)) for p, y in zip(self.problems, self.outputs, strict=True)]
            for i, c in enumerate(contenders)
        }
        timings = time_calls(calls, DEVICE)
        return [timings[name] for name in calls]

    def _arguments(self, contender: Contender, problem: Problem, y: Tensor) -> list[Tensor]:
        operands, form = problem.operands, self.forms.get(contender.schedule.program)
        if form is not None:
            place = (form, id(problem))
            if place not in self._formed:
                self._formed[place] = form(problem)
            operands = self._formed[place]
        return contender.arguments(operands, problem.x[: y.shape[0]], y)


Described = Callable[[Workload, Contender, Timing, float, int], dict[str, Any]]


def row(workload: Workload, contender: Contender, timing: Timing, rel_err: float, tried: int) -> dict[str, Any]:
    """One step's row, without the fields of the process; ``tried`` counts the verified schedules it
    was the fastest of."""
    c, f = contender, workload.format
    row = format_row("ablation", workload, c.step, c.idea, c.schedule, timing, rel_err, tried)
    return {**row, "dependent": c.dependent, "format": f.family, "group_size": f.group_size, "symmetric": f.symmetric}


def format_row(
    op: str, workload: Workload, step: int, idea: str, schedule: Schedule, timing: Timing, rel_err: float, tried: int
) -> dict[str, Any]:
    """One step's row of a product in any format, under its whole name; without the fields of the process."""
    w = workload
    return {
        "op": op,
        "step": step,
        "idea": idea,
        "n": w.n,
        "k": w.k,
        "m": w.m,
        "format": w.format.name,
        "dtype": w.dtype,
        "us": round(timing.us, 3),
        "us_p20": round(timing.us_p20, 3),
        "us_p80": round(timing.us_p80, 3),
        "rel_err": rel_err,
        "tried": tried,
        "schedule": schedule.to_json(),
    }


def climb(bench: Bench, kernels: Mapping[Climbed, Sequence[Kernel]], row: Described = row) -> list[dict[str, Any]]:
    """The rows of one workload, one per step with a working kernel, as ``row`` describes it."""
    winners: list[Contender] = []
    errors: dict[Contender, float] = {}
    tried: dict[int, int] = {}
    for step, made in kernels.items():
        contenders = [bench.contender(step, kernel) for kernel in made]
        right = {c: error for c in contenders if (error := bench.verified(c)) is not None}
        tried[step.number] = len(right)
        if right:
            times = dict(zip(right, bench.time([*right]), strict=True))
            winners.append(min(right, key=lambda c: times[c].us))
            errors[winners[-1]] = right[winners[-1]]
    able = [c for c in winners if c.step > 0 and c.kernel.run_dependent is not None]
    if able:
        times = dict(zip(able, bench.time(able), strict=True))
        best = replace(min(able, key=lambda c: times[c].us), step=DEPENDENT.number, idea=DEPENDENT.idea, dependent=True)
        error = bench.verified(best)
        tried[DEPENDENT.number] = 1
        if error is not None:
            winners.append(best)
            errors[best] = error
    if not winners:
        return []
    return [row(bench.workload, c, timing, errors[c], tried[c.step]) for c, timing in zip(winners, bench.time(winners), strict=True)]


def folder_file(folder: Path, target: Target) -> Path:
    """Where the rows of a device stand."""
    return folder / f"{file_stem(target.name)}.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROWS / "ablation", help="folder to append <device>.jsonl in")
    options = parser.parse_args()
    target = detect_target()
    if target.arch not in naive.RULE.arches:
        parser.error(f"this machine's device is {target.name} ({target.arch}); accepted: an NVIDIA GPU, {', '.join(naive.RULE.arches)}")
    common = process_fields(target)
    path = folder_file(options.out, target)
    kernels = compiled([(w, drawn(w, target)) for w in WORKLOADS], target)
    for workload, made in zip(WORKLOADS, kernels, strict=True):
        print(f"n {workload.n}, k {workload.k}, m {workload.m}", flush=True)
        rows = [{**common, **found} for found in climb(Bench(workload, target), made)]
        write_rows(path, rows)
        for r in rows:
            print(f"  {r['step']}  {r['us']:9.2f} us  {r['idea']}  ({r['tried']} tried)", flush=True)


if __name__ == "__main__":
    main()
