"""The page of products of int8 activations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from results.report.formats import points_of
from results.report.int8 import int8_section
from results.report.int8_plot import int8_speed
from results.report.rows import Row


def row(impl: str, format: str, us: float, n: int = 4096, run: str = "1") -> Row:
    common = {"op": "gemm", "dtype": "float16", "m": 64, "k": 4096, "n": n, "run": run, "gpu": "a GPU", "date": "", "commit": "a" * 40}
    given: dict[str, Any] = {**common, "impl": impl, "format": format, "us": us, "group_size": 128, "symmetric": True}
    return Row(**{f.name: given.get(f.name) for f in fields(Row)})  # type: ignore[arg-type]


def test_each_kind_of_kernel_is_compared_by_its_fastest() -> None:
    rows = [row("tilebit", "w4a8_lqq", 10.0), row("tilebit", "w4a8_lqq", 10.0, n=8192)]
    rows += [row("humming", "w4a8_int8", 20.0), row("vllm", "w4a8_fp8", 12.0), row("humming", "w4a8_fp8", 15.0, n=8192)]
    rows += [row("vllm", "w8a8_int8", 9.0), row("tilebit", "w4a16", 18.0), row("marlin", "w4a16", 5.0), row("cublas", "fp16", 30.0)]
    lines = int8_section({"a GPU": rows}).split("\n")
    assert "| tilebit w4a8_lqq_g128 | against fastest W4A8 kernel here | **1.34** (1.20 of 2) | - | - |" in lines
    assert "| tilebit w4a8_lqq_g128 | against W8A8 of int8 | **0.90** (0.90 of 1) | - | - |" in lines
    assert "| tilebit w4a8_lqq_g128 | against tilebit W4A16 | **1.80** (1.80 of 1) | - | - |" in lines
    assert "| tilebit w4a8_lqq_g128 | against cuBLAS, fp16 | **3.00** (3.00 of 1) | - | - |" in lines
    assert not any("W8A8 of fp8" in line for line in lines)


def test_times_of_one_process_are_compared() -> None:
    rows = [row("tilebit", "w4a8_lqq", 10.0), row("humming", "w4a8_int8", 12.0), row("vllm", "w4a8_fp8", 13.0), row("cublas", "fp16", 20.0)]
    rows += [row("tilebit", "w4a8_lqq", 8.0, run="2"), row("humming", "w4a8_int8", 10.0, run="2"), row("cublas", "fp16", 18.0, run="3")]
    lines = int8_section({"a GPU": rows}).split("\n")
    assert "| tilebit w4a8_lqq_g128 | against fastest W4A8 kernel here | **1.25** (1.25 of 1) | - | - |" in lines
    assert "| tilebit w4a8_lqq_g128 | against cuBLAS, fp16 | **2.00** (2.00 of 1) | - | - |" in lines
    rows += [row("humming", "w4a8_int8", 5.0, run="4"), row("vllm", "w4a8_fp8", 8.8, run="2")]
    lines = int8_section({"a GPU": rows}).split("\n")
    assert "| tilebit w4a8_lqq_g128 | against fastest W4A8 kernel here | **1.10** (1.10 of 1) | - | - |" in lines


def test_without_rows_there_is_no_page() -> None:
    assert int8_section({}) == int8_section({"a GPU": []}) == ""


def test_the_plot_shows_the_fastest_of_each_kind_over_16_bits() -> None:
    rows = [row("tilebit", "w4a8_lqq", 10.0), row("vllm", "w4a8_fp8", 12.0), row("humming", "w4a8_int8", 20.0), row("cublas", "fp16", 30.0)]
    rows += [row("tilebit", "w4a8_lqq", 10.0, n=8192)]  # nothing to compare it with
    figure = int8_speed("a GPU", points_of(rows))
    lines = {line.get_label(): list(line.get_ydata()) for axes in figure.axes for line in axes.get_lines()}  # type: ignore[arg-type]
    assert lines == {"tilebit w4a8_lqq_g128": [3.0], "fastest W4A8 of others": [2.5], "cuBLAS fp16": [1.0]}
