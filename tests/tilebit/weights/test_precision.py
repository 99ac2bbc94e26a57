"""The global precision search against plain loops over samples and channels, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tilebit.layouts.formats import QuantFormat
from tilebit.weights.batches import next_token_loss
from tilebit.weights.precision import PrecisionPlan, select_channels
from tilebit.weights.quantize import quantize
from tilebit.weights.salience import Salience, channel_salience

pytestmark = pytest.mark.usefixtures("one_thread")

LOW, HIGH = QuantFormat(4, 32, False), QuantFormat(8, 32, True)
NAMES = ("up", "mixer", "down")
VOCABULARY = 17


class Toy(nn.Module):
    """A model of next tokens; ``mixer`` is computed twice, ``idle`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCABULARY, 20), nn.Linear(20, VOCABULARY)
        self.up, self.mixer, self.down, self.idle = nn.Linear(20, 40), nn.Linear(40, 40), nn.Linear(40, 20), nn.Linear(20, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(self.embed(ids)))
        x = torch.tanh(self.mixer(torch.tanh(self.mixer(x)).roll(1, 1)))
        return self.lm_head(3 * self.down(x))


def _model() -> Toy:
    torch.manual_seed(0)
    model = Toy()
    with torch.no_grad():
        for layer in (model.up, model.mixer, model.down):
            layer.weight.mul_(torch.exp(torch.randn(layer.out_features, 1)))
    return model


def _samples(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (1, 9), generator=generator) for _ in range(count)]


def _by_loops(model: Toy, samples: list[torch.Tensor]) -> dict[str, dict[str, list[float]]]:
    """|first + second|, |first| and second of each channel, as the equations are written."""
    found = {name: {terms: [0.0] * getattr(model, name).out_features for terms in ("both", "first", "second")} for name in NAMES}
    for sample in samples:
        weights = [getattr(model, name).weight for name in NAMES]
        logits = model(sample)[0]
        loss = torch.stack([functional.cross_entropy(logits[t], sample[0, t + 1]) for t in range(sample.shape[1] - 1)]).mean()
        for name, gradient, weight in zip(NAMES, torch.autograd.grad(loss, weights), weights, strict=True):
            change = quantize(weight.detach(), LOW).dequantize() - weight.detach()
            for channel in range(weight.shape[0]):
                d = sum(float(g) * float(w) for g, w in zip(gradient[channel], change[channel], strict=True))
                for terms, value in (("both", abs(d + d * d / 2)), ("first", abs(d)), ("second", d * d / 2)):
                    found[name][terms][channel] += value / len(samples)
    return found


def test_salience_is_the_paper_s() -> None:
    model, samples = _model(), _samples()
    expected, got = _by_loops(model, samples), channel_salience(model, samples, LOW)
    assert list(got) == ["up", "mixer", "down", "idle"]
    for name in NAMES:
        assert got[name].samples == 5 and got[name].k == getattr(model, name).in_features
        for terms in ("both", "first", "second"):
            value = got[name].of(terms)  # type: ignore[arg-type]
            assert value.dtype == torch.float64
            assert torch.allclose(value, torch.tensor(expected[name][terms], dtype=torch.float64), rtol=1e-3, atol=1e-9)
    assert not got["idle"].both.any()


def test_it_estimates_what_quantizing_a_channel_does_to_the_loss() -> None:
    """Equation 1: the salient channels are those whose quantization moves the loss most."""
    model, samples = _model().double(), _samples(1)
    salience = channel_salience(model, samples, LOW)

    def loss() -> float:
        with torch.no_grad():
            return float(functional.cross_entropy(model(samples[0])[0, :-1], samples[0][0, 1:]))

    before, moved, estimated = loss(), [], []
    for name in NAMES:
        weight = getattr(model, name).weight.data
        for channel in range(len(weight)):
            kept = weight[channel].clone()
            weight[channel] = quantize(kept[None], LOW).dequantize(torch.float64)[0]
            moved.append(abs(loss() - before))
            estimated.append(float(salience[name].both[channel]))
            weight[channel] = kept
    assert float(torch.corrcoef(torch.tensor([moved, estimated]))[0, 1]) > 0.95


def test_the_model_is_left_as_it_was() -> None:
    model = _model().train()
    model.embed.weight.requires_grad_(False)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before = [(p.requires_grad, p.grad, p.clone()) for p in model.parameters()]

    def stumble(_model: nn.Module, _batch: Any) -> torch.Tensor:
        raise RuntimeError("stumbled")

    channel_salience(model, _samples(1), LOW)
    with pytest.raises(RuntimeError, match="stumbled"):
        channel_salience(model, _samples(1), LOW, loss=stumble)
    for parameter, (required, grad, value) in zip(model.parameters(), before, strict=True):
        assert parameter.requires_grad == required and parameter.grad is grad and torch.equal(parameter, value)
        assert not parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    assert model.training and torch.equal(model.up.weight.grad, torch.ones_like(model.up.weight))


def _salience() -> dict[str, Salience]:
    def of(values: list[float], k: int) -> Salience:
        both = torch.tensor(values, dtype=torch.float64)
        return Salience(k, 4, both, both.flip(0), both.square())

    return {"a.q": of([5, 1, 9, 2], 64), "a.v": of([3, 8], 128), "b.q": of([0, 7, 7, 4], 64)}


def _chosen(plan: PrecisionPlan) -> dict[str, list[int]]:
    return {name: channels.tolist() for name, channels in plan.channels.items()}


def test_one_threshold_for_all_layers() -> None:
    plan = select_channels(_salience(), 0.4, low=LOW, high=HIGH)
    assert _chosen(plan) == {"a.q": [2], "a.v": [1], "b.q": [1, 2]} and plan.share == 0.4
    assert all(channels.dtype == torch.int64 for channels in plan.channels.values())
    assert _chosen(select_channels(_salience(), 0.3)) == {"a.q": [2], "a.v": [1], "b.q": [1]}  # equal ones in order


def test_the_ends_of_the_share() -> None:
    for share, count in ((0, 0), (1, 10)):
        for choice in ("global", "layer", "random"):
            for of in ("channels", "weights"):
                plan = select_channels(_salience(), share, of, choice)  # type: ignore[arg-type]
                assert sum(map(len, plan.channels.values())) == count


def test_the_same_share_of_each_layer_and_at_random() -> None:
    assert _chosen(select_channels(_salience(), 0.5, choice="layer")) == {"a.q": [0, 2], "a.v": [1], "b.q": [1, 2]}
    first, again, other = (select_channels(_salience(), 0.5, choice="random", seed=seed) for seed in (3, 3, 4))
    assert _chosen(first) == _chosen(again) != _chosen(other) and first.share == other.share == 0.5


def test_other_terms() -> None:
    assert _chosen(select_channels(_salience(), 0.1, terms="first")) == {"a.q": [1], "a.v": [], "b.q": []}
    assert _chosen(select_channels(_salience(), 0.4, terms="second")) == _chosen(select_channels(_salience(), 0.4))


def test_a_share_of_weights() -> None:
    """768 weights; 9, 8, 7, 7 have 64, 128, 64, 64."""
    assert _chosen(select_channels(_salience(), 0.25, of="weights")) == {"a.q": [2], "a.v": [1], "b.q": []}
    assert _chosen(select_channels(_salience(), 0.24, of="weights")) == {"a.q": [2], "a.v": [], "b.q": []}


def test_the_report(tmp_path: Path) -> None:
    plan = select_channels(_salience(), 0.4, low=QuantFormat(4, 64, False), high=QuantFormat(8, 64, True))
    report = plan.to_json()
    assert report["low"] == "w4a16_g64_asym" and report["high"] == "w8a16_g64" and report["share"] == 0.4
    # Of 64 weights a group's scale and zero point are 32 bits, a scale alone 16.
    assert report["layers"][0] == {
        "name": "a.q", "n": 4, "k": 64, "share": 0.25, "bits_per_weight": 0.75 * 4.5 + 0.25 * 8.25, "channels": [2]
    }  # fmt: skip
    weights = {"a.q": (256, 0.25), "a.v": (256, 0.5), "b.q": (256, 0.5)}
    expected = sum(count * (4.5 + share * 3.75) for count, share in weights.values()) / 768
    assert report["bits_per_weight"] == pytest.approx(expected)
    again = PrecisionPlan.from_json(json.loads(json.dumps(report)))
    assert again.to_json() == report and _chosen(again) == _chosen(plan)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = select_channels(_salience(), 0.4).draw(tmp_path / f"plan{suffix}")
    assert path.stat().st_size > 1000
    if suffix == ".svg":
        assert all(f"<!-- {words} -->" in path.read_text() for words in ("channels in 8 bits, %", "bits a weight", "q", "v"))


def test_the_picture_without_matplotlib_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"tilebit\[draw\]"):
        select_channels(_salience(), 0.4).draw(tmp_path / "plan.png")


def test_bad_arguments() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"share": 1.5}, "share is 1.5"),
        ({"share": 0.1, "choice": "all"}, "choice is 'all'"),
        ({"share": 0.1, "of": "bytes"}, "of 'bytes'"),
        ({"share": 0.1, "terms": "third"}, "terms is 'third'"),
    )
    for options, words in cases:
        with pytest.raises(ValueError, match=words):
            select_channels(_salience(), **options)
    with pytest.raises(ValueError, match="of no layer"):
        select_channels({}, 0.1)
    for bad in (float("nan"), float("inf")):
        salience = _salience()
        salience["a.v"].both[1] = bad
        with pytest.raises(ValueError, match=r"the salience of a.v is NaN or infinite; accepted: finite numbers"):
            select_channels(salience, 0.1)


@pytest.mark.parametrize("channels", [[1.7], [True], ["1"], [0, None]])
def test_channels_of_a_report_are_whole_numbers(channels: list[Any]) -> None:
    report = select_channels(_salience(), 0.4).to_json()
    report["layers"][1]["channels"] = channels
    with pytest.raises(ValueError, match=r"channels of a.v are .*; accepted: whole numbers"):
        PrecisionPlan.from_json(report)


def test_bad_calibration() -> None:
    model = _model()
    with pytest.raises(TypeError, match="accepted: token ids as a tensor"):
        channel_salience(model, [(torch.ones(1, 2),)], LOW)
    with pytest.raises(ValueError, match=r"the loss of batch 1 is \[nan\]"):
        losses = iter((model.up.weight.sum(), model.up.weight.sum() * float("nan")))
        channel_salience(model, _samples(2), LOW, loss=lambda *_: next(losses))
    with pytest.raises(TypeError, match=r"the loss of batch 0 is float '1.5'; accepted: a torch.Tensor of one number"):
        channel_salience(model, _samples(1), LOW, loss=lambda *_: 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the loss of batch 0 has no gradient; accepted"):
        channel_salience(model, _samples(1), LOW, loss=lambda *_: torch.tensor(1.0))
    for context in (torch.no_grad, torch.inference_mode):
        with pytest.raises(ValueError, match=r"has no gradient; .* outside of torch.no_grad and torch.inference_mode"):
            channel_salience(model, _samples(1), LOW, loss=context()(next_token_loss))
    with pytest.raises(ValueError, match="up has gradients that are NaN or infinite; accepted"):
        channel_salience(model, _samples(1), LOW, loss=lambda *_: (model.up.weight * 0).square().sum().sqrt())
    assert not any(parameter.grad is not None or not parameter.requires_grad for parameter in model.parameters())
    model.lm_head.weight = model.embed.weight
    channel_salience(model, _samples(1), LOW)
    with pytest.raises(ValueError, match="the weight of lm_head is that of another module"):
        channel_salience(model, _samples(1), LOW, skip=())


def test_each_layer_has_a_whole_multiple_of_channels() -> None:
    """The nearest one of what the global threshold gives, its most salient ones; all where that is nearest."""
    generator = torch.Generator().manual_seed(2)
    values = {name: torch.rand(n, generator=generator, dtype=torch.float64) for name, n in (("a", 40), ("b", 27), ("c", 3))}
    salience = {name: Salience(16, 1, value, value, value) for name, value in values.items()}
    for choice in ("global", "layer", "random"):
        free = select_channels(salience, 0.5, choice=choice)
        whole = select_channels(salience, 0.5, choice=choice, multiple=8)
        for before, layer in zip(free.layers, whole.layers, strict=True):
            count = len(layer.channels)
            assert count % 8 == 0 or count == layer.n
            assert abs(count - len(before.channels)) <= 4
            same = set(before.channels.tolist()), set(layer.channels.tolist())
            assert same[0] <= same[1] or same[1] <= same[0], "rounded, not chosen anew"
            assert layer.channels.tolist() == sorted(layer.channels.tolist())
        if choice != "random":
            assert all(
                set(layer.channels.tolist()) == set(values[layer.name].topk(len(layer.channels)).indices.tolist()) for layer in whole.layers
            )
    assert [len(layer.channels) for layer in select_channels(salience, 1, multiple=64).layers] == [40, 27, 3]
    with pytest.raises(ValueError, match="multiple is 0; accepted"):
        select_channels(salience, 0.5, multiple=0)
