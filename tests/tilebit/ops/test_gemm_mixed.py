"""The operator of mixed linear layers: one kernel and one launch, found ahead and in packs; what it refuses before."""

from __future__ import annotations

import copy

import pytest
import torch
from mixed_layers import K, M, N, made
from torch import nn

from tilebit import packs, prepare, quantize_activations
from tilebit.kernels import build
from tilebit.ops import dispatch, gemm_mixed
from tilebit.schedules.gemm.parts import ADDED
from tilebit.weights.mixed import LOW


def test_kernels_are_prepared(launches) -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    dispatch.forget()
    prepare(nn.Sequential(layer), m=[M])
    assert [(w.n, w.width, w.nibbles, w.format) for w, _ in launches.seen] == [(128, N, True, LOW)]
    launches.seen.clear()
    layer(x)
    assert launches.seen == []


def test_a_call_is_one_launch(launches) -> None:
    layer, x = made(50)[0], torch.randn(M, K).half()
    layer(x)
    dispatch.forget()
    launches.seen.clear()
    layer.of_codes(*quantize_activations(x, group=128))
    assert [(w.width, rows) for w, rows in launches.seen if w.op == "gemm"] == [(N, M)]


def test_kernels_may_join_nibbles_where_the_caller_says_that_rows_are_such(launches) -> None:
    """A layer whose rows are as ``split_nibbles`` gives them does; one in another order, and an operator's caller who says nothing, do
    not, and get the same."""
    for order in ("drawn", "scattered"):
        layer, x = made(10, order)[0], torch.randn(M, K).half()
        dispatch.forget()
        launches.seen.clear()
        y, packed = layer(x), layer.rows.packed
        assert layer.nibbles == (order == "drawn") == next(w.nibbles for w, _ in launches.seen if w.op == "gemm")
        operands = packed.weight, packed.scales, packed.zeros, None, layer.rows.bias, layer.channels
        said = torch.ops.tilebit.gemm_mixed(*quantize_activations(x, group=128), *operands, N, K, LOW.name, torch.float16)
        assert torch.equal(said, y) and not launches.seen[-1][0].nibbles


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [(0, 1, "do not hold each of 0 to 99 once"), (119, ADDED, "channels are -1 at row 119"), (127, -3, "channels reach -3")],
)
def test_an_operator_s_index_is_checked_where_asked(monkeypatch: pytest.MonkeyPatch, row: int, value: int, message: str) -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    layer.channels[row] = value if value < 0 else layer.channels[value]
    monkeypatch.setattr(gemm_mixed, "CHECKED", True)
    with pytest.raises(ValueError, match=message):
        layer(x)


def test_operands_are_checked() -> None:
    layer, x = made(10)[0], torch.randn(M, K).half()
    layer(x)
    for name in ("zeros", "scales", "weight", "bias"):
        broken = copy.deepcopy(layer)
        broken.rows._buffers[name] = torch.zeros(3, dtype=getattr(layer.rows, name).dtype)
        with pytest.raises(ValueError, match=rf"{name} is .* needs"):
            broken(x)
    broken = copy.deepcopy(layer)
    broken.channels = layer.channels.long()
    with pytest.raises(ValueError, match=r"channels is .* needs"):
        broken(x)


def test_an_operator_s_arguments_are_checked_before_a_launch(launches) -> None:
    layer = made(10)[0]
    rows, codes = layer.rows, quantize_activations(torch.randn(M, K).half(), group=128)
    operands = (rows.weight, rows.scales, rows.zeros, rows.row_scales, rows.bias, layer.channels)
    launches.seen.clear()
    for changes, message in (
        ({"n": 129}, "do not hold each of 0 to 128 once"),
        ({"n": 0}, "do not hold each of 0 to -1 once"),
        ({"format": "w8a8_g128"}, "format is w8a8_g128; accepted: one of 4 bits with int8 x"),
        ({"format": "w4a16_g128"}, "format is w4a16_g128; accepted: one of 4 bits with int8 x"),
        ({"dtype": torch.float32}, "dtype is torch.float32; accepted"),
        ({"k": 290}, r"x is .*accepted: int8 \[..., 290\]"),
    ):
        said = {"n": N, "k": K, "format": LOW.name, "dtype": torch.float16} | changes
        with pytest.raises(ValueError, match=message):
            torch.ops.tilebit.gemm_mixed(*codes, *operands, said["n"], said["k"], said["format"], said["dtype"])
    assert launches.seen == []


def test_a_pack_serves_the_kernel(tmp_path, launches) -> None:
    """As where nothing may be compiled: the pack has the kernel, with its index, and no other is looked for."""
    layer, x = made(10)[0], torch.randn(M, K).half()
    expected = layer(x)
    plan = dispatch.plan_for(layer.channels.device, 128, K, LOW.name, x.dtype, True, False, N, nibbles=True)
    packs.export(tmp_path / "pack", build([plan.workload.with_m(M)], plan.target))
    loaded = packs.load(tmp_path / "pack")
    try:
        assert [(w["n"], w["width"]) for entry in loaded.kernels if (w := entry.workload.to_json())] == [(128, N)]
        assert torch.equal(layer(x), expected)
        assert packs.find(launches.seen[-1][0], plan.target) is not None
    finally:
        packs.unload(loaded)
