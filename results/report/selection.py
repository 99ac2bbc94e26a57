"""How well ``select`` and the tuner choose: rows of ``selection``."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from .cells import Judged, against_bar, commits_of, format_name, require, slower_by, workload_cells
from .markdown import number, table
from .rows import json_rows

SELECTION_FIELDS = ("gpu", "kind", "n", "k", "m", "format", "group_size", "symmetric", "dtype", "best_us", "candidates", "measured")
FRESH_FIELDS, SCAN_FIELDS = ("us", "source"), ("tuned_us", "legal", "scanned", "failed", "share")
# What is asked of the choices: slower by at most so much, with at most such a share of what the
# scan could time.
FRESH_MEDIAN, FRESH_WORST, SCAN_WORST = 0.10, 0.25, 0.03
SCAN_SHARE = 0.25


def read_selection(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The newest row of each workload, by device and kind ("fresh", "exhaustive"). Raises
    ``ValueError`` with file and line for a row that lacks a field."""
    devices: dict[str, dict[str, dict[tuple[Any, ...], dict[str, Any]]]] = {}
    for place, row in json_rows(folder, SELECTION_FIELDS):
        require(place, row, FRESH_FIELDS if row["kind"] == "fresh" else SCAN_FIELDS)
        of_kind = devices.setdefault(row["gpu"], {}).setdefault(row["kind"], {})
        of_kind[row["n"], row["k"], row["m"], format_name(row)] = row
    return {gpu: {kind: list(rows.values()) for kind, rows in kinds.items()} for gpu, kinds in sorted(devices.items())}


def judged_selection(folder: Path) -> list[Judged]:
    """What the choices lose at worst, against what is asked of them."""
    found = []
    for gpu, kinds in read_selection(folder).items():
        if fresh := kinds.get("fresh"):
            losses, commit = list(map(slower_by, fresh)), commits_of(fresh)
            found.append(Judged("untuned choice for a new shape over the tuned one, median", gpu, commit, median(losses), FRESH_MEDIAN))
            found.append(Judged("the same, worst shape", gpu, commit, max(losses), FRESH_WORST))
        if scans := kinds.get("exhaustive"):
            worst, commit = max(row["tuned_us"] / row["best_us"] - 1 for row in scans), commits_of(scans)
            found.append(Judged("tuned choice over the best of a full scan, worst workload", gpu, commit, worst, SCAN_WORST))
    return found


def selection_section(folder: Path) -> str:
    """What ``select`` gives for shapes without a record against the tuner's choice, and that
    against the best of a scan, the newest row of each workload; "" without rows. Raises
    ``ValueError`` with file and line for a row that lacks a field."""
    parts = []
    for gpu, kinds in read_selection(folder).items():
        parts.append(f"## {gpu}")
        if "fresh" in kinds:
            parts += _fresh(kinds["fresh"])
        if "exhaustive" in kinds:
            parts += _scans(kinds["exhaustive"])
    return "\n\n".join(parts)


def _fresh(rows: list[dict[str, Any]]) -> list[str]:
    """A summary in words and the table of workloads without a record."""
    losses = list(map(slower_by, rows))
    said = (
        f"Without a record: what `select` gives for workloads of shapes that were in no record ({len(rows)}), beside the tuner's "
        f"choice, timed side by side. Slower in the median by **{median(losses):.1%}** ({against_bar(median(losses), FRESH_MEDIAN)}), "
        f"in the worst case by **{max(losses):.1%}** ({against_bar(max(losses), FRESH_WORST)})."
    )
    lines = []
    for row, loss in zip(rows, losses, strict=True):
        times = row["source"], number(row["us"]), number(row["best_us"]), f"{loss:.1%}"
        lines.append([*workload_cells(row), *times, f"{row['measured']} of {row['candidates']}"])
    return [said, table(["n x k", "m", "format", "chosen by", "µs", "tuned µs", "slower by", "tuner measured"], lines)]


def _scans(rows: list[dict[str, Any]]) -> list[str]:
    """A summary in words and the table of scanned workloads."""
    losses, shares = [row["tuned_us"] / row["best_us"] - 1 for row in rows], [row["share"] for row in rows]
    said = (
        f"Against a scan: the tuner's choice beside the fastest of a scan of all that the rules accept ({len(rows)} workloads). Where they "
        "accept too much, the scan takes the rules' own candidates, the cost model's fastest of each tile shape, and an even draw (`rule` "
        f"of the rows). Slower at worst by **{max(losses):.1%}** ({against_bar(max(losses), SCAN_WORST)}), with at most "
        f"**{max(shares):.1%}** of the scan's measurements ({against_bar(max(shares), SCAN_SHARE)})."
    )
    lines = []
    for row, loss, share in zip(rows, losses, shares, strict=True):
        scan = f"{row['legal']:,}", f"{row['scanned']} ({row['failed']} failed)"
        times = number(row["best_us"]), number(row["tuned_us"]), f"{loss:.1%}"
        lines.append([*workload_cells(row), *scan, *times, f"{row['measured']} of {row['candidates']}", f"{share:.1%}"])
    header = ["n x k", "m", "format", "legal", "scanned", "best µs", "tuned µs", "slower by", "tuner measured", "of the scan"]
    return [said, table(header, lines)]
