"""What the pages of several studies say of a row in a cell: its shape and format, and whether a bar
was met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .markdown import short_commit


@dataclass(frozen=True, slots=True)
class Judged:
    """A figure that a bar was set for: ``what`` was measured on ``gpu`` at ``commits``, ``found``
    and ``asked`` at most, as shares."""

    what: str
    gpu: str
    commits: str
    found: float
    asked: float


def require(place: str, row: dict[str, Any], fields: Sequence[str]) -> None:
    """Raises ``ValueError`` when ``row``, which is at ``place``, lacks a field of its kind."""
    lacking = [field for field in fields if field not in row]
    if lacking:
        raise ValueError(f"{place}: {', '.join(lacking)} missing; accepted: rows as the measuring programs write them")


def against_bar(value: float, bar: float) -> str:
    """The bar and whether ``value`` keeps it."""
    return f"asked: at most {bar:.0%}, {verdict(value, bar)}"


def commits_of(rows: Iterable[dict[str, Any]]) -> str:
    """The short commits of ``rows``, sorted; "unknown" for rows that name none."""
    return ", ".join(sorted({short_commit(row.get("commit")) or "unknown" for row in rows}))


def verdict(value: float, bar: float) -> str:
    """Whether ``value`` is at most ``bar``."""
    return "met" if value <= bar else "**missed**"


def workload_cells(row: dict[str, Any]) -> list[str]:
    """Shape, m and format."""
    return [shape_text((row["n"], row["k"])), str(row["m"]), format_name(row)]


def format_name(row: dict[str, Any]) -> str:
    """The format and type of activations: "w4a16_g128_asym, float16"."""
    return f"{row['format']}_g{row['group_size']}{'' if row['symmetric'] else '_asym'}, {row['dtype']}"


def slower_by(row: dict[str, Any]) -> float:
    """The share by which a row's time is above the best of its workload."""
    return row["us"] / row["best_us"] - 1


def shape_text(shape: Any) -> str:
    """[n, k] as "n x k"."""
    return shape if isinstance(shape, str) else " x ".join(str(size) for size in shape)
