"""The gate of quantized activations: its reference against numbers worked out otherwise, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tilebit.autotune.problems.activations import Outputs, QuantizeGate, QuantizeProblem, edge_problem, gate, quantized, random_problem
from tilebit.schedules.activations.workload import QuantizeWorkload

TOKEN = QuantizeWorkload(9, 300)
GROUP = replace(TOKEN, group=128)
NORM = replace(GROUP, norm=True, smooth=True, dtype="bfloat16")
EVERY = (TOKEN, GROUP, NORM, *(replace(w, out="e4m3") for w in (TOKEN, GROUP, NORM)))


def right(problem: QuantizeProblem, outputs: Outputs) -> None:
    for name, expected in problem.reference().items():
        outputs[name].view(torch.int8).copy_(expected.view(torch.int8))


def verdict(w: QuantizeWorkload, run: Callable[[QuantizeProblem, Outputs], None]) -> tuple[str, ...]:
    return gate(w, 3, "sm_90a", "cpu").verify(run).reasons


@pytest.mark.parametrize("w", EVERY, ids=lambda w: w.title)
def test_the_reference_is_accepted(w: QuantizeWorkload):
    assert verdict(w, right) == ()


def test_numbers_worked_out_by_hand():
    x = torch.tensor([[2.54, -1.0, 0.01, 0.0], [0.0] * 4, [1.0, torch.nan, 2.0, 3.0], [1.0, torch.inf, 2.0, 3.0]]).half()
    codes, scales = quantized(x, QuantizeWorkload(4, 4), {})
    assert codes.tolist() == [[127, -50, 1, 0], [0] * 4, [0] * 4, [0] * 4]
    assert scales[0] == x[0, 0].float() / 127 and scales[1] == 2.0**-126 and scales[2:].isnan().all()
    ties = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]).half()
    assert quantized(ties, QuantizeWorkload(1, 6), {})[0].tolist() == [[127, 0, 2, 2, 0, -2]]
    floats = torch.tensor([[448.0, 17.0, 19.0, 2**-9, 2**-10, 3 * 2**-10, -0.0]]).half()
    codes, scales = quantized(floats, QuantizeWorkload(1, 7, out="e4m3"), {})
    assert codes.view(torch.float8_e4m3fn).float().tolist() == [[448.0, 16.0, 20.0, 2**-9, 0.0, 2**-8, 0.0]] and scales == 1.0


@pytest.mark.parametrize("w", EVERY, ids=lambda w: w.title)
def test_codes_times_scales_are_the_values(w: QuantizeWorkload):
    """An error of half a step; and the norm is torch's."""
    problem = random_problem(w, 1)
    o, found = problem.operands, problem.reference()
    y = o["x"].double()
    if w.norm:
        y = torch.nn.functional.rms_norm(y, (w.k,), o["norm_weight"].double(), w.eps) * o["smooth"].double()
    scales = found["scales"].double().view(w.groups, -1).t().repeat_interleave(128 if w.group > 0 else w.k, 1)[:, : w.k]
    numbers = found["codes"].float().double()
    step = 0.5 if w.out == "int8" else (numbers.abs() / 16).clamp(min=2.0**-10)
    assert ((numbers * scales - y).abs() <= (step * scales * 1.0001)).all()


def changed(edit: Callable[[QuantizeProblem, Outputs], None]) -> Callable[[QuantizeProblem, Outputs], None]:
    def run(problem: QuantizeProblem, outputs: Outputs) -> None:
        right(problem, outputs)
        edit(problem, outputs)

    return run


def of(**fields: object) -> Callable[[QuantizeProblem, Outputs], None]:
    """What a kernel for another workload would give."""

    def run(problem: QuantizeProblem, outputs: Outputs) -> None:
        right(replace(problem, workload=replace(problem.workload, **fields)), outputs)

    return run


def truncated(problem: QuantizeProblem, outputs: Outputs) -> None:
    k, x = problem.workload.k, problem.operands["x"].double()
    scale = outputs["scales"].double()[:, None]
    outputs["codes"][:, :k] = torch.where(scale.isnan(), 0.0, x[:, :k] / scale).trunc().to(torch.int8)


def of_the_neighbour(problem: QuantizeProblem, outputs: Outputs) -> None:
    outputs["scales"].copy_(outputs["scales"].roll(1, -1))


def finite(problem: QuantizeProblem, outputs: Outputs) -> None:
    outputs["scales"].nan_to_num_(nan=1.0)


def one_past_127(problem: QuantizeProblem, outputs: Outputs) -> None:
    outputs["scales"].mul_(127 / 128)


def behind_k(problem: QuantizeProblem, outputs: Outputs) -> None:
    outputs["codes"].view(torch.int8)[:, problem.workload.k :] = 1


def tail_forgotten(problem: QuantizeProblem, outputs: Outputs) -> None:
    outputs["codes"].view(torch.int8)[:, problem.workload.k // 128 * 128 :] = 0


def row_not_written(problem: QuantizeProblem, outputs: Outputs) -> None:
    poison = -128 if problem.workload.out == "int8" else -1
    outputs["codes"].view(torch.int8)[-1] = poison


def beyond(problem: QuantizeProblem, outputs: Outputs) -> None:
    past = outputs["codes"].view(torch.int8)
    past.as_strided((1,), (1,), past.storage_offset() + past.numel()).fill_(0)


BUGS = {
    "truncation": (TOKEN, changed(truncated)),
    "scale of the neighbour": (GROUP, changed(of_the_neighbour)),
    "NaN lost": (TOKEN, changed(finite)),
    "128 steps": (TOKEN, changed(one_past_127)),
    "padding not zero": (TOKEN, changed(behind_k)),
    "last group's tail": (GROUP, changed(tail_forgotten)),
    "row not written": (replace(GROUP, out="e4m3"), changed(row_not_written)),
    "past the end": (TOKEN, changed(beyond)),
    "eps forgotten": (NORM, of(eps=0.0)),
    "norm forgotten": (NORM, of(norm=False)),
    "factors forgotten": (NORM, of(smooth=False)),
}


@pytest.mark.parametrize("name", BUGS)
def test_wrong_results_are_refused(name: str):
    w, run = BUGS[name]
    assert verdict(w, run) != ()


def test_runs_that_differ_are_refused():
    turns = iter(range(9))

    def run(problem: QuantizeProblem, outputs: Outputs) -> None:
        right(problem, outputs)
        if next(turns) % 2:
            outputs["codes"][0, 0] ^= 1

    (reason,) = QuantizeGate(edge_problem(TOKEN, 1), random_problem(TOKEN, 2)).verify(run).reasons
    assert reason == "edges: two runs on the same input differ."


def test_after_a_norm_few_codes_may_be_one_apart():
    def run(problem: QuantizeProblem, outputs: Outputs) -> None:
        right(problem, outputs)
        outputs["codes"][0, 1] += 1
        outputs["scales"] *= 1 + 4e-6

    codes = replace(NORM, m=40)
    assert verdict(codes, run) == ()
    assert verdict(TOKEN, run) != ()

    def many(problem: QuantizeProblem, outputs: Outputs) -> None:
        right(problem, outputs)
        outputs["codes"][3:, ::2] -= outputs["codes"][3:, ::2].sign()

    assert "one apart; accepted" in verdict(codes, many)[0]
