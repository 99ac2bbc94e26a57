"""The page of what every width of one store costs a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from results.report.any_quality import any_quality_section, read_any_quality
from results.report.quality_plot import any_quality


def row(bits: int, method: str, sensitivity: str, kl: float, **fields: Any) -> dict[str, Any]:
    common = {"model": "tiny", "gpu": "a CPU", "tokens": 2048, "window": 1024, "samples": 16, "sample_tokens": 128, "commit": "a" * 40}
    what = {"bits": bits, "method": method, "sensitivity": sensitivity, "megabytes": bits * 10.0}
    return {**common, **what, "perplexity": 12 + kl, "kl": kl, "top1": 1 - kl / 10, "date": "2026-01-01", **fields}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_kinds_stand_beside_one_another(tmp_path: Path) -> None:
    rows = (row(16, "", "", 0.0), row(3, "upscaled", "none", 0.5), row(3, "independent", "fisher", 0.25), row(4, "upscaled", "none", 0.1))
    text = any_quality_section(written(tmp_path, *rows))
    assert "| 3 | 30.0 | 0.5000 | 0.2500 |" in text
    assert "| 4 | 40.0 | 0.1000 | - |" in text
    assert "| 16 | 160.0 | 0.0000 | 0.0000 |" in text
    assert "| bits | megabytes | one store | that width alone, by squared gradients |" in text
    assert text.count("what nesting costs is the difference") == 1
    assert "| 3 | 30.0 | 95.0% | 97.5% |" in text and "plots/a_cpu_tiny_any_precision.svg" in text


def test_the_newest_row_with_the_most_text_counts(tmp_path: Path) -> None:
    old, new = row(3, "upscaled", "none", 0.5), row(3, "upscaled", "none", 0.4)
    less = row(3, "upscaled", "none", 0.3, tokens=1024)
    text = any_quality_section(written(tmp_path, old, new, less))
    assert "0.4000" in text and "0.5000" not in text and "0.3000" not in text


def test_the_plot_has_a_line_for_each_kind(tmp_path: Path) -> None:
    rows = [row(bits, method, kind, 1 / bits) for method in ("upscaled", "independent") for kind in ("none", "fisher") for bits in (3, 4)]
    ((_, shown),) = read_any_quality(written(tmp_path, row(16, "", "", 0.0), *rows)).items()
    (axes,) = any_quality("tiny", shown).axes
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.get_lines()] == [[3, 4]] * 4


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    short = row(3, "upscaled", "none", 0.5)
    del short["megabytes"]
    with pytest.raises(ValueError, match="megabytes missing"):
        any_quality_section(written(tmp_path, short))
    assert any_quality_section(tmp_path / "nothing") == ""
