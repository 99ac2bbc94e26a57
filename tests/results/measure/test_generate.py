"""Measuring tokens of generate, here on a CPU with a model of one layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from results.measure import generate, step
from results.report.step import step_section

SMALL = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
POINT = ["--device", "cpu", "--layers", "1", "--points", "2x40"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MODEL", {**step.MODEL, **SMALL})
    monkeypatch.setattr(generate, "ROUNDS", 2)
    monkeypatch.setattr(generate, "TOKENS", 3)


def test_a_row_for_each_cache(small: None, tmp_path: Path) -> None:
    generate.main([*POINT, "--kv", "kv16,kv4_channel", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["op"], row["impl"], row["kv_format"], row["batch"], row["kv_len"]) for row in rows] == [
        ("generate", "tilebit", "kv16", 2, 40), ("generate", "tilebit", "kv4_channel", 2, 40)
    ]  # fmt: skip
    assert all(0 < row["us_p20"] <= row["us"] == row["graph_us"] <= row["us_p80"] for row in rows)
    assert all(row["rel_err"] < step.TOLERANCE for row in rows)
    assert "### In generate" in step_section(tmp_path) and "| 2 | 40 | 1 | w4a16_g128 | kv4_channel |" in step_section(tmp_path)


def test_wrong_logits_write_no_row(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "uncompiled", lambda model, cache, tokens, prompt: torch.randn(len(tokens), 256))
    generate.main([*POINT, "--kv", "kv4_channel", "--out", str(tmp_path)])
    assert "the relative error of generate's logits over kv4_channel is" in capsys.readouterr().out
    assert list(tmp_path.glob("*.jsonl")) == []
