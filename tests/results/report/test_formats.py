"""Pages of 4-bit floats: ratios against the first format, points under what is asked, newest rows, and peers of the same format alone."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from results.report.formats import floats_section, formats_section
from results.report.rows import Row


def measured(n: int, m: int, us: float, floats: float, commit: str) -> dict[str, Any]:
    formats = [{"format": "w4a16_g32", "us": us}, {"format": "w4a16_mxfp4", "us": floats}]
    return {"gpu": "a GPU", "n": n, "k": 64, "m": m, "dtype": "float16", "commit": commit, "formats": formats}


def test_formats_are_beside_the_first_of_their_newest_row(tmp_path: Path) -> None:
    rows = [measured(64, 1, 10.0, 20.0, "a" * 40), measured(64, 1, 9.5, 10.0, "b" * 40), measured(128, 1, 9.6, 10.0, "b" * 40)]
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = formats_section(tmp_path).split("\n")
    assert "| w4a16_mxfp4, m <= 16 | 2 | 0.955 | 0.950 | 1 |" in lines, "0.96 itself is not under 0.96"
    assert "| 64 x 64 | 1 | 9.50 | 10.0 (0.95) |" in lines
    assert not any("a" * 12 in line for line in lines), "an older row's commit"


def test_no_rows_are_no_page(tmp_path: Path) -> None:
    assert formats_section(tmp_path) == "" and floats_section({}) == ""


def row(impl: str, format: str, us: float, m: int = 1) -> Row:
    common = {
        "op": "gemm",
        "gpu": "a GPU",
        "commit": "c" * 40,
        "n": 64,
        "k": 64,
        "dtype": "bfloat16",
        "run": "1",
        "date": "",
        "group_size": 32,
    }
    given: dict[str, Any] = {**common, "impl": impl, "format": format, "us": us, "m": m}
    return Row(**{f.name: given.get(f.name) for f in fields(Row)})  # type: ignore[arg-type]


def test_peers_of_another_format_are_no_comparison() -> None:
    rows = [row("tilebit", "w4a16_mxfp4", 10.0), row("marlin", "w4a16_mxfp4", 15.0), row("marlin", "w4a16_nvfp4", 5.0)]
    lines = floats_section({"a GPU": rows}).split("\n")
    assert "| w4a16_mxfp4, m = 1, against marlin | 1 | **1.50** | 1.50 |" in lines
    assert not any("nvfp4, m = 1, against" in line for line in lines)
