"""What each of the papers' ideas is worth in decode attention: ``python -m
results.measure.ablation.attention [--steps 0,2,3] [--out DIR]`` times a decode step with one idea
after another added (``steps_attention.py``).

Each step is the fastest of a few schedules that use its idea and passed the gate of
``autotune.attention_verify``. The winners of a case's steps are timed once more side by side, and
only those times are written. Copies of the cache rotate, so that no cache holds what a call reads.
A schedule or a step that fails is named and left out; one that leaves the device unusable can be
left out with ``--steps``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.measure import Timing, time_calls
from tilebit.autotune.problems.attention import AttentionProblem, edge_attention
from tilebit.autotune.problems.attention_verify import AttentionGate, Outputs
from tilebit.command.bench import process_fields, write_rows
from tilebit.layouts.kv import RESIDUAL
from tilebit.runtime import LoadedKernel
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import workspace_words
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, detect_target, file_stem
from tilebit.tiles.compiler.kernel import Kernel

from ...report.rows import ROWS
from ..attention import contiguous, one_length, rotating, workload
from . import row_major
from .compiled import compiled
from .steps_attention import APART, DEPENDENT, GATHERED, ROWS_APART, STEPS, TOGETHER, Step, drawn, together

DEVICE = "cuda:0"
KV4_CASES = ((1, 32768), (8, 8192), (32, 4096))  # batch, kv_len
WORKLOADS = (
    *(workload("decode", batch, 1, kv_len, "kv4_channel") for batch, kv_len in KV4_CASES),
    workload("decode", 32, 1, 4096, "kv8_channel"),
    workload("decode", 32, 1, 4096, "kv2_channel"),
)
SMALL = (3, 2 * RESIDUAL + 44)  # batch and kv_len of what step 0 is checked on: torch's attention takes sequences of one length


@dataclass(frozen=True, slots=True, eq=False)
class Contender:
    """A loaded kernel of one step and its workspace (0 words where it takes none). ``dependent``:
    launched as a dependent of the call before."""

    step: Step
    schedule: Schedule
    kernel: LoadedKernel
    workspace: Tensor
    dependent: bool = False

    def call(self, formed: AttentionProblem, outputs: Outputs) -> Callable[[], Tensor]:
        """A call on a problem of the step's form that returns the attention, after writing to
        ``outputs``."""
        named = {**formed.named(outputs), "workspace": self.workspace}
        launch = self.kernel.run_dependent if self.dependent else self.kernel.run
        arguments = [named[name] for name in self.kernel.params]
        if self.step.form is GATHERED:
            return lambda: (launch(*arguments), _attended(formed, outputs))[1]
        return lambda: (launch(*arguments), outputs["out"])[1]


def _attended(problem: AttentionProblem, rows: Outputs) -> Tensor:
    """[batch, 1, heads_q, head_dim]: torch's attention over gathered ``rows`` of sequences of one
    length."""
    q, w = problem.operands["q"], problem.workload
    k, v = (rows[name].unflatten(0, (len(q), -1)).transpose(1, 2) for name in ("out_k", "out_v"))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q.transpose(1, 2), k, v, scale=w.softmax_scale, enable_gqa=True).transpose(1, 2)


class Bench:
    """One case on a device: gates, and copies of its cache, in every step's form as it is asked
    for."""

    def __init__(self, workload: AttentionWorkload, target: Target, device: str = DEVICE) -> None:
        self.workload, self.target, self.device = workload, target, device
        self.problem = contiguous(one_length(workload, device))
        self.problems = rotating(self.problem, target.l2)
        self._gates: dict[bool, AttentionGate] = {}
        self._forms: dict[tuple[int, int], AttentionProblem] = {}

    def contender(self, step: Step, kernel: Kernel) -> Contender:
        words = workspace_words(step.form.workload(self.workload), kernel.schedule, self.target)
        return Contender(step, kernel.schedule, kernel.load(), torch.zeros(words, dtype=torch.int32, device=self.device))

    def verified(self, contender: Contender) -> float | None:
        """The contender's largest relative error of a sequence; None, and a line about why, when it
        is wrong."""
        verdict = self._gate(contender.step).verify(lambda problem, outputs: self._answer(contender, problem, outputs))
        if not verdict.ok:
            print(f"  wrong, left out: step {contender.step.number}, {contender.schedule}: {' '.join(verdict.reasons)}", flush=True)
            return None
        return verdict.rel_err

    def time(self, contenders: Sequence[Contender]) -> list[Timing]:
        """Times of ``contenders`` side by side, in order."""
        calls = {}
        for i, c in enumerate(contenders):
            formed = [self._formed(c.step, problem) for problem in self.problems]
            outputs = formed[0].outputs()
            calls[str(i)] = [c.call(problem, outputs) for problem in formed]
        timings = time_calls(calls, self.device)
        return [timings[name] for name in calls]

    def _gate(self, step: Step) -> AttentionGate:
        alike = step.form is GATHERED
        if alike not in self._gates:
            batch, kv_len = SMALL
            edges = one_length(replace(self.workload, batch=batch, kv_len=kv_len), self.device) if alike else None
            # torch's attention may differ from run to run in its last bits: it takes cuDNN at 32 x
            # 4096 on an H200, whose results vary
            self._gates[alike] = AttentionGate(edges or edge_attention(self.workload, 0, self.device), self.problem, reproducible=not alike)
        return self._gates[alike]

    def _answer(self, contender: Contender, problem: AttentionProblem, outputs: Outputs) -> None:
        formed = self._formed(contender.step, problem)
        if contender.step.form is TOGETHER:
            contender.call(formed, outputs)()
            return
        own = {name: torch.full(shape, torch.nan, dtype=dtype, device=self.device) for name, (shape, dtype) in formed.written.items()}
        out = contender.call(formed, own)()
        outputs["out"].copy_(together(out, problem.workload) if contender.step.form in (APART, ROWS_APART) else out)

    def _formed(self, step: Step, problem: AttentionProblem) -> AttentionProblem:
        place = (step.number, id(problem))  # of the gates' and this bench's problems, which live as long as it does
        if place not in self._forms:
            self._forms[place] = step.form.problem(problem)
        return self._forms[place]


def climb(bench: Bench, kernels: Mapping[Step, Sequence[Kernel]]) -> list[dict[str, Any]]:
    """The rows of one case, one per step with a working kernel."""
    winners: list[Contender] = []
    errors: dict[Contender, float] = {}
    tried: dict[int, int] = {}
    able: list[Contender] = []  # that a dependent launch can start early

    def enter(step: Step, contenders: Sequence[Contender]) -> None:
        right = {}
        for c in contenders:
            with _going_on(f"step {step.number}, {c.schedule}"):
                if (error := bench.verified(c)) is not None:
                    right[c] = error
        if right:
            times = dict(zip(right, bench.time([*right]), strict=True))
            best = min(right, key=lambda c: times[c].us)
            winners.append(best)
            able.extend(c for c in right if c.step.form is TOGETHER and c.kernel.run_dependent is not None)
            errors[best], tried[step.number] = right[best], len(right)

    for step, made in kernels.items():
        with _going_on(f"step {step.number}"):
            enter(step, [bench.contender(step, kernel) for kernel in made])
    if able:
        fastest = [c for c in winners if c in able]
        with _going_on(f"step {DEPENDENT.number}"):
            times = dict(zip(fastest, bench.time(fastest), strict=True))
            step = min(fastest, key=lambda c: times[c].us).step  # all its schedules: which is best depends on the way to launch
            enter(DEPENDENT, [replace(c, step=DEPENDENT, dependent=True) for c in able if c.step is step])
    if not winners:
        return []
    return [row(bench.workload, c, timing, errors[c], tried[c.step.number]) for c, timing in zip(winners, bench.time(winners), strict=True)]


@contextmanager
def _going_on(what: str) -> Iterator[None]:
    """Goes on after whatever fails inside, and says what is left out: it must not cost the other
    steps their rows."""
    try:
        yield
    except Exception as error:
        print(f"  failed, left out: {what}: {error!r}", flush=True)


def row(workload: AttentionWorkload, contender: Contender, timing: Timing, rel_err: float, tried: int) -> dict[str, Any]:
    """One step's row, without the fields of the process; ``tried`` counts the verified schedules it
    was the fastest of."""
    w = workload
    return {
        "op": "ablation_attention",
        "step": contender.step.number,
        "idea": contender.step.idea,
        "dependent": contender.dependent,
        "format": w.format.name,
        "dtype": w.dtype,
        "page_size": w.page_size,
        "batch": w.batch,
        "kv_len": w.kv_len,
        "q_len": w.q_len,
        "heads_q": w.heads_q,
        "heads_kv": w.heads_kv,
        "head_dim": w.head_dim,
        "us": round(timing.us, 3),
        "us_p20": round(timing.us_p20, 3),
        "us_p80": round(timing.us_p80, 3),
        "rel_err": rel_err,
        "tried": tried,
        "schedule": contender.schedule.to_json(),
    }


def posed(workload: AttentionWorkload, step: Step) -> AttentionWorkload:
    """What a step's kernels are compiled for."""
    return step.form.workload(workload)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.ablation.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = ",".join(str(step.number) for step in STEPS)
    parser.add_argument("--steps", default=numbers, help=f"the steps to measure, and {DEPENDENT.number} with them (default: {numbers})")
    parser.add_argument("--out", type=Path, default=ROWS / "ablation_attention", help="folder to append <device>.jsonl in")
    options = parser.parse_args(arguments)
    wanted = options.steps.split(",")
    if unknown := set(wanted) - set(numbers.split(",")):
        parser.error(f"--steps names {', '.join(sorted(unknown))}; accepted: {numbers}")
    target = detect_target()
    if target.arch not in row_major.RULE.arches:
        accepted = ", ".join(row_major.RULE.arches)
        parser.error(f"this machine's device is {target.name} ({target.arch}); accepted: an NVIDIA GPU, {accepted}")
    common = process_fields(target)
    path = options.out / f"{file_stem(target.name)}.jsonl"
    drawings = [(w, {step: ss for step, ss in drawn(w, target).items() if str(step.number) in wanted}) for w in WORKLOADS]
    for w, made in zip(WORKLOADS, compiled(drawings, target, posed), strict=True):
        print(w.title, flush=True)
        with _going_on(w.title):
            rows = [{**common, **found} for found in climb(Bench(w, target), made)]
            write_rows(path, rows)
            for r in rows:
                print(f"  {r['step']}  {r['us']:9.2f} us  {r['idea']}  ({r['tried']} tried)", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
