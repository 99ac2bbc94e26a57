"""A row of the quantizer's time: the median of the calls after the warm one."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from results.measure import any_quantizer
from results.measure.any_quantizer import CALLS, main, seconds_of


def test_a_row_says_what_was_timed(tmp_path: Path) -> None:
    out = tmp_path / "new" / "cpu.jsonl"
    asked = ["--device", "cpu", "--shape", "40x64", "--max-bits", "5", "--out", str(out)]
    assert main(asked) == main([*asked, "--dtype", "float32"]) == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["op"], first["n"], first["k"], first["seed_bits"], first["max_bits"]) == ("any_quantizer", 40, 64, 3, 5)
    assert (first["dtype"], second["dtype"], first["threads"]) == ("bfloat16", "float32", torch.get_num_threads())
    assert len(first["all_seconds"]) == CALLS and first["seconds"] == statistics.median(first["all_seconds"]) > 0


def test_the_first_call_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 100.0, 101.0, 101.0, 103.0])
    calls = []
    monkeypatch.setattr(any_quantizer.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(any_quantizer, "quantize_any", lambda *given: calls.append(given))
    w = torch.ones(2, 3)
    assert seconds_of(w, 2, 6, calls=2) == [1.0, 2.0]
    assert calls == [(w, 2, 6)] * 3
