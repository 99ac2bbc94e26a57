"""Plots of measured rows, as PNG and SVG: time against m with every peer and the floor, a roofline,
what each idea adds, decode over a low-bit cache, and a language model's quality."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .ablation import Ablation
from .any_quality import Rows as AnyQuality
from .attention import ABOUT_PLOT, BASELINE, STATED_MARK, attention_plot, decode_rows
from .attention_rows import FLOAT, AttentionRow
from .formats import points_of
from .gemm import speed_plot
from .int8 import int8_plot
from .int8_plot import int8_speed
from .markdown import number, slug
from .problems import Problem, is_baseline, problems
from .quality import quality_plot
from .quality_formats import formats_plot
from .quality_plot import any_quality, formats, quality
from .rows import OURS, Rates, Row, rates

# The same rows must give the same bytes: no creation dates, no random identifiers.
SETTINGS = {"svg.hashsalt": "tilebit", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
COLUMNS = 3
COLORS = matplotlib.color_sequences["tab10"]
FLOOR = "floor"
OURS_COLORS = (COLORS[0], COLORS[3])  # symmetric, asymmetric


def draw(
    devices: dict[str, list[Row]],
    studies: Mapping[str, list[Ablation]],
    folder: Path,
    attention: Mapping[str, list[AttentionRow]] | None = None,
    language: Mapping[tuple[str, str], list[dict[str, Any]]] | None = None,
    every_format: Mapping[tuple[str, str], list[dict[str, Any]]] | None = None,
    every_width: AnyQuality | None = None,
    int8: Mapping[str, Iterable[Row]] | None = None,
) -> list[Path]:
    """Write every plot to ``folder``, remove those that no row stands behind any more, and return
    the files. A device without measured rates has no roofline and no floor. ``studies``: ablations by the
    name of their study."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    with matplotlib.rc_context(SETTINGS):  # pyright: ignore[reportArgumentType]
        for gpu, rows in devices.items():
            shown, ceiling = problems(rows), rates(rows)
            for bits in sorted({problem.bits for problem in shown}):
                figures[speed_plot(gpu, bits)] = speed(gpu, [p for p in shown if p.bits == bits], ceiling)
            if shown and ceiling:
                figures[f"{slug(gpu)}_roofline"] = roofline(gpu, shown, ceiling)
        for name, found in studies.items():
            figures |= {f"{slug(study.gpu)}_{name}": ablation(study) for study in found}
        for gpu, rows in (attention or {}).items():
            if points := decode_speedups(rows):
                figures[attention_plot(gpu)] = decode(gpu, points)
        for (model, gpu), rows in (language or {}).items():
            figures[quality_plot(model, gpu)] = quality(model, rows)
        for (model, gpu), rows in (every_format or {}).items():
            figures[formats_plot(model, gpu)] = formats(model, rows)
        for setting, rows in (every_width or {}).items():
            figures[setting.plot] = any_quality(setting.model, rows)
        for gpu, rows in (int8 or {}).items():
            if points := points_of(rows):
                figures[int8_plot(gpu)] = int8_speed(gpu, points)
        written = [path for name, figure in figures.items() for path in _save(figure, folder / name)]
    for path in folder.iterdir():
        if path.suffix[1:] in METADATA and path not in written:
            path.unlink()
    return written


def speed(gpu: str, shown: list[Problem], ceiling: Rates | None) -> Figure:
    """Time in microseconds against m, one panel per weight shape of one width, one line per series
    and the floor dashed."""
    figure, panels = _panels(len(shown), f"{gpu}, {shown[0].bits}-bit weights: time of one product, lower is better")
    styles = _styles(row for problem in shown for row in problem.rows)
    for axes, problem in zip(panels, shown, strict=True):
        # Ours last: on top of the others.
        for name in sorted((name for name in problem.series if name in styles), key=lambda name: styles[name]["zorder"]):
            points = [(m, line[name]) for m, line in problem.lines.items() if name in line]
            axes.plot([m for m, _ in points], [row.us for _, row in points], label=name, **styles[name])
        ours = next((name for name in problem.series if name.startswith(f"{OURS} ")), None)
        if ceiling and ours:  # zero points move 3 % more bytes than their absence: one floor serves both
            floor = [(m, ceiling.floor_us(line[ours])) for m, line in problem.lines.items() if ours in line]
            axes.plot(*zip(*floor, strict=True), "--", color="gray", linewidth=1.2, label=FLOOR)
        axes.set_title(f"{problem.n} x {problem.k} (n x k), {problem.dtype}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(problem.lines), [str(m) for m in problem.lines], rotation=45 if len(problem.lines) > 8 else 0)
        axes.set_xlabel("m (rows of x)")
        axes.set_ylabel("µs (median)")
    _legend(figure, panels)
    return figure


def roofline(gpu: str, shown: list[Problem], ceiling: Rates) -> Figure:
    """Reached TFLOP/s against operations per byte, under the roof of the device's measured rates;
    all peers in one look."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Axes = figure.subplots()
    rows = [row for problem in shown for row in problem.rows]
    styles = _styles(row for row in rows if not _is_other(row))
    series: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_is_other, reverse=True):  # peers first: below the others
        if _is_other(row) or row.series in styles:
            series.setdefault("peers" if _is_other(row) else row.series, []).append(row)
    for name, members in series.items():
        look = styles.get(name, {"color": "lightgray", "marker": "x", "markersize": 3})
        x, y = zip(*((row.flops / row.bytes, row.flops / row.us / 1e6) for row in members), strict=True)
        axes.plot(x, y, label=name, **{**look, "linestyle": "none"})
    reached = [row.flops / row.bytes for members in series.values() for row in members]
    x = np.geomspace(min(reached) / 2, max(*reached, 2000 * ceiling.mma_tflops / ceiling.read_gbps) * 2, 200)
    axes.plot(x, np.minimum(x * ceiling.read_gbps / 1e3, ceiling.mma_tflops), color="black", linewidth=1, label="roof")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{gpu}: {ceiling.read_gbps:,.0f} GB/s read, {ceiling.mma_tflops:,.4g} TFLOP/s")
    axes.legend(fontsize=7)
    return figure


def ablation(study: Ablation) -> Figure:
    """µs of each step, one panel per product, the first on top."""
    figure, panels = _panels(len(study.times), f"{study.gpu}: what each idea is worth, lower is better")
    steps = list(study.ideas)
    for index, (axes, ((n, k, m), times)) in enumerate(zip(panels, study.times.items(), strict=True)):
        bars = axes.barh([steps.index(step) for step in times], list(times.values()), color=OURS_COLORS[0])
        axes.bar_label(bars, [number(us) for us in times.values()], fontsize=7, padding=2)
        axes.set_yticks(range(len(steps)), study.ideas.values() if index % COLUMNS == 0 else [""] * len(steps), fontsize=7)
        axes.set_ylim(len(steps) - 0.5, -0.5)
        axes.margins(x=0.15)
        axes.set_title(f"{n} x {k} (n x k), m = {m}")
        axes.set_xlabel("µs (median)")
    return figure


Speedups = dict[tuple[int, int, int], dict[str, dict[tuple[int, int], float]]]


def decode_speedups(rows: list[AttentionRow]) -> Speedups:
    """By heads, series and (batch, kv_len): FA3's time on a 16-bit cache over this series', both of
    one process (stated figures: over tilebit's process)."""
    shown, points = decode_rows(rows), {}
    bases = {(row.place, row.run): row.us for row in rows if row.series == BASELINE}
    newest = {row.place: row.us for row in shown if row.series == BASELINE}
    for row in shown:
        base = newest.get(row.place) if row.stated else bases.get((row.place, row.run))
        wanted = (row.impl == OURS and not row.variant) or (row.is_peer and row.format != FLOAT)
        if base and wanted:
            name = row.series + f" {STATED_MARK}" * row.stated
            points.setdefault(row.heads, {}).setdefault(name, {})[row.case] = base / row.us
    return points


def decode(gpu: str, points: Speedups) -> Figure:
    """Times faster than FA3 on a 16-bit cache, one panel per kind of heads, cases across; peers on
    low-bit caches thin."""
    figure, panels = _panels(len(points), f"{gpu}: {ABOUT_PLOT}, higher is better")
    names = sorted({name for series in points.values() for name in series}, key=lambda name: (not name.startswith(f"{OURS} "), name))
    for axes, (heads, series) in zip(panels, sorted(points.items(), key=lambda item: (item[0][0] != 32, item[0])), strict=True):
        cases = sorted({case for line in series.values() for case in line})
        for index, name in enumerate(names):
            line = series.get(name, {})
            ours = name.startswith(f"{OURS} ")
            look = {"marker": "o", "linewidth": 2, "zorder": 4} if ours else {"marker": "x", "linewidth": 1, "linestyle": ":", "zorder": 2}
            at = [(place, line[case]) for place, case in enumerate(cases) if case in line]
            axes.plot([x for x, _ in at], [y for _, y in at], label=name, color=COLORS[index % len(COLORS)], markersize=4, **look)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_title(f"heads {heads[0]}/{heads[1]} x {heads[2]}")
        axes.set_xticks(range(len(cases)), [f"{batch} x {length:,}" for batch, length in cases], rotation=45)
        axes.set_xlabel("sequences x tokens")
        axes.set_ylim(bottom=0)
    _legend(figure, panels)
    return figure


def _panels(count: int, title: str) -> tuple[Figure, list[Axes]]:
    columns = min(COLUMNS, count)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.8 * columns, 6), 3.6 * lines + 0.6), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flatten())
    for axes in panels[count:]:
        axes.set_axis_off()
    figure.suptitle(title)
    return figure, panels[:count]


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """One legend for all panels, below them: the unquantized product and the floor, tilebit, the
    peers."""
    looks = {}
    for axes in panels:
        looks.update({label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True) if label not in looks})
    looks = dict(sorted(looks.items(), key=lambda item: (-item[1].get_zorder(), item[0])))
    figure.legend(list(looks.values()), list(looks), loc="outside lower center", ncols=min(5, len(looks)), fontsize=8)


def _styles(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """One look per series over all panels: tilebit bold, the unquantized product black, each peer
    in its own color, what is asymmetric dotted. Dependent launch is left out: what it saves lies
    between kernels."""
    members = {row.series: row for row in rows if row.impl == OURS or is_baseline(row) or _is_other(row)}
    free = [color for color in COLORS if color not in OURS_COLORS]
    impls = sorted({row.impl for row in members.values() if _is_other(row)})
    looks: dict[str, dict[str, Any]] = {}
    for name, row in members.items():
        asymmetric = name.endswith("_asym")
        if is_baseline(row):
            looks[name] = {"color": "black", "marker": "s", "markersize": 3, "linewidth": 1, "zorder": 3}
        elif row.impl == OURS:
            looks[name] = {
                "color": OURS_COLORS[asymmetric],
                "marker": "o" if row.weight_bits == 4 else "^",
                "markersize": 4,
                "linewidth": 2,
                "zorder": 4,
            }
        else:
            color = free[impls.index(row.impl) % len(free)]
            looks[name] = {"color": color, "marker": "x", "markersize": 4, "linewidth": 1, "zorder": 2}
            looks[name]["linestyle"] = ":" if asymmetric else "-"
    return looks


def _is_other(row: Row) -> bool:
    """Whether these are quantized weights in another library's kernel."""
    return not row.impl.startswith(OURS) and not is_baseline(row)


def _save(figure: Figure, stem: Path) -> list[Path]:
    files = []
    for kind, metadata in METADATA.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        figure.savefig(path, format=kind, dpi=90, metadata=metadata)
        files.append(path)
    return files
