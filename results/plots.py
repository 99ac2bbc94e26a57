"""Plots of measured rows, as PNG and SVG: speed against m with every peer and the floor, and a roofline."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .rows import OURS, Problem, Rates, Row, is_baseline, problems, rates
from .tables import slug

# The same rows must give the same bytes: no creation dates, no random identifiers.
SETTINGS = {"svg.hashsalt": "tilebit", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
COLUMNS = 2


def draw(devices: dict[str, list[Row]], folder: Path) -> list[Path]:
    """Write both plots of every device to ``folder`` and return the files; a device without measured rates has no roofline and no floor."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(SETTINGS):  # pyright: ignore[reportArgumentType]
        for gpu, rows in devices.items():
            shown, ceiling = problems(rows), rates(rows)
            if not shown:
                continue
            written += _save(speed(gpu, shown, ceiling), folder / f"{slug(gpu)}_speed")
            if ceiling:
                written += _save(roofline(gpu, shown, ceiling), folder / f"{slug(gpu)}_roofline")
    return written


def speed(gpu: str, shown: list[Problem], ceiling: Rates | None) -> Figure:
    """Time in microseconds against m, one panel per weight shape, one line per series, its floor dashed."""
    rows_of_panels = math.ceil(len(shown) / COLUMNS)
    figure = Figure(figsize=(5.2 * COLUMNS, 3.6 * rows_of_panels), layout="constrained")
    panels = figure.subplots(rows_of_panels, COLUMNS, squeeze=False).flatten()
    styles = _styles(shown)
    for axes, problem in zip(panels, shown, strict=False):
        for name in problem.series:
            points = [(m, line[name]) for m, line in problem.lines.items() if name in line]
            ms = [m for m, _ in points]
            axes.plot(ms, [row.us for _, row in points], label=name, **styles[name])
            if ceiling and points[0][1].impl == OURS:
                axes.plot(
                    ms,
                    [ceiling.floor_us(row) for _, row in points],
                    "--",
                    color=styles[name]["color"],
                    linewidth=1,
                    label=f"floor of {name}",
                )
        axes.set_title(f"{problem.n} x {problem.k} (n x k), {problem.dtype}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(problem.lines), [str(m) for m in problem.lines])
        axes.set_xlabel("m (rows of x)")
        axes.set_ylabel("µs (median)")
        axes.legend(fontsize=7)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    figure.suptitle(f"{gpu}: time of one product, lower is better")
    return figure


def roofline(gpu: str, shown: list[Problem], ceiling: Rates) -> Figure:
    """Reached TFLOP/s against operations per byte, under the roof of the device's measured rates."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Axes = figure.subplots()
    styles, named = _styles(shown), set()
    intensities = []
    for problem in shown:
        for line in problem.lines.values():
            for name, row in line.items():
                intensities.append(row.flops / row.bytes)
                label = None if name in named else name
                named.add(name)
                axes.plot(intensities[-1], row.flops / row.us / 1e6, label=label, **{**styles[name], "linestyle": "none"})
    x = np.geomspace(min(intensities) / 2, max(*intensities, 2000 * ceiling.mma_tflops / ceiling.read_gbps) * 2, 200)
    axes.plot(x, np.minimum(x * ceiling.read_gbps / 1e3, ceiling.mma_tflops), color="black", linewidth=1, label="roof")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{gpu}: {ceiling.read_gbps:,.0f} GB/s read, {ceiling.mma_tflops:,.4g} TFLOP/s")
    axes.legend(fontsize=7)
    return figure


def _styles(shown: list[Problem]) -> dict[str, dict]:
    """One look per series over all panels: tilebit bold, the unquantized product black."""
    rows = {name: row for problem in shown for line in problem.lines.values() for name, row in line.items()}
    colors = matplotlib.color_sequences["tab10"]
    looks, next_color = {}, 0
    for name in sorted(rows, key=lambda name: (rows[name].impl != OURS, name)):
        if is_baseline(rows[name]):
            looks[name] = {"color": "black", "marker": "s", "markersize": 3, "linewidth": 1}
            continue
        bold = rows[name].impl == OURS
        looks[name] = {
            "color": colors[next_color % len(colors)],
            "marker": "o" if bold else "x",
            "markersize": 4,
            "linewidth": 2 if bold else 1,
        }
        next_color += 1
    return looks


def _save(figure: Figure, stem: Path) -> list[Path]:
    files = []
    for kind, metadata in METADATA.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        figure.savefig(path, format=kind, dpi=110, metadata=metadata)
        files.append(path)
    return files
