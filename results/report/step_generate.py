"""Tokens of ``model.generate`` beside the captured step: a part of the page of ``step``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .cells import commits_of
from .markdown import number, table

OP = "generate"  # of its rows


def generate_section(rows: Iterable[dict[str, Any]]) -> str:
    """The newest of ``rows``, which are one device's, for each batch, length, weights and cache; "" without rows."""
    newest = {(row["layers"], row["kv_len"], row["batch"], row["format"], row["kv_format"]): row for row in rows}
    if not newest:
        return ""
    about = (
        f"Commit {commits_of(newest.values())}. A token of all sequences in transformers' `generate`, over prompts of as many tokens: "
        "the step, the choice of the next token and the host's work, from one look at the stopping criteria to the next; medians of "
        "rounds of 64 tokens. Beside it its captured step, replayed alone. Logits are off the uncompiled model's by no more than is "
        "accepted: 2 % over a 16-bit cache; where rounding moves codes, which random weights make much of, [what it was "
        "measured to do](../notes/step-codes.md). "
        "`python -m results.measure.generate` writes these rows."
    )
    header = [
        "batch", "tokens in the cache", "layers", "weights", "cache", "ms a token", "its graph alone, ms", "longer by", "logits off by",
        "commit",
    ]  # fmt: skip
    lines = [
        [
            str(row["batch"]), str(row["kv_len"]), str(row["layers"]), row["format"], row["kv_format"], number(row["us"] / 1e3),
            number(row["graph_us"] / 1e3), f"{row['us'] / row['graph_us'] - 1:.0%}",
            f"{row['rel_err']:.1%} (of {row['rel_err_accepted']:.0%})", str(row["commit"])[:7],
        ]
        for _, row in sorted(newest.items())
    ]  # fmt: skip
    return f"### In generate\n\n{about}\n\n{table(header, lines)}"
