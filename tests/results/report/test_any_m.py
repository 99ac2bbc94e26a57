"""The page of any m: bars that rounding does not pass, points under them counted, each pass beside its own peers, newest rows first."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from results.report.any_m import any_m_section
from results.report.rows import Row

COMMON = {"op": "gemm", "gpu": "a GPU", "commit": "0" * 40, "n": 64, "k": 64, "dtype": "float16"}
TUNED = "### Tuned at m = 100, 200, 300, 500, 700, 1500 and 3000"


def row(run: str, impl: str, m: int, us: float) -> Row:
    given: dict[str, Any] = {**COMMON, "run": run, "impl": impl, "m": m, "us": us}
    return Row(**{f.name: given.get(f.name) for f in fields(Row)})  # type: ignore[arg-type]


def page(*measured: tuple[str, int, float, float, float]) -> list[str]:
    """The page's lines, of (pass, m, ours, cuBLAS, a peer)."""
    rows = []
    for run, m, ours, cublas, peer in measured:
        rows += [row(run, "tilebit", m, ours), row(run, "cublas", m, cublas), row(run, "humming", m, peer)]
    return any_m_section({"a GPU": rows} if rows else {}).split("\n")


MEASURED = (("untuned", 100, 10.0, 10.0, 13.0), ("untuned", 300, 10.0, 10.0, 9.0), ("untuned", 1000, 10.0, 9.468, 12.0))


def test_rounding_passes_no_bar() -> None:
    lines = page(*MEASURED)
    assert "| m >= 512, cuBLAS fp16 | 1 | **0.947** | 0.95 | 0.947 | 1 |" in lines
    assert "| m > 200, fastest peer | 2 | **1.039** | 1.05 | 0.900 | 1 |" in lines


def test_each_pass_is_beside_its_own_peers_and_the_newest_rows_count() -> None:
    old, new = ("tuned", 300, 10.0, 11.0, 7.0), ("tuned later", 300, 10.0, 11.0, 12.0)
    lines = page(*MEASURED, old, ("tuned", 100, 10.0, 10.0, 14.0), ("tuned", 1000, 10.0, 11.0, 11.0), new)
    tuned = lines[lines.index(TUNED) :]
    assert "| m > 200, fastest peer | 2 | **1.149** | 1.05 | 1.100 | 0 |" in tuned
    assert "| m >= 512, cuBLAS fp16 | 1 | **1.100** | 0.95 | 1.100 | 0 |" in tuned
    assert "| 64 x 64 | 300 | 10.0 | 11.0 | 12.0 |" in tuned
    assert "| 64 x 64 | 300 | 10.0 | 10.0 | 9.00 |" in lines[: lines.index(TUNED)]


def test_no_rows_are_no_page() -> None:
    assert page() == [""]
