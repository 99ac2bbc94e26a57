"""The page of the squared error of every width of one store: rows of ``any_errors``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import table
from .rows import json_rows

FIELDS = (
    "values", "k", "n", "seed", "sensitivity", "bits", "error", "error_exact", "ratio", "ratio_worst", "gpu", "commit", "date"
)  # fmt: skip
ACCEPTED = 1.25  # of a width's squared error to the exact optimum's; above, it is a defect
VALUES = {"normal": "normal", "laplace": "Laplace", "outliers": "normal, 0.5 % times 20"}
WEIGHTS = {"none": "alike", "squares": "weighted"}
ABOUT = (
    "Squared error of each width of one store of 3 to 8 bits (`quantize_any`) over that of exact k-means of that width alone, which no "
    "codebooks are below; both have fp16 codebooks, and errors are summed over a layer in fp64. Layers are random. Values count alike, or "
    "**weighted** with squares of normal numbers, which stand for squared gradients."
)
WHY = (
    f"**Bold**: above {ACCEPTED}, which counts as a defect. What is known of why: all clusters of a width are cut into as many codes, "
    "whatever they hold. The best clusters of 3 bits follow the few largest values, so that at 8 bits these have most of the codes and "
    "the many small ones too few; the more so the heavier the tails and the fewer values there are for a code, which are two at 8 bits "
    "of 576 values. There no nested clusters are near: of one row of 1024 values with outliers the mean of the six ratios is at least "
    "2.48, whatever is chosen ([note](../notes/any-nested.md)). How much of the ratios below a better choice would save was not measured."
)
RATIOS = "**Over exact clusters**: of the layer, and of its worst row."
ERRORS = "**Relative errors**: squared errors of one store and of exact clusters, as shares of the weight's own square."


def any_errors_section(folder: Path) -> str:
    """The newest row of each layer, kind of weights and width, by device; "" without rows. Raises
    ``ValueError`` with file and line for a row that lacks a field."""
    devices: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for _, row in json_rows(folder, FIELDS):
        rows = devices.setdefault(row["gpu"], {})
        what = (*_layer(row), row["bits"])
        if what not in rows or row["date"] >= rows[what]["date"]:
            rows[what] = row
    parts = []
    for gpu, found in sorted(devices.items()):
        rows = list(found.values())
        above = [row for row in rows if row["ratio"] > ACCEPTED]
        parts += [
            f"## {gpu}",
            f"{len(rows)} layers and widths, {len(above)} of them above {ACCEPTED}; commit {commits_of(rows)}.",
            RATIOS,
            _table(rows, lambda row: f"{_marked(row['ratio'])}, {_marked(row['ratio_worst'])}"),
            ERRORS,
            _table(rows, lambda row: f"{row['error']:.2e}, {row['error_exact']:.2e}"),
        ]
    return "\n\n".join([ABOUT, WHY, *parts]) if parts else ""


def _layer(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["values"], row["k"], row["n"], row["seed"], row["sensitivity"]


def _marked(ratio: float) -> str:
    return f"**{ratio:.3f}**" if ratio > ACCEPTED else f"{ratio:.3f}"


def _table(rows: Sequence[dict[str, Any]], cell: Any) -> str:
    """A line for each layer and kind of weights, a column for each width."""
    widths = sorted({row["bits"] for row in rows})
    lines = []
    for layer in dict.fromkeys(_layer(row) for row in rows):
        own = {row["bits"]: row for row in rows if _layer(row) == layer}
        values, k, n, _, sensitivity = layer
        cells = [cell(own[bits]) if bits in own else "-" for bits in widths]
        lines.append([f"{VALUES[values]}, {n} x {k}", WEIGHTS[sensitivity], *cells])
    return table(["layer", "values count", *(f"{bits} bits" for bits in widths)], lines)
