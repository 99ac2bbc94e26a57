"""What all rows of a device say together: tilebit against the fastest peers, and how much of the
memory's rate it reaches."""

from __future__ import annotations

from collections.abc import Sequence

from .markdown import details, number, table
from .problems import BANDS, SLOWER, Comparison, comparisons, fastest_peer, geometric_mean
from .rows import OURS, Rates, Row

LARGE = 50e6  # bytes of packed weight from which the read rate, not a launch, sets the time at m = 1


def bars_table(rows: Sequence[Row]) -> str:
    """The ratio "fastest peer / tilebit" by format and band of m: geometric mean, worst point,
    points that are lost. "" without peers."""
    lines = []
    for name, found in comparisons(rows).items():
        for band, first, last in BANDS:
            points = [c for c in found if first <= c.ours.m <= last]
            if points:
                worst = min(points, key=lambda c: c.ratio)
                lost = sum(c.ratio < SLOWER for c in points)
                mean = geometric_mean(c.ratio for c in points)
                lines.append([name, band, str(len(points)), f"**{mean:.2f}**", _worst(worst), str(lost)])
    header = ["format", "rows of x", "points", "geometric mean", "worst point", f"below {SLOWER}"]
    return table(header, lines, numbers=False) if lines else ""


def _worst(c: Comparison) -> str:
    return f"{c.ratio:.2f} ({c.ours.n} x {c.ours.k}, m = {c.ours.m}, {c.peer.impl})"


def ratio_tables(rows: Sequence[Row]) -> list[str]:
    """One folded table per format: the ratio and the fastest peer's name, shapes down and m across."""
    parts = []
    for name, found in comparisons(rows).items():
        ms = sorted({c.ours.m for c in found})
        by_place = {(c.ours.n, c.ours.k, c.ours.m): c for c in found}
        shapes = dict.fromkeys((c.ours.n, c.ours.k) for c in found)
        lines = [[f"{n} x {k}", *(_ratio(by_place.get((n, k, m))) for m in ms)] for n, k in shapes]
        parts.append(details(f"{name}: fastest peer / tilebit at every point", table(["n x k", *(f"m = {m}" for m in ms)], lines)))
    return parts


def _ratio(c: Comparison | None) -> str:
    if c is None:
        return "-"
    ratio = f"{c.ratio:.2f}"
    return f"{f'**{ratio}**' if c.ratio < SLOWER else ratio} {c.peer.impl}"


def bandwidth_table(rows: Sequence[Row], ceiling: Rates) -> str:
    """The share of the measured read rate at m = 1 on large weights, tilebit's and the fastest
    peer's of the same run; "" without any."""
    newest: dict[tuple, Row] = {}
    for row in sorted((r for r in rows if r.impl == OURS and r.op == "gemm" and r.m == 1), key=lambda r: r.date):
        if row.weight_bytes >= LARGE:
            newest[(row.dtype != "float16", row.weight_bytes, row.n, row.series, row.dtype)] = row
    lines = []
    for row in (row for _, row in sorted(newest.items(), key=lambda item: item[0])):
        peer = fastest_peer(row, rows)
        reached = row.bytes / row.us / 1e3
        lines.append(
            [
                f"{row.n} x {row.k}",
                f"{row.series.removeprefix(OURS + ' ')}, {row.dtype}",
                f"{row.weight_bytes / 1e6:.0f}",
                number(row.us),
                f"{reached:,.0f}",
                f"{reached / ceiling.read_gbps:.0%}",
                f"{peer.bytes / peer.us / 1e3 / ceiling.read_gbps:.0%} {peer.impl}" if peer else "-",
            ]
        )
    header = ["n x k", "format", "weight in MB", "µs", "GB/s", "of the read rate", "fastest peer"]
    return table(header, lines) if lines else ""
