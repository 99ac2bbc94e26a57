"""The page of products that were each timed alone."""

from __future__ import annotations

from results.report.int8_alone import int8_alone_section
from results.report.rows import Row


def row(impl: str, format: str, us: float, n: int = 4096, run: str = "1") -> Row:
    common = {"op": "gemm", "dtype": "float16", "m": 1024, "k": 4096, "n": n, "run": run, "gpu": "a GPU", "date": "", "commit": "a" * 40}
    return Row.from_json({**common, "impl": impl, "format": format, "us": us, "group_size": 128, "symmetric": True})


def test_alone_and_in_turn_stand_side_by_side() -> None:
    """Of the points that were timed alone; without one of them in turn there is no figure."""
    alone = [row("tilebit", "w4a8_lqq", 10.0), row("vllm", "w8a8_int8", 12.0), row("cublas", "fp16", 20.0)]
    alone += [row("tilebit", "w4a8_lqq", 10.0, n=8192), row("vllm", "w8a8_int8", 11.0, n=8192)]
    turns = [row("tilebit", "w4a8_lqq", 10.0, run="2"), row("vllm", "w8a8_int8", 9.0, run="2"), row("cublas", "fp16", 18.0, run="2")]
    lines = int8_alone_section({"a GPU": alone}, {"a GPU": turns}).split("\n")
    assert "| tilebit w4a8_lqq_g128 | against W8A8 of int8 | 2 | **1.15** (1.10) | - |" in lines
    assert "| tilebit w4a8_lqq_g128 | against cuBLAS, fp16 | 1 | **2.00** (2.00) | **1.80** (1.80) |" in lines
    turns += [row("tilebit", "w4a8_lqq", 10.0, n=8192, run="2"), row("vllm", "w8a8_int8", 8.0, n=8192, run="2")]
    lines = int8_alone_section({"a GPU": alone}, {"a GPU": turns}).split("\n")
    assert "| tilebit w4a8_lqq_g128 | against W8A8 of int8 | 2 | **1.15** (1.10) | **0.85** (0.80) |" in lines
    turns += [row("humming", "w8a8_int8", 4.0, run="2")]  # which was not timed alone
    assert int8_alone_section({"a GPU": alone}, {"a GPU": turns}).split("\n") == lines
    assert not any("fp8" in line for line in lines)


def test_without_rows_there_is_no_page() -> None:
    assert int8_alone_section({}, {}) == int8_alone_section({"a GPU": []}, {}) == ""
