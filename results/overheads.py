"""What a call costs beside the product itself: the last section of the results page, from the rows of ``results/overheads``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import number, short_commit, table

FIELDS = ("gpu", "run", "commit", "impl", "what", "unit", "value")


def overheads_section(folder: Path) -> str:
    """Markdown of the newest run of each device; empty without rows. Raises ``ValueError`` with file and line for a row that lacks a
    field."""
    parts = []
    for path in sorted(folder.glob("*.jsonl")):
        rows = [_row(path.name, line_number, line) for line_number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
        newest = [row for row in rows if row["run"] == rows[-1]["run"]]
        lines = [[row["impl"], row["what"], _shape(row), f"{number(float(row['value']))} {row['unit']}"] for row in newest]
        title = f"### {newest[0]['gpu']}, commit {short_commit(newest[0]['commit'])}"
        parts += [title, table(["impl", "what", "weight", "value"], lines, numbers=False)]
    return "\n\n".join(["## Overheads", *parts]) + "\n" if parts else ""


def _row(name: str, line_number: int, line: str) -> dict[str, Any]:
    row = json.loads(line)
    missing = [field for field in FIELDS if field not in row]
    if missing:
        raise ValueError(f"{name}, line {line_number}: {', '.join(missing)} missing; accepted: rows of `python -m results.measure`")
    return row


def _shape(row: dict[str, Any]) -> str:
    split = f", split-k {row['split_k']}" if row.get("split_k", 1) not in (None, 1) else ""
    return f"{row['n']} x {row['k']}{split}" if "n" in row else "-"
