"""The page of the quality of low-bit caches: rows of ``kv_cache``."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from .markdown import table
from .rows import json_rows

FIELDS = ("problem", "format", "seed", "token_bytes", "head_dim", "rel_err", "rel_err_worst", "one_minus_cosine", "top1", "largest_weight")
ABOUT = (
    "What attention loses when its keys and values are quantized, on random problems of grouped-query heads: relative error of the "
    "outputs, in brackets that of the worst query and head; mean cosine with the exact output; **top-1**, how often the largest attention "
    "weight stays on the same token. Everything but the quantization is fp64. Outlier channels are 10 to 30 times larger than the others "
    "and nearly constant, as models' keys have them; some queries attend to one token, some to many. Values are white noise, the hardest "
    "case: averaged over many tokens they cancel, and errors do not. Means over the seeds; `python -m results.measure.kv_cache` "
    "writes the rows, and how problems are drawn stands there. A **token** takes so many bytes in one key head, parameters included "
    "(512 in 16 bits)."
)


def read_quality(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The rows by problem and format. Raises ``ValueError`` with file and line for a row that lacks
    a field."""
    problems: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for _, row in json_rows(folder, FIELDS):
        problems.setdefault(row["problem"], {}).setdefault(row["format"], []).append(row)
    return problems


def quality_table(folder: Path) -> str:
    """Formats down, problems across: the mean error of the outputs; "" without rows."""
    problems = read_quality(folder)
    formats = {format: rows[0]["token_bytes"] for of_problem in problems.values() for format, rows in of_problem.items()}
    lines = [
        [
            format,
            str(size),
            *(
                f"{mean(row['rel_err'] for row in of_problem[format]):.2%}" if format in of_problem else "-"
                for of_problem in problems.values()
            ),
        ]
        for format, size in formats.items()
    ]
    return table(["cache", "bytes a token and key head", *problems], lines) if lines else ""


def accuracy_section(folder: Path) -> str:
    """Formats down, one table per problem; "" without rows. Raises ``ValueError`` with file and
    line for a row that lacks a field."""
    parts = []
    for problem, formats in read_quality(folder).items():
        first = next(iter(formats.values()))
        heaviest = mean(row["largest_weight"] for row in first)
        lines = [
            [
                format,
                str(rows[0]["token_bytes"]),
                f"{mean(row['rel_err'] for row in rows):.2%} ({max(row['rel_err_worst'] for row in rows):.1%})",
                f"{1 - mean(row['one_minus_cosine'] for row in rows):.5f}",
                f"{mean(row['top1'] for row in rows):.1%}",
            ]
            for format, rows in formats.items()
        ]
        parts.append(f"**{problem}** ({len(first)} seeds; a query's largest weight is {heaviest:.2f} on average)")
        parts.append(table(["cache", "bytes a token", "error of outputs", "cosine", "top-1"], lines))
    return "\n\n".join([ABOUT, *parts]) if parts else ""
