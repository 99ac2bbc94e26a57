"""The page of any precision, and the program that measures it, here on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.measure import any_precision
from results.report.any_precision import any_precision_section


def pair(us: float, dense: float, bits: int = 3, **fields: Any) -> list[dict[str, Any]]:
    common = {"gpu": "a GPU", "m": 1, "n": 64, "k": 128, "rel_err": 1e-4, "run": "1", "commit": "a" * 40, **fields}
    return [
        {**common, "impl": "tilebit", "format": f"w{bits}a16_any", "us": us},
        {**common, "impl": "cublas", "format": "fp16", "us": dense},
    ]


def section(tmp_path: Path, *rows: dict[str, Any]) -> str:
    (tmp_path / "a-gpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return any_precision_section(tmp_path)


def test_each_width_stands_beside_16_bits_of_its_process(tmp_path: Path) -> None:
    text = section(tmp_path, *pair(50.0, 60.0), *pair(10.0, 40.0), *pair(10.0, 90.0, n=96), *pair(20.0, 40.0, 8))
    assert "| w3a16_any | 6.00x of 2 | 3.40x |" in text and "| w8a16_any | 2.00x of 1 | 1.55x |" in text
    assert "| 64 x 128 | 1 | 10.0 (4.00x) | 20.0 (2.00x) |" in text and "| 96 x 128 | 1 | 10.0 (9.00x) | - |" in text


def test_separate_models_have_commits_of_their_own(tmp_path: Path) -> None:
    """They are timed beside the store, perhaps by earlier code."""
    apart = pair(20.0, 40.0, commit="b" * 40)
    apart[0]["format"] = "w4a16"
    assert "Commit aaaaaaaaaaaa (of separate models, w4a16, bbbbbbbbbbbb)." in section(tmp_path, *pair(10.0, 40.0), *apart)
    assert "Commit aaaaaaaaaaaa. Microseconds" in section(tmp_path, *pair(10.0, 40.0))


def test_memory_of_a_family_is_the_papers(tmp_path: Path) -> None:
    lines = [line.split("|")[2:-1] for line in section(tmp_path, *pair(50.0, 60.0)).splitlines() if line.startswith("| 3, ")]
    assert len(lines) == 5
    for one, apart, _, paper_one, paper_apart, _ in (map(lambda cell: cell.strip(" x"), line) for line in lines):
        assert abs(float(one) - float(paper_one)) < 0.11 and 1 < float(apart) / float(paper_apart) < 1.06  # which leave codebooks out


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    rows = pair(1.0, 2.0)
    del rows[0]["rel_err"]
    with pytest.raises(ValueError, match="rel_err missing"):
        section(tmp_path, *rows)
    assert section(tmp_path) == ""


@pytest.mark.slow
def test_it_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--ms", "1", "--widths", "3", "--out", str(tmp_path)]
    any_precision.main([*options, "--shapes", "64x128", "--beside", "w4a16_g128"])
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["impl"] for row in rows][:2] == ["tilebit", "torch"]
    assert [row["format"] for row in rows if row["impl"] == "tilebit"] == ["w3a16_any", "w4a16"]
    assert "| 64 x 128 | 1 |" in any_precision_section(tmp_path)
    any_precision.main([*options, "--shapes", "64x128", "--budget", "0"])
    assert "64 x 128 is left out: 0 s have passed" in capsys.readouterr().out
