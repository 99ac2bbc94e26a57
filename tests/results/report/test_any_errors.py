"""The page of the squared error of every width: ratios above the bar are marked, the newest rows count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.any_errors import any_errors_section


def row(bits: int, ratio: float, **fields: Any) -> dict[str, Any]:
    layer = {"values": "laplace", "k": 4096, "n": 64, "seed": 0, "sensitivity": "none", "bits": bits}
    found = {"error": ratio * 1e-3, "error_exact": 1e-3, "ratio": ratio, "ratio_worst": ratio + 0.1}
    return {**layer, **found, "gpu": "a CPU", "commit": "a" * 40, "date": "2026-01-01", **fields}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_ratios_above_the_bar_are_marked_and_counted(tmp_path: Path) -> None:
    rows = (row(3, 1.25), row(8, 1.251), row(3, 1.1, sensitivity="squares"))
    text = any_errors_section(written(tmp_path, *rows))
    assert "| Laplace, 64 x 4096 | alike | 1.250, **1.350** | **1.251**, **1.351** |" in text
    assert "| Laplace, 64 x 4096 | weighted | 1.100, 1.200 | - |" in text
    assert "| Laplace, 64 x 4096 | alike | 1.25e-03, 1.00e-03 | 1.25e-03, 1.00e-03 |" in text
    assert "3 layers and widths, 1 of them above 1.25; commit aaaaaaaaaaaa." in text and "any-nested.md" in text


def test_the_newest_row_of_each_device_counts(tmp_path: Path) -> None:
    rows = (row(3, 1.02, date="2026-01-03"), row(3, 1.04), row(3, 1.08, gpu="a GPU"), row(3, 1.01, k=576))
    text = any_errors_section(written(tmp_path, *rows))
    assert "1.020" in text and "1.040" not in text and "64 x 576 | alike | 1.010" in text
    assert text.index("## a CPU") < text.index("## a GPU") < text.index("1.080")


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    short = row(3, 1.0)
    del short["error_exact"]
    with pytest.raises(ValueError, match="line 1: error_exact missing"):
        any_errors_section(written(tmp_path, short))
    assert any_errors_section(tmp_path / "nothing") == ""
