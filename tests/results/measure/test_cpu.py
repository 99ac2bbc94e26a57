"""Measuring products on this CPU: which rows there are, and that a wrong kernel gives none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from results.measure import cpu
from results.report.cpu import cpu_section
from tilebit.autotune.problems.verify import Gate, Verdict
from tilebit.schedules.target import cpu_target

OPTIONS = ["--shapes", "64x256", "--patience", "5"]  # seconds at most, where other processes disturb every call


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.mark.skipif("avx2" not in cpu_target().features, reason="CPU programs need AVX2")
def test_a_row_for_each_format_and_kind_of_x_beside_torch(tmp_path: Path) -> None:
    cpu.main([*OPTIONS, "--ms", "1", "--threads", "1", "--formats", "w4a16_g128,w4a8_lqq_g64,w3a16_any", "--out", str(tmp_path)])
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["impl"], row["format"], row["x"]) for row in rows][:5] == [
        ("tilebit", "w4a16_g128", None), ("tilebit", "w4a8_lqq_g64", "codes"), ("tilebit", "w4a8_lqq_g64", "quantized"),
        ("tilebit", "w3a16_any", None), ("torch", "bf16", None),
    ]  # fmt: skip
    assert all(row["threads"] == 1 and 0 < row["us_p20"] <= row["us"] <= row["us_p80"] for row in rows)
    assert all(row["rel_err"] < cpu.QUANTIZED_ERROR and row["schedule"]["num_warps"] == 1 for row in rows if row["impl"] == "tilebit")
    assert "| w4a8_lqq_g64, x quantized |" in cpu_section(tmp_path)


@pytest.mark.skipif("avx2" not in cpu_target().features, reason="CPU programs need AVX2")
def test_a_wrong_kernel_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "verify", lambda self, run: Verdict(("no.",)))
    with pytest.raises(ValueError, match=r"m=1 n=64 k=256 w4a16_g128 is wrong: no\."):
        cpu.main([*OPTIONS, "--ms", "1", "--formats", "w4a16_g128", "--out", str(tmp_path)])
    assert not list(tmp_path.glob("*.jsonl"))
