"""Directories that other quantizers wrote, loaded: the page of ``foreign``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import joined, table
from .rows import json_rows

FIELDS = ("tool", "scheme", "dtype", "versions", "loaded", "weight_error", "logit_error", "gpu", "run", "commit", "date")
WEIGHT_LIMIT = 1e-3  # relative: the tools round weights to 16 bits, and tilebit holds their codes; bfloat16 has three bits less
LOGIT_LIMIT = 0.01
BFLOAT16 = 8
# Of logits where x is quantized, too: each side rounds x as it is in 16 bits, and the tool to its own steps.
X_LIMITS = {"w8a8_channel": 0.05, "w8a8_fp8": 0.15, "w8a8_fp8_g128": 0.15}


def limits(row: Mapping[str, Any]) -> tuple[float, float]:
    """What the errors of weights and of logits of a row may be at most."""
    wider = BFLOAT16 if row["dtype"] == "bfloat16" else 1
    return wider * WEIGHT_LIMIT, max([wider * LOGIT_LIMIT, *(X_LIMITS.get(format, 0.0) for format in row["loaded"])])


def within(row: Mapping[str, Any]) -> bool:
    """Whether a row's errors are what rounding makes."""
    weights, logits = limits(row)
    return row["weight_error"] <= weights and row["logit_error"] <= logits


def foreign_section(folder: Path) -> str:
    """The newest row of each scheme of each tool and of each of its releases; "" without rows."""
    newest: dict[tuple[str, ...], dict[str, Any]] = {}
    for _, row in json_rows(folder, FIELDS):
        newest[row["tool"], *(f"{name} {release}" for name, release in row["versions"].items()), row["scheme"]] = row
    if not newest:
        return ""
    about = (
        f"Commit {commits_of(newest.values())}. A random Llama of two layers that the tool itself quantized and saved, in an environment "
        "of its own, loaded by `tilebit.transformers.load`. Errors are relative norms: of the layer whose weight is farthest from the one "
        "that the tool computes with, and of the logits of 40 tokens beside those of the tool's model on the same CPU. "
        f"Rounding makes up to {WEIGHT_LIMIT:.0e} and {LOGIT_LIMIT:.0e} in float16, {BFLOAT16} times that in bfloat16; logits of formats "
        "that quantize x differ by more, since x on the edge of a step goes either way, and compressed-tensors' steps of int8 are 1/127.5 "
        "of a row's largest number where tilebit's are 1/127."
    )
    parts, groups = [about], {}
    for (tool, *releases, _), row in newest.items():
        groups.setdefault((tool, ", ".join(releases)), []).append(row)
    for (tool, releases), rows in sorted(groups.items()):
        header = ["scheme", "dtype", "loaded as", "error of weights", "error of logits", ""]
        parts += [f"## {tool}", f"{releases}.", table(header, [_line(row) for row in rows], numbers=False)]
    return joined(*parts)


def _line(row: Mapping[str, Any]) -> list[str]:
    formats = ", ".join(f"{count} `{name}`" for name, count in row["loaded"].items())
    verdict = "as rounded" if within(row) else "**differs**"
    return [row["scheme"], row["dtype"], formats, f"{row['weight_error']:.1e}", f"{row['logit_error']:.1e}", verdict]
