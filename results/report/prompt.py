"""Whole prompts of an 8B model: the page of ``prompt``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import table
from .rows import json_rows
from .targets import OF_A_PROMPT

FIELDS = ("gpu", "impl", "format", "kv_format", "batch", "prompt", "us", "run", "commit")
NAMES = {"cublas": "fp16, fused likewise", "transformers": "fp16, as transformers runs it"}


def prompt_section(folder: Path) -> str:
    """The newest process's rows of each device and prompt; "" without rows."""
    newest: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for _, row in json_rows(folder, FIELDS):
        kept = newest.setdefault((row["gpu"], row["batch"], row["prompt"]), [])
        if kept and kept[0]["run"] != row["run"]:
            kept.clear()
        kept.append(row)
    parts = []
    for (gpu, batch, tokens), rows in sorted(newest.items()):
        dense = {row["impl"]: row["us"] for row in rows if row["impl"] != "tilebit"}
        about = (
            f"Commit {commits_of(rows)}. {batch} x {tokens} tokens into a cache, logits of the last one. Ratios: "
            "times as fast as the 16-bit model, whose prompt is fused likewise, and as transformers runs it."
        )
        lines = []
        for row in rows:
            name = NAMES.get(row["impl"]) or f"{row['format']}, {row['kv_format']}"
            ratios = [f"{dense[impl] / row['us']:.2f}x" if impl in dense else "-" for impl in NAMES]
            asked = OF_A_PROMPT.get(row["format"]) if (batch, tokens) == (1, 8192) else None
            lines.append([name, f"{row['us'] / 1e3:.1f}", *ratios, "-" if asked is None else f"{asked}x"])
        header = ["", "ms", "against fused 16 bits", "against transformers", "asked, fused 16 bits"]
        parts += [f"## {gpu}, {batch} x {tokens}", about, table(header, lines)]
    return "\n\n".join(parts)
