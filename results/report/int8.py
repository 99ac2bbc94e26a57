"""Products of 8-bit activations beside other kernels: the page of ``int8``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from .formats import points_of, times
from .markdown import short_commit, slug, table
from .problems import geometric_mean, newest_beside
from .rows import OURS, Row

BANDS = (("m <= 64", 1, 64), ("m = 128 to 512", 65, 1023), ("m >= 1024", 1024, 1 << 30))
W4A8_PEERS, W8A8_PEERS = "fastest W4A8 kernel here", ("W8A8 of int8", "W8A8 of fp8")
Processes = dict[tuple[int, int, int], dict[str, dict[str, Row]]]
AGAINST: dict[str, Callable[[Row], bool]] = {
    W4A8_PEERS: lambda row: row.impl != OURS and row.format.startswith("w4a8"),
    "W8A8 of int8": lambda row: row.impl != OURS and row.format == "w8a8_int8",
    "W8A8 of fp8": lambda row: row.impl != OURS and row.format == "w8a8_fp8",
    "W8A8 of fp8 blocks": lambda row: row.impl != OURS and row.format == "w8a8_fp8_g128",
    "tilebit W4A16": lambda row: row.impl == OURS and row.format == "w4a16",
    "cuBLAS, fp16": lambda row: row.format == "fp16",
}


def int8_plot(gpu: str) -> str:
    """The name of a device's plot."""
    return f"{slug(gpu)}_int8"


def int8_section(devices: Mapping[str, Iterable[Row]]) -> str:
    """tilebit's formats of 8-bit x beside W4A8 and W8A8 kernels, its own W4A16 and cuBLAS; "" without
    rows."""
    parts = []
    for gpu, found in devices.items():
        rows = list(found)
        points = points_of(rows)
        if not points:
            continue
        commits = sorted({short_commit(row.commit) or "unknown" for found in points.values() for row in found.values() if row.impl == OURS})
        shapes = len({(n, k) for _, n, k in points})
        about = (
            f"float16 results, µs, activations quantized beforehand, in orders that are drawn. {shapes} shapes. "
            f"Commit {', '.join(commits)}. Times as fast: geometric means, in brackets the worst of how many points; two times are "
            "compared where one process measured both, the newest that did. The last table has the newest time of each."
        )
        picture = f"![times as fast as 16 bits, against m](../plots/{int8_plot(gpu)}.svg)"
        parts += [f"## {gpu}", about, picture, table(["", "", *(band for band, _, _ in BANDS)], list(_lines(rows))), times(points)]
    return "\n\n".join(parts)


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Mean, worst and number of points of each band, for each format and what it is compared with."""
    processes = by_point(rows)
    formats = sorted({row.series for row in rows if row.impl == OURS and "a8" in row.format})
    for name in formats:
        for what, compared in AGAINST.items():
            cells = []
            for _, least, most in BANDS:
                ratios = [
                    one
                    for (m, _, _), found in sorted(processes.items())
                    if least <= m <= most and (one := ratio(found.values(), name, compared)) is not None
                ]
                cells.append(f"**{geometric_mean(ratios):.2f}** ({min(ratios):.2f} of {len(ratios)})" if ratios else "-")
            if any(cell != "-" for cell in cells):
                yield [name, f"against {what}", *cells]


def by_point(rows: Iterable[Row]) -> Processes:
    """The rows of each m, n and k, by process and series."""
    found: Processes = {}
    for row in rows:
        found.setdefault((row.m, row.n, row.k), {}).setdefault(row.run, {})[row.series] = row
    return found


def ratio(processes: Iterable[Mapping[str, Row]], name: str, compared: Callable[[Row], bool]) -> float | None:
    """How many times as fast ``name`` is as the fastest of what it is compared with, by each one's newest
    process that timed both; None: none did."""
    pairs = newest_beside(processes, name).values()
    return min((theirs.us / own.us for own, theirs in pairs if compared(theirs)), default=None)
