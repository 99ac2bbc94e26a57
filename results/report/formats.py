"""4-bit floats beside integers of as many bits, and beside other kernels of them: the pages of
``formats`` and ``floats``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import number, short_commit, table
from .problems import BANDS, geometric_mean
from .rows import OURS, Row, json_rows

Points = dict[tuple[int, int, int], dict[str, Row]]  # by m, n and k, then by series
FORMATS_FIELDS = ("gpu", "n", "k", "m", "dtype", "formats", "commit")
LEAST = 0.96  # asked of mxfp4 beside integers with a 16-bit scale for as many weights, up to 16 rows and from 256 on
JUDGED = "w4a16_mxfp4"


def formats_section(folder: Path) -> str:
    """Each device's newest row of every shape, m and type; "" without rows."""
    newest: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for _, row in json_rows(folder, FORMATS_FIELDS):
        newest.setdefault(row["gpu"], {})[row["dtype"], row["n"], row["k"], row["m"]] = row
    parts = []
    for gpu, found in sorted(newest.items()):
        rows = [found[place] for place in sorted(found, key=lambda place: (place[0], place[3], *place[1:3]))]
        first, *others = (f["format"] for f in rows[0]["formats"])
        about = (
            f"Commit {commits_of(rows)}. Each format with the fastest of the schedules that were tried, in one process, in alternation; in "
            f"brackets, the time of {first} over it. Asked of {JUDGED}: at least {LEAST} for m <= 16 and for m >= 256."
        )
        parts += [f"## {gpu}", about, table(["", "points", "mean", "worst", f"under {LEAST}"], list(_bands(rows, others)))]
        header = ["n x k", "m", *(f["format"] for f in rows[0]["formats"])]
        parts.append(table(header, [[f"{r['n']} x {r['k']}", str(r["m"]), *_times(r["formats"])] for r in rows]))
    return "\n\n".join(parts)


def _bands(rows: Sequence[dict[str, Any]], others: Sequence[str]) -> Iterator[list[str]]:
    for name in others:
        for band, first, last in BANDS:
            ratios = [
                row["formats"][0]["us"] / f["us"]
                for row in rows
                for f in row["formats"]
                if f["format"] == name and first <= row["m"] <= last
            ]
            if ratios:
                under = str(sum(ratio < LEAST for ratio in ratios))
                yield [f"{name}, {band}", str(len(ratios)), f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}", under]


def _times(formats: Sequence[dict[str, Any]]) -> list[str]:
    first = formats[0]["us"]
    return [number(first), *(f"{number(f['us'])} ({first / f['us']:.2f})" for f in formats[1:])]


def floats_section(devices: Mapping[str, Iterable[Row]]) -> str:
    """Products of 4-bit floats beside those of other kernels; "" without rows."""
    parts = []
    for gpu, rows in devices.items():
        points = points_of(rows)
        commits = sorted({short_commit(row.commit) for found in points.values() for row in found.values() if row.impl == OURS})
        parts += [f"## {gpu}", f"bfloat16, µs; one process, in orders that are drawn. Commit {', '.join(commits)}."]
        parts.append(table(["", "points", "times as fast", "worst"], list(_against(points))))
        parts.append(times(points))
    return "\n\n".join(parts)


def points_of(rows: Iterable[Row]) -> Points:
    """The newest row of every series, by m, n and k."""
    points: Points = {}
    for row in rows:
        points.setdefault((row.m, row.n, row.k), {})[row.series] = row
    return points


def times(points: Points) -> str:
    """All times: shapes and m down, series across, tilebit's first."""
    series = sorted({name for found in points.values() for name in found}, key=lambda name: (not name.startswith(OURS), name))
    lines = [
        [f"{n} x {k}", str(m), *(number(found[name].us) if name in found else "-" for name in series)]
        for (m, n, k), found in sorted(points.items())
    ]
    return table(["n x k", "m", *series], lines)


def _against(points: Mapping[tuple[int, int, int], Mapping[str, Row]]) -> Iterator[list[str]]:
    """tilebit beside every other kernel of the same format."""
    pairs: dict[tuple[str, str], dict[int, list[float]]] = {}
    for (m, _, _), found in points.items():
        for ours in (row for row in found.values() if row.impl == OURS):
            for peer in (row for row in found.values() if row.impl != OURS and row.format == ours.format):
                pairs.setdefault((ours.format, peer.impl), {}).setdefault(m, []).append(peer.us / ours.us)
    for (format, impl), by_m in sorted(pairs.items()):
        for m, ratios in sorted(by_m.items()):
            yield [f"{format}, m = {m}, against {impl}", str(len(ratios)), f"**{geometric_mean(ratios):.2f}**", f"{min(ratios):.2f}"]
