"""The plots of a language model's quality: KL divergence against bits a weight, and against bits in a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .any_quality import KINDS
from .quality import METHODS, searched, uniform
from .quality_formats import any_precision, cache_bits, caches, weight_name, weights

MARKERS = {"round": "o", "clip": "s", "gptq": "^", "gptq_clip": "D"}
COLORS = matplotlib.color_sequences["tab10"]


def quality(title: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """One mark for each format and method, named by its format's scales; two precisions as a line
    over their share of 8-bit channels."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Axes = figure.subplots()
    for index, method in enumerate(MARKERS):
        color = COLORS[index]
        if points := [row for row in uniform(rows) if row["method"] == method]:
            bits, kl = zip(*((row["bits_per_weight"], row["kl"]) for row in points), strict=True)
            axes.plot(bits, kl, MARKERS[method], color=color, label=METHODS[method])
            for row in points:
                scales = row["format"].split("_")[1]
                axes.annotate(scales, (row["bits_per_weight"], row["kl"]), xytext=(5, 3), textcoords="offset points", fontsize=7)
        if line := searched(rows, method):
            bits, kl = zip(*((row["bits_per_weight"], row["kl"]) for row in line), strict=True)
            axes.plot(bits, kl, "--", marker=MARKERS[method], markersize=4, color=color, label=f"two precisions, {METHODS[method]}")
            for row in line:
                place = (row["bits_per_weight"], row["kl"])
                axes.annotate(f"{row['share']:.0%}", place, xytext=(5, -9), textcoords="offset points", fontsize=7, color=color)
    _label(axes, "bits a weight, scales and zero points included", title)
    return figure


def formats(title: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """Caches alone beside weights alone, one mark for each format; the widths of any precision as lines."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    axes: tuple[Axes, Axes] = figure.subplots(1, 2, sharey=True)
    points = [(cache_bits(row["kv_format"]), row["kl"], row["kv_format"]) for row in caches(rows) if row["kept"] == 0]
    marked = [(row["bits_per_weight"], row["kl"], weight_name(row)) for row in weights(rows) if not any_precision(row)]
    for place, what, found in zip(axes, ("number in the cache", "weight"), (points, marked), strict=True):
        for index, (bits, kl, name) in enumerate(found):
            if kl > 0:
                place.plot(bits, kl, "o", color=COLORS[index % len(COLORS)])
                place.annotate(name, (bits, kl), xytext=(5, 2), textcoords="offset points", fontsize=7)
        place.set_yscale("log")
        place.set_xlabel(f"bits a {what}, scales and zero points included")
    _widths(axes[1], [row for row in weights(rows) if any_precision(row)])
    axes[0].set_ylabel("KL divergence from the 16-bit model, nats a token")
    figure.suptitle(f"{title}: lower is better")
    return figure


def _widths(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """A line for values that count alike, and one for those that count by squared gradients."""
    for style, gradients in (("--s", False), ("-s", True)):
        if points := [(row["bits_per_weight"], row["kl"], row["format"]) for row in rows if bool(row["samples"]) == gradients]:
            bits, kl, names = zip(*points, strict=True)
            label = "any precision" + ", by squared gradients" * gradients
            axes.plot(bits, kl, style, color="gray", markersize=4, linewidth=1, label=label)
            for name, x, y in zip(names, bits, kl, strict=True):
                axes.annotate(name, (x, y), xytext=(5, 2), textcoords="offset points", fontsize=7, color="gray")
    if rows:
        axes.legend(fontsize=8)


def any_quality(title: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """KL divergence against bits a weight, a line for each kind of clusters."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Axes = figure.subplots()
    for index, (kind, name) in enumerate(KINDS.items()):
        if points := sorted((row["bits"], row["kl"]) for row in rows if (row["method"], row["sensitivity"]) == kind):
            style = {"upscaled": "-o", "upscaled_4": "-.v", "exact": "--s", "independent": ":^"}[kind[0]]
            axes.plot(*zip(*points, strict=True), style, color=COLORS[index % 2], markersize=4, label=name)
    _label(axes, "bits a weight, codebooks not counted", f"{title}, every width of one store")
    return figure


def _label(axes: Axes, bits: str, title: str) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(bits)
    axes.set_ylabel("KL divergence from the 16-bit model, nats a token")
    axes.set_title(f"{title}: lower is better")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
