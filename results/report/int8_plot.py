"""The plot of products of 8-bit activations: how many times as fast as 16 bits, against rows of x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .formats import Points
from .int8 import AGAINST, W4A8_PEERS, W8A8_PEERS
from .rows import OURS, Row

COLUMNS = 3
COLORS = matplotlib.color_sequences["tab10"]
BASE = AGAINST["cuBLAS, fp16"]


def _ours(name: str) -> Callable[[Row], bool]:
    return lambda row: row.impl == OURS and row.series == f"{OURS} {name}"


# The fastest row of each: (label, which rows, look).
SERIES: tuple[tuple[str, Callable[[Row], bool], Mapping[str, object]], ...] = (
    ("tilebit w4a8_lqq_g128", _ours("w4a8_lqq_g128"), {"color": COLORS[0], "marker": "o", "linewidth": 2.2}),
    ("tilebit w8a8_channel", _ours("w8a8_channel"), {"color": COLORS[2], "marker": "s"}),
    ("tilebit w8a8_fp8", _ours("w8a8_fp8"), {"color": COLORS[4], "marker": "^"}),
    ("tilebit w4a16_g128", AGAINST["tilebit W4A16"], {"color": COLORS[0], "linestyle": ":", "marker": "o", "markersize": 3}),
    ("fastest W4A8 of others", AGAINST[W4A8_PEERS], {"color": COLORS[1], "marker": "x"}),
    ("fastest W8A8 of others", lambda row: any(AGAINST[kind](row) for kind in W8A8_PEERS), {"color": COLORS[3], "marker": "+"}),
    ("cuBLAS fp16", BASE, {"color": "black", "linewidth": 1.2}),
)


def _fastest(found: Mapping[str, Row], wanted: Callable[[Row], bool]) -> float | None:
    return min((row.us for row in found.values() if wanted(row)), default=None)


def int8_speed(gpu: str, points: Points) -> Figure:
    """One panel a shape."""
    shapes = sorted({(n, k) for _, n, k in points}, key=lambda shape: (shape[0] * shape[1], shape))
    lines = ceil(len(shapes) / COLUMNS)
    figure = Figure(figsize=(4.8 * COLUMNS, 3.6 * lines + 0.8), layout="constrained")
    panels: list[Axes] = list(figure.subplots(lines, COLUMNS, squeeze=False).flatten())
    for axes in panels[len(shapes) :]:
        axes.set_axis_off()
    looks = {}
    for axes, (n, k) in zip(panels, shapes, strict=False):
        ms = sorted(m for m, *shape in points if shape == [n, k] and _fastest(points[m, n, k], BASE))
        for label, wanted, look in SERIES:
            fastest = [(m, us) for m in ms if (us := _fastest(points[m, n, k], wanted))]
            if fastest:
                ratios = [base / us for m, us in fastest if (base := _fastest(points[m, n, k], BASE))]
                (looks[label],) = axes.plot([m for m, _ in fastest], ratios, label=label, **look)  # pyright: ignore[reportArgumentType]
        axes.set_title(f"{n} x {k} (n x k)")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        ticks = [m for m in ms if m & (m - 1) == 0]
        axes.set_xticks(ticks, [str(m) for m in ticks], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel("m (rows of x)")
        axes.set_ylabel("times as fast as cuBLAS fp16")
    figure.suptitle(f"{gpu}: products of 8-bit activations, higher is better")
    figure.legend(list(looks.values()), list(looks), loc="outside lower center", ncols=4, fontsize=8)
    return figure
