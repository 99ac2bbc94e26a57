"""Products at numbers of rows between powers of two, on shapes without records: rows of ``any_m``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from .markdown import details, number, short_commit, table
from .problems import geometric_mean
from .rows import Row

PASSES = {"untuned": "Untuned: schedules from the model alone", "tuned": "Tuned at m = 100, 200, 300, 500, 700, 1500 and 3000"}
OURS, ANCHOR = "tilebit", "cublas"
# What is asked of the fastest quantized peer's time over ours, up to 200 rows and above, and of
# cuBLAS's from 512 rows on.
PEER_BARS = (("m <= 200, fastest peer", 1.20, 1, 200), ("m > 200, fastest peer", 1.05, 201, 1 << 30))
ANCHOR_BAR = ("m >= 512, cuBLAS fp16", 0.95, 512, 1 << 30)
LEAST = 0.95  # asked of every single point

Place = tuple[int, int, int]  # n, k, m
Pass = Mapping[Place, Mapping[str, Row]]


def any_m_section(rows: Mapping[str, Iterable[Row]]) -> str:
    """Each pass of each device beside the peers of its own process; "" without rows. The newest
    rows of a pass count."""
    parts = []
    for gpu, found in rows.items():
        passes: dict[str, dict[Place, dict[str, Row]]] = {name: {} for name in PASSES}
        for row in found:
            passes[row.run.partition(" ")[0]].setdefault((row.n, row.k, row.m), {})[row.impl] = row
        parts += [f"## {gpu}", "w4a16_g128, float16. Their time over ours: above 1, tilebit is faster."]
        for name, title in PASSES.items():
            if passes[name]:
                parts += [f"### {title}", _about(passes[name]), _bars(passes[name]), _points(passes[name])]
    return "\n\n".join(parts)


def _about(times: Pass) -> str:
    ours = {short_commit(found[OURS].commit) for found in times.values()}
    peers = sorted({impl for found in times.values() for impl in found} - {OURS})
    return f"Commit {', '.join(sorted(ours))}; beside {', '.join(peers)} in the same process."


def _bars(times: Pass) -> str:
    lines = []
    for what, bar, first, last in PEER_BARS:
        lines.append(_line(what, bar, [_fastest(found) / found[OURS].us for (_, _, m), found in times.items() if first <= m <= last]))
    what, bar, first, last = ANCHOR_BAR
    lines.append(_line(what, bar, [found[ANCHOR].us / found[OURS].us for (_, _, m), found in times.items() if first <= m <= last]))
    return table(["", "points", "mean", "asked", "worst", f"under {LEAST}"], lines)


def _line(what: str, bar: float, ratios: list[float]) -> list[str]:
    """Three digits, so that rounding lets nothing pass."""
    under = str(sum(ratio < LEAST for ratio in ratios))
    return [what, str(len(ratios)), f"**{geometric_mean(ratios):.3f}**", f"{bar:.2f}", f"{min(ratios):.3f}", under]


def _fastest(found: Mapping[str, Row]) -> float:
    return min(row.us for impl, row in found.items() if impl not in (OURS, ANCHOR))


def _points(times: Pass) -> str:
    impls = sorted(set(chain.from_iterable(times.values())), key=lambda impl: (impl != OURS, impl))
    lines = [
        [f"{n} x {k}", str(m), *(number(found[impl].us) if impl in found else "-" for impl in impls)]
        for (n, k, m), found in sorted(times.items())
    ]
    return details(f"all {len(lines)} points, µs", table(["n x k", "m", *impls], lines))
