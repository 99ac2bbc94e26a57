"""Layers of smoothed inputs: what is multiplied, what is saved and loaded, moved, cast and joined."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilebit
from tilebit import QuantLinear
from tilebit.layouts.formats import FORMATS
from tilebit.weights.gated import interleaved
from tilebit.weights.joined import joined
from tilebit.weights.mixed import MixedLinear
from tilebit.weights.mixed_tensor import MixedTensor
from tilebit.weights.packed import pack
from tilebit.weights.quantize import quantize
from tilebit.weights.smooth import Smoothing, smoothing_factors

N, K, GROUP = 128, 256, "w8a8_g128"
CODED = [name for name, format in FORMATS.items() if format.x]


def _problem(seed: int = 0) -> tuple[nn.Linear, Tensor, Smoothing]:
    """A layer, x whose columns are of very different sizes, and factors of both."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(K, N, dtype=torch.float16)
    linear.weight.data.copy_(torch.randn(N, K, generator=generator))
    x = (torch.randn(7, K, generator=generator) * torch.exp(torch.randn(K, generator=generator))).half()
    factors = smoothing_factors(linear.weight.detach().float(), x.float(), 0.5)
    return linear.requires_grad_(False), x, Smoothing(factors, 0.5, 0.0, 0.0)


def _layer(format: str = "w8a8_channel", seed: int = 0) -> QuantLinear:
    linear, _, smoothing = _problem(seed)
    return QuantLinear.from_float(linear, format, smoothing=smoothing)


def _codes(x: Tensor, format: str, smooth: Tensor | None) -> tuple[Tensor, Tensor]:
    own = FORMATS[format]
    return tilebit.quantize_activations(x, "int8" if own.x == "int8" else "e4m3", own.x_group if own.x_grouped else None, smooth=smooth)


@pytest.mark.parametrize(
    "format", [name if name in ("w8a8_channel", GROUP) else pytest.param(name, marks=pytest.mark.slow) for name in CODED]
)
def test_the_layer_multiplies_divided_x_with_the_folded_weight(format: str) -> None:
    """Bit for bit the product of what x / s and w * s are quantized to; as x, as codes, and with a residual in the same kernel."""
    linear, x, smoothing = _problem()
    layer = QuantLinear.from_float(linear, format, smoothing=smoothing)
    folded = pack(quantize(linear.weight.float() * smoothing.factors, FORMATS[format], scale_dtype=torch.float16), torch.float16)
    codes, scales = _codes(x, format, 1 / smoothing.factors)
    expected = tilebit.gemm(codes, folded, linear.bias, token_scales=scales)
    assert layer.smooth is not None and layer.smooth.dtype == torch.float32 and torch.equal(layer(x), expected)
    assert torch.equal(layer(x[None, :3]), expected[None, :3])
    if FORMATS[format].integer_sums:
        assert torch.equal(layer.of_codes(codes, scales), expected)
    residual = torch.randn(7, N, generator=torch.Generator().manual_seed(1)).half()
    given = tilebit.gemm(x, layer.packed, linear.bias, residual=residual)
    assert torch.equal(given, tilebit.gemm(codes, folded, linear.bias, token_scales=scales, residual=residual))
    assert torch.equal(tilebit.gemm(x, layer.packed, linear.bias), expected)
    lost = [float((got - linear(x)).float().norm()) for got in (expected, QuantLinear.from_float(linear, format)(x))]
    assert lost[0] < lost[1]


def test_without_factors_a_layer_holds_none() -> None:
    linear, x, _ = _problem()
    layer = QuantLinear.from_float(linear, "w8a8_channel", smoothing=Smoothing(torch.ones(K), None, 0.0, 0.0))
    plain = QuantLinear.from_float(linear, "w8a8_channel")
    assert layer.smooth is None and layer.state_dict().keys() == plain.state_dict().keys() and torch.equal(layer(x), plain(x))


def test_columns_in_another_order_keep_their_factors() -> None:
    """``perm`` comes first, factors are those of the codes' columns; codes of x cannot be told apart, and are refused."""
    linear, x, smoothing = _problem()
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(2))
    for format in ("w8a8_channel", GROUP):
        q = quantize((linear.weight.float() * smoothing.factors)[:, perm], FORMATS[format], scale_dtype=torch.float16)
        layer = QuantLinear(pack(smoothing.applied(replace(q, perm=perm)), torch.float16))
        codes, scales = _codes(x[:, perm], format, smoothing.reciprocals[perm])
        assert layer.x_group is None and torch.equal(layer(x), tilebit.gemm(codes, pack(q, torch.float16), token_scales=scales))
        assert torch.equal(tilebit.gemm(x, layer.packed), layer(x))
        codes, scales = _codes(x, format, None)
        for options in ({}, {"gate": "silu"}):
            with pytest.raises(ValueError, match=r"columns are reordered \(act order\)"):
                tilebit.gemm(codes, layer.packed, token_scales=scales, **options)  # type: ignore[arg-type]
        assert float((layer.unpack().dequantize() - linear.weight).norm() / linear.weight.float().norm()) < 0.02


def test_state_dicts_hold_factors_and_layers_take_them_or_none() -> None:
    """Whatever the layer had; what lacks them though it says it has them, or the other way round, is refused and changes nothing."""
    layer, x = _layer(), _problem()[1]
    plain = QuantLinear.from_float(_problem()[0], "w8a8_channel")
    state, expected = layer.state_dict(), layer(x)
    assert list(plain.state_dict()) == [name for name in state if name != "smooth"]
    for other in (_layer(seed=1), QuantLinear.from_float(_problem(1)[0], "w8a8_channel")):
        other.load_state_dict(state)
        assert torch.equal(other(x), expected)
        other.load_state_dict(plain.state_dict())
        assert other.smooth is None and torch.equal(other(x), plain(x))
        held = layer.state_dict()  # torch keeps the word of ``assign`` with it
        other.load_state_dict(held, assign=True)
        assert torch.equal(other(x), expected) and other.smooth is held["smooth"]
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        (
            {name: tensor for name, tensor in state.items() if name != "smooth"},
            "has no smooth, and says of the layer that its x is smoothed",
        ),
        (plain.state_dict() | {"smooth": state["smooth"]}, "has smooth, and says of the layer that its x is not smoothed"),
        (state | {"smooth": state["smooth"].half()}, r"smooth is float16 \[256\]; this module needs float32 \[256\]"),
        (state | {"smooth": state["smooth"][1:]}, r"smooth is float32 \[255\]; this module needs float32 \[256\]"),
        (state | {"smooth": -state["smooth"]}, "with zero, negative, infinite or NaN factors"),
    )
    for wrong, words in cases:
        for other in (_layer(), plain):
            before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
            for strict in (True, False):
                with pytest.raises(RuntimeError, match=words):
                    other.load_state_dict(wrong, strict=strict)
            after = other.state_dict()
            assert after.keys() == before.keys() and all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_model_of_smoothed_layers_is_loaded_into_one_without(tmp_path: Any) -> None:
    model, other = nn.Sequential(_layer(), nn.ReLU()), nn.Sequential(QuantLinear.from_float(_problem(1)[0], "w8a8_channel"), nn.ReLU())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    x = _problem()[1]
    assert torch.equal(other(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_factors_stay_fp32_and_go_where_the_layer_goes() -> None:
    layer, x = _layer(), _problem()[1]
    factors = layer.smooth
    assert factors is not None
    cast = copy.deepcopy(layer).to(torch.bfloat16)
    assert cast.dtype == torch.bfloat16 and cast.smooth is not None and torch.equal(cast.smooth, factors)
    assert torch.equal(cast.half()(x), layer(x)) or float((cast.half()(x) - layer(x)).abs().max()) < 0.1 * float(layer(x).abs().max())
    there = copy.deepcopy(layer).to("meta")
    assert there.smooth is not None and there.smooth.is_meta and there.smooth.dtype == torch.float32
    for arch in ("sm_80", "sm_90a"):
        packed = pack(layer.unpack(), torch.float16, arch=arch)
        assert packed.smooth is not None and torch.equal(packed.smooth, factors)
        assert packed.nbytes == replace(packed, smooth=None).nbytes + 4 * K
        assert torch.equal(packed.dequantize(), layer.packed.dequantize())
        foreign = QuantLinear(packed)  # as a file of another machine holds it
        foreign_state = foreign.state_dict()
        own = QuantLinear.from_float(_problem(1)[0], "w8a8_channel")
        own.bias = None
        own.load_state_dict(foreign_state)
        assert own.smooth is not None and torch.equal(own.smooth, factors) and torch.equal(own.weight, layer.weight)


def test_layers_of_other_factors_are_not_joined() -> None:
    """Those of the same are, and compute what they computed apart."""
    x, first = _problem()[1], _layer()
    smoothing = _problem()[2]
    other = nn.Linear(K, N, dtype=torch.float16).requires_grad_(False)
    second, plain = (QuantLinear.from_float(other, "w8a8_channel", smoothing=own) for own in (smoothing, None))
    both = joined([first, second])
    assert both is not None and torch.equal(both(x), torch.cat([first(x), second(x)], -1))
    assert joined([first, plain]) is None and joined([plain, first]) is None and joined([first, _layer(seed=1)]) is None
    gated = QuantLinear(interleaved(first.packed, second.packed))
    assert gated.smooth is not None and torch.equal(gated.smooth, smoothing.reciprocals)
    for one, two in ((first, plain), (first, _layer(seed=1))):
        with pytest.raises(ValueError, match=r"by different factors \(smooth\); accepted: the same factors, or none"):
            interleaved(one.packed, two.packed)


@pytest.mark.parametrize("low,high", [("w4a8_channel_asym", "w8a8_channel"), ("w4a8_g128_asym", GROUP)])
def test_a_mixed_layer_divides_x_for_both_of_its_formats(low: str, high: str) -> None:
    linear, x, smoothing = _problem()
    layer = MixedLinear.from_float(linear, torch.arange(0, N, 5), low, high, smoothing=smoothing)
    assert layer.smooth is not None and torch.equal(layer.smooth, smoothing.reciprocals)
    plain = replace(smoothing, factors=torch.ones(K))
    folded = nn.Linear(K, N, dtype=torch.float16)
    folded.weight.data.copy_(linear.weight.float() * smoothing.factors)  # rounded to fp16 once: near, not equal
    folded.bias.data.copy_(linear.bias)
    codes, scales = _codes(x, low, smoothing.reciprocals)
    near = MixedLinear.from_float(folded, torch.arange(0, N, 5), low, high, smoothing=plain).of_codes(codes, scales)
    assert torch.equal(layer.of_codes(codes, scales), layer(x)) and float((near - layer(x)).float().norm() / near.float().norm()) < 0.02
    other = MixedLinear.from_float(linear, torch.arange(0, N, 5), low, high)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_weights_and_factors_that_do_not_fit() -> None:
    linear, _, smoothing = _problem()
    q = _layer().unpack()
    factors = q.smooth
    assert factors is not None
    for wrong, words in (
        ({"smooth": factors.half()}, r"smooth is float16 \[256\].*accepted: float32 \[256\]"),
        ({"smooth": factors[1:]}, r"smooth is float32 \[255\]"),
        ({"smooth": factors * 0}, "zero, negative, infinite or NaN"),
        ({"smooth": factors / 0}, "zero, negative, infinite or NaN"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(q, **wrong)
    with pytest.raises(TypeError, match="smooth is float"):
        replace(q, smooth=3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="w4a16_g64 multiplies 16-bit x, which is not smoothed"):
        replace(quantize(linear.weight, FORMATS["w4a16_g64"]), smooth=factors)
    with pytest.raises(ValueError, match="w4a16_g64 multiplies 16-bit x, which is not smoothed"):
        replace(pack(quantize(linear.weight, FORMATS["w4a16_g64"]), torch.float16), smooth=factors)
    with pytest.raises(ValueError, match="accepted: formats with int8 or e4m3 x"):
        QuantLinear.from_float(linear, "w4a16_g64", smoothing=smoothing)
    with pytest.raises(ValueError, match=r"smoothing has factors \[3\]; the layer needs \[256\]"):
        QuantLinear.from_float(linear, "w8a8_channel", smoothing=replace(smoothing, factors=torch.ones(3)))
    with pytest.raises(TypeError, match="a Smoothing, as search_smoothing"):
        QuantLinear.from_float(linear, "w8a8_channel", smoothing=factors)  # type: ignore[arg-type]
    low = quantize(linear.weight, FORMATS["w4a8_channel_asym"])
    with pytest.raises(ValueError, match=r"different factors of x \(smooth\)"):
        MixedTensor(low, q, torch.arange(2 * N))


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_product() -> None:
    linear, x, smoothing = _problem()
    for format in CODED:
        if FORMATS[format].x != "int8" and torch.cuda.get_device_capability() < (8, 9):
            continue
        layer = QuantLinear.from_float(linear, format, smoothing=smoothing).cuda()
        codes, scales = _codes(x.cuda(), format, layer.smooth)
        expected = tilebit.gemm(codes, replace(layer.packed, smooth=None), layer.bias, token_scales=scales)
        assert torch.equal(layer(x.cuda()), expected)
