"""Bugs planted in the CUDA programs of attention are caught by the gate that the tuner uses, or by the emulation itself; the same kernel
without the bug passes it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.emulated_program import Edits
from emulation.generated_attention import GeneratedAttention
from emulation.planted_attention import BUGS as CACHE_BUGS
from emulation.planted_attention import Bug
from emulation.planted_prefill import BUGS as PREFILL_BUGS
from kv_cases import poisoned_problem, prefill_problem
from lanes import one_of_each

from tilebit.autotune.problems import Verdict
from tilebit.autotune.problems.attention import AttentionProblem
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

TARGET = replace(target_from_name("sm_90a"), units=3)
# (tokens, new or asked ones) of each sequence, and the queries of a decode
BUGS = (*CACHE_BUGS, *PREFILL_BUGS)
PROBLEMS = ((((300, 3), (0, 0), (129, 129), (17, 1)), 1), (((391, 150), (140, 12), (512, 260)), 3))
FULL_WINDOWS = (((256, 1), (0, 0), (129, 1), (17, 1), (128, 1)), 1), (((384, 1), (127, 1), (512, 1), (128, 1)), 3)


@cache
def gate(workload: AttentionWorkload) -> AttentionGate:
    if workload.op == "prefill":
        return AttentionGate(*(prefill_problem(workload, steps, seed) for seed, (steps, _) in enumerate(PROBLEMS)))
    asked = FULL_WINDOWS if workload.full_windows or workload.op == "pack" else PROBLEMS
    problems = [
        poisoned_problem(replace(workload, q_len=q_len), [n for n, _ in steps], [rows for _, rows in steps], seed)
        for seed, (steps, q_len) in enumerate(asked)
    ]
    return AttentionGate(*problems)


def verdict(workload: AttentionWorkload, schedule: Schedule, edits: Edits | None = None) -> Verdict:
    kernel = GeneratedAttention(workload, schedule, TARGET, edits, seed=2)

    def run(problem: AttentionProblem, outputs: dict[str, torch.Tensor]) -> None:
        kernel(problem.named(outputs))
        if kernel.tickets_left:
            raise KernelFault("tickets are left behind")

    return gate(workload).verify(run)


@cache
def sound_verdict(workload: AttentionWorkload, schedule: Schedule) -> Verdict:
    """What the gate says of the kernel as it is."""
    return verdict(workload, schedule)


def test_there_are_enough_of_them():
    assert len(BUGS) >= 15
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@needs_host_compiler
@pytest.mark.parametrize("bug", one_of_each(BUGS, lambda bug: bug.schedule.program), ids=lambda bug: bug.name.replace(" ", "-"))
def test_caught(bug: Bug):
    assert legal(bug.workload, bug.schedule, TARGET) == []
    sound = sound_verdict(bug.workload, bug.schedule)
    assert sound.ok, sound.reasons
    try:
        reasons = verdict(bug.workload, bug.schedule, bug.edits).reasons
    except KernelFault as fault:
        reasons = (str(fault),)
    assert reasons, f"{bug.name} passed the gate"
    assert any(bug.sign in reason for reason in reasons), reasons
