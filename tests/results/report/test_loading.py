"""The page of memory and first tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.loading import loading_section


def row(case: str, run: str = "1", **fields: Any) -> dict[str, Any]:
    sizes = {"weight_bytes": 80_000_000, "cache_bytes": 1_500_000, "load_peak_bytes": 90_000_000, "run_peak_bytes": 95_000_000}
    seconds = {"load_s": 1.0, "first_token_s": 2.5, "second_token_s": 3.25}
    what = {"format": None, "kv_format": None} if case == "16 bits" else {"format": "w4a16_g64", "kv_format": "kv4_channel"}
    common = {"model": "tiny", "gpu": "a CPU", "arch": "cpu", "dtype": "float16", "prompt_tokens": 64, "new_tokens": 16, "commit": "a" * 40}
    return {**common, **what, **sizes, **seconds, "case": case, "run": run, **fields}


def section(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return loading_section(folder)


def test_the_newest_process_is_shown(tmp_path: Path) -> None:
    text = section(tmp_path, row("16 bits", load_s=9.0), row("pack"), row("16 bits", "2"), row("pack", "2", first_token_s=0.5))
    assert "| 16 bits, as transformers runs it | 80.0 | 1.5 | 90.0 | 95.0 | 1.00 | 2.50 | 3.25 |" in text
    assert "| packed directory, kernels of a pack, compiling forbidden | 80.0 | 1.5 | 90.0 | 95.0 | 1.00 | 0.50 | 3.25 |" in text
    assert "9.00" not in text and "w4a16_g64 over kv4_channel" in text and "resident memory" in text
    assert "Other programs ran" in text
    assert "allocations. Load before the first case: 0.3 on 8 cores" in section(tmp_path, row("pack", arch="sm_90a", load=0.26, cores=8))


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    short = row("pack")
    del short["load_s"]
    with pytest.raises(ValueError, match="load_s missing"):
        section(tmp_path, short)
    assert loading_section(tmp_path / "nothing") == ""
