"""Casts of packed layers: what does not fit is refused before any tensor has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tilebit import AnyPrecisionLinear, MixedLinear, QuantizedTensor, QuantLinear
from tilebit.weights.embedding import QuantEmbedding
from tilebit.weights.packed import pack
from tilebit.weights.quantize import quantize

N, K = 64, 256
BF16 = torch.bfloat16
FORMATS = ("w4a16_g128", "w4a16_g32_asym", "w8a16_channel", "w4a16_mxfp4", "w4a16_nvfp4", "w4a8_lqq_g64", "w8a8_fp8", "w8a8_g128")


def linear(dtype: torch.dtype = BF16, bias: float = 0.0) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(K, N).to(dtype)
    nn.init.constant_(made.bias, bias)
    return made


MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: QuantLinear.from_float(linear(), name) for name in FORMATS},
    "mixed": lambda: MixedLinear.from_float(linear(), torch.arange(8)),
    "any": lambda: AnyPrecisionLinear.from_float(linear(), 3, 4),
    "embedding": lambda: QuantEmbedding.from_float(nn.Embedding(N, K, dtype=BF16), "w4a16_g64"),
}


def refused(layer: nn.Module, cast: Callable[[nn.Module], Any], words: str) -> None:
    """The cast is an error, and the layer holds the tensors that it held."""
    before, dtype = dict(layer.named_buffers()), layer.dtype
    with pytest.raises(ValueError, match=words):
        cast(layer)
    after = dict(layer.named_buffers())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before) and layer.dtype == dtype


@pytest.mark.parametrize("kind", MAKERS)
def test_only_dtypes_of_products_are_cast_to(kind: str) -> None:
    layer = MAKERS[kind]()
    for dtype in (torch.float32, torch.float64):
        refused(layer, lambda one, dtype=dtype: one.to(dtype), f"would be cast to {dtype}; accepted: torch.float16, torch.bfloat16")
    refused(layer, lambda one: one.type(torch.float16), "int32 codes would become torch.float16; accepted: .*to.torch.float16")
    assert layer.half().dtype is torch.float16 and layer.to("meta").dtype is torch.float16


def test_scales_that_do_not_fit_are_refused() -> None:
    """Of integers, too; those of nothing but zeros stay numbers."""
    for scale in (1e6, 1e-12):
        q = quantize(linear().weight.detach(), QuantLinear.from_float(linear()).format)
        layer = QuantLinear(pack(QuantizedTensor(q.codes, torch.full_like(q.scales, scale), None, q.format), BF16))
        refused(layer, lambda one: one.half(), "scales do not fit torch.float16, the first at .*use torch.bfloat16")
    empty = quantize(torch.zeros(N, K), MAKERS["w4a16_mxfp4"]().format, scale_dtype=BF16)  # type: ignore[arg-type]
    large = QuantizedTensor(empty.codes, torch.full_like(empty.scales, 2.0**20), None, empty.format)
    layer = QuantLinear(pack(large, BF16)).half()
    assert torch.equal(layer.unpack().dequantize(), torch.zeros(N, K))


def test_a_bias_that_does_not_fit_is_refused() -> None:
    words = r"bias has 64 values that do not fit torch.float16, the first 999424; accepted: up to 65504: compute in torch.bfloat16"
    for make in (
        lambda source: QuantLinear.from_float(source, dtype=torch.float16),
        lambda source: MixedLinear.from_float(source, torch.arange(8), dtype=torch.float16),
        lambda source: AnyPrecisionLinear.from_float(source, 3, 3, dtype=torch.float16),
    ):
        with pytest.raises(ValueError, match=r"bias has [0-9]+ values that do not fit torch.float16"):
            make(linear(torch.float32, 1e6))
    for layer in (QuantLinear.from_float(linear(BF16, 1e6)), AnyPrecisionLinear.from_float(linear(BF16, 1e6), 3, 3)):
        refused(layer, lambda one: one.half(), words)


def test_a_loaded_bias_fits_or_is_refused() -> None:
    state = AnyPrecisionLinear.from_float(linear(BF16, 1e6), 3, 3).state_dict()
    layer = AnyPrecisionLinear.from_float(linear(torch.float16), 3, 3)
    before = copy.deepcopy(layer.state_dict())
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"bias has 64 values that do not fit torch.float16"):
            layer.load_state_dict(state, assign=assign)
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.load_state_dict(AnyPrecisionLinear.from_float(linear(BF16, 2.0), 3, 3).state_dict(), assign=True)
    assert layer.bias is not None and layer.bias.dtype is layer.dtype is torch.float16
    assert layer(torch.zeros(1, K).half()).eq(2).all()
