"""Products of every width of any precision: the page of ``any_precision``."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import number, table
from .rows import json_rows
from .targets import AT_ONE_ROW

FIELDS = ("gpu", "impl", "format", "m", "n", "k", "us", "rel_err", "run", "commit")
ASKED = {f"w{bits}a16_any": asked for bits, (asked, _) in AT_ONE_ROW.items()}  # m = 1, H200
DENSE = ("fp16", "bf16")
LLAMA = ((4 * 32, 4096, 4096), (2 * 32, 11008, 4096), (32, 4096, 11008))  # layers, n and k of Llama-2-7B
LLAMA_OTHER = 2 * 2 * 32000 * 4096  # bytes of its embedding and output layer, in 16 bits
FAMILIES = {  # table 1 of the paper: GB in one store, GB apart, saved
    (3, 6): ("5.6", "8.3", "1.49x"),
    (4, 8): ("7.7", "10.8", "1.40x"),
    (3, 4, 6): ("5.6", "12.1", "2.15x"),
    (3, 4, 8): ("7.7", "13.7", "1.76x"),
    (3, 4, 6, 8): ("7.9", "19.1", "2.41x"),
    (3, 4, 5, 6, 7, 8): ("8.4", "29.9", "3.56x"),
}
ABOUT_MEMORY = (
    "**Memory of a family** of widths of Llama-2-7B, in one store and as separate models, computed from its shapes: planes of the widest "
    "width and a codebook of each, embedding and output layer in 16 bits; beside the table 1 of Any-Precision LLM, "
    "whose separate models are smaller by just their codebooks."
)
PICTURE = (
    "Where the bits of a plane lie: `tilebit show planes_mma:1 --out planes.svg` (NVIDIA, plane 0; plane p has each word rotated by p "
    "bits) and `planes_cpu:1`."
)


def any_precision_section(folder: Path) -> str:
    """Each device's newest times of every shape, number of rows and width, beside 16 bits in the same
    process; "" without rows."""
    newest: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    held: dict[str, Any] = {}
    for _, row in json_rows(folder, FIELDS):
        if row["impl"] == "tilebit":
            held = row
            newest.setdefault(row["gpu"], {})[row["m"], row["n"], row["k"], row["format"]] = [row]
        elif held and row["format"] in DENSE:  # the 16-bit product that was timed in turn with it
            newest[row["gpu"]][held["m"], held["n"], held["k"], held["format"]].append(row)
    parts = []
    for gpu, cases in sorted(newest.items()):
        pairs = {key: (rows[0], rows[1]) for key, rows in cases.items() if len(rows) > 1}
        owns = [own for own, _ in pairs.values()]
        apart = [own for own in owns if not own["format"].endswith("_any")]
        of_models = f" (of separate models, {' and '.join(sorted({own['format'] for own in apart}))}, {commits_of(apart)})" if apart else ""
        about = (
            f"Commit {commits_of([own for own in owns if own not in apart])}{of_models}. Microseconds of a product, and how many times as "
            "fast as the 16-bit product of the same process it is. One store serves all widths."
        )
        if any("tried" in own for own, _ in pairs.values()):
            about += (
                " These are a trial's: the fastest of up to fifteen schedules, which need not be the one that is chosen, each with exact "
                "results on whole numbers; errors of random floats were not recorded, and the kernel has changed since."
            )
        parts += [f"## {gpu}", about, _means(pairs), _times(pairs)]
    return "\n\n".join([*parts, *_memory(), PICTURE]) if parts else ""


def _memory() -> list[str]:
    """What a family of widths of Llama-2-7B takes, in one store and as separate models, beside the
    paper's table 1: computed from shapes, nothing is measured."""
    lines = []
    for widths, paper in FAMILIES.items():
        one = LLAMA_OTHER + _codes(max(widths)) + sum(map(_codebooks, widths))
        apart = sum(LLAMA_OTHER + _codes(bits) + _codebooks(bits) for bits in widths)
        lines.append([", ".join(map(str, widths)), f"{one / 1e9:.1f}", f"{apart / 1e9:.1f}", f"{apart / one:.2f}x", *paper])
    return [ABOUT_MEMORY, table(["widths", "one store, GB", "separate, GB", "saved", "paper: one", "separate", "saved"], lines)]


def _codes(bits: int) -> float:
    """Bytes of the codes of Llama-2-7B's linear layers."""
    return sum(count * n * k for count, n, k in LLAMA) * bits / 8


def _codebooks(bits: int) -> int:
    """Bytes of their codebooks of one width: 2^bits numbers of 16 bits for each output channel."""
    return sum(count * n for count, n, _ in LLAMA) * (2 << bits)


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
