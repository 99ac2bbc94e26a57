"""The page of decode steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.step import step_section


def row(impl: str, us: float, run: str = "1", **fields: Any) -> dict[str, Any]:
    common = {"gpu": "a GPU", "format": "w4a16_g128", "kv_format": "kv16", "batch": 16, "kv_len": 4096, "layers": 32, "rel_err": 0.001}
    return {**common, "impl": impl, "us": us, "graph_us": us - 100.0, "run": run, "commit": "a" * 40, **fields}


def section(tmp_path: Path, *rows: dict[str, Any]) -> str:
    (tmp_path / "a-gpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return step_section(tmp_path)


def test_each_step_stands_beside_its_peers_of_the_newest_process(tmp_path: Path) -> None:
    old = row("tilebit", 9000.0, kv_format="kv4_channel"), row("vllm_kernels", 9000.0), row("tilebit", 4500.0, kv_format="kv8_channel")
    new = (
        row("tilebit", 2000.0, "2", kv_format="kv4_channel"),
        row("cublas_fa3", 6000.0, "2", format="fp16"),
        row("vllm_kernels", 5000.0, "2"),
    )
    text = section(tmp_path, *old, *new)
    assert "| 16 | 4096 | 32 | tilebit | w4a16_g128 | kv4_channel | as shipped | 2.00 | 1.90 | 3.00x | 2.50x | aaaaaaa |" in text
    assert "| 16 | 4096 | 32 | cuBLAS, FA3 | fp16 | kv16 | - | 6.00 | - | - | - | aaaaaaa |" in text
    assert "9.00" not in text
    assert "| kv8_channel | as shipped | 4.50 | 4.40 | - | 2.00x |" in text, (
        "a cache that the newer process did not time, beside its own peers"
    )
    assert "| 1 | 4096 | 32 | tilebit | w4a16_g128 | kv16 | as shipped | 2.00 | 1.90 | - | - | aaaaaaa |" in section(
        tmp_path, *new, row("tilebit", 2000.0, "3", batch=1)
    )


def test_a_process_without_peers_replaces_its_like_alone(tmp_path: Path) -> None:
    """Ratios stay those of one process; steps tuned where they run are kinds of their own."""
    beside = row("tilebit", 2000.0, "2"), row("vllm_kernels", 5000.0, "2")
    later = row("tilebit", 1990.0, "3"), row("tilebit", 1900.0, "4"), row("tilebit", 1800.0, "5", tuned="step")
    text = section(tmp_path, row("tilebit", 2100.0, "1"), *beside, *later)
    assert "2.10" not in text, "of a process without peers, before one with them"
    assert "| as shipped | 2.00 | 1.90 | - | 2.50x |" in text and "| as shipped | 1.90 | 1.80 | - | - |" in text
    assert "| in steps | 1.80 | 1.70 | - | - |" in text and "1.99" not in text


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    short = row("tilebit", 10.0)
    del short["graph_us"]
    with pytest.raises(ValueError, match="graph_us missing"):
        section(tmp_path, short)


def test_without_rows_there_is_no_page(tmp_path: Path) -> None:
    assert section(tmp_path) == ""


def test_tokens_of_generate_stand_beside_their_graph(tmp_path: Path) -> None:
    """The newest of each; steps are not mixed with them."""
    fields = {"op": "generate", "graph_us": 2000.0, "rel_err_accepted": 0.02}
    old, new = (row("tilebit", us, run, **fields) for us, run in ((3000.0, "1"), (2200.0, "2")))
    text = section(tmp_path, old, new, row("tilebit", 2100.0, "3", op="step"))
    steps, tokens = text.split("### In generate")
    assert "| as shipped | 2.10 | 2.00 | - | - |" in steps and "2.20" not in steps
    assert "| 16 | 4096 | 32 | w4a16_g128 | kv16 | 2.20 | 2.00 | 10% | 0.1% (of 2%) | aaaaaaa |" in tokens and "3.00" not in tokens
    alone = section(tmp_path, new)
    assert alone.startswith("## a GPU\n\n### In generate") and alone.count("| 16 |") == 1
