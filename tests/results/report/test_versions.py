"""The page of comparisons with an earlier commit: means, worst points and bars by hand, and which
rows count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.versions import versions_section


def row(m: int, ratio: float, program: str = "gemm_wgmma", **changed: Any) -> dict[str, Any]:
    schedule = {"program": program}
    sides = {"us_before": 10.0, "us_after": 10.0 / ratio, "schedule_before": schedule, "schedule_after": schedule}
    same = {"same_schedule": True, "same_bits": True, "again": 1.002, "spread": [ratio - 0.01, ratio + 0.01], "bouts": 3}
    named = {"gpu": "NVIDIA H200", "commit": "new", "commit_before": "old", "kind": "chosen", "title": f"m={m}"}
    return {**named, "workload": {"op": "gemm", "m": m}, "ratio": ratio, **sides, **same, **changed}


def section(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "nvidia-h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return versions_section(folder)


def test_means_worst_points_and_bars(tmp_path: Path) -> None:
    assert versions_section(tmp_path) == ""
    decode = {"workload": {"op": "decode", "format": {"key": "int4"}}, "title": "decode"}
    host = {"kind": "host", "workload": None, "title": "QuantLinear 256x256", "us_before": 5.0, "us_after": 6.0}
    said = section(
        tmp_path,
        [
            row(1, 1.0, "gemm_stream"),
            row(16, 0.81, "gemm_stream", again=0.95),
            row(64, 1.21, same_schedule=False, same_bits=False),
            row(64, 1.0, kind="forced"),
            row(1, 0.98, "attention_decode", **decode, same_bits=False),
            {**row(0, 0.8333), **host},
        ],
    )
    assert "| product | 3 | **0.993** | **0.810** (m=16) | 0.950 |" in said  # (1.0 * 0.81 * 1.21) ** (1 / 3)
    assert "| product, m <= 16 | 2 | **0.900** | **0.810** (m=16) | 0.950 |" in said
    assert "| product, 16 < m <= 128 | 1 | 1.210 | 1.210 (m=64) | 1.002 |" in said and "m > 128" not in said
    assert "| decode, int4 cache | 1 | **0.980** | 0.980 (decode) | 1.002 |" in said
    assert "| `gemm_wgmma` | 1 | 1.210 |" in said and "| `gemm_stream` | 2 | **0.900** |" in said
    assert "| the schedule before in both | 4 |" in said  # 1.0, 0.81, the forced one and decode
    assert "(4 points) the results are equal bit for bit at 3" in said and "off by more than 1% at 1 of 4 points" in said
    assert "| QuantLinear 256x256 | 5.00 | 6.00 | **0.833** |" in said and "Other processes" not in said
    assert "| m=64 | 10.0 | 8.26 | 1.210 | 1.200 to 1.220 | 1.002 | gemm_wgmma | another | other |" in said


def test_the_newest_row_of_a_point_counts_against_one_commit(tmp_path: Path) -> None:
    rows = [row(1, 0.5, commit_before="older"), row(4, 0.5), row(4, 1.0, commit="newer"), row(16, 1.0, others=0.4)]
    said = section(tmp_path, rows)
    assert "| product | 2 | 1.000 |" in said and "Commit new, newer against old" in said and "Other processes had up to 40%" in said


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    whole = row(1, 1.0)
    for lacking in ("ratio", "same_bits"):
        with pytest.raises(ValueError, match=f"{lacking} missing"):
            section(tmp_path, [{name: value for name, value in whole.items() if name != lacking}])
