"""Measuring prompts, here on a CPU with a model of one layer: what rows say, and what is checked before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from results.measure import prompt, step
from results.report.prompt import prompt_section

SMALL = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
OPTIONS = ["--device", "cpu", "--layers", "1", "--points", "1x150"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MODEL", {**step.MODEL, **SMALL})
    monkeypatch.setattr(prompt, "ROUNDS", 2)


def test_a_row_for_each_way(small: None, tmp_path: Path) -> None:
    prompt.main([*OPTIONS, "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["op"], row["impl"], row["format"], row["batch"], row["prompt"]) for row in rows] == [
        ("prompt", "cublas", "fp16", 1, 150), ("prompt", "transformers", "fp16", 1, 150), ("prompt", "tilebit", "w4a16_g128", 1, 150),
        ("prompt", "tilebit", "w4a8_lqq_g128", 1, 150),
    ]  # fmt: skip
    assert all(0 < row["us_p20"] <= row["us"] <= row["us_p80"] for row in rows)
    assert all(row["rel_err"] <= row["rel_err_accepted"] for row in rows)
    page = prompt_section(tmp_path)
    assert "| w4a16_g128, kv4_channel |" in page and prompt_section(tmp_path / "nothing") == ""


def test_wrong_logits_write_no_row(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompt, "unfused", lambda model, cache, ids: torch.randn(len(ids), 256))
    prompt.main([*OPTIONS, "--formats", "w4a16_g128", "--out", str(tmp_path)])
    assert "the relative error of the logits of fp16 is" in capsys.readouterr().out
    assert list(tmp_path.glob("*.jsonl")) == []
