"""Models whose layers get channels of two formats by a plan: rounded, calibrated, given; a plan of another model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from mixed_layers import K, M, N, placed
from torch import nn

from tilebit import MixedLinear, PrecisionPlan, QuantLinear, quantize_model
from tilebit.layouts.formats import GemmFormat
from tilebit.weights.calibrate import calibrate
from tilebit.weights.gptq import gptq
from tilebit.weights.mixed import HIGH, LOW
from tilebit.weights.mixed_tensor import MixedTensor
from tilebit.weights.precision import LayerPrecision
from tilebit.weights.quantize import quantize


def planned(**channels: torch.Tensor) -> PrecisionPlan:
    return PrecisionPlan(tuple(LayerPrecision(name, N, K, own) for name, own in channels.items()), LOW, HIGH)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(one=nn.Linear(K, N), two=nn.Linear(K, N), head=nn.Linear(K, N))).half()


def test_a_model_is_quantized_by_a_plan() -> None:
    """Rows of either format are those that quantizing rounds alone; layers that the plan has not are in the other format."""
    floats, quantized = model(), model()
    own = torch.tensor([3, 50, 99])
    assert quantize_model(quantized, "w4a16_g64", ("head",), precision=planned(one=own)) == ["one", "two"]
    mixed, plain = quantized.one, quantized.two
    assert isinstance(mixed, MixedLinear) and isinstance(plain, QuantLinear) and type(quantized.head) is nn.Linear
    assert plain.format.name == "w4a16_g64" and mixed.high_channels.tolist() == own.tolist() and mixed.dtype == torch.float16
    expected = quantize(floats.one.weight, LOW).dequantize(torch.float16)
    expected[own] = quantize(floats.one.weight[own], HIGH).dequantize(torch.float16)
    assert torch.equal(mixed.dequantize(), expected)
    bias, stored = mixed.get_buffer("rows.bias"), mixed.channels >= 0
    assert torch.equal(bias[stored], floats.one.bias[mixed.channels[stored]]) and not bias[~stored].any()


@pytest.mark.parametrize(("count", "format"), [(0, LOW), (N, HIGH)])
def test_a_layer_with_all_channels_in_one_format_is_a_plain_one(count: int, format: GemmFormat) -> None:
    """As a pair of rows costs twice the operations; of given weights the rows in order."""
    floats, own = model(), torch.arange(count)
    plain = QuantLinear.from_float(floats.one, format)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    part = quantize(floats.one.weight[order], format)
    given = MixedTensor(part, None, order) if format == LOW else MixedTensor(None, part, order)
    for weights in ({}, {"one": given}):
        quantized = copy.deepcopy(floats)
        quantize_model(quantized, "w4a16_g64", ("head",), dependent=True, weights=weights, precision=planned(one=own))
        layer = quantized.one
        assert type(layer) is QuantLinear and layer.dependent and layer.format == format
        assert list(layer.state_dict()) == list(plain.state_dict())
        assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in layer.state_dict().items())


def test_channels_ascend_and_given_weights_may_have_them_in_another_order() -> None:
    floats, quantized = model(), model()
    own, drawn = torch.tensor([3, 50, 99]), torch.tensor([50, 99, 3])
    layer = MixedLinear.from_float(floats.one, drawn)
    assert layer.high_channels.tolist() == own.tolist() and layer.channels[placed(layer, "high")].tolist() == own.tolist()
    rest = torch.tensor([row for row in range(N) if row not in own.tolist()])
    w = floats.one.weight
    weight = MixedTensor(quantize(w[rest], LOW), quantize(w[drawn], HIGH), torch.cat([rest, drawn]))
    quantize_model(quantized, "w4a16_g64", ("head",), weights={"one": weight}, precision=planned(one=drawn))
    assert quantized.one.channels[placed(quantized.one, "high")].tolist() == drawn.tolist()
    assert quantized.one.high_channels.tolist() == own.tolist()
    assert torch.equal(quantized.one.dequantize(), MixedLinear.from_float(floats.one, own).dequantize())
    with torch.no_grad():
        x = torch.randn(M, K).half()
        assert torch.equal(quantized.one(x), MixedLinear.from_float(floats.one, own)(x))


CHANNEL = (GemmFormat.parse("w4a8_channel_asym"), GemmFormat.parse("w8a8_channel"))


@pytest.mark.parametrize("formats", [(LOW, HIGH), CHANNEL], ids=["groups", "channels"])
@pytest.mark.parametrize("count", [0, 3, N])
def test_a_plan_is_calibrated_part_by_part(formats: tuple[GemmFormat, GemmFormat], count: int) -> None:
    """Each part is what GPTQ makes of its rows alone, columns reordered only where no groups share scales; the model takes the
    weights beside their plan."""
    floats = model()
    own = torch.randperm(N, generator=torch.Generator().manual_seed(2))[:count].sort().values
    plan = PrecisionPlan((LayerPrecision("one", N, K, own),), *formats)
    x = torch.randn(400, K, generator=torch.Generator().manual_seed(1)).half()
    weights = calibrate(nn.Sequential(OrderedDict(one=floats.one)), [x], precision=plan)
    weight, products = weights["one"], x.float().t() @ x.float()
    assert isinstance(weight, MixedTensor)
    rest = torch.tensor([row for row in range(N) if row not in own.tolist()], dtype=torch.int64)
    for part, format, rows in ((weight.low, formats[0], rest), (weight.high, formats[1], own)):
        if not len(rows):
            assert part is None
            continue
        assert part is not None and part.perm is None and part.format == format
        expected = gptq(floats.one.weight[rows], products, format, act_order=formats == CHANNEL)
        assert torch.equal(part.codes, expected.codes) and torch.equal(part.scales, expected.scales)
        assert torch.equal(weight.dequantize()[rows], expected.dequantize())
    quantized = copy.deepcopy(floats)
    quantize_model(quantized, "w4a16_g64", ("head",), weights=weights, precision=plan)
    assert isinstance(quantized.two, QuantLinear)
    if count in (0, N):
        assert quantized.one.format == formats[count > 0]
        assert torch.equal(quantized.one.packed.dequantize(), weight.dequantize(torch.float16))
        return
    assert isinstance(quantized.one, MixedLinear) and quantized.one.high_channels.tolist() == own.tolist()
    assert torch.equal(quantized.one.dequantize(), weight.dequantize(torch.float16))


@pytest.mark.parametrize(
    ("plan", "weights", "message"),
    [
        (planned(three=torch.tensor([0])), {}, "precision names 'three'; accepted: layers that are replaced: one, two"),
        (planned(head=torch.tensor([0])), {}, "precision names 'head'; accepted"),
        (PrecisionPlan((LayerPrecision("one", N, 8, torch.tensor([0])),), LOW, HIGH), {}, r"\[100, 8\]; the layer is \[100, 300\]"),
        (planned(one=torch.tensor([0])), {"one": 1}, r"weights\['one'\] are not in w4a8_g128_asym with the channels in w8a8_g128"),
        (planned(one=torch.tensor([100])), {}, "accepted: some of 0 to 99"),
    ],
)
def test_a_plan_of_another_model_leaves_it_as_it_was(plan: PrecisionPlan, weights: dict[str, int], message: str) -> None:
    floats = model()
    given = {name: quantize(floats.one.weight, LOW) for name in weights}
    with pytest.raises(ValueError, match=message):
        quantize_model(floats, "w4a16_g64", ("head",), precision=plan, weights=given)
    assert all(type(layer) is nn.Linear for layer in floats)
