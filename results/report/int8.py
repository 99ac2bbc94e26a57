"""Products of 8-bit activations beside other kernels: the page of ``int8``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from .formats import Points, points_of, times
from .markdown import short_commit, slug, table
from .problems import geometric_mean
from .rows import OURS, Row

BANDS = (("m <= 64", 1, 64), ("m = 128 to 512", 65, 1023), ("m >= 1024", 1024, 1 << 30))
W4A8_PEERS, W8A8_PEERS = "fastest W4A8 kernel here", ("W8A8 of int8", "W8A8 of fp8")
AGAINST: dict[str, Callable[[Row], bool]] = {
    W4A8_PEERS: lambda row: row.impl != OURS and row.format.startswith("w4a8"),
    "W8A8 of int8": lambda row: row.impl != OURS and row.format == "w8a8_int8",
    "W8A8 of fp8": lambda row: row.impl != OURS and row.format == "w8a8_fp8",
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
    for gpu, rows in devices.items():
        points = points_of(rows)
        if not points:
            continue
        commits = sorted({short_commit(row.commit) or "unknown" for found in points.values() for row in found.values() if row.impl == OURS})
        shapes = len({(n, k) for _, n, k in points})
        about = (
            f"float16 results, µs, activations quantized beforehand; one process, in orders that are drawn. {shapes} shapes. "
            f"Commit {', '.join(commits)}. Times as fast: geometric means, in brackets the worst of how many points."
        )
        picture = f"![times as fast as 16 bits, against m](../plots/{int8_plot(gpu)}.svg)"
        parts += [f"## {gpu}", about, picture, table(["", "", *(band for band, _, _ in BANDS)], list(_lines(points))), times(points)]
    return "\n\n".join(parts)


def _lines(points: Points) -> Iterator[list[str]]:
    """Mean, worst and number of points of each band, for each format and what it is compared with."""
    formats = sorted({row.series for found in points.values() for row in found.values() if row.impl == OURS and "a8" in row.format})
    for name in formats:
        for what, compared in AGAINST.items():
            cells = []
            for _, least, most in BANDS:
                ratios = [
                    min(others) / found[name].us
                    for (m, _, _), found in sorted(points.items())
                    if least <= m <= most and name in found and (others := [row.us for row in found.values() if compared(row)])
                ]
                cells.append(f"**{geometric_mean(ratios):.2f}** ({min(ratios):.2f} of {len(ratios)})" if ratios else "-")
            if any(cell != "-" for cell in cells):
                yield [name, f"against {what}", *cells]
