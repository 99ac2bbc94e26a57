"""The page of what every width of one store costs a language model: rows of ``any_quality``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import slug, table
from .rows import json_rows

FIELDS = (
    "model", "bits", "method", "sensitivity", "megabytes", "perplexity", "kl", "top1", "tokens", "window", "samples", "sample_tokens",
    "gpu", "python", "commit", "date",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """What rows that stand beside one another have alike: ``texts`` names the Python whose texts they
    are of ("python3.11"), ``samples`` of so many tokens give squared gradients."""

    model: str
    gpu: str
    tokens: int
    window: int
    texts: str
    samples: int
    sample_tokens: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Setting:
        """Of a row; earlier ones name Python's version, not its texts."""
        texts = row.get("texts") or "python" + ".".join(row["python"].split(".")[:2])
        alike = {name: row[name] for name in cls.__slots__ if name != "texts"}
        return cls(texts=texts, **alike)

    @property
    def plot(self) -> str:
        """The name of its plot."""
        text = f"{self.tokens}_{self.window}_{self.samples}x{self.sample_tokens}"
        return f"{slug(self.gpu)}_{slug(self.model)}_{slug(self.texts)}_{text}_any_precision"


Rows = dict[Setting, list[dict[str, Any]]]
# How a width's numbers were found: method and sensitivity
KINDS = {
    ("upscaled", "none"): "one store",
    ("upscaled", "fisher"): "one store, by squared gradients",
    ("upscaled_4", "none"): "one store from 4 bits on",
    ("upscaled_4", "fisher"): "one store from 4 bits on, by squared gradients",
    ("exact", "none"): "that width alone",
    ("exact", "fisher"): "that width alone, by squared gradients",
    ("independent", "none"): "that width alone, not exact",
    ("independent", "fisher"): "that width alone, not exact, by squared gradients",
}
ABOUT = (
    "**One store** holds 3 to 8 bits of every weight (`quantize_any`; Any-Precision LLM, sections 4.1 and 4.2): each width is "
    "the first bits of the next one. **From 4 bits on** its seed has 4 bits, which no narrower width constrains. Values count alike "
    "or **by squared gradients** of the loss on calibration text, summed over samples. All linear layers but the output layer; "
    "computing is fp32 with the values of the codebooks. Measured are perplexity of Python's language reference, the mean **KL** "
    "divergence of the next token's distribution from the 16-bit model's in nats, and how often the most likely token is the "
    "same (**top-1**). **Megabytes** are what a token reads of linear layers, codebooks included: they weigh more in a model as small as "
    "this one."
)
ALONE = {
    "exact": "**That width alone** is the exact k-means of each output channel for that width and no other, of the least squared error "
    "that any codebooks leave ([by how much less](any_errors.md)): what nesting costs is the difference.",
    "independent": "**Not exact** is the k-means of each output channel for that width and no other up to 4 bits by dynamic programming "
    "on a grid of cuts, above by Lloyd's algorithm, which leaves 2.6 times the least squared error at 8 bits of 576 normal values: from 5 "
    "bits on the difference says too little of what nesting costs.",
}
CAVEAT = (
    "The text is short: the same tokens are predicted in every row, and small differences are not to be trusted, the less the fewer "
    "tokens there are."
)


def read_any_quality(folder: Path) -> Rows:
    """The newest row of each width and kind of each setting, the newest setting first. Raises
    ``ValueError`` with file and line for a row that lacks a field."""
    found: dict[Setting, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for _, row in json_rows(folder, FIELDS):
        rows = found.setdefault(Setting.of(row), {})
        kind = row["bits"], row["method"], row["sensitivity"]
        if kind not in rows or row["date"] >= rows[kind]["date"]:
            rows[kind] = row
    newest = sorted(found, key=lambda setting: max(row["date"] for row in found[setting].values()), reverse=True)
    return {setting: list(found[setting].values()) for setting in newest}


def any_quality_section(folder: Path) -> str:
    """Tables of each setting; "" without rows."""
    parts = []
    for setting, rows in read_any_quality(folder).items():
        parts += [
            f"## {setting.model}, {setting.gpu}, {setting.tokens:,} tokens",
            f"{setting.tokens:,} tokens in windows of {setting.window:,}; squared gradients of {setting.samples} samples of "
            f"{setting.sample_tokens} tokens; Python {setting.texts.removeprefix('python')}'s texts; commit {commits_of(rows)}.",
            *(text for method, text in ALONE.items() if any(row["method"] == method for row in rows)),
            *(f"**{name}**\n\n{_table(rows, field, form)}" for name, field, form in FIGURES),
            f"![KL divergence against bits a weight](../plots/{setting.plot}.svg)",
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
