"""The plot of a language model's quality: KL divergence against bits a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .quality import METHODS, searched, uniform

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
    axes.set_yscale("log")
    axes.set_xlabel("bits a weight, scales and zero points included")
    axes.set_ylabel("KL divergence from the 16-bit model, nats a token")
    axes.set_title(f"{title}: lower is better")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return figure
