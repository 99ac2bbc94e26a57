"""How much slower the schedules are that are chosen without a record: rows of ``ranker``."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from .cells import shape_text, slower_by
from .markdown import details, number, table
from .rows import json_rows

RANKER_FIELDS = ("shape", "m", "source", "us", "best_us")


def ranker_section(folder: Path) -> str:
    """How much slower the schedules are that are chosen without a record of their workload; ""
    without rows."""
    by_source: dict[str, list[dict[str, Any]]] = {}
    for _, row in json_rows(folder, RANKER_FIELDS):
        by_source.setdefault(row["source"], []).append(row)
    if not by_source:
        return ""
    lines, points = [], []
    for source, rows in sorted(by_source.items(), key=lambda item: median(map(slower_by, item[1]))):
        losses = list(map(slower_by, rows))
        lines.append([source, str(len(rows)), f"{median(losses):.1%}", f"{max(losses):.1%}"])
        for row in rows:
            times = number(row["us"]), number(row["best_us"]), f"{slower_by(row):.1%}"
            points.append([shape_text(row["shape"]), str(row["m"]), source, *times])
    about = (
        "Each workload's records are left out in turn, and a schedule is chosen for it by each source: how much slower it is than the best "
        "schedule that was measured for this workload."
    )
    folded = details("Every workload", table(["n x k", "m", "source", "µs", "best µs", "slower by"], points))
    return "\n\n".join([about, table(["source", "workloads", "median", "worst"], lines), folded])
