"""Time as a function of m, and shapes that are a multiple of nothing: rows of ``sweep``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import Judged, against_bar, commits_of, format_name, require, shape_text, verdict, workload_cells
from .markdown import number, table
from .rows import json_rows

SWEEP_FIELDS = ("gpu", "run", "kind", "n", "k", "m", "format", "group_size", "symmetric", "dtype", "us")
ODD_FIELDS = ("per", "ratio", "neighbour")
SWEEP_WORST = 0.15  # what is asked: so much above the envelope, and so much more time per byte or operation than the neighbour


def envelope(times: Mapping[int, float]) -> dict[int, int]:
    """For each m of ``times`` (its µs) the m' >= m of the least time, the smaller of two equal
    ones, in ascending order: a call of m rows could be padded to m'."""
    return {m: min((other for other in sorted(times) if other >= m), key=lambda other: times[other]) for m in sorted(times)}


Swept = dict[str, list[list[dict[str, Any]]]]
Odd = dict[str, list[dict[str, Any]]]


def read_sweep(folder: Path) -> tuple[Swept, Odd]:
    """By device: the rows of the newest run of each swept shape, and the newest row of each odd
    shape. Raises ``ValueError`` with file and line for a row that lacks a field."""
    swept: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    odd: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for place, row in json_rows(folder, SWEEP_FIELDS):
        shape = row["n"], row["k"], format_name(row)
        if row["kind"] == "odd":
            require(place, row, ODD_FIELDS)
            odd.setdefault(row["gpu"], {})[*shape, row["m"]] = row
        else:
            swept.setdefault(row["gpu"], {}).setdefault(shape, []).append(row)
    newest = {gpu: [[r for r in rows if r["run"] == rows[-1]["run"]] for rows in shapes.values()] for gpu, shapes in swept.items()}
    return newest, {gpu: list(rows.values()) for gpu, rows in odd.items()}


def judged_sweep(folder: Path) -> list[Judged]:
    """How far the worst point of the sweep and the worst odd shape are from what is asked."""
    swept, odd = read_sweep(folder)
    found = []
    for gpu, shapes in sorted(swept.items()):
        worst = max(max(_above(rows).values()) for rows in shapes)
        commits = commits_of(row for rows in shapes for row in rows)
        found.append(Judged("any m over the best of all larger m, worst point", gpu, commits, worst, SWEEP_WORST))
    for gpu, rows in sorted(odd.items()):
        worst = max(row["ratio"] - 1 for row in rows)
        what = "odd shape over a listed one, time per byte or operation, worst shape"
        found.append(Judged(what, gpu, commits_of(rows), worst, SWEEP_WORST))
    return found


def _above(rows: list[dict[str, Any]]) -> dict[int, float]:
    """For each m of one swept shape the share by which its time is above the envelope."""
    times = {row["m"]: row["us"] for row in rows}
    return {m: times[m] / times[least] - 1 for m, least in envelope(times).items()}


def sweep_section(folder: Path) -> str:
    """How far time as a function of m lies above its envelope, of the newest run of each shape, and
    odd shapes beside their nearest listed neighbour, the newest row of each; "" without rows.
    Raises ``ValueError`` with file and line for a row that lacks a field."""
    swept, odd = read_sweep(folder)
    parts = []
    for gpu in sorted(swept.keys() | odd.keys()):
        parts.append(f"## {gpu}")
        if gpu in swept:
            parts += _sweeps(swept[gpu])
        if gpu in odd:
            parts += _odd(odd[gpu])
    return "\n\n".join(parts)


def _sweeps(shapes: list[list[dict[str, Any]]]) -> list[str]:
    """A summary in words and the table of the swept shapes, each a list of its rows."""
    lines, worst = [], []
    for rows in shapes:
        times = {row["m"]: row["us"] for row in rows}
        least = envelope(times)
        above = _above(rows)
        m = max(above, key=lambda m: above[m])
        worst.append(above[m])
        shape, cell = shape_text((rows[0]["n"], rows[0]["k"])), f"{number(times[least[m]])} (m = {least[m]})"
        found = str(len(times)), f"{above[m]:.1%}", str(m), number(times[m]), cell, verdict(above[m], SWEEP_WORST)
        lines.append([shape, format_name(rows[0]), *found])
    said = (
        "Time as a function of m: at the border of every m-bucket, the first m after it and one inside, timed in alternation. A call of m "
        "rows could be padded to any m' above it, so that the least time of any m' from m on is m's envelope. Above it at worst by "
        f"**{max(worst):.1%}** ({against_bar(max(worst), SWEEP_WORST)})."
    )
    header = ["n x k", "format", "m measured", "worst above the envelope", "at m", "µs", "envelope µs", f"at most {SWEEP_WORST:.0%}"]
    return [said, table(header, lines)]


def _odd(rows: list[dict[str, Any]]) -> list[str]:
    """A summary in words and the table of odd shapes."""
    losses = [row["ratio"] - 1 for row in rows]
    said = (
        "Shapes that are a multiple of nothing, each beside the nearest shape of the tables (a factor of two in n or in k is one unit of "
        "distance), timed side by side: how much more time each takes per byte it must move (small m) or per operation (large m). At worst "
        f"**{max(losses):.1%}** ({against_bar(max(losses), SWEEP_WORST)})."
    )
    lines = []
    for row, loss in zip(rows, losses, strict=True):
        near = row["neighbour"]
        times = number(row["us"]), shape_text((near["n"], near["k"])), number(near["us"])
        lines.append([*workload_cells(row), *times, row["per"], f"{loss:+.1%}", verdict(loss, SWEEP_WORST)])
    header = ["n x k", "m", "format", "µs", "neighbour", "its µs", "time per", "against it", f"at most {SWEEP_WORST:.0%}"]
    return [said, table(header, lines)]
