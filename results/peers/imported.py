"""Rows of others' harnesses on their way into results/: appended once, one file per device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilebit.command.bench import write_rows
from tilebit.schedules.target import file_stem


def append_by_device(tool: str, folder: Path, rows: Sequence[dict[str, Any]], key: Sequence[str], left_out: Counter[str]) -> None:
    """Append to ``folder`` those of ``rows`` whose values of ``key`` their device's file does not
    hold, and say in the name of ``tool`` how many they were and how many were ``left_out`` why."""
    for gpu in sorted({row["gpu"] for row in rows}):
        path = folder / f"{file_stem(gpu)}.jsonl"
        mine = [row for row in rows if row["gpu"] == gpu]
        print(f"{tool}: {_append_new(path, mine, key)} of {len(mine)} rows appended to {path}")
    for reason, count in sorted(left_out.items()):
        print(f"{tool}: {count} rows left out: {reason}")


def _append_new(path: Path, rows: list[dict[str, Any]], key: Sequence[str]) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    held = {tuple(row.get(name) for name in key) for row in map(json.loads, filter(str.strip, lines))}
    new = [row for row in rows if tuple(row[name] for name in key) not in held]
    write_rows(path, new)
    return len(new)
