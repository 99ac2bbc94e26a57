"""Products at numbers of rows between powers of two, on shapes without records: rows of ``any_m``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from math import exp, log

from .markdown import number, table
from .rows import Row

PASSES = {"untuned": "Untuned: schedules from the model alone", "tuned": "Tuned at m = 100, 200, 300, 500, 700, 1500 and 3000"}
PEERS_IN = "untuned"
OURS, ANCHOR = "tilebit", "cublas"
# What is asked of the fastest quantized peer's time over ours, up to 200 rows and above, and of
# cuBLAS's from 512 rows on.
PEER_BARS = (("m <= 200, fastest peer", 1.20, 1, 200), ("m > 200, fastest peer", 1.05, 201, 1 << 30))
ANCHOR_BAR = ("m >= 512, cuBLAS fp16", 0.95, 512, 1 << 30)
LEAST = 0.95  # asked of every single point

Place = tuple[int, int, int]  # n, k, m
Times = Mapping[Place, Mapping[str, float]]


def any_m_section(rows: Mapping[str, Iterable[Row]]) -> str:
    """Both passes beside peers; "" without rows. The peers ran in the first pass alone, cuBLAS in
    both: the second pass is beside its own cuBLAS as timed, and beside the peers both as timed and
    brought to the first pass' level by cuBLAS."""
    by_pass: dict[str, dict[Place, dict[str, float]]] = {name: {} for name in PASSES}
    gpus, commits = set(), set()
    for row in chain.from_iterable(rows.values()):
        found = by_pass[row.run.partition(" ")[0]].setdefault((row.n, row.k, row.m), {})
        found[row.impl] = row.us
        gpus.add(row.gpu)
        commits |= {row.commit[:12]} if row.commit else set()
    if not gpus:
        return ""
    peers = by_pass[PEERS_IN]
    parts = [f"## {', '.join(sorted(gpus))}", f"w4a16_g128, float16. Commit {', '.join(sorted(commits))}."]
    for name, title in PASSES.items():
        if by_pass[name]:
            parts += [f"### {title}", _words(name, peers, by_pass[name]), _bars(name, peers, by_pass[name])]
    parts += ["### All points, µs", _points(by_pass)]
    return "\n\n".join(parts)


def _words(name: str, peers: Times, times: Times) -> str:
    above = "Their time over ours: above 1, tilebit is faster."
    if name == PEERS_IN:
        return above
    drift = {place: found[ANCHOR] / peers[place][ANCHOR] for place, found in times.items()}
    small, large = ([ratio for (_, _, m), ratio in drift.items() if (m > 200) == above_200] for above_200 in (False, True))
    return (
        f"{above} No peer ran in this pass: they are those of the pass before, where cuBLAS, which ran in both, took other times: "
        f"here {min(small):.2f} to {max(small):.2f} of those up to 200 rows, {min(large):.2f} to {max(large):.2f} above. *Scaled*: our "
        "times are divided by that ratio, which supposes that clocks slow all kernels alike. *As timed*: they are not. What is "
        "between the two is not known until peers run in one pass with the tuned kernels."
    )


def _bars(name: str, peers: Times, times: Times) -> str:
    lines = []
    for what, bar, first, last in PEER_BARS:
        points = {p: found for p, found in times.items() if first <= p[2] <= last}
        timed = {p: _fastest(peers[p]) / found[OURS] for p, found in points.items()}
        if name == PEERS_IN:
            lines.append(_line(what, bar, timed.values()))
        else:
            scaled = [ratio * points[p][ANCHOR] / peers[p][ANCHOR] for p, ratio in timed.items()]
            lines += [_line(f"{what}, scaled", bar, scaled), _line(f"{what}, as timed", bar, timed.values())]
    what, bar, first, last = ANCHOR_BAR
    lines.append(_line(what, bar, [found[ANCHOR] / found[OURS] for (_, _, m), found in times.items() if first <= m <= last]))
    return table(["", "points", "mean", "asked", "worst", f"under {LEAST}"], lines)


def _line(what: str, bar: float, ratios: Iterable[float]) -> list[str]:
    """Three digits, so that rounding lets nothing pass."""
    found = list(ratios)
    mean = exp(sum(map(log, found)) / len(found))
    return [what, str(len(found)), f"**{mean:.3f}**", f"{bar:.2f}", f"{min(found):.3f}", str(sum(ratio < LEAST for ratio in found))]


def _fastest(times: Mapping[str, float]) -> float:
    return min(us for impl, us in times.items() if impl not in (OURS, ANCHOR))


def _points(by_pass: Mapping[str, Times]) -> str:
    """As timed: the tuned pass has its own cuBLAS."""
    impls = sorted({impl for times in by_pass[PEERS_IN].values() for impl in times if impl != OURS})
    lines = []
    for (n, k, m), times in sorted(by_pass[PEERS_IN].items()):
        tuned = by_pass["tuned"].get((n, k, m), {})
        cells = [
            number(found[i]) if i in found else "-"
            for found, i in ((times, OURS), *((times, i) for i in impls), (tuned, OURS), (tuned, ANCHOR))
        ]
        lines.append([f"{n} x {k}", str(m), *cells])
    return table(["n x k", "m", "tilebit untuned", *impls, "tilebit tuned", "cublas beside tuned"], lines)
