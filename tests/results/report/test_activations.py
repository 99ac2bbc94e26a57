"""The page of quantized activations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.activations import activations_section


def row(us: float, run: str = "1", **fields: Any) -> dict[str, Any]:
    common = {"gpu": "a GPU", "kind": "int8_token_norm", "dtype": "float16", "m": 4096, "k": 8192, "copy_us": 20.0, "commit": "a" * 40}
    schedule = {"block_m": 2, "num_warps": 8, "num_stages": 2, "min_blocks": 3}
    return {**common, "us": us, "run": run, "schedule": schedule, **fields}


def section(tmp_path: Path, *rows: dict[str, Any]) -> str:
    (tmp_path / "a-gpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return activations_section(tmp_path)


def test_the_fastest_of_the_newest_process_is_shown(tmp_path: Path) -> None:
    text = section(tmp_path, row(10.0), row(50.0, "2"), row(25.0, "2"), row(40.0, "2", kind="int8_group"))
    assert "| 4096 x 8192 | int8 token norm | float16 | 2 | 25.0 | 20.0 | 80% | 2 rows, 8 warps, 3 blocks an SM through all rows |" in text
    assert "| 4096 x 8192 | int8 group | float16 | 1 | 40.0 | 20.0 | 50% |" in text


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    short = row(10.0)
    del short["copy_us"]
    with pytest.raises(ValueError, match="copy_us missing"):
        section(tmp_path, short)


def test_without_rows_there_is_no_page(tmp_path: Path) -> None:
    assert section(tmp_path) == ""
