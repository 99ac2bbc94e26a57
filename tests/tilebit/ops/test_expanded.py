"""Many rows with a weight of any precision on GPUs, as far as it can be told without one: from which number of rows the weight is expanded,
what is prepared for it, and the product behind the expansion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilebit.autotune.problems.expand import random_problem
from tilebit.layouts.formats import GemmFormat
from tilebit.ops import dispatch
from tilebit.ops.dispatch import Plan
from tilebit.ops.expanded import expanded
from tilebit.schedules.gemm.expand import ExpandWorkload, library_from
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import target_from_name

H200, W4 = target_from_name("sm_90a"), GemmFormat.parse("w4a16_any")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(dispatch, "device_target", lambda device: H200)
    return Plan(torch.device("cpu"), 4096, 4100, W4, torch.float16, False)


def test_the_weight_is_expanded_from_the_stated_number_of_rows_on(plan: Plan) -> None:
    first = library_from(plan.workload, H200)
    assert first is not None
    own, dense = plan.missing([1, 2, first - 1]), plan.missing([first, first + 1, 1 << 20])
    assert all(isinstance(workload, Workload) for workload in own) and plan.missing([1]) != plan.missing([first - 1])
    assert dense == [ExpandWorkload(4096, 4100, 4)] and plan.serving(first) == dense[0] and plan.serving(first - 1) in own
    assert plan.missing(None)[-1] == dense[0] and plan.bounds[-2:] == (first - 1, first)  # what prepare() builds and loads
    assert list(plan.bounds) == sorted(set(plan.bounds))


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_behind_an_expansion(bias: bool) -> None:
    workload = ExpandWorkload(70, 300, 5)
    problem = random_problem(workload, 0, "sm_90a", "cpu")
    held: list[Tensor] = []

    def run(weight: Tensor, scales: Tensor, y: Tensor) -> None:
        assert weight is problem.operands["weight"] and scales is problem.operands["scales"]
        held.append(y.copy_(problem.reference()))

    kernel: Any = SimpleNamespace(params=("weight", "scales", "y"), run=run, run_dependent=None, path="")
    plan: Any = SimpleNamespace(target=H200, device=torch.device("cpu"))
    launch = expanded(kernel, workload, plan)
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)).half()
    added = torch.arange(70).half() if bias else None
    rows = torch.nn.functional.pad(x, (0, workload.columns - 300))
    y = torch.full((9, 70), torch.nan, dtype=torch.float16)
    for _ in range(2):
        launch(rows, *problem.operands.values(), None, None, added, y)
    expected = x.double() @ problem.reference()[:, :300].double().t() + (0 if added is None else added.double())
    torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-2)
    assert len(held) == 2 and held[0] is not held[1]
