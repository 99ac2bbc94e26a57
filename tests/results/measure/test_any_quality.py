"""The study of every width in a language model, on a tiny random one: what is measured, and what is not measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language_model import VOCABULARY, text_of, tiny
from torch import nn

from results.measure import any_quality, quality_model
from results.measure.any_exact import independent
from results.measure.any_quality import METHODS, SEEDS, main, weights_of
from results.measure.quality_model import Texts, spaced, squared_gradients
from tilebit.weights.kmeans import SortedRows, lloyd
from tilebit.weights.nested import density_of, even

pytestmark = pytest.mark.usefixtures("one_thread")


def texts_of(_: Any, tokens: int, window: int, library: Path) -> Texts:
    ids = text_of()
    return Texts(spaced(ids, -(-tokens // window), window), ids)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the program with some arguments, and gives the rows that it added."""
    monkeypatch.setattr(quality_model, "load", lambda folder, device: (tiny(1), None))
    monkeypatch.setattr(quality_model, "texts", texts_of)
    monkeypatch.setattr(any_quality, "WIDTHS", (3, 5))
    monkeypatch.setattr(any_quality, "SAMPLES", (2, 16))
    out = tmp_path / "new" / "cpu.jsonl"

    def run(*arguments: str) -> list[dict[str, Any]]:
        before = out.read_text().splitlines() if out.exists() else []
        assert main(["--model", "none", "--window", "24", "--out", str(out), *arguments]) == 0
        after = out.read_text().splitlines()
        assert after[: len(before)] == before
        return [json.loads(line) for line in after[len(before) :]]

    return run


def test_rows_of_other_settings_do_not_count(study: Any) -> None:
    rows = study("--tokens", "48")
    assert [(row["method"], row["sensitivity"], row["bits"]) for row in rows] == [
        ("", "", 16),
        *((method, kind, bits) for method in METHODS for kind in ("none", "fisher") for bits in (3, 5) if bits >= SEEDS.get(method, 3)),
    ]  # fmt: skip
    assert all(row["tokens"] == 48 and row["texts"] == quality_model.LIBRARY.name and row["threads"] == 1 for row in rows)
    by = {(row["method"], row["sensitivity"], row["bits"]): row["kl"] for row in rows}
    assert rows[0]["kl"] == 0 and all(by[method, kind, 5] < by[method, kind, 3] for method, kind, bits in by if bits == 3)
    assert study("--tokens", "48") == []
    assert len(study("--tokens", "24", "--only", "exact")) == 5
    assert len(study("--tokens", "24")) == 6
    assert {row["texts"] for row in study("--tokens", "24", "--library", "lib/python3.1")} == {"python3.1"}


def test_earlier_rows_count_without_the_name_of_their_texts(study: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study("--tokens", "24", "--only", "exact")
    file = tmp_path / "new" / "cpu.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        del row["texts"], row["threads"]
        if row["method"]:
            row["method"] = "independent"  # not exact: such rows stand for no exact ones
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {row["bits"] for row in study("--tokens", "24", "--only", "exact")} == {3, 5}


def test_layers_are_clustered_together_where_rows_are_as_long() -> None:
    model, generator = tiny(1), torch.Generator().manual_seed(2)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "lm_head" not in name}
    originals = {name: layer.weight.detach() for name, layer in layers.items()}
    gradients = squared_gradients(model, layers, [torch.randint(0, VOCABULARY, (1, 24), generator=generator)])
    for given in (None, gradients):
        ((bits, values),) = weights_of(originals, "exact", given, [4])
        assert bits == 4 and values.keys() == originals.keys()
        for name, w in originals.items():
            assert torch.equal(values[name], independent(w, 4, None if given is None else given[name])), name


@pytest.mark.parametrize("bits", [3, 8])
def test_one_width_alone_has_the_values_of_exact_clusters_in_fp16(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(70, 300, generator=torch.Generator().manual_seed(3))
    found = independent(w, bits, None)
    assert torch.equal(found, found.half().float()) and max(len(row.unique()) for row in found) == 1 << bits
    rows = SortedRows.of(w, None)
    free = (rows.values**2).sum() - rows.gains(lloyd(rows, even(density_of(rows), 1 << bits))).sum()
    assert float(((w - found).double() ** 2).sum()) < float(free)
    for threads, values in ((2, 300 * 32), (1, 1 << 20)):
        torch.set_num_threads(threads)
        monkeypatch.setattr("results.measure.any_exact.CPU_VALUES", values)
        assert torch.equal(independent(w, bits, None), found)
