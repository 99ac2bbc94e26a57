"""Smoothing factors of whole models: one for each input, those of the plain way, and closer to the model than none."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilebit
from tilebit.layouts.formats import FORMATS
from tilebit.weights.calibrate_smooth import calibrate_smoothing
from tilebit.weights.gptq import gptq
from tilebit.weights.input_rows import InputRows, Inputs
from tilebit.weights.smooth import Smoothing, quantize_smoothed, search_smoothing

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, FORMAT = 64, "w4a8_lqq_g64"
STRENGTHS = (0.0, 0.3, 0.6)


class Block(nn.Module):
    """Gate and up of one input, whose columns are of very different sizes, then down."""

    sizes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH)
        self.register_buffer("sizes", torch.exp(2 * torch.randn(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.sizes
        return torch.tanh(self.down(torch.relu(self.gate(x)) * self.up(x)))


class Toy(nn.Module):
    """Blocks in a row; ``twice`` computes them twice, which cannot be streamed. ``never`` is not called."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.blocks, self.never, self.twice = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 8), twice

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.twice):
            for block in self.blocks:
                x = block(x)
        return x


def _model(**options: bool) -> Toy:
    torch.manual_seed(0)
    return Toy(**options).eval()


def _batches(count: int = 3, rows: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, rows, WIDTH, generator=generator) for _ in range(count)]


@torch.no_grad()
def _plain(model: nn.Module, groups: list[list[str]], batches: list[Tensor], format: str) -> dict[str, Smoothing]:
    """The plain way: for each input all rows of a pass of everything through the whole model."""
    model, found = copy.deepcopy(model), {}
    for group in groups:
        layers: list[Any] = [model.get_submodule(name) for name in group]
        inputs: list[Tensor] = []
        hook = layers[0].register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].reshape(-1, args[0].shape[-1])))
        for batch in batches:
            model(batch)
        hook.remove()
        x, w = torch.cat(inputs), torch.cat([layer.weight for layer in layers])
        found.update(dict.fromkeys(group, search_smoothing(w, x, format, STRENGTHS)))
        for name, layer in zip(group, layers, strict=True):
            layer.weight.data = quantize_smoothed(layer.weight, FORMATS[format], found[name]).dequantize()
    return found


GROUPS = [[f"blocks.{i}.{name}" for name in names] for i in range(2) for names in (("gate", "up"), ("down",))]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("format", [FORMAT, "w8a8_fp8"])
def test_factors_are_those_of_the_plain_way(twice: bool, format: str) -> None:
    """Streamed and in whole passes; layers of one input share one vector, those of others have their own."""
    model, before = _model(twice=twice), _model(twice=twice).state_dict()
    found, expected = calibrate_smoothing(model, iter(_batches()), format, strengths=STRENGTHS), _plain(model, GROUPS, _batches(), format)
    assert list(found) == [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    for name, own in expected.items():
        assert found[name].strength == own.strength and torch.allclose(found[name].factors, own.factors, rtol=1e-4), name
        assert found[name].error == pytest.approx(own.error, rel=1e-3) and found[name].error <= found[name].error_without
    for first, second in GROUPS[::2]:
        assert torch.equal(found[first].factors, found[second].factors) and found[first].strength is not None
    assert not torch.equal(found["blocks.0.gate"].factors, found["blocks.1.gate"].factors)
    assert found["never"].strength is None and torch.equal(found["never"].factors, torch.ones(WIDTH))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    again = calibrate_smoothing(model, _batches(), format, strengths=STRENGTHS)
    assert all(torch.equal(again[name].factors, own.factors) for name, own in found.items())


def test_experts_with_inputs_of_their_own_have_factors_of_their_own() -> None:
    """They are visited together, and only layers of the same rows share."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(WIDTH, 16), "up": nn.Linear(WIDTH, 16)}) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for i, expert in enumerate(self.experts):
                rows = x[i::2] * (1 + 50.0 * (torch.arange(WIDTH) % 7 == i))
                x = x + (expert["gate"](rows) * expert["up"](rows)).sum() / 1e6  # type: ignore[index]
            return x

    torch.manual_seed(0)
    found = calibrate_smoothing(nn.Sequential(Experts(), Experts()), [x.flatten(0, 1) for x in _batches()], "w8a8_channel")
    for block in "01":
        first, second = (found[f"{block}.experts.{i}.gate"].factors for i in (0, 1))
        assert torch.equal(first, found[f"{block}.experts.0.up"].factors) and torch.equal(second, found[f"{block}.experts.1.up"].factors)
        assert not torch.allclose(first, second, rtol=0.1)


def test_rows_are_taken_at_equal_distances_whatever_the_calls() -> None:
    x = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
    for sizes in ([1000], [1, 999], [333, 0, 334, 333], [7] * 142 + [6]):
        own = Inputs(torch.zeros(5), 100)
        for part in x.split(sizes):
            own.add(part)
        assert torch.equal(own.rows, x[::16]) and torch.equal(own.largest, x.abs().amax(0))
    few = Inputs(torch.zeros(5), 100)
    few.add(x[:100])
    assert torch.equal(few.rows, x[:100])


def test_an_input_that_is_written_to_in_place_is_another_one() -> None:
    layers = {name: nn.Linear(4, 2) for name in "abcd"}
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), InputRows(layers) as rows:
        layers["a"](x)
        layers["b"](input=x)
        x.mul_(2)
        layers["c"](x)
    assert [rows.of[name].together for name in "abcd"] == [["a", "b"], ["a", "b"], ["c"], ["d"]]
    assert torch.equal(rows.of["c"].rows, 2 * rows.of["a"].rows) and torch.equal(rows.of["a"].rows, rows.of["b"].rows)
    assert rows.of["d"].rows.shape == (0, 4)


def test_quantized_models_are_closer_with_factors() -> None:
    """Rounded and by GPTQ, through the kernels."""
    model, batches = _model().half(), [batch.half() for batch in _batches(6)]
    smoothing = calibrate_smoothing(model, batches, "w8a8_channel", skip=("never",))
    options: dict[str, Any] = {"format": "w8a8_channel", "skip": ("never",)}

    def error(**given: Any) -> float:
        low = copy.deepcopy(model)
        tilebit.quantize_model(low, **options, **given)
        with torch.no_grad():
            return sum(float((low(batch) - model(batch)).float().norm()) for batch in batches)

    nearest, smoothed = error(), error(smoothing=smoothing)
    assert smoothed < 0.7 * nearest
    both = tilebit.calibrate(model, batches, **options, smoothing=smoothing)
    assert error(weights=both) < 1.05 * smoothed


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_takes_folded_weights_and_the_products_of_divided_inputs(act_order: bool) -> None:
    """Also where it reorders columns: factors then lie in the order of the codes."""
    torch.manual_seed(0)
    layer, x = nn.Linear(192, 32), torch.randn(64, 192) * torch.exp(torch.randn(192))
    found = calibrate_smoothing(nn.Sequential(layer), [x], FORMAT)["0"]
    (got,) = tilebit.calibrate(nn.Sequential(layer), [x], FORMAT, act_order=act_order, smoothing={"0": found}).values()
    divided = x.double() * found.reciprocals.double()
    expected = gptq(layer.weight.detach() * found.factors, divided.t() @ divided, FORMAT, act_order)
    assert (got.perm is None) == (not act_order) and got.smooth is not None and found.strength is not None
    columns = torch.arange(192) if got.perm is None else got.perm
    assert torch.equal(got.smooth, found.reciprocals[columns])
    assert float((got.codes != expected.codes).double().mean()) < 0.01  # sums of products round, and a code at a tie may move
    unfolded = torch.empty(32, 192)
    unfolded[:, columns] = replace(got, perm=None, smooth=None).dequantize() * got.smooth
    assert torch.allclose(got.dequantize(), unfolded)


def test_what_does_not_fit_is_refused() -> None:
    model = _model()
    found = calibrate_smoothing(model, _batches(1), FORMAT, strengths=STRENGTHS)
    narrow = Smoothing(torch.ones(3), None, 0.0, 0.0)
    calls: list[Any] = [
        lambda smoothing: tilebit.quantize_model(_model().half(), FORMAT, smoothing=smoothing),
        lambda smoothing: tilebit.calibrate(_model(), _batches(1), FORMAT, smoothing=smoothing),
    ]
    for call in calls:
        for smoothing, error, words in (
            ({"no.such": found["never"]}, ValueError, "smoothing names 'no.such'"),
            ({"never": narrow}, ValueError, r"smoothing\['never'\] has factors \[3\]; the layer needs \[64\]"),
            ({"never": torch.ones(64)}, TypeError, r"smoothing\['never'\] is Tensor.*a Smoothing"),
        ):
            with pytest.raises(error, match=words):
                call(smoothing)
    weights = tilebit.calibrate(model, _batches(1), FORMAT)
    with pytest.raises(ValueError, match=r"smoothing and weights both name 'blocks.0.gate'; accepted: one of them"):
        tilebit.quantize_model(copy.deepcopy(model).half(), FORMAT, weights=weights, smoothing=found)
    with pytest.raises(ValueError, match="format is w4a16_g64; accepted: formats with int8 or e4m3 x"):
        tilebit.quantize_model(half := copy.deepcopy(model).half(), "w4a16_g64", smoothing=found)
    assert type(half.never) is nn.Linear
    with pytest.raises(ValueError, match="format is w4a16_g64; accepted: formats with int8 or e4m3 x"):
        tilebit.calibrate(model, _batches(1), "w4a16_g64", smoothing=found)
    with pytest.raises(ValueError, match="format is w4a16_g128; accepted"):
        calibrate_smoothing(model, _batches(1), "w4a16_g128")
    with pytest.raises(ValueError, match="calibration is empty"):
        calibrate_smoothing(model, [], FORMAT)
    with pytest.raises(ValueError, match=r"blocks\.0\.gate: strengths are \[2\]"):
        calibrate_smoothing(_model(), _batches(1), FORMAT, strengths=[2])


@pytest.mark.gpu
def test_on_a_gpu_it_stays_there() -> None:
    model = _model().cuda()
    found = calibrate_smoothing(model, _batches(), FORMAT, strengths=STRENGTHS)
    expected = calibrate_smoothing(_model(), _batches(), FORMAT, strengths=STRENGTHS)
    for name, own in expected.items():
        assert found[name].factors.is_cuda and torch.allclose(found[name].factors.cpu(), own.factors, rtol=1e-2), name
    tilebit.quantize_model(model.half(), FORMAT, smoothing=found)
    assert model(_batches(1)[0].cuda().half()).isfinite().all()
