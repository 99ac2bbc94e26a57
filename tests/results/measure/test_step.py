"""Measuring decode steps, here on a CPU with a model of one layer: what rows say, and what is checked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from results.measure import step
from results.report.step import step_section

SMALL = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MODEL", {**step.MODEL, **SMALL})
    monkeypatch.setattr(step, "ROUNDS", 2)
    monkeypatch.setattr(step, "STEPS", 2)


def test_a_row_for_each_cache(small: None, tmp_path: Path) -> None:
    step.main(["--device", "cpu", "--layers", "1", "--points", "2x200", "--kv", "kv16,kv4_channel", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["op"], row["impl"], row["kv_format"], row["batch"], row["kv_len"]) for row in rows] == [
        ("step", "tilebit", "kv16", 2, 200), ("step", "tilebit", "kv4_channel", 2, 200)
    ]  # fmt: skip
    assert all(0 < row["us_p20"] <= row["us"] <= row["us_p80"] and row["rel_err"] < step.TOLERANCE for row in rows)


def test_two_steps_in_turn_on_one_cache(small: None, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--layers", "1", "--points", "2x200", "--kv", "kv4_channel", "--out", str(tmp_path)]
    step.main([*options, "--parts", "residual,gate,norm"])
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["impl"], row["kv_format"]) for row in rows] == [("tilebit", "kv4_channel"), ("tilebit_parts", "kv4_channel")]
    assert all(row["us"] > 0 and row["rel_err"] < step.TOLERANCE for row in rows)
    assert [row["parts"] for row in rows] == ["gate", "residual,gate,norm"]
    said = step_section(tmp_path)
    assert "tilebit, residual,gate,norm in products" in said and "tilebit, gate in products" in said


def test_the_default_and_a_step_without_parts_say_what_their_products_do(small: None, tmp_path: Path) -> None:
    points = "1x256,17x256"
    step.main(
        ["--device", "cpu", "--layers", "1", "--points", points, "--kv", "kv4_channel", "--parts", "none", "--out", str(tmp_path)]
    )  # the gate up to 16 sequences
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["impl"], row["batch"], row["parts"]) for row in rows] == [
        ("tilebit", 1, "gate"), ("tilebit_parts", 1, ""), ("tilebit", 17, ""), ("tilebit_parts", 17, "")
    ]  # fmt: skip


def test_weights_of_two_formats_in_turn(small: None, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--layers", "1", "--points", "2x200", "--kv", "kv4_channel", "--out", str(tmp_path)]
    step.main([*options, "--format", "w4a16_g128,w4a8_lqq_g128", "--parts", "none"])
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["impl"], row["format"], row["parts"]) for row in rows] == [
        ("tilebit", "w4a16_g128", "gate"), ("tilebit_parts", "w4a16_g128", ""),
        ("tilebit", "w4a8_lqq_g128", ""), ("tilebit_parts", "w4a8_lqq_g128", ""),
    ]  # fmt: skip
    assert len({row["run"] for row in rows}) == 1 and all(row["rel_err"] <= row["rel_err_accepted"] for row in rows)


def test_wrong_logits_write_no_row(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "uncompiled", lambda model, cache, ids, lengths: torch.randn(len(ids), 256))
    step.main(["--device", "cpu", "--layers", "1", "--points", "1x150", "--kv", "kv4_channel", "--out", str(tmp_path)])
    assert "relative errors of logits, and what is accepted, are {'tilebit w4a16_g128 kv4_channel'" in capsys.readouterr().out
    assert list(tmp_path.glob("*.jsonl")) == []


def test_no_window_fills_at_the_first_step() -> None:
    for batch in (1, 16, 64):
        lengths = step.spread(batch, 4096)
        assert len(set(lengths)) == batch and all((length + 1) % 128 for length in lengths)


def test_codes_are_judged_by_what_rounding_moves(small: None, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--layers", "1", "--points", "2x200", "--kv", "kv4_channel", "--out", str(tmp_path)]
    step.main([*options, "--format", "w4a8_lqq_g128"])
    (file,) = tmp_path.glob("*.jsonl")
    (row,) = (json.loads(line) for line in file.read_text().splitlines())
    assert row["rel_err"] <= row["rel_err_accepted"] < 0.1
    assert row["rel_err_accepted"] >= step.TOLERANCE
