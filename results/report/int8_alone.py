"""Products of 8-bit activations each timed by itself, beside the same in turn with others: the page of ``int8_alone``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .cells import commits_of
from .formats import points_of, times
from .int8 import AGAINST, by_point, ratio
from .markdown import table
from .problems import geometric_mean
from .rows import OURS, Row


def int8_alone_section(alone: Mapping[str, Iterable[Row]], in_turn: Mapping[str, Iterable[Row]]) -> str:
    """Of each device how many times as fast tilebit's formats are as others, of ``alone``, whose kernels ran one
    after another, each for itself, and of the same kernels and points of ``in_turn``; "" without rows."""
    parts = []
    for gpu, found in alone.items():
        rows = list(found)
        if not rows:
            continue
        ms, shapes = sorted({row.m for row in rows}), {(row.n, row.k) for row in rows}
        about = (
            f"Commit {commits_of({'commit': row.commit} for row in rows if row.impl == OURS)}. float16 results, µs, activations quantized "
            f"beforehand; {len(shapes)} shapes, m = {', '.join(map(str, ms))}. Each kernel runs until it has its time, then the next. "
            "Beside it the same kernels at the same points [in turn](int8.md), of the newest process that timed both: there another "
            "kernel comes before it each time, in drawn orders. Geometric means, in brackets the worst. [What differs, and what is known "
            "of why](../notes/power-in-turn.md)."
        )
        header = ["", "", "points", "each alone", "in turn"]
        parts += [f"## {gpu}", about, table(header, list(_lines(rows, in_turn.get(gpu, ())))), times(points_of(rows))]
    return "\n\n".join(parts)


def _lines(alone: Iterable[Row], in_turn: Iterable[Row]) -> Iterator[list[str]]:
    ours = by_point(alone)
    timed = {(place, name) for place, found in ours.items() for rows in found.values() for name in rows}
    theirs = by_point(row for row in in_turn if ((row.m, row.n, row.k), row.series) in timed)
    names = sorted({name for found in ours.values() for rows in found.values() for name, row in rows.items() if row.impl == OURS})
    for name in names:
        for what, compared in AGAINST.items():
            places = [place for place, found in sorted(ours.items()) if ratio(found.values(), name, compared) is not None]
            cells = [
                _mean([found for place in places if (found := ratio(of.get(place, {}).values(), name, compared)) is not None], len(places))
                for of in (ours, theirs)
            ]
            if places:
                yield [name, f"against {what}", str(len(places)), *cells]


def _mean(ratios: list[float], wanted: int) -> str:
    return f"**{geometric_mean(ratios):.2f}** ({min(ratios):.2f})" if len(ratios) == wanted and ratios else "-"
