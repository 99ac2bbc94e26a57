"""The gate of norms and gates: a right kernel passes whatever is drawn, also one that rounds elsewhere; a wrong one does not."""

from __future__ import annotations

import pytest
import torch

from tilebit.autotune.problems.glue import LEAST_ACTIVATED, GlueProblem, Outputs, compared, gate, gated_reference
from tilebit.schedules.activations.glue import GlueWorkload


def nearly(problem: GlueProblem, outputs: Outputs) -> None:
    """A norm whose reciprocal root is two units in the last place of fp32 too large."""
    w, o = problem.workload, problem.operands
    f = o["x"].float()
    root = (f.square().sum(-1, keepdim=True) / w.k + w.eps).rsqrt()
    root = torch.where(f.square().sum(-1, keepdim=True).isfinite(), root * (1 + 2.0**-22), torch.nan)
    outputs["y"].copy_(f * root * (o["norm_weight"].float() + w.offset))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_that_rounds_elsewhere_passes(offset: float, dtype: str):
    for seed in range(20):
        verdict = gate(GlueWorkload("norm", 1, 1000, dtype, eps=1e-5, offset=offset), seed, "cpu", "cpu").verify(nearly)
        assert verdict.ok, (seed, verdict.reasons)


def test_what_an_exponential_loses_may_be_zero_and_nothing_else():
    right = torch.tensor([LEAST_ACTIVATED / 2, -LEAST_ACTIVATED / 2, 2 * LEAST_ACTIVATED, 1.0], dtype=torch.bfloat16)
    assert compared({"y": right * torch.tensor([0, 0, 1, 1]).bfloat16()}, {"y": right})[0] == []
    assert "2 of 4" in compared({"y": right * torch.tensor([0, 2, 0, 1]).bfloat16()}, {"y": right})[0][0]
    assert "1 of 4" in compared({"y": right * torch.tensor([1, 1, 1, 0]).bfloat16()}, {"y": right})[0][0]


def test_a_gate_in_fp32_passes_where_activations_vanish():
    x = torch.cat([torch.linspace(-100.0, 10.0, 440), torch.ones(440)])[None].bfloat16()
    gates, ups = x.float().chunk(2, -1)
    y, right = (gates / (1 + torch.exp(-gates)) * ups).bfloat16(), gated_reference(x, "silu")
    assert bool(((y == 0) & (right != 0)).any()) and compared({"y": y}, {"y": right})[0] == []
