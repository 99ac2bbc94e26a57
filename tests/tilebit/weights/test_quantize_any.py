"""Any-precision quantization: codes of b bits are prefixes, errors near those of exact clustering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cluster_cases import layer, optima, weights_of
from torch import Tensor

from tilebit.weights.kmeans import SortedRows, ascending, cluster
from tilebit.weights.nested import nested, split
from tilebit.weights.quantize_any import AnyPrecisionTensor, quantize_any

LARGEST_RATIO = 1.25  # of an upscaled weight's squared error to the exact optimum's at the same width


def _errors(w: Tensor, q: AnyPrecisionTensor, weights: Tensor | None = None) -> dict[int, Tensor]:
    return {bits: (((w - q.dequantize(bits)) ** 2) * (1 if weights is None else weights)).sum(1) for bits in q.widths}


def _ratios(kind: str, widths: range, weighted: bool = False) -> dict[int, float]:
    w, weights = layer(kind, 1, 2048), weights_of(1, 2048) if weighted else torch.ones(1, 2048)
    exact = optima(w[0].numpy(), weights[0].numpy(), [1 << bits for bits in widths])
    errors = _errors(w, quantize_any(w, sensitivity=weights if weighted else None), weights)
    return {bits: float(errors[bits][0]) / exact[1 << bits] for bits in widths}


@pytest.mark.parametrize(("kind", "weighted", "most"), [("gauss", False, 7), ("gauss", True, 6), ("laplace", False, 6)])
def test_errors_are_near_the_exact_optimum_of_each_width(kind: str, weighted: bool, most: int) -> None:
    ratios = _ratios(kind, range(3, most + 1), weighted)
    assert max(ratios.values()) < LARGEST_RATIO and min(ratios.values()) > 0.999, ratios


@pytest.mark.parametrize("kind", ["laplace", "outliers"])
def test_looking_ahead_leaves_less_error_than_the_best_cut_of_each_width(kind: str) -> None:
    rows = SortedRows.of(layer(kind, 16, 1024), weights_of(16, 1024))
    squares = (rows.mass.diff(dim=1) * rows.values**2).sum(1)
    best, seen = cluster(rows, 8), nested(rows, 3, 8)
    assert float(((squares - rows.gains(seen[:, ::32]).sum(1)) / (squares - rows.gains(best).sum(1))).mean()) < 1.02  # of the seed
    for _ in range(5):
        best = split(rows, best, torch.ones(16, 1, dtype=torch.float64))
    ratio = (squares - rows.gains(seen).sum(1)) / (squares - rows.gains(best).sum(1))
    assert float(ratio.mean()) < 0.92 and float(ratio.max()) < 1.02, ratio


@pytest.mark.parametrize("seed_bits", [2, 3, 4])
@pytest.mark.parametrize("kind", ["gauss", "outliers", "laplace"])
def test_the_seed_is_as_good_as_exact_clustering(kind: str, seed_bits: int) -> None:
    w, weights = layer(kind, 6, 400, seed_bits), weights_of(6, 400)
    weights /= weights.mean(1, keepdim=True)  # in units of which rows count
    rows = SortedRows.of(w, weights)
    edges = cluster(rows, 1 << seed_bits)
    error = (weights.double() * w.double() ** 2).sum(1) - rows.gains(edges).sum(1)
    exact = [optima(w[i].numpy(), weights[i].numpy(), [1 << seed_bits])[1 << seed_bits] for i in range(6)]
    ratios = error / torch.tensor(exact)
    assert float(ratios.max()) < 1.02 and float(ratios.mean()) < 1.005, ratios


def test_each_cluster_is_cut_where_the_error_is_least() -> None:
    w, weights = layer("laplace", 4, 61), weights_of(4, 61)
    rows = SortedRows.of(w, weights)
    edges = cluster(rows, 8)
    cut = split(rows, edges, torch.ones(4, 1, dtype=torch.float64))
    assert torch.equal(cut[:, ::2], edges)
    for i in range(4):
        v, s = rows.values[i].numpy(), rows.mass[i].diff().numpy()
        for start, middle, end in zip(cut[i, 0:-1:2], cut[i, 1::2], cut[i, 2::2], strict=True):
            parts = [_within(v[start:at], s[start:at]) + _within(v[at:end], s[at:end]) for at in range(int(start) + 1, int(end) + 1)]
            found = _within(v[start:middle], s[start:middle]) + _within(v[middle:end], s[middle:end])
            assert found <= min(parts, default=0.0) + 1e-12


def _within(v: np.ndarray, s: np.ndarray) -> float:
    return float((s * (v - (s * v).sum() / s.sum()) ** 2).sum()) if len(v) else 0.0


@pytest.mark.parametrize("kind", ["gauss", "outliers"])
def test_codes_are_prefixes_and_error_falls_with_every_bit(kind: str) -> None:
    w = layer(kind, 130, 515)
    for seed_bits in (2, 3, 4):
        q = quantize_any(w, seed_bits)
        errors = _errors(w, q)
        for bits in range(seed_bits, 8):
            assert torch.equal(q.codes_of(bits), q.codes_of(bits + 1) >> 1)
            assert bool((errors[bits + 1] < errors[bits]).all())
        shorter = quantize_any(w, seed_bits, max_bits=5)
        assert shorter.max_bits == 5 and list(shorter.codebooks) == list(range(seed_bits, 6))
        assert bool(_errors(w, shorter)[5].sum() < errors[5].sum())  # no wider width is looked at


def test_codebooks_are_the_weighted_means_of_their_codes() -> None:
    w, weights = layer("gauss", 5, 300), weights_of(5, 300)
    q = quantize_any(w, sensitivity=weights)
    for bits in q.widths:
        codes = q.codes_of(bits).long()
        mass = torch.zeros(5, 1 << bits, dtype=torch.float64).scatter_add_(1, codes, weights.double())
        moment = torch.zeros(5, 1 << bits, dtype=torch.float64).scatter_add_(1, codes, (weights * w).double())
        held = mass > 0
        torch.testing.assert_close(q.codebooks[bits][held].double(), (moment / mass)[held], rtol=1e-3, atol=2e-5)


def test_sensitive_values_are_kept_better() -> None:
    w = layer("gauss", 16, 512)
    weights = torch.ones(16, 512)
    weights[:, :32] = 1000.0
    plain, aware = quantize_any(w), quantize_any(w, sensitivity=weights)
    for bits in (3, 4):
        before, after = ((w - q.dequantize(bits)) ** 2 for q in (plain, aware))
        assert float(after[:, :32].sum()) < 0.5 * float(before[:, :32].sum())
        assert float(after.sum()) > float(before.sum())
    scaled = quantize_any(w, sensitivity=weights * 2.0**-30)
    assert torch.equal(scaled.codes, aware.codes)


def test_values_that_nothing_depends_on_lie_between_their_neighbours_codes() -> None:
    w, weights = layer("gauss", 3, 64), weights_of(3, 64)
    weights[:, ::3] = 0.0
    weights[2] = 0.0
    q = quantize_any(w, sensitivity=weights)
    assert torch.equal(q.codes[2], quantize_any(w).codes[2])
    assert all(bool(book.isfinite().all()) for book in q.codebooks.values())
    order = w.argsort(1)
    for bits in q.widths:
        assert bool((q.dequantize(bits).gather(1, order).diff(dim=1) >= 0).all())


@pytest.mark.parametrize("k", [1, 2, 5, 33, 257])
def test_rows_of_few_values(k: int) -> None:
    w = torch.stack((torch.zeros(k), torch.full((k,), -3.5), torch.arange(k) % 5 - 2.0, torch.linspace(-1, 1, k).half().float()))
    q = quantize_any(w)
    assert torch.equal(q.dequantize(8)[:3], w[:3])
    if k <= 33:
        torch.testing.assert_close(q.dequantize(8)[3], w[3], rtol=0, atol=0)
    for bits in q.widths:
        assert torch.equal(q.dequantize(bits)[:3], w[:3])  # eight codes hold five values
        assert bool(q.codebooks[bits].isfinite().all())


def test_rows_do_not_depend_on_each_other() -> None:
    w = layer("outliers", 300, 96)
    q = quantize_any(w)
    one = quantize_any(w[200:201])
    assert torch.equal(one.codes[0], q.codes[200]) and torch.equal(one.codebooks[5][0], q.codebooks[5][200])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same(threads: Callable[[int], None]) -> None:
    w, weights = layer("outliers", 150, 700), weights_of(150, 700)
    threads(1)
    alone = quantize_any(w, sensitivity=weights)
    for number in (2, 3, 16):
        threads(number)
        with torch.inference_mode(number == 3):
            found = quantize_any(w.clone(), sensitivity=weights)
        assert torch.equal(found.codes, alone.codes) and torch.get_num_threads() == number
        assert all(torch.equal(found.codebooks[bits], alone.codebooks[bits]) for bits in alone.widths)
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 16


def test_equal_values_lie_in_the_order_of_their_columns() -> None:
    w = torch.tensor([[0.5, -0.0, -1.0, 0.0, 0.5, -2.0, 65504.0, -65504.0, 1e-45, -1e-45], [0.0] * 10])
    values, order = ascending(w)
    assert order.tolist() == [[7, 5, 2, 9, 1, 3, 8, 0, 4, 6], list(range(10))]
    assert torch.equal(values, w.gather(1, order))
    wide = layer("laplace", 5, 3000).round(decimals=1)
    for found, expected in zip(ascending(wide), torch.sort(wide, dim=1, stable=True), strict=True):
        assert torch.equal(found, expected)


def test_progress_counts_rows_on_a_terminal_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for forced, shown, seen in (("1", True, True), ("1", False, False), (None, True, False)):
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        if forced is not None:
            monkeypatch.setenv("FORCE_COLOR", forced)
        quantize_any(layer("gauss", 70, 8), progress=shown)
        said = capsys.readouterr().err
        assert ("quantizing rows" in said and "3/3" in said) == seen and (said == "") != seen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, a: (w[0], a), "w is torch.float32"),
        (lambda w, a: (w.int(), a), "accepted: floating point"),
        (lambda w, a: (w[:, :0], a), "at least 1 x 1"),
        (lambda w, a: (w * 1e6, a), "65504"),
        (lambda w, a: (w * 1e-9, a), "fp16 codebooks make 0, all of them; rescale the weight"),
        (lambda w, a: (w / 0, a), "NaN, infinite"),
        (lambda w, a: (w * torch.nan, a), "NaN, infinite"),
        (lambda w, a: (w, {"seed_bits": 5}), "seed_bits is 5"),
        (lambda w, a: (w, {"max_bits": 9}), "max_bits is 9"),
        (lambda w, a: (w, {"seed_bits": 4, "max_bits": 3}), "max_bits is 3"),
        (lambda w, a: (w, {"sensitivity": -w.abs()}), "below 0"),
        (lambda w, a: (w, {"sensitivity": w.abs() * torch.nan}), "NaN"),
        (lambda w, a: (w, {"sensitivity": w[:1].abs()}), "sensitivity is torch.float32 [1, 8]"),
    ],
)
def test_what_cannot_be_quantized_is_refused(change, message: str) -> None:
    w, arguments = change(layer("gauss", 4, 8) + 3, {})
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        quantize_any(w, **arguments)


def test_widths_that_are_not_held_are_refused() -> None:
    q = quantize_any(layer("gauss", 4, 8), max_bits=6)
    for call in (q.codes_of, q.codebooks_of, q.dequantize):
        with pytest.raises(ValueError, match="bits is 7; accepted: 3 to 6"):
            call(7)
    with pytest.raises(ValueError, match="none left out"):
        AnyPrecisionTensor(q.codes, {bits: book for bits, book in q.codebooks.items() if bits != 4})
    with pytest.raises(ValueError, match="codes reach"):
        AnyPrecisionTensor(q.codes, {3: q.codebooks[3]})
    with pytest.raises(TypeError, match="w is list"):
        quantize_any([[1.0]])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("exponent", [-80, -40, 40])
def test_a_factor_of_the_sensitivity_changes_nothing(exponent: int) -> None:
    """Squared gradients are tiny, and fp32 takes no products of them."""
    w, weights = layer("gauss", 6, 512), weights_of(6, 512)
    expected, found = quantize_any(w, sensitivity=weights), quantize_any(w, sensitivity=weights.double() * 2.0**exponent)
    assert torch.equal(found.codes, expected.codes)
    assert all(torch.equal(found.codebooks[bits], expected.codebooks[bits]) for bits in expected.widths)
