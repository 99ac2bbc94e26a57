"""The page of what every width of one store costs a language model: rows of ``any_quality``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import slug, table
from .quality_formats import with_most_text

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
    "**One store** holds 3 to 8 bits of every weight (`quantize_any`; Any-Precision LLM, sections 4.1 and 4.2): each width is "
    "the first bits of the next one. Values count alike or **by squared gradients** of the loss on calibration text, summed over "
    "samples. All linear layers but the output layer; computing is fp32 with the values of the codebooks. Measured are perplexity of "
    "Python's language reference, the mean **KL** divergence of the next token's distribution from the 16-bit model's in nats, and how "
    "often the most likely token is the same (**top-1**). **Megabytes** are what a token reads of linear layers, codebooks included: "
    "they weigh more in a model as small as this one."
)
ALONE = (
    "**That width alone** is the k-means of each output channel, by Lloyd's algorithm, for that width and no other: what nesting costs is "
    "the difference."
)
CAVEAT = "The text is short: the same tokens are predicted in every row, and small differences are not to be trusted."


def read_any_quality(folder: Path) -> Rows:
    """The newest row of each width and kind with the most text. Raises ``ValueError`` with file and
    line for a row that lacks a field."""
    return with_most_text(folder, FIELDS, ("bits", "method", "sensitivity"))


def any_quality_section(folder: Path) -> str:
    """Tables of each model and device; "" without rows."""
    parts = []
    for (model, gpu), rows in read_any_quality(folder).items():
        first = rows[0]
        parts += [
            f"## {model}, {gpu}",
            f"{first['tokens']:,} tokens in windows of {first['window']:,}; squared gradients of {first['samples']} samples of "
            f"{first['sample_tokens']} tokens; commit {commits_of(rows)}.",
            *[ALONE] * any(row["method"] == "independent" for row in rows),
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
