"""Norms of the residual sum and gates through the door: on CPUs what the definitions say; on a GPU what its kernel is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilebit
from tilebit.autotune.problems.glue import compared, edge_problem, gated_reference, norm_reference, random_problem
from tilebit.schedules.activations.glue import GlueWorkload
from tilebit.schedules.operations import candidates, legal, workload_from_json
from tilebit.schedules.select import choose
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("dtype", "offset"), [("float16", 0.0), ("bfloat16", 1.0)])
def test_norms_are_as_defined(dtype: str, offset: float, residual: bool, edges: bool):
    w = GlueWorkload("norm", 7, 200, dtype, residual, 1e-5, offset)
    problem = (edge_problem if edges else random_problem)(w, 3)
    o, expected = problem.operands, problem.reference()
    held = o.get("residual")
    before = None if held is None else held.clone()
    y, new = tilebit.add_norm(o["x"], held, o["norm_weight"], 1e-5, offset)
    assert (held is None) == (new is None)
    found = {"y": y} if new is None else {"y": y, "residual": new}
    assert compared(found, expected)[0] == []
    if held is not None and new is not None and before is not None:
        assert torch.equal(held.view(torch.int16), before.view(torch.int16))
        again, kept = tilebit.add_norm(o["x"], held, o["norm_weight"], 1e-5, offset, inplace=True)
        assert kept is held and torch.equal(held.view(torch.int16), new.view(torch.int16))
        assert torch.equal(again.view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gates_are_as_defined(activation: str, dtype: torch.dtype):
    x = torch.randn(2, 3, 2 * 40, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    y = tilebit.gated(x, activation)
    assert y.shape == (2, 3, 40) and compared({"y": y}, {"y": gated_reference(x, activation)})[0] == []
    assert torch.equal(tilebit.gated(x.transpose(0, 1), activation), y.transpose(0, 1))
    assert tilebit.gated(x[:0], activation).shape == (0, 3, 40)


def test_both_trace_and_have_fakes():
    x, residual, weight = torch.randn(3, 64).half(), torch.randn(3, 64).half(), torch.randn(64).half()

    def both(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, held = tilebit.add_norm(x, residual, weight)
        assert held is not None
        return tilebit.gated(y), held

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(x, residual), both(x, residual), strict=True))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert tilebit.gated(fake).shape == (3, 32)
    for op, given in (("add_norm", (x, residual, weight)), ("gated", (x,))):
        torch.library.opcheck(getattr(torch.ops.tilebit, op).default, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 64)}, "x is float32"),
        ({"x": torch.zeros(()).half()}, r"accepted: float16 or bfloat16 \[..., k\]"),
        ({"weight": torch.zeros(32).half()}, r"weight is float16 \[32\].*accepted with x of .*float16 \[64\]"),
        ({"weight": torch.zeros(64).bfloat16()}, "weight is bfloat16"),
        ({"residual": torch.zeros(2, 64).half()}, r"residual is float16 \[2, 64\]"),
        ({"residual": torch.zeros(64, 3).half().t(), "inplace": True}, "accepted in place: a contiguous one"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], words: str):
    given = {"x": torch.zeros(3, 64).half(), "residual": torch.zeros(3, 64).half(), "weight": torch.zeros(64).half(), **change}
    before = given["residual"].clone()
    with pytest.raises(ValueError, match=words):
        tilebit.add_norm(**given)
    assert torch.equal(given["residual"], before)


def test_gates_that_do_not_fit():
    for x, words in ((torch.zeros(3, 7).half(), r"\[..., 2 k\]"), (torch.zeros(3, 8), "x is float32")):
        with pytest.raises(ValueError, match=words):
            tilebit.gated(x)
    with pytest.raises(ValueError, match="activation is 'relu'; accepted: 'silu', 'gelu_tanh', 'gelu'"):
        tilebit.gated(torch.zeros(3, 8).half(), "relu")
    with pytest.raises(TypeError, match="x is list"):
        tilebit.gated([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps from 0"):
        GlueWorkload("norm", 1, 16, eps=-1.0)
    with pytest.raises(ValueError, match="derivative with respect to x"):
        tilebit.gated(torch.zeros(3, 8).half().requires_grad_())


@pytest.mark.parametrize(
    "w", [GlueWorkload("norm", 3, 4096, residual=True, eps=1e-5, offset=1.0), GlueWorkload("gated", 1, 14336, "bfloat16")]
)
def test_workloads_are_stored_and_have_schedules(w: GlueWorkload):
    assert workload_from_json(w.to_json()) == w and w.static().m == 0
    found = candidates(w, H200) or []
    assert len(found) >= 3 and all(legal(w, schedule, H200) == [] for schedule in found)
    assert choose(w, H200, []).schedule in found
    assert w.operands("sm_90a")[0].name == "x"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 20}, "k a multiple of 8"),
        ({"op": "sum"}, "op is 'sum'"),
        ({"eps": -1.0}, "eps from 0"),
        ({"activation": "relu"}, "activation is"),
    ],
)
def test_fields_out_of_range_are_named(change: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        GlueWorkload(**{"op": "gated", "m": 1, "k": 16, **change})
    assert GlueWorkload("gated", 1, 16, residual=True, eps=2.0, offset=1.0) == GlueWorkload("gated", 1, 16)
    assert norm_reference(torch.zeros(1, 8).half(), None, torch.ones(8).half(), 1e-6, 0.0)[1] is None
