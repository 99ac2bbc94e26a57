"""Calibration of a model: streamed block by block it is what passes through the whole model give, and nothing stays behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tilebit.layouts.formats import QuantFormat
from tilebit.weights import stream
from tilebit.weights.calibrate import calibrate
from tilebit.weights.gptq import gptq
from tilebit.weights.modules import QuantLinear, quantize_model
from tilebit.weights.quantize import QuantizedTensor, quantize
from tilebit.weights.stream import find_blocks, visit_layers

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, TOKENS = 40, 11
FORMAT = QuantFormat(4, 32, False)


class Block(nn.Module):
    def __init__(self, returns_tuple: bool) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48, bias=False)
        self.down, self.dropout = nn.Linear(48, WIDTH), nn.Dropout(0.5)
        self.returns_tuple = returns_tuple

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: float = 0.0) -> Any:
        y = x + self.dropout(self.down(torch.relu(self.gate(x)) * self.up(x) * scale + shift))
        return (y, None) if self.returns_tuple else y


class Toy(nn.Module):
    """A layer, blocks in a row, a layer; ``twice`` computes the blocks twice, which cannot be streamed."""

    def __init__(self, twice: bool = False, returns_tuple: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.first = nn.Linear(24, WIDTH)
        self.blocks = nn.ModuleList(Block(returns_tuple) for _ in range(3))
        self.last, self.never = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 8)
        self.twice = twice

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(self.embed(ids))
        for _ in range(2 if self.twice else 1):
            for place, block in enumerate(self.blocks):
                x = block(x, torch.tensor(1.0 + place) if scale is None else scale, shift=0.1 * place)
                x = x[0] if isinstance(x, tuple) else x
        return self.last(x)


def _model(**options: bool) -> Toy:
    torch.manual_seed(0)
    return Toy(**options)


def _batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 30, (2, TOKENS), generator=generator) for _ in range(count)]


def _appending(inputs: list[torch.Tensor]) -> Callable[[nn.Module, Any], None]:
    return lambda _, args: inputs.append(args[0])


def _whole_passes(model: nn.Module, groups: list[list[str]], batches: list[torch.Tensor]) -> dict[str, QuantizedTensor]:
    """The plain way: for each group of layers a pass of everything through the whole model."""
    model, found = copy.deepcopy(model).eval(), {}
    for group in groups:
        inputs: dict[str, list[torch.Tensor]] = {name: [] for name in group}
        hooks = [model.get_submodule(name).register_forward_pre_hook(_appending(own)) for name, own in inputs.items()]
        with torch.no_grad():
            for batch in batches:
                model(batch)
        for hook in hooks:
            hook.remove()
        for name in group:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            x = torch.cat([part.reshape(-1, layer.in_features) for part in inputs[name]] or [torch.zeros(1, layer.in_features)])
            found[name] = gptq(layer.weight, x.t() @ x, FORMAT)
            layer.weight.data = found[name].dequantize()
    return found


BLOCKS = [[f"blocks.{i}.{name}" for name in names] for i in range(3) for names in (("gate", "up"), ("down",))]
STREAMED = [["first"], *BLOCKS, ["last"], ["never"]]


def _assert_same(got: dict[str, QuantizedTensor], expected: dict[str, QuantizedTensor]) -> None:
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        # Sums in another order round differently: a code at a tie may move, and the columns behind it.
        assert float((got[name].codes != weight.codes).double().mean()) < 0.01, name
        assert torch.allclose(got[name].scales.float(), weight.scales.float(), rtol=2e-3), name


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_streaming_gives_what_whole_passes_give(returns_tuple: bool) -> None:
    model, passes = _model(returns_tuple=returns_tuple), []
    expected = _whole_passes(model, STREAMED, _batches())
    model.register_forward_hook(lambda *_: passes.append(1))
    _assert_same(calibrate(model, _batches(), FORMAT), expected)
    # The order, one for each of first, last and never, and one for the blocks' inputs: not one for each block.
    assert len(passes) == 1 + 4 * 3


class Experts(nn.Module):
    """Two experts of two layers each, one after the other, then a layer of what both gave."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleDict({"fc1": nn.Linear(WIDTH, 16), "fc2": nn.Linear(16, WIDTH)}) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(sum(expert["fc2"](torch.relu(expert["fc1"](x * 2))) for expert in self.experts))  # type: ignore[arg-type]


def test_experts_are_visited_together_and_layers_in_a_row_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts())
    batches = [torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    groups = [
        [f"{block}.{name}" for name in names]
        for block in range(2)
        for names in (("experts.0.fc1", "experts.1.fc1"), ("experts.0.fc2", "experts.1.fc2"), ("out",))
    ]
    _assert_same(calibrate(model, batches, FORMAT), _whole_passes(model, groups, batches))


def test_what_cannot_be_streamed_takes_whole_passes() -> None:
    model = _model(twice=True)
    _assert_same(calibrate(model, _batches(), FORMAT), _whole_passes(model, STREAMED, _batches()))


class TwoStreams(nn.Module):
    """Blocks that take what the one before them gave beside x, or what the first one gave."""

    def __init__(self, of_first: bool) -> None:
        super().__init__()
        self.blocks, self.of_first = nn.ModuleList(TwoStreamBlock() for _ in range(3)), of_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, first = self.blocks[0](x, beside=torch.ones_like(x))
        beside = first
        for block in self.blocks[1:]:
            x, beside = block(x, beside=first if self.of_first else beside)
        return x + beside


class TwoStreamBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(torch.relu(self.up(x * beside)))
        return x + y, torch.tanh(y)


@pytest.mark.parametrize("of_first", [False, True])
def test_a_second_stream_is_that_of_the_quantized_layers(of_first: bool) -> None:
    torch.manual_seed(2)
    model, batches = TwoStreams(of_first), [torch.randn(2, TOKENS, WIDTH) for _ in range(3)]
    groups = [[f"blocks.{i}.{name}"] for i in range(3) for name in ("up", "down")]
    _assert_same(calibrate(model, batches, FORMAT), _whole_passes(model, groups, batches))


def test_the_model_is_left_as_it_was() -> None:
    model = _model().train()
    model.blocks[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = {name: id(parameter) for name, parameter in model.named_parameters()}
    training = [module.training for module in model.modules()]

    def stumble(name: str, layer: nn.Linear, products: torch.Tensor) -> torch.Tensor:
        if name == "blocks.1.down":
            raise RuntimeError("stumbled")
        return torch.zeros_like(layer.weight)

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    with pytest.raises(RuntimeError, match="stumbled"):
        visit_layers(model, layers, _batches(), stumble)
    calibrate(model, _batches(1), FORMAT)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert weights == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert training == [module.training for module in model.modules()]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_batches_of_each_kind(kind: str) -> None:
    scale = torch.tensor(2.0)
    batches: list[Any] = {
        "tensor": _batches(),
        "tuple": [(ids, scale) for ids in _batches()],
        "dict": [{"ids": ids, "scale": scale} for ids in _batches()],
    }[kind]
    found = calibrate(_model(), iter(batches), FORMAT)
    others = calibrate(_model(), _batches(), FORMAT)
    same = {name for name in found if torch.equal(found[name].codes, others[name].codes)}
    assert ("blocks.2.down" in same) == (kind == "tensor") and "first" in same


def test_a_layer_that_nothing_reached_is_rounded_to_nearest() -> None:
    model = _model()
    assert torch.equal(calibrate(model, _batches(), FORMAT)["never"].dequantize(), quantize(model.never.weight, FORMAT).dequantize())


def test_gptq_is_closer_to_the_model_than_rounding() -> None:
    model, batches = _model().eval(), _batches(12)

    def error(weights: dict[str, QuantizedTensor]) -> float:
        copied = copy.deepcopy(model)
        for name, weight in weights.items():
            dict(copied.named_parameters())[f"{name}.weight"].data = weight.dequantize()
        with torch.no_grad():
            return sum(float((copied(batch) - model(batch)).norm()) for batch in batches)

    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    nearest = {name: quantize(layer.weight, FORMAT) for name, layer in linears.items()}
    assert error(calibrate(model, batches, FORMAT)) < 0.8 * error(nearest)


def test_quantize_model_takes_what_calibrate_gives() -> None:
    model = _model().half().eval()
    weights = calibrate(model, _batches(), FORMAT, skip=("last",))
    replaced = quantize_model(model, "w8a16_g32", skip=("never",), weights={k: w for k, w in weights.items() if k != "never"})
    assert "never" not in replaced and "last" in replaced
    down, last = model.blocks[0].down, model.last
    assert isinstance(down, QuantLinear) and isinstance(last, QuantLinear)
    assert down.format == FORMAT and last.format == QuantFormat(8, 32)
    assert torch.equal(down.unpack().dequantize(), weights["blocks.0.down"].dequantize())


def test_weights_that_do_not_fit() -> None:
    model, weight = _model().half(), quantize(torch.ones(3, 5), FORMAT)
    cases: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"no.such": weight}, ValueError, "weights name 'no.such'"),
        ({"first": weight}, ValueError, r"\[3, 5\]; the layer needs \[40, 24\]"),
        ({"first": torch.ones(3)}, TypeError, "accepted: a QuantizedTensor"),
    )
    for weights, error, words in cases:
        with pytest.raises(error, match=words):
            quantize_model(model, FORMAT, weights=weights)
    assert type(model.first) is nn.Linear


def test_blocks_are_the_longest_list_without_shared_parts() -> None:
    model = _model()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert find_blocks(model, layers) == list(model.blocks)
    model.blocks[1].up = model.blocks[0].up
    assert find_blocks(model, layers) == []
    assert calibrate(model, _batches(1), FORMAT).keys() == layers.keys() - {"blocks.1.up"}


def test_a_shared_input_is_multiplied_once_and_never_a_stale_one() -> None:
    layers = {name: nn.Linear(4, 2) for name in "abc"}
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), stream.InputProducts(layers) as products:
        layers["a"](x)
        layers["b"](input=x)
        assert torch.equal(products.of["a"], products.of["b"])
        x.mul_(2)
        layers["c"](x)
    assert torch.allclose(products.of["c"], 4 * products.of["a"])


def test_progress_is_shown_on_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for forced, shown, seen in (("1", True, True), ("1", False, False), (None, True, False)):
        if forced is None:
            monkeypatch.delenv("FORCE_COLOR")
        else:
            monkeypatch.setenv("FORCE_COLOR", forced)
        calibrate(_model(), _batches(1), FORMAT, progress=shown)
        said = capsys.readouterr().err
        assert ("calibrating" in said and "12/12" in said) == seen and (said == "") != seen


@pytest.mark.parametrize(
    "calibration,error,words",
    [([], ValueError, "calibration is empty"), (torch.ones(2), TypeError, "calibration is Tensor"), (5, TypeError, "calibration is int")],
)
def test_bad_calibration(calibration: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        calibrate(_model(), calibration, FORMAT)


def test_errors_name_the_layer() -> None:
    model = _model()
    model.get_parameter("blocks.2.gate.weight").data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.2\.gate: w has 1 NaN"):
        calibrate(model, _batches(1), FORMAT)
    with pytest.raises(ValueError, match="accepted: formats of integers"):
        calibrate(model, _batches(1), "w4a16_mxfp4")


def test_a_row_of_layers_is_streamed_too() -> None:
    torch.manual_seed(0)
    linears = nn.Linear(20, 40), nn.Linear(40, 8)
    model = nn.Sequential(linears[0], nn.ReLU(), linears[1])
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        first = gptq(linears[0].weight, x.t() @ x, FORMAT)
        hidden = torch.relu(x @ first.dequantize().t() + linears[0].bias)
        second = gptq(linears[1].weight, hidden.t() @ hidden, FORMAT)
    _assert_same(calibrate(model, [x], FORMAT), {"0": first, "2": second})


@pytest.mark.gpu
def test_on_a_gpu_it_stays_there() -> None:
    found = calibrate(_model().cuda(), _batches(), FORMAT)
    assert all(weight.device.type == "cuda" for weight in found.values())
    _assert_same({name: weight.to("cpu") for name, weight in found.items()}, calibrate(_model(), _batches(), FORMAT))
