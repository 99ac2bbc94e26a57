"""Products at numbers of rows between powers of two, on shapes without records: rows of ``any_m``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from math import exp, log

from .markdown import number, table
from .rows import Row

PASSES = {"untuned": "Untuned: schedules from the model alone", "tuned": "Tuned at m = 100, 200, 300, 500, 700, 1500 and 3000"}
OURS, ANCHOR = "tilebit", "cublas"
# What is asked of the fastest quantized peer's time over ours, up to 200 rows and above, and of cuBLAS's from 512 rows on.
BARS = (("m <= 200, fastest peer", 1.20), ("m > 200, fastest peer", 1.05), ("m >= 512, cuBLAS fp16", 0.95))

Place = tuple[int, int, int]  # n, k, m


def any_m_section(rows: Mapping[str, Iterable[Row]]) -> str:
    """Both passes beside peers; "" without rows. The peers ran in the first pass: in the second, times are brought to its level by
    cuBLAS's, which ran in both."""
    by_pass: dict[str, dict[Place, dict[str, float]]] = {name: {} for name in PASSES}
    gpus, commits = set(), set()
    for row in chain.from_iterable(rows.values()):
        found = by_pass[row.run.partition(" ")[0]].setdefault((row.n, row.k, row.m), {})
        found[row.impl] = row.us
        gpus.add(row.gpu)
        commits |= {row.commit[:12]} if row.commit else set()
    if not gpus:
        return ""
    first = by_pass["untuned"]
    parts = [f"## {', '.join(sorted(gpus))}", f"w4a16_g128, float16. Commit {', '.join(sorted(commits))}."]
    for name, title in PASSES.items():
        ratios = {place: _ratios(first[place], times) for place, times in by_pass[name].items()}
        if not ratios:
            continue
        groups = (
            [peer for (_, _, m), (peer, _) in ratios.items() if m <= 200],
            [peer for (_, _, m), (peer, _) in ratios.items() if m > 200],
            [cublas for (_, _, m), (_, cublas) in ratios.items() if m >= 512],
        )
        lines = [
            [what, str(len(group)), f"**{_mean(group):.2f}**", f"{bar:.2f}", f"{min(group):.2f}"]
            for (what, bar), group in zip(BARS, groups, strict=True)
        ]
        parts += [
            f"### {title}",
            "Their time over ours: above 1, tilebit is faster.",
            table(["", "points", "mean", "asked", "worst"], lines),
        ]
    parts += ["### All points, µs", _points(by_pass)]
    return "\n\n".join(parts)


def _ratios(peers: dict[str, float], times: dict[str, float]) -> tuple[float, float]:
    """(fastest quantized peer over ours, cuBLAS over ours)."""
    ours = times[OURS] * peers[ANCHOR] / times[ANCHOR]
    return min(us for impl, us in peers.items() if impl not in (OURS, ANCHOR)) / ours, peers[ANCHOR] / ours


def _mean(ratios: list[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


def _points(by_pass: dict[str, dict[Place, dict[str, float]]]) -> str:
    impls = sorted({impl for times in by_pass["untuned"].values() for impl in times if impl != OURS})
    lines = []
    for (n, k, m), times in sorted(by_pass["untuned"].items()):
        tuned = by_pass["tuned"].get((n, k, m), {})
        cells = [number(times[OURS]), number(tuned[OURS]) if tuned else "-", *(number(times[i]) if i in times else "-" for i in impls)]
        lines.append([f"{n} x {k}", str(m), *cells])
    return table(["n x k", "m", "tilebit untuned", "tuned", *impls], lines)
