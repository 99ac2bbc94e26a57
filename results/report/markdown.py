"""Pieces of Markdown that every generated page is made of."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], lines: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A markdown table; ``numbers`` sets every column but the first to the right."""
    rule = ["---", *(["---:" if numbers else "---"] * (len(header) - 1))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


def joined(*parts: str) -> str:
    """Those of ``parts`` that say something, one below the other."""
    return "\n\n".join(filter(None, parts))


def details(summary: str, *parts: str) -> str:
    """``parts`` folded away under the line ``summary``."""
    return "\n\n".join([f"<details><summary>{summary}</summary>", *parts, "</details>"])


def number(us: float) -> str:
    """Three significant digits, no exponent: 6.93, 18.0, 1,240."""
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def slug(gpu: str) -> str:
    """A file name for a device: "NVIDIA H200" is nvidia_h200."""
    return "_".join("".join(c if c.isalnum() else " " for c in gpu.lower()).split())


def short_commit(commit: str | None) -> str:
    """Twelve digits, and that the tree was not clean when it was not."""
    hash, dirty, _ = (commit or "").partition("-dirty")
    return hash[:12] + dirty
