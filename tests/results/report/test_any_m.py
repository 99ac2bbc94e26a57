"""The page of any m: bars that rounding does not pass, points under them counted, and a pass without peers said to be one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from results.report.any_m import any_m_section
from results.report.rows import Row

COMMON = {"op": "gemm", "gpu": "a GPU", "commit": "0" * 40, "n": 64, "k": 64, "dtype": "float16"}


def row(run: str, impl: str, m: int, us: float) -> Row:
    given: dict[str, Any] = {**COMMON, "run": run, "impl": impl, "m": m, "us": us}
    return Row(**{f.name: given.get(f.name) for f in fields(Row)})  # type: ignore[arg-type]


def page(*measured: tuple[str, int, float, float, float | None]) -> list[str]:
    """The page's lines, of (pass, m, ours, cuBLAS, a peer)."""
    rows = []
    for run, m, ours, cublas, peer in measured:
        rows += [row(run, "tilebit", m, ours), row(run, "cublas", m, cublas)]
        rows += [row(run, "humming", m, peer)] if peer is not None else []
    return any_m_section({"made up": rows}).split("\n")


MEASURED = (("untuned", 100, 10.0, 10.0, 13.0), ("untuned", 300, 10.0, 10.0, 9.0), ("untuned", 1000, 10.0, 9.468, 12.0))


def test_rounding_passes_no_bar() -> None:
    lines = page(*MEASURED)
    assert "| m >= 512, cuBLAS fp16 | 1 | **0.947** | 0.95 | 0.947 | 1 |" in lines
    assert "| m > 200, fastest peer | 2 | **1.039** | 1.05 | 0.900 | 1 |" in lines


def test_a_pass_without_peers_is_beside_them_both_ways() -> None:
    lines = page(*MEASURED, ("tuned", 100, 10.0, 10.0, None), ("tuned", 300, 10.0, 11.0, None), ("tuned", 1000, 10.0, 11.0, None))
    tuned = lines[lines.index("### Tuned at m = 100, 200, 300, 500, 700, 1500 and 3000") :]
    assert any("No peer ran in this pass" in line and "1.10 to 1.16 above" in line for line in tuned)
    assert "| m > 200, fastest peer, as timed | 2 | **1.039** | 1.05 | 0.900 | 1 |" in tuned
    assert "| m > 200, fastest peer, scaled | 2 | **1.175** | 1.05 | 0.990 | 0 |" in tuned
    assert "| m >= 512, cuBLAS fp16 | 1 | **1.100** | 0.95 | 1.100 | 0 |" in tuned, "its own, in the same pass"
    assert "| 64 x 64 | 300 | 10.0 | 10.0 | 9.00 | 10.0 | 11.0 |" in tuned


def test_no_rows_are_no_page() -> None:
    assert page() == [""]
