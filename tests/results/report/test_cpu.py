"""The page of products on CPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from results.report.cpu import cpu_section


def row(format: str, us: float, m: int = 32, impl: str = "tilebit", x: str | None = None, **fields: Any) -> dict[str, Any]:
    common = {"gpu": "a CPU", "threads": 2, "dtype": "bfloat16", "n": 4096, "k": 4096, "others": 0.01, "run": "1", "commit": "a" * 40}
    return {**common, "impl": impl, "format": format, "m": m, "x": x, "us": us, **fields}


def section(tmp_path: Path, *rows: dict[str, Any]) -> str:
    (tmp_path / "a-cpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return cpu_section(tmp_path)


def test_ratios_are_to_torch_in_the_same_process(tmp_path: Path) -> None:
    text = section(
        tmp_path,
        row("w4a16_g128", 900.0, run="0"),
        row("w4a16_g128", 300.0), row("w4a8_lqq_g64", 100.0, x="codes"), row("w4a8_lqq_g64", 250.0, x="quantized"),
        row("bf16", 200.0, impl="torch"), row("int8", 150.0, impl="torch", x="quantized"), row("w4a16_g128", 50.0, 1),
    )  # fmt: skip
    assert "## a CPU, 2 threads" in text and "at most 1% of the cores" in text
    assert "| w4a8_lqq_g64, x int8 | - | - | - | 100 | 2.00x | 1.50x |" in text
    assert "| w4a16_g128 | 50.0 | - | - | 300 | 0.67x | 0.50x |" in text
    assert "| w4a8_lqq_g64, x int8, m = 32, against w4a16_g128 | 3.00x | 1.5x with VNNI | met |" in text
    assert "| w4a8_lqq_g64, x quantized, m = 32, against w4a16_g128 | 1.20x | 1.5x with VNNI | **missed** |" in text


def test_each_width_is_asked_to_beat_16_bits_and_the_next(tmp_path: Path) -> None:
    text = section(tmp_path, row("w4a16_any", 80.0, 1), row("w3a16_any", 40.0, 1), row("bf16", 60.0, 1, impl="torch"))
    assert "| w3a16_any, m = 1, against torch bf16 | 1.50x | more than 1x | met |" in text
    assert "| w4a16_any, m = 1, against torch bf16 | 0.75x | more than 1x | **missed** |" in text
    assert "| w3a16_any, m = 1, against w4a16_any | 2.00x | more than 1x | met |" in text


def test_bars_are_of_one_shape(tmp_path: Path) -> None:
    assert "asked" not in section(tmp_path, row("w4a16_g128", 300.0, n=64), row("w4a8_lqq_g64", 100.0, x="codes", n=64))


def test_a_row_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    short = row("w4a16_g128", 10.0)
    del short["others"]
    with pytest.raises(ValueError, match="others missing"):
        section(tmp_path, short)
    assert section(tmp_path) == ""
