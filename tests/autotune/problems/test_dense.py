"""The gate of products with a 16-bit weight: what is right passes, in any order of k; what is wrong in one number does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilebit.autotune.problems import gate_of
from tilebit.autotune.problems.dense import DenseProblem, exact_problem, random_problem
from tilebit.schedules.gemm.dense import DenseWorkload

Run = Callable[[DenseProblem, Tensor], None]


def product(edit: Callable[[Tensor], None] = lambda y: None, terms: slice = slice(None, None)) -> Run:
    def run(problem: DenseProblem, y: Tensor) -> None:
        x, weight = problem.x[: len(y), terms].float(), problem.operands["weight"][:, terms].float()
        sums = x.flip(1) @ weight.flip(1).t()
        edit(sums)
        y.copy_(sums)

    return run


def one_number(y: Tensor) -> None:
    y[0, 3] += 1


def rows_exchanged(y: Tensor) -> None:
    y.copy_(y.roll(1, 0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_verdicts(dtype: str):
    gate = gate_of(DenseWorkload(5, 130, 1000, dtype), 3, "sm_90a", "cpu")
    assert gate.verify(product()).ok
    for wrong in (product(one_number), product(rows_exchanged), product(terms=slice(None, -8)), lambda problem, y: None):
        assert not gate.verify(wrong).ok


def test_exact_sums_are_whole_and_finite():
    problem = exact_problem(DenseWorkload(64, 300, 16384), 1, "cpu")
    y = problem.reference()
    assert torch.equal(y, y.round()) and 0 < float(y.abs().max()) < 65504
    assert torch.equal(problem.copied().x, problem.x) and problem.copied().x.data_ptr() != problem.x.data_ptr()
    assert 0.8 < float(random_problem(problem.workload, 1, "cpu").reference().std()) < 1.2
