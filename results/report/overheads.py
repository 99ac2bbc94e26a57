"""What a call costs beside the product itself: the page of ``overheads``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .markdown import number, short_commit, table
from .rows import json_rows

FIELDS = ("gpu", "run", "commit", "impl", "what", "unit", "value")


def overheads_section(folder: Path) -> str:
    """Markdown of the newest run of each device; empty without rows. Raises ``ValueError`` with
    file and line for a row that lacks a field."""
    devices: dict[str, list[dict[str, Any]]] = {}
    for _, row in json_rows(folder, FIELDS):
        devices.setdefault(row["gpu"], []).append(row)
    parts = []
    for gpu, rows in devices.items():
        newest = [row for row in rows if row["run"] == rows[-1]["run"]]
        lines = [[row["impl"], row["what"], _shape(row), f"{number(float(row['value']))} {row['unit']}"] for row in newest]
        title = f"## {gpu}, commit {short_commit(newest[0]['commit'])}"
        parts += [title, table(["impl", "what", "weight", "value"], lines, numbers=False)]
    return "\n\n".join(parts)


def _shape(row: dict[str, Any]) -> str:
    split = f", split-k {row['split_k']}" if row.get("split_k", 1) not in (None, 1) else ""
    return f"{row['n']} x {row['k']}{split}" if "n" in row else "-"
