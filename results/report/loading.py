"""Memory and first tokens of a whole model: the page of ``loading``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import table
from .rows import json_rows

FIELDS = (
    "model", "case", "format", "kv_format", "gpu", "dtype", "prompt_tokens", "new_tokens", "load_s", "first_token_s", "second_token_s",
    "load_peak_bytes", "run_peak_bytes", "weight_bytes", "cache_bytes", "run", "commit",
)  # fmt: skip
CASES = {
    "16 bits": "16 bits, as transformers runs it", "while loading": "quantized while it loads, kernels at hand",
    "empty cache": "packed directory, every kernel compiled first", "filled cache": "packed directory, kernels at hand",
    "pack": "packed directory, kernels of a pack, compiling forbidden",
}  # fmt: skip


def loading_section(folder: Path) -> str:
    """The newest process's rows of each model, format, cache and device; "" without rows."""
    newest: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    formats: dict[str, tuple[str, str]] = {}
    rows = [row for _, row in json_rows(folder, FIELDS)]
    for row in rows:
        if row["format"] is not None:
            formats[row["run"]] = row["format"], row["kv_format"]
    for row in rows:
        kept = newest.setdefault((row["gpu"], row["model"], *formats[row["run"]]), [])
        if kept and kept[0]["run"] != row["run"]:
            kept.clear()
        kept.append(row)
    parts = []
    for (gpu, model, format, cache), found in sorted(newest.items()):
        first, load = found[0], found[0].get("load")  # rows of before it was noted are of a busy machine
        held = "the process's resident memory, mapped pages of the weights' file included" if first.get("arch") == "cpu" else "allocations"
        busy = (
            "Other programs ran on the machine: seconds are an order of size."
            if load is None
            else f"Load before the first case: {load:.1f} on {first['cores']} cores."
        )
        about = (
            f"Commit {commits_of(found)}. {format} over {cache}, {first['dtype']}; a prompt of {first['prompt_tokens']} tokens, "
            f"{first['new_tokens']} new ones; each case a process of its own, seconds and megabytes after its imports. Peaks are of "
            f"{held}. {busy}"
        )
        header = ["case", "weights", "cache", "peak of loading", "peak of running", "loaded", "first token", "second token"]
        parts += [f"## {model}, {gpu}", about, table(header, [_line(row) for row in found])]
    return "\n\n".join(parts)


def _line(row: dict[str, Any]) -> list[str]:
    megabytes = [f"{row[name] / 1e6:,.1f}" for name in ("weight_bytes", "cache_bytes", "load_peak_bytes", "run_peak_bytes")]
    seconds = [f"{row[name]:.2f}" for name in ("load_s", "first_token_s", "second_token_s")]
    return [CASES[row["case"]], *megabytes, *seconds]
