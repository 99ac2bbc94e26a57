"""The study of the squared error of every width: layers are the same everywhere, errors are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from results.measure import any_errors
from results.measure.any_errors import LAYERS, Layer, compared, errors, main
from results.measure.any_exact import independent
from tilebit.weights.quantize_any import quantize_any


def test_layers_are_drawn_as_they_are_called() -> None:
    for values in ("normal", "laplace", "outliers"):
        layer = Layer(values, 4096, 16)
        w, costs = layer.drawn()
        assert w.shape == costs.shape == (16, 4096) and bool((costs >= 0).all())
        assert all(torch.equal(one, other) for one, other in zip(layer.drawn(), (w, costs), strict=True))
    w = Layer("laplace", 4096, 16).drawn()[0]
    assert float(w.abs().mean()) == pytest.approx(1, abs=0.02) and float((w > 0).float().mean()) == pytest.approx(0.5, abs=0.01)
    plain, large = (Layer(values, 4096, 16).drawn()[0] for values in ("normal", "outliers"))
    changed = plain != large
    assert torch.equal(plain[changed] * 20, large[changed]) and float(changed.float().mean()) == pytest.approx(0.005, abs=0.001)


@pytest.mark.parametrize("sensitivity", ["none", "squares"])
def test_errors_are_weighted_and_stand_beside_exact_ones(sensitivity: str) -> None:
    layer = Layer("laplace", 200, 3)
    w, costs = layer.drawn()
    given = costs if sensitivity == "squares" else None
    weights = torch.ones_like(w) if given is None else given
    rows = compared(layer, sensitivity, "cpu", (3, 6))
    assert [(row["bits"], row["values"], row["k"], row["n"]) for row in rows] == [(bits, "laplace", 200, 3) for bits in (3, 6)]
    own = float((weights.double() * w.double() ** 2).sum())
    store = quantize_any(w, sensitivity=given)
    for row in rows:
        shared = (weights.double() * (w - store.dequantize(row["bits"])).double() ** 2).sum(1)
        alone = errors(w, independent(w, row["bits"], given), weights)
        assert row["error"] == pytest.approx(float(shared.sum()) / own, rel=1e-4)
        assert row["error_exact"] == pytest.approx(float(alone.sum()) / own, rel=1e-4)
        assert row["ratio"] == pytest.approx(row["error"] / row["error_exact"], rel=1e-4)
        assert row["ratio_worst"] == pytest.approx(float((shared / alone).max()), rel=1e-4) and 1 <= row["ratio"] <= row["ratio_worst"]


def test_every_layer_has_rows_of_every_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_errors, "LAYERS", (Layer("normal", 64), Layer("outliers", 48)))
    out = tmp_path / "new" / "cpu.jsonl"
    assert main(["--rows", "2", "--out", str(out)]) == main(["--rows", "2", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 * 6 and {row["op"] for row in rows} == {"any_errors"}
    first, second = ([{**row, "date": ""} for row in half] for half in (rows[:24], rows[24:]))
    assert first == second and {row["n"] for row in rows} == {2}
    assert len(set(LAYERS)) == 6 and {layer.k for layer in LAYERS if layer.values == "normal"} == {576, 1024, 4096, 14336}
