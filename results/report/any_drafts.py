"""The page of speculative decoding from one store: rows of ``any_drafts``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import table
from .rows import json_rows

FIELDS = (
    "model", "sensitivity", "bits", "ahead", "drafted", "accepted", "same", "prompts", "new", "seconds", "seconds_alone", "gpu", "commit",
    "date",
)  # fmt: skip
KINDS = {"none": "all values alike", "fisher": "by squared gradients"}
ABOUT = (
    "The view of a model in few bits drafts a fixed number of tokens, its 8-bit view, of the same store, checks them in one step "
    "(transformers' assisted generation, greedy, in float16). **Accepted** are drafts that the 8-bit view would have chosen itself; a "
    "step gives them and one token of its own. Tokens are those of the 8-bit view alone in every prompt that is counted as the same. "
    "Times are of transformers' own loop, which costs a model as small as this one more than its weights do: they say nothing of a "
    "large model."
)


def any_drafts_section(folder: Path) -> str:
    """The newest row of each kind of store, width and number of drafts; "" without rows. Raises
    ``ValueError`` with file and line for a row that lacks a field."""
    newest: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for _, row in json_rows(folder, FIELDS):
        newest.setdefault((row["model"], row["gpu"]), {})[row["sensitivity"], row["bits"], row["ahead"]] = row
    parts = []
    for (model, gpu), found in sorted(newest.items()):
        rows = [found[place] for place in sorted(found, key=lambda place: (list(KINDS).index(place[0]), *place[1:]))]
        header = ["store", "bits of drafts", "drafts a step", "accepted", "tokens a step", "prompts the same", "seconds", "alone"]
        parts += [
            f"## {model}, {gpu}",
            f"{rows[0]['new']} new tokens of {rows[0]['prompts']} prompts; commit {commits_of(rows)}.",
            table(header, [_line(row) for row in rows]),
        ]
    return "\n\n".join([ABOUT, *parts]) if parts else ""


def _line(row: dict[str, Any]) -> list[str]:
    steps = row["new"] - row["accepted"]
    return [
        KINDS[row["sensitivity"]], str(row["bits"]), str(row["ahead"]), f"{row['accepted'] / max(1, row['drafted']):.0%}",
        f"{row['new'] / max(1, steps):.2f}", f"{row['same']} of {row['prompts']}", f"{row['seconds']:.1f}", f"{row['seconds_alone']:.1f}",
    ]  # fmt: skip
