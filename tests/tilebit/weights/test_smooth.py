"""SmoothQuant's factors and the search of their strength: what is multiplied stays the same, and less is lost."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import tilebit
from tilebit.layouts.formats import FORMATS, FP8
from tilebit.weights.gptq import gptq
from tilebit.weights.quantize import QuantizedTensor, quantize
from tilebit.weights.smooth import STRENGTHS, search_smoothing, smoothing_factors

pytestmark = pytest.mark.usefixtures("one_thread")

CODED = [name for name, format in FORMATS.items() if format.x]  # of 8-bit x


def _problem(seed: int = 0, n: int = 70, k: int = 200, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """(w [n, k], x [80, k]); some columns of x are far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(k, generator=generator))
    return torch.randn(n, k, generator=generator), torch.randn(80, k, generator=generator) * sizes


def _lost(w: Tensor, x: Tensor, q: QuantizedTensor, factors: Tensor) -> float:
    """Relative squared error of the output, by loops over the definition."""
    rows, e4m3 = [], q.format.x == FP8
    for row in (x / factors).double():
        scale = float(row.abs().max()) / (448 if e4m3 else 127)
        rows.append((row / scale).to(torch.float8_e4m3fn).double() * scale if e4m3 else (row / scale).round() * scale)
    got, expected = torch.stack(rows) @ q.dequantize().double().t(), x.double() @ w.double().t()
    return float((got - expected).square().sum() / expected.square().sum())


@pytest.mark.parametrize("name", CODED)
def test_it_is_the_best_of_the_grid(name: str) -> None:
    w, x = _problem(n=30, k=96)
    found, format = search_smoothing(w, x, name), FORMATS[name]
    lost: dict[float | None, float] = {None: _lost(w, x, quantize(w, format, scale_dtype=torch.float32), torch.ones(96))}
    for strength in STRENGTHS:
        factors = smoothing_factors(w, x, strength)
        lost[strength] = _lost(w, x, quantize(w * factors, format, scale_dtype=torch.float32), factors)
    assert found.strength is not None and lost[found.strength] <= min(lost.values()) * (1 + 1e-3)
    assert found.error == pytest.approx(lost[found.strength], rel=1e-3)
    assert found.error_without == pytest.approx(lost[None], rel=1e-3)
    assert found.error < 0.9 * found.error_without


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_factors_are_the_paper_s(strength: float) -> None:
    w, x = _problem(1)
    factors = smoothing_factors(w, x, strength)
    for i, j in itertools.pairwise(range(0, 200, 7)):  # but for a common factor, which changes nothing
        raw = [float(x[:, c].abs().max()) ** strength / float(w[:, c].abs().max()) ** (1 - strength) for c in (i, j)]
        assert float(factors[i] / factors[j]) == pytest.approx(raw[0] / raw[1], rel=1e-4)
    assert float(factors.log().mean()) == pytest.approx(0, abs=1e-5)
    assert torch.allclose((x / factors) @ (w * factors).t(), x @ w.t(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", CODED)
def test_never_worse_than_none_on_its_inputs(name: str) -> None:
    for seed, spread in itertools.product(range(4), (0.0, 1.0)):
        w, x = _problem(seed, 20, 96, spread)
        found = search_smoothing(w, x, name, strengths=(0.0, 0.5, 1.0))
        assert found.error <= found.error_without
    # where nothing is to be gained, nothing is changed
    w, x = torch.ones(3, 64), torch.ones(5, 64)
    found = search_smoothing(w, x, name)
    assert found.strength is None and torch.equal(found.factors, torch.ones(64)) and found.error == found.error_without


def test_strengths_may_be_an_iterator() -> None:
    w, x = _problem(n=20, k=96)
    found, expected = (
        search_smoothing(w, x, "w8a8_channel", (s / 4 for s in range(5))),
        search_smoothing(w, x, "w8a8_channel", (0, 0.25, 0.5, 0.75, 1)),
    )
    assert found.strength is not None and found.strength == expected.strength and torch.equal(found.factors, expected.factors)


def test_factors_are_made_of_the_largest_inputs_that_are_named() -> None:
    """Of more inputs than the error is tried on."""
    w, x = _problem(4)
    named = x.abs().amax(0).roll(1)
    found = search_smoothing(w, x, "w8a8_channel", (0.5,), largest=named)
    assert not torch.equal(smoothing_factors(w, named[None], 0.5), smoothing_factors(w, x, 0.5))
    expected = search_smoothing(w, x, "w8a8_channel", (0.5,), largest=x.abs().amax(0))
    assert torch.equal(expected.factors, smoothing_factors(w, x, 0.5)) and expected.strength == 0.5
    assert found.strength is None or torch.equal(found.factors, smoothing_factors(w, named[None], 0.5))


def test_columns_of_zeros_and_huge_ones() -> None:
    w, x = _problem(2, 12, 64)
    w[:, 3], x[:, 5] = 0, 0
    x[:, 7], w[:, 9] = x[:, 7] * 1e6, w[:, 9] * 1e-6
    found = search_smoothing(w, x, "w8a8_channel")
    assert bool((found.factors > 0).all() and found.factors.isfinite().all()) and found.error < found.error_without
    assert search_smoothing(torch.zeros(2, 64), x, "w4a8_lqq_g64").error == 0


@pytest.mark.parametrize("name", ["w4a8_lqq_g64", "w8a8_channel"])
def test_what_it_finds_goes_through_the_kernels(name: str) -> None:
    """Folded into the weight, and given to the kernel that quantizes x; also after GPTQ."""
    w, x = _problem(3)
    x = x.half()
    found = search_smoothing(w, x, name)
    rounded, hessian = quantize(found.fold(w), FORMATS[name], scale_dtype=torch.float16), x.float().t() @ x.float()
    y = x.double() @ w.double().t()
    codes, scales = tilebit.quantize_activations(x[:6], smooth=found.reciprocals)
    lost: dict[str, float] = {}
    for how, q in {"nearest": rounded, "gptq": gptq(found.fold(w), found.fold_products(hessian), name, damping=0.01)}.items():
        got = tilebit.gemm(codes, tilebit.pack(q, torch.float16), token_scales=scales)
        lost[how] = float((got.double() - y[:6]).square().sum() / y[:6].square().sum())
    assert lost["nearest"] < 3 * found.error and lost["gptq"] < lost["nearest"]


def test_what_does_not_fit_is_refused() -> None:
    w, x = torch.ones(2, 64), torch.ones(3, 64)
    cases = (
        ({"format": "w4a16_g64"}, "accepted: formats with int8 or e4m3 x"),
        ({"x": torch.ones(3, 32)}, r"x is torch.float32 \[3, 32\] on cpu; accepted for this w: floating point \[rows, 64\] on cpu"),
        ({"x": torch.ones(0, 64)}, r"x is torch.float32 \[0, 64\]"),
        ({"x": torch.ones(64)}, r"x is torch.float32 \[64\]"),
        ({"x": x.int()}, "x is torch.int32"),
        ({"x": x * float("nan")}, "x has NaN"),
        ({"largest": torch.ones(63)}, r"largest is torch.float32 \[63\] on cpu; accepted for this w: floating point \[64\] on cpu"),
        ({"largest": torch.full((64,), torch.inf)}, "largest has NaN or infinite values"),
        ({"w": w * float("inf")}, "w has 128 NaN or infinite values"),
        ({"w": torch.ones(64)}, "accepted: a floating point"),
        ({"strengths": (0.5, 1.5)}, r"strengths are \[0.5, 1.5\]; accepted: numbers from 0 to 1"),
    )
    for options, words in cases:
        with pytest.raises(ValueError, match=words):
            search_smoothing(**{"w": w, "x": x, "format": "w8a8_channel", **options})  # type: ignore[arg-type]
    for options, words in (({"largest": 3.0}, "largest is float"), ({"x": [1.0]}, "x is list")):
        with pytest.raises(TypeError, match=words):
            search_smoothing(**{"w": w, "x": x, "format": "w8a8_channel", **options})  # type: ignore[arg-type]
