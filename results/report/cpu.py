"""Products on CPUs, of every kind of low-bit weight: the page of ``cpu``."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import number, table
from .rows import json_rows

FIELDS = ("gpu", "threads", "impl", "format", "x", "dtype", "m", "n", "k", "us", "others", "run", "commit")
LEAST = 1.5  # times as fast as W4A16, asked of W4A8 at ASKED_M, where the machine has VNNI
ASKED_M, ASKED_SHAPE = 32, (4096, 4096)
W4A16, ANY = "w4a16_g128", "_any"
BF16, INT8 = ("torch", "bf16"), ("torch", "int8")
X = {"codes": ", x int8", "quantized": ", x quantized"}
ABOUT = (
    "Microseconds of a call, in one process with torch's linears, in alternation. x and y are {dtype}; torch's int8 linear takes and gives "
    "fp32. Where a format's x is int8, it is quantized beforehand (x int8) or by the call (x quantized), as torch's int8 linear does."
)


def cpu_section(folder: Path) -> str:
    """The newest process's rows of each device, number of threads, shape and m; "" without rows."""
    newest: dict[tuple[Any, ...], dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for _, row in json_rows(folder, FIELDS):
        sizes = newest.setdefault((row["gpu"], row["threads"]), {})
        kept = sizes.setdefault((row["n"], row["k"], row["m"]), [])
        if kept and kept[0]["run"] != row["run"]:
            kept.clear()
        kept.append(row)
    parts = []
    for (gpu, threads), sizes in sorted(newest.items()):
        rows = [row for found in sizes.values() for row in found]
        others = max(row["others"] or 0.0 for row in rows)
        about = f"Commit {commits_of(rows)}. {ABOUT.format(dtype=rows[0]['dtype'])} Other processes had at most {others:.0%} of the cores."
        parts += [f"## {gpu}, {threads} thread{'s' * (threads > 1)}", about]
        for n, k in sorted({size[:2] for size in sizes}):
            ms = {m: {_case(row): row["us"] for row in found} for (*shape, m), found in sizes.items() if shape == [n, k]}
            parts += [f"### {n} x {k}", _times(ms), *_bars(ms) * ((n, k) == ASKED_SHAPE)]
    return "\n\n".join(parts)


def _case(row: dict[str, Any]) -> tuple[str, str, str | None]:
    return row["impl"], row["format"], row["x"]


def _times(ms: dict[int, dict[tuple[Any, ...], float]]) -> str:
    """Each format's time at every m, and how many times as fast as torch's linears it is."""
    cases = list(dict.fromkeys(case for times in ms.values() for case in times))
    lines = []
    for case in cases:
        cells = []
        for _, times in sorted(ms.items()):
            us = times.get(case)
            cells += ["-" if us is None else number(us), *(_ratio(_of(times, peer), us) for peer in (BF16, INT8))]
        lines.append([_name(case), *cells])
    header = [cell for m in sorted(ms) for cell in (f"m = {m}, µs", "against torch bf16", "against torch int8")]
    return table(["", *header], lines)


def _name(case: tuple[Any, ...]) -> str:
    impl, format, x = case
    return f"torch {format}" if impl == "torch" else f"{format}{X.get(x, '')}"


def _of(times: dict[tuple[Any, ...], float], peer: tuple[str, str]) -> float | None:
    return next((us for case, us in times.items() if case[:2] == peer), None)


def _ratio(before: float | None, us: float | None) -> str:
    return "-" if before is None or us is None else f"{before / us:.2f}x"


def _bars(ms: dict[int, dict[tuple[Any, ...], float]]) -> list[str]:
    """What was asked of this shape, beside what was found."""
    many, one, lines = ms.get(ASKED_M, {}), ms.get(1, {}), []
    base = many.get(("tilebit", W4A16, None))
    for case, us in many.items():
        if base is not None and case[1].startswith("w4a8_lqq"):
            lines.append(
                [f"{_name(case)}, m = {ASKED_M}, against {W4A16}", f"{base / us:.2f}x", f"{LEAST}x with VNNI", _said(base / us >= LEAST)]
            )
    widths = [(case[1], us) for case, us in sorted(one.items(), key=lambda item: str(item[0])) if case[1].endswith(ANY)]
    dense = _of(one, BF16)
    if dense is not None:
        lines += [[f"{name}, m = 1, against torch bf16", f"{dense / us:.2f}x", "more than 1x", _said(us < dense)] for name, us in widths]
    for (name, us), (wider, more) in pairwise(widths):
        lines.append([f"{name}, m = 1, against {wider}", f"{more / us:.2f}x", "more than 1x", _said(us < more)])
    return [table(["asked", "found", "at least", ""], lines)] if lines else []


def _said(kept: bool) -> str:
    return "met" if kept else "**missed**"
