"""How gated products are timed: behind a norm, whose own time is not theirs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from tilebit.autotune.behind_norm import NORM, behind, norm_ahead, without
from tilebit.autotune.measure import Timing
from tilebit.autotune.problems.gemm import random_problem
from tilebit.autotune.search import searched
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import target_from_name

GATED = Workload(1, 28672, 4096, GemmFormat.parse("w4a16_g128"), "float16", gate="silu")


def test_who_has_a_norm_ahead():
    """Products of a gate that take x of 16 bits on a GPU; no other ones, and none on a CPU."""
    small = Workload(2, 64, 64, GemmFormat.parse("w4a16_g32"), "float16", gate="silu")
    assert norm_ahead(random_problem(small, 0, "sm_90a", "cpu")) is None
    on_gpu = SimpleNamespace(is_cuda=True, is_floating_point=lambda: True, shape=(2, 64))
    for workload, x in ((SimpleNamespace(gate=""), on_gpu), (SimpleNamespace(gate="silu", norm=True), on_gpu), (SimpleNamespace(), on_gpu)):
        assert norm_ahead(SimpleNamespace(workload=workload, operands={"x": x})) is None  # type: ignore[arg-type]
    codes = SimpleNamespace(is_cuda=True, is_floating_point=lambda: False)
    assert norm_ahead(SimpleNamespace(workload=SimpleNamespace(gate="silu"), operands={"x": codes})) is None  # type: ignore[arg-type]


def test_each_call_comes_behind_the_norm():
    said: list[str] = []
    calls = behind(
        lambda: said.append("norm"), {"a": [lambda: said.append("a0"), lambda: said.append("a1")], "b": [lambda: said.append("b")]}
    )
    assert said == ["norm"], "its kernel is loaded first"
    assert {name: len(those) for name, those in calls.items()} == {NORM: 1, "a": 2, "b": 1}
    for call in (*calls["a"], *calls["b"], *calls[NORM]):
        call()
    assert said[1:] == ["norm", "a0", "norm", "a1", "norm", "b", "norm"]


def test_the_norms_time_is_taken_off():
    found = without({NORM: Timing(2.0, 1.75, 2.5, 10, 5), "0": Timing(16.0, 15.5, 17.0, 10, 5)})
    assert found == {"0": Timing(14.0, 13.5, 15.0, 10, 5)}


def test_gated_products_are_tried_with_deeper_rings():
    """28672 x 4096, m = 1: four stages make an H200's step 1.4 % faster than the two that are best alone."""
    target = target_from_name("sm_90a")
    for workload, more in ((GATED, 2), (replace(GATED, gate=""), 0)):
        first = searched(workload, target, 8)
        assert first is not None and len(first) == 8
        deeper = [s.num_stages - first[0].num_stages for s in first[1:] if replace(s, num_stages=first[0].num_stages) == first[0]]
        assert deeper[:more] == [1, 2][:more]
        assert more == 0 or replace(first[2], num_stages=first[0].num_stages) == first[0], "at once"
