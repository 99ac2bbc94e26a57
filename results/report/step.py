"""A whole decode step of an 8B model: the page of ``step``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import number, table
from .rows import json_rows
from .step_generate import OP, generate_section

FIELDS = ("gpu", "impl", "format", "kv_format", "batch", "kv_len", "layers", "us", "graph_us", "rel_err", "run", "commit")
PARTED = "tilebit_parts"  # a step with other parts in products than the default's
OURS = ("tilebit", PARTED)
NAMES = {"cublas_fa3": "cuBLAS, FA3", "vllm_kernels": "Marlin, FA3"}


def step_section(folder: Path) -> str:
    """Each device's steps over each cache in the newest process that timed them with weights of their format
    beside peers, and in one without where that is newer, with shipped records and tuned in steps; and tokens
    of ``generate``; "" without rows."""
    newest: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    runs: dict[tuple[Any, ...], str] = {}
    every = [row for _, row in json_rows(folder, FIELDS)]
    rows = [row for row in every if row.get("op") != OP]
    peers = {(row["run"], row["layers"], row["batch"], row["kv_len"], row["impl"]): row for row in rows if row["impl"] not in OURS}
    beside = {run for run, *_ in peers}
    for row in rows:
        kind = row["format"], row.get("tuned", ""), row["run"] in beside
        case = row["gpu"], row["layers"], row["batch"], row["kv_len"], *kind
        cases = newest.setdefault(row["gpu"], {})
        if runs.get(case) != row["run"]:
            runs[case] = row["run"]
            replaced = (*case[1:-1], False)  # by a newer process with peers those of one without
            for key in [key for key in cases if case[-1] and (*key[:3], *key[4:7]) == replaced]:
                del cases[key]
        cases[(*case[1:4], row["impl"], *kind, row["kv_format"])] = row
    parts = []
    for gpu in sorted({row["gpu"] for row in every}):
        in_generate = generate_section(row for row in every if row["gpu"] == gpu and row.get("op") == OP)
        rows = list(newest.get(gpu, {}).values())
        if not rows:
            parts += [f"## {gpu}", in_generate]
            continue
        about = (
            f"Commit {commits_of(rows)}. One new token for each sequence of a batch, from the token to its logits: medians of "
            "rounds in which all of a batch's steps alternate. tilebit's sequences grow, with room made on the host at each step, "
            "and windows fill at different steps; the others run again at one length. A graph alone is the captured step "
            "replayed, its sequences' lengths put back before (from 7002672 on). Logits agree with each other's, and over low-bit "
            "caches with the uncompiled model's, to 2 %; where activations are of 8 bits, to 1.25 times what moving the tokens' "
            "embeddings by their rounding (0.05 %) does to them. Rows with a ratio are of one process with what they are compared "
            "with; those without may be of later code, and of another device of the name. Schedules are those of the shipped "
            "records, or (in steps) of products that were tuned on the device where they run: `tilebit.transformers.tune`."
        )
        header = [
            "batch", "tokens in the cache", "layers", "kernels", "weights", "cache", "tuned", "ms a step", "its graph alone, ms",
            "16 bits take", "vLLM's kernels take", "commit",
        ]  # fmt: skip
        parts += [f"## {gpu}", about, table(header, [_line(row, peers) for row in sorted(rows, key=_order)]), in_generate]
    return "\n\n".join(part for part in parts if part)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kv_len"], row["batch"], -row["us"]


def _line(row: dict[str, Any], peers: dict[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    ratios = []
    for impl in ("cublas_fa3", "vllm_kernels"):
        peer = peers.get((row["run"], row["layers"], row["batch"], row["kv_len"], impl))
        ratios.append("-" if peer is None or row["impl"] not in OURS else f"{peer['us'] / row['us']:.2f}x")
    does = row.get("parts") and f", {row['parts']} in products"
    name = NAMES.get(row["impl"]) or f"tilebit{does or ''}"
    graph = number(row["graph_us"] / 1e3) if row["impl"] in OURS else "-"
    tuned = "-" if row["impl"] not in OURS else "in steps" if row.get("tuned") else "as shipped"
    return [
        str(row["batch"]), str(row["kv_len"]), str(row["layers"]), name, row["format"], row["kv_format"], tuned,
        number(row["us"] / 1e3), graph, *ratios, str(row["commit"])[:7],
    ]  # fmt: skip
