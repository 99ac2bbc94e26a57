"""Layers of one input as one: the same outputs, the same tensors, and which layers do not make one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tilebit.weights.joined import joined
from tilebit.weights.modules import QuantLinear

K = 256
ROWS = (64, 128, 64)


def layers_of(format: str, bias: bool = False, rows: tuple[int, ...] = ROWS, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    floats = [nn.Linear(K, n, bias, dtype=torch.bfloat16) for n in rows]
    return [QuantLinear.from_float(layer, format) if format else layer for layer in floats]


@pytest.mark.parametrize(
    ("format", "bias"),
    [
        ("", False), ("", True), ("w4a16_g64", False), ("w4a16_g64", True), ("w4a16_g128_asym", False), ("w8a16_channel", True),
        ("w4a16_mxfp4", False), ("w4a8_lqq_g128", True), ("w8a8_channel", False), ("w8a8_channel", True), ("w8a8_fp8", False),
    ],
)  # fmt: skip
def test_outputs_lie_side_by_side(format: str, bias: bool):
    layers = layers_of(format, bias)
    before = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in layers]
    x = torch.randn(3, K, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = torch.cat([layer(x) for layer in layers], -1)
        found: Any = joined(layers)
        assert found is not None
        assert torch.equal(found(x), expected)
        assert torch.equal(torch.cat([layer(x) for layer in layers], -1), expected)  # they go on by themselves
    assert layers[0].weight.data_ptr() == found.weight.data_ptr()
    ends = [layer.weight.data_ptr() + layer.weight.nbytes for layer in layers]
    assert ends == [*(layer.weight.data_ptr() for layer in layers[1:]), found.weight.data_ptr() + found.weight.nbytes]
    for layer, held in zip(layers, before, strict=True):
        assert all(torch.equal(value, held[name]) for name, value in layer.state_dict().items())


def test_one_without_a_bias_adds_nothing():
    layers = [*layers_of("w4a16_g64", True, (64,)), *layers_of("w4a16_g64", False, (64,))]
    x = torch.randn(2, K, dtype=torch.bfloat16)
    found: Any = joined(layers)
    assert found is not None and torch.equal(found(x), torch.cat([layer(x) for layer in layers], -1))


def test_one_layer_is_itself():
    (layer,) = layers_of("w4a16_g64", True, (64,))
    found = joined([layer], dependent=True)
    assert isinstance(found, QuantLinear) and found.dependent and found.weight is layer.weight
    (plain,) = layers_of("", True, (64,))
    assert joined([plain]) is plain


def _permuted(layers: list[Any]) -> None:
    layers[1].register_buffer("perm", torch.randperm(K))


CASES: dict[str, Callable[[], list[Any]]] = {
    "kinds": lambda: [*layers_of("w4a16_g64", rows=(64,)), *layers_of("", rows=(64,))],
    "formats": lambda: [*layers_of("w4a16_g64", rows=(64,)), *layers_of("w4a16_g128", rows=(64,))],
    "dtypes": lambda: [*layers_of("w4a16_g64", rows=(64,)), layers_of("w4a16_g64", rows=(64,))[0].to(torch.float16)],
    "rows that end inside a tile": lambda: layers_of("w4a16_g64", rows=(72, 64)),
    "biases of floats": lambda: [*layers_of("", True, (64,)), *layers_of("", False, (64,))],
}


@pytest.mark.parametrize("case", [*CASES, "orders of channels"])
def test_what_makes_no_one_layer(case: str):
    if case in CASES:
        layers = CASES[case]()
    else:
        layers = layers_of("w4a16_g64")
        _permuted(layers)
    held = [layer.weight.data_ptr() for layer in layers]
    assert joined(layers) is None
    assert [layer.weight.data_ptr() for layer in layers] == held  # nothing has changed


def test_layers_that_read_channels_in_one_order_make_one():
    layers = layers_of("w4a16_g64")
    order = torch.randperm(K)
    for layer in layers:
        layer.register_buffer("perm", order.clone())
    x = torch.randn(2, K, dtype=torch.bfloat16)
    found: Any = joined(layers)
    assert found is not None and torch.equal(found(x), torch.cat([layer(x) for layer in layers], -1))


def test_a_part_that_loads_leaves_the_joined_layer_what_it_was():
    """Never codes of one with scales of the other."""
    layers, x = layers_of("w4a16_g64", True), torch.randn(2, K, dtype=torch.bfloat16)
    found: Any = joined(layers)
    before, other = found(x), layers_of("w4a16_g64", True, seed=1)[0]
    layers[0].load_state_dict(other.state_dict())
    assert torch.equal(layers[0](x), other(x)) and torch.equal(found(x), before)
    anew: Any = joined(layers)
    assert torch.equal(anew(x), torch.cat([layer(x) for layer in layers], -1))


def test_one_layer_shares_all_that_it_holds():
    (layer,), (other,) = (layers_of("w4a16_g64", True, (64,), seed) for seed in (0, 1))
    found, x = joined([layer], dependent=True), torch.randn(2, K, dtype=torch.bfloat16)
    assert isinstance(found, QuantLinear) and found.bias is layer.bias
    layer.load_state_dict(other.state_dict())
    assert torch.equal(found(x), other(x))
