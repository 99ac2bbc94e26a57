"""Products of 8-bit activations each timed by itself, beside the same in turn with others: the page of ``int8_alone``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .cells import commits_of
from .formats import points_of, times
from .int8 import AGAINST, ratio
from .markdown import table
from .problems import geometric_mean
from .rows import OURS, Row

Processes = dict[tuple[int, int, int], dict[str, dict[str, Row]]]  # rows of a point by process and series


def int8_alone_section(alone: Mapping[str, Iterable[Row]], in_turn: Mapping[str, Iterable[Row]]) -> str:
    """Of each device how many times as fast tilebit's formats are as others, of ``alone``, whose kernels ran one
    after another, each for itself, and of the same points of ``in_turn``; "" without rows."""
    parts = []
    for gpu, found in alone.items():
        rows = list(found)
        if not rows:
            continue
        about = (
            f"Commit {commits_of({'commit': row.commit} for row in rows if row.impl == OURS)}. float16 results, µs, activations quantized "
            f"beforehand; {len({(row.n, row.k) for row in rows})} shapes, m = {', '.join(map(str, sorted({row.m for row in rows})))}. "
            "Each kernel runs for itself until it has its time, then comes the next: at the power limit it has the clock that its own "
            "power leaves it. Beside it the same points [in turn](int8.md), of the newest process that timed both: there a kernel comes "
            "behind another one each time, in drawn orders, and has the clock that both leave it. Geometric means, in brackets the worst."
        )
        header = ["", "", "points", "each alone", "in turn"]
        parts += [f"## {gpu}", about, table(header, list(_lines(rows, in_turn.get(gpu, ())))), times(points_of(rows))]
    return "\n\n".join(parts)


def _lines(alone: Iterable[Row], in_turn: Iterable[Row]) -> Iterator[list[str]]:
    ours, theirs = _by_point(alone), _by_point(in_turn)
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


def _by_point(rows: Iterable[Row]) -> Processes:
    found: Processes = {}
    for row in rows:
        found.setdefault((row.m, row.n, row.k), {}).setdefault(row.run, {})[row.series] = row
    return found
