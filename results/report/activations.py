"""Quantization of activations beside a copy of as many bytes: the page of ``activations``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import number, table
from .rows import json_rows

FIELDS = ("gpu", "kind", "dtype", "m", "k", "us", "copy_us", "schedule", "run", "commit")
LEAST = 0.8  # of a copy's rate, asked at 4096 x 8192


def activations_section(folder: Path) -> str:
    """Each device's fastest schedule of every size and kind in the newest process that timed it; "" without rows."""
    newest: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for _, row in json_rows(folder, FIELDS):
        cases = newest.setdefault(row["gpu"], {})
        place = _place(row)
        if place not in cases or cases[place][0]["run"] != row["run"]:
            cases[place] = []
        cases[place].append(row)
    parts = []
    for gpu, cases in sorted(newest.items()):
        rows = [min(tried, key=lambda row: row["us"]) for _, tried in sorted(cases.items())]
        about = (
            f"Commit {commits_of(rows)}. The fastest of the schedules that were tried, in one process with a copy of as many bytes as the "
            f"quantization of a token moves; every kernel passed its gate first. Asked at 4096 x 8192: at least {LEAST:.0%} of its rate."
        )
        header = ["m x k", "what", "dtype", "schedules tried", "µs", "copy, µs", "of a copy's rate", "fastest schedule"]
        lines = [[*_case(row), str(len(cases[_place(row)])), *_times(row), _schedule(row["schedule"])] for row in rows]
        parts += [f"## {gpu}", about, table(header, lines)]
    return "\n\n".join(parts)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["m"], row["k"], row["dtype"], row["kind"]


def _case(row: dict[str, Any]) -> list[str]:
    return [f"{row['m']} x {row['k']}", row["kind"].replace("_", " "), row["dtype"]]


def _times(row: dict[str, Any]) -> list[str]:
    return [number(row["us"]), number(row["copy_us"]), f"{row['copy_us'] / row['us']:.0%}"]


def _schedule(schedule: dict[str, Any]) -> str:
    through = f", {schedule.get('min_blocks', 1)} blocks an SM through all rows" if schedule.get("num_stages", 1) == 2 else ""
    return f"{schedule['block_m']} rows, {schedule['num_warps']} warps{through}"
