"""Products of every width of any precision: the page of ``any_precision``."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import number, table
from .rows import json_rows

FIELDS = ("gpu", "impl", "format", "m", "n", "k", "us", "rel_err", "run", "commit")
ASKED = {"w3a16_any": 3.4, "w4a16_any": 2.8, "w5a16_any": 2.4, "w6a16_any": 2.0, "w7a16_any": 1.75, "w8a16_any": 1.55}  # m = 1, H200


def any_precision_section(folder: Path) -> str:
    """Each device's newest times of every shape, number of rows and width, beside 16 bits in the same
    process; "" without rows."""
    newest: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    held: dict[str, Any] = {}
    for _, row in json_rows(folder, FIELDS):
        if row["impl"] == "tilebit":
            held = row
            newest.setdefault(row["gpu"], {})[row["m"], row["n"], row["k"], row["format"]] = [row]
        elif held:  # the 16-bit product that was timed in turn with it
            newest[row["gpu"]][held["m"], held["n"], held["k"], held["format"]].append(row)
    parts = []
    for gpu, cases in sorted(newest.items()):
        pairs = {key: (rows[0], rows[1]) for key, rows in cases.items() if len(rows) > 1}
        about = (
            f"Commit {commits_of([own for own, _ in pairs.values()])}. Microseconds of a product, and how many times as fast as the 16-bit "
            "product of the same process it is. One store serves all widths."
        )
        if any("tried" in own for own, _ in pairs.values()):
            about += (
                " These are a trial's: the fastest of up to fifteen schedules, which need not be the one that is chosen, each with exact "
                "results on whole numbers; errors of random floats were not recorded, and the kernel has changed since."
            )
        parts += [f"## {gpu}", about, _means(pairs), _times(pairs)]
    return "\n\n".join(parts)


def _ratio(pair: tuple[dict[str, Any], dict[str, Any]]) -> float:
    return pair[1]["us"] / pair[0]["us"]


def _means(pairs: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]]) -> str:
    ms, formats = sorted({key[0] for key in pairs}), sorted({key[3] for key in pairs})
    lines = []
    for format in formats:
        cells = []
        for m in ms:
            ratios = [_ratio(pair) for key, pair in pairs.items() if (key[0], key[3]) == (m, format)]
            cells.append(f"{exp(sum(map(log, ratios)) / len(ratios)):.2f}x of {len(ratios)}" if ratios else "-")
        lines.append([format, *cells, f"{ASKED[format]:.2f}x" if format in ASKED else "-"])
    return table(["width", *(f"m = {m}, geometric mean" for m in ms), "asked at m = 1, NVIDIA H200"], lines)


def _times(pairs: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]]) -> str:
    formats = sorted({key[3] for key in pairs})
    places = sorted({key[:3] for key in pairs})
    lines = []
    for m, n, k in places:
        own = [pairs.get((m, n, k, format)) for format in formats]
        lines.append([f"{n} x {k}", str(m), *("-" if pair is None else f"{number(pair[0]['us'])} ({_ratio(pair):.2f}x)" for pair in own)])
    return table(["n x k", "m", *formats], lines)
