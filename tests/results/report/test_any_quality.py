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
    common = {
        "model": "tiny",
        "gpu": "a CPU",
        "tokens": 2048,
        "window": 1024,
        "samples": 16,
        "sample_tokens": 128,
        "commit": "a" * 40,
        "python": "3.11.7",
    }
    what = {"bits": bits, "method": method, "sensitivity": sensitivity, "megabytes": bits * 10.0}
    return {**common, **what, "perplexity": 12 + kl, "kl": kl, "top1": 1 - kl / 10, "date": "2026-01-01", **fields}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_kinds_stand_beside_one_another(tmp_path: Path) -> None:
    rows = (row(16, "", "", 0.0), row(3, "upscaled", "none", 0.5), row(3, "exact", "fisher", 0.25), row(4, "upscaled", "none", 0.1))
    text = any_quality_section(written(tmp_path, *rows))
    assert "| 3 | 30.0 | 0.5000 | 0.2500 |" in text
    assert "| 4 | 40.0 | 0.1000 | - |" in text
    assert "| 16 | 160.0 | 0.0000 | 0.0000 |" in text
    assert "| bits | megabytes | one store | that width alone, by squared gradients |" in text
    assert text.count("what nesting costs is the difference") == 1
    assert "| 3 | 30.0 | 95.0% | 97.5% |" in text and "plots/a_cpu_tiny_python3_11_2048_1024_16x128_any_precision.svg" in text


def test_the_newest_row_counts(tmp_path: Path) -> None:
    old, new = row(3, "upscaled", "none", 0.5, date="2026-01-02"), row(3, "upscaled", "none", 0.4, date="2026-01-03")
    text = any_quality_section(written(tmp_path, new, old))
    assert "0.4000" in text and "0.5000" not in text


def test_settings_and_devices_stand_apart_the_newest_first(tmp_path: Path) -> None:
    few = [row(bits, "upscaled", "none", 1 / bits) for bits in (3, 4)]
    many = [{**one, "tokens": 16384, "date": "2026-02-01", "texts": "python3.11"} for one in few]
    on_gpu = [{**one, "gpu": "a GPU", "kl": 0.25, "date": "2026-03-01"} for one in many[:1]]
    elsewhere = row(3, "upscaled", "none", 0.125, python="3.12.1")
    text = any_quality_section(written(tmp_path, elsewhere, *few, *many, *on_gpu))
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == ["## tiny, a GPU, 16,384 tokens", "## tiny, a CPU, 16,384 tokens", *["## tiny, a CPU, 2,048 tokens"] * 2]
    assert text.split("## ")[1].count("0.2500") == 1 and "| 4 |" not in text.split("## ")[1]
    assert "Python 3.12's texts" in text and text.count("Python 3.11's texts") == 3
    plots = [setting.plot for setting in read_any_quality(tmp_path)]
    assert len(set(plots)) == 4 and all(f"(../plots/{plot}.svg)" in text for plot in plots)


def test_earlier_clusters_of_one_width_are_said_not_to_be_exact(tmp_path: Path) -> None:
    text = any_quality_section(written(tmp_path, row(5, "independent", "none", 0.2), row(5, "exact", "none", 0.1)))
    assert "| bits | megabytes | that width alone | that width alone, not exact |" in text and "| 5 | 50.0 | 0.1000 | 0.2000 |" in text
    assert "Lloyd" in text and "exact k-means" in text
    assert "Lloyd" not in any_quality_section(written(tmp_path, row(5, "exact", "none", 0.1)))


def test_the_plot_has_a_line_for_each_kind(tmp_path: Path) -> None:
    rows = [
        row(bits, method, kind, 1 / bits)
        for method in ("upscaled", "upscaled_4", "exact", "independent")
        for kind in ("none", "fisher")
        for bits in (3, 4)
    ]
    ((_, shown),) = read_any_quality(written(tmp_path, row(16, "", "", 0.0), *rows)).items()
    (axes,) = any_quality("tiny", shown).axes
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.get_lines()] == [[3, 4]] * 8


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    short = row(3, "upscaled", "none", 0.5)
    del short["megabytes"]
    with pytest.raises(ValueError, match="megabytes missing"):
        any_quality_section(written(tmp_path, short))
    assert any_quality_section(tmp_path / "nothing") == ""
