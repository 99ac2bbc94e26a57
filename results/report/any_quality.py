"""The page of what every width of one store costs a language model, and its plot: rows of
``any_quality``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .cells import commits_of
from .markdown import slug, table
from .rows import json_rows

FIELDS = (
    "model", "bits", "method", "sensitivity", "megabytes", "perplexity", "kl", "top1", "tokens", "window", "samples", "sample_tokens",
    "gpu", "commit", "date",
)  # fmt: skip
Rows = dict[tuple[str, str], list[dict[str, Any]]]  # by model and device
# How a width's numbers were found: method and sensitivity
KINDS = {
    ("upscaled", "none"): "one store",
    ("upscaled", "fisher"): "one store, by squared gradients",
    ("independent", "none"): "that width alone",
    ("independent", "fisher"): "that width alone, by squared gradients",
}
ABOUT = (
    "**One store** holds 3 to 8 bits of every weight (`quantize_any`, Any-Precision LLM, section 3): a width is the first bits of the next "
    "one. **That width alone** is the k-means of each output channel, by Lloyd's algorithm, for that width and no other: what nesting "
    "costs is the difference. Values count alike or **by squared gradients** of the loss on calibration text, summed over samples. All "
    "linear layers but the output layer; computing is fp32 with the values of the codebooks. Measured are perplexity of Python's language "
    "reference, the mean **KL** divergence of the next token's distribution from the 16-bit model's in nats, and how often the most "
    "likely token is the same (**top-1**). **Megabytes** are what a token reads of linear layers, codebooks included: they weigh more "
    "in a model as small as this one."
)
CAVEAT = "The text is short: the same tokens are predicted in every row, and small differences are not to be trusted."


def read_any_quality(folder: Path) -> Rows:
    """The newest row of each width and kind with the most text. Raises ``ValueError`` with file and
    line for a row that lacks a field."""
    rows = [row for _, row in json_rows(folder, FIELDS)]
    found: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for row in rows:
        where = (row["model"], row["gpu"])
        if row["tokens"] == max(other["tokens"] for other in rows if (other["model"], other["gpu"]) == where):
            found.setdefault(where, {})[(row["bits"], row["method"], row["sensitivity"])] = row
    return {where: list(kept.values()) for where, kept in found.items()}


def any_quality_section(folder: Path) -> str:
    """Tables of each model and device; "" without rows."""
    parts = []
    for (model, gpu), rows in read_any_quality(folder).items():
        first = rows[0]
        parts += [
            f"## {model}, {gpu}",
            f"{first['tokens']:,} tokens in windows of {first['window']:,}; squared gradients of {first['samples']} samples of "
            f"{first['sample_tokens']} tokens; commit {commits_of(rows)}.",
            *(f"**{name}**\n\n{_table(rows, field, form)}" for name, field, form in FIGURES),
            f"![KL divergence against bits a weight](../plots/{any_quality_plot(model, gpu)}.svg)",
        ]
    return "\n\n".join([ABOUT, CAVEAT, *parts]) if parts else ""


FIGURES = (("KL divergence, nats", "kl", ".4f"), ("Perplexity", "perplexity", ".2f"), ("Top-1", "top1", ".1%"))


def _table(rows: Sequence[dict[str, Any]], field: str, form: str) -> str:
    """A line for each width, a column for each kind that was measured."""
    found = {(row["bits"], row["method"], row["sensitivity"]): row for row in rows}
    kinds = [kind for kind in KINDS if any(kind == key[1:] for key in found)]
    lines = []
    for bits in sorted({row["bits"] for row in rows}):
        here = [row for row in rows if row["bits"] == bits]
        dense = found.get((bits, "", ""))
        cells = [found.get((bits, *kind), dense) for kind in kinds]
        lines.append([str(bits), f"{here[0]['megabytes']:.1f}", *("-" if row is None else format(row[field], form) for row in cells)])
    return table(["bits", "megabytes", *(KINDS[kind] for kind in kinds)], lines)


def any_quality_plot(model: str, gpu: str) -> str:
    """The name of the plot of one model's rows of one device."""
    return f"{slug(gpu)}_{slug(model)}_any_precision"


def any_quality(title: str, rows: Sequence[dict[str, Any]]) -> Figure:
    """KL divergence against bits a weight, a line for each kind."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Axes = figure.subplots()
    for index, (kind, name) in enumerate(KINDS.items()):
        points = sorted((row["bits"], row["kl"]) for row in rows if (row["method"], row["sensitivity"]) == kind)
        if points:
            style = "-o" if kind[0] == "upscaled" else "--s"
            color = matplotlib.color_sequences["tab10"][index % 2]
            axes.plot(*zip(*points, strict=True), style, color=color, markersize=4, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("bits a weight, codebooks not counted")
    axes.set_ylabel("KL divergence from the 16-bit model, nats a token")
    axes.set_title(f"{title}: every width of one store, lower is better")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return figure
