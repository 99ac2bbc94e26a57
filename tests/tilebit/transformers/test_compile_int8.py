"""Compiled models whose products take int8 x: norms and gates write its codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import own_cache, prompts
from tiny_models import llama, made

import tilebit
from tilebit.ops import gemm_int8
from tilebit.transformers import compile, fused
from tilebit.transformers.fused import FusedStep, factors, x_group
from tilebit.weights import mixed
from tilebit.weights.mixed import MixedLinear
from tilebit.weights.modules import QuantLinear
from tilebit.weights.precision import LayerPrecision, PrecisionPlan

LAYERS = 2
KINDS = (  # LiquidGEMM's, SmoothQuant's without and with factors, MixLLM's, two of these in one layer
    "w4a8_lqq_g64",
    "w8a8_channel",
    "w8a8_channel smooth",
    "w8a8_g128",
    "mixed",
)


def model_of(kind: str) -> Any:
    """All its linear layers are of one shape, so that few kernels compile."""
    model: Any = made(llama(num_attention_heads=2, intermediate_size=128), torch.float16)
    if kind != "mixed":
        format, *words = kind.split()
        batches = [torch.randint(2, 256, (2, 24), generator=torch.Generator().manual_seed(4))]
        smoothing = tilebit.calibrate_smoothing(model, batches, format, strengths=(0.5,)) if words else None
        tilebit.quantize_model(model, format, smoothing=smoothing)
        return model
    names = [name for name, layer in model.named_modules() if type(layer) is torch.nn.Linear and name != "lm_head"]
    layers = tuple(LayerPrecision(name, 128, 128, torch.arange(1, 128, 4)) for name in names)
    tilebit.quantize_model(model, precision=PrecisionPlan(layers, mixed.LOW, mixed.HIGH))
    return model


@torch.no_grad()
def steps_of(model: Any, count: int = 6) -> torch.Tensor:
    """Logits [count, vocabulary] of tokens that are always the same, behind a prompt."""
    cache = own_cache(model)
    model(**prompts(1, 20), past_key_values=cache)
    ids = torch.randint(2, 256, (count, 1, 1), generator=torch.Generator().manual_seed(3))
    return torch.cat([model(input_ids=step, past_key_values=cache).logits[0].float().clone() for step in ids])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) if kind != "w8a8_channel" else kind for kind in KINDS])
def test_codes_go_from_norms_and_gates_to_products(kind: str, monkeypatch: pytest.MonkeyPatch):
    """In a fused step only what attention gives is quantized by a kernel of its own, once a layer. Its logits are, bit for bit, those of
    norms, gates and quantization one after another, and near the model's own, whose sums are rounded elsewhere: a code of 127 that
    falls to the other side of a half moves more than such a rounding does."""
    model = model_of(kind)
    expected = steps_of(model)
    compile(model, (1,))
    step: FusedStep = model.tilebit_steps.step
    takers = [layer for block in step.blocks for layer in (block.qkv, block.o, block.gate_up, block.down)]
    assert {x_group(layer) for layer in takers} == ({128} if kind in ("w8a8_g128", "mixed") else {-1}) and x_group(model.lm_head) is None
    assert any(factors(layer) is not None for layer in takers) == kind.endswith("smooth")
    with monkeypatch.context() as counting:
        apart: list[int] = []
        for module in (gemm_int8, mixed):
            counting.setattr(module, "QUANTIZE", _counted(module.QUANTIZE, apart))
        found = steps_of(model)
        assert apart.count(1) == LAYERS * (len(found) + 1)  # with a new cache a step runs once more, to say which kernels it needs
    assert float((found - expected).square().mean()) < (0.1 * float(expected.std())) ** 2
    for name, in_turn in (("add_norm", _normed_in_turn), ("gated", _gated_in_turn)):
        monkeypatch.setattr(fused, name, in_turn)
    assert torch.equal(steps_of(model), found)


def _counted(real: Any, rows: list[int]) -> Any:
    def quantize(x: torch.Tensor, *rest: Any) -> Any:
        rows.append(x.numel() // x.shape[-1])
        return real(x, *rest)

    return quantize


def _normed_in_turn(x: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float, offset: float, out: str = "", **options: Any) -> Any:
    """``add_norm`` of models without an offset."""
    if not out:
        return tilebit.add_norm(x, residual, weight, eps, offset, inplace=options["inplace"])
    summed = x if residual is None else residual.add_(x)
    return *tilebit.quantize_activations(summed, out, options["group"], weight, eps, options["smooth"]), residual


def _gated_in_turn(x: torch.Tensor, activation: str, dependent: bool, out: str, group: int | None, smooth: torch.Tensor | None) -> Any:
    return tilebit.quantize_activations(tilebit.gated(x, activation), out, group, smooth=smooth)


def test_layers_take_codes_as_they_take_x():
    """The same bits; who takes no codes says so."""
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).half()
    linear = torch.nn.Linear(128, 128, dtype=torch.float16)
    layer = QuantLinear.from_float(linear, "w8a8_channel")
    assert torch.equal(layer.of_codes(*tilebit.quantize_activations(x)), layer(x))
    parts = MixedLinear.from_float(linear, torch.arange(0, 128, 5), "w4a8_channel_asym", "w8a8_channel")
    assert parts.x_group == layer.x_group == -1 and torch.equal(parts.of_codes(*tilebit.quantize_activations(x)), parts(x))
    for other in (QuantLinear.from_float(linear, "w4a16_g64"), _reordered(layer)):
        assert other.x_group is None
        with pytest.raises(ValueError, match=r"takes no codes; accepted: x of torch.float16"):
            other.of_codes(*tilebit.quantize_activations(x))


def _reordered(layer: QuantLinear) -> QuantLinear:
    return QuantLinear(replace(layer.packed, perm=torch.arange(127, -1, -1)))
