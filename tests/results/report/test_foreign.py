"""The page of directories that other quantizers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.foreign import foreign_section, limits, within


def row(scheme: str, tool: str = "llm-compressor", **fields: Any) -> dict[str, Any]:
    what = {"loaded": {"w4a16_g128": 14}, "weight_error": 2e-4, "logit_error": 3e-3, "dtype": "float16"}
    versions = {"llmcompressor": "0.14.0", "torch": "2.13.0"}
    where = {"gpu": "a CPU", "run": "1", "commit": "a" * 40, "date": "2026-11-30"}
    return {"tool": tool, "scheme": scheme, "versions": versions, **what, **where, **fields}


def section(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return foreign_section(folder)


def test_the_newest_row_of_each_scheme_and_release(tmp_path: Path) -> None:
    older: dict[str, Any] = {"versions": {"llmcompressor": "0.11.0", "torch": "2.13.0"}}
    text = section(tmp_path, row("W4A16", logit_error=0.5), row("W4A16"), row("W4A16", **older), row("g128", "autoawq", weight_error=0.2))
    assert "| W4A16 | float16 | 14 `w4a16_g128` | 2.0e-04 | 3.0e-03 | as rounded |" in text
    assert "| g128 | float16 | 14 `w4a16_g128` | 2.0e-01 | 3.0e-03 | **differs** |" in text
    assert text.count("| W4A16 |") == 2 and "5.0e-01" not in text
    assert "llmcompressor 0.11.0, torch 2.13.0." in text and "llmcompressor 0.14.0, torch 2.13.0." in text
    assert foreign_section(tmp_path / "nothing") == ""


def test_what_rounding_makes_depends_on_the_dtype_and_on_x() -> None:
    assert limits(row("W4A16")) == (1e-3, 0.01) and limits(row("NVFP4A16", dtype="bfloat16")) == (8e-3, 0.08)
    assert limits(row("W8A8", loaded={"w4a16_g128": 1, "w8a8_channel": 13})) == (1e-3, 0.05)
    assert within(row("W8A8", loaded={"w8a8_channel": 14}, logit_error=0.04)) and not within(row("W4A16", logit_error=0.04))
    assert not within(row("W4A16", weight_error=float("nan")))


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    short = row("W4A16")
    del short["loaded"]
    with pytest.raises(ValueError, match="loaded missing"):
        section(tmp_path, short)
