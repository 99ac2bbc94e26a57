"""The page of the quality of low-bit weights in a language model: rows of ``quality``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .markdown import short_commit, slug, table
from .rows import json_rows

FIELDS = (
    "model", "format", "method", "high", "share", "choice", "terms", "samples", "activations", "bits_per_weight", "perplexity", "kl",
    "top1", "tokens", "window", "calibration_samples", "calibration_window", "search_window", "seconds_search", "gpu", "date",
)  # fmt: skip
VARIANT = ("format", "method", "high", "share", "choice", "terms", "samples", "activations", "smooth")
SETTINGS = ("tokens", "window", "calibration_samples", "calibration_window", "search_window", "damping")
UNSAID_DAMPING = 0.1  # of GPTQ, in rows of before it could be chosen
METHODS = {"": "16 bits", "round": "to nearest", "clip": "clip search", "gptq": "GPTQ", "gptq_clip": "GPTQ, clip search"}
ACTIVATIONS = {
    "": "16 bits", "a8_token": "8 bits, a scale a token", "a8_g128": "8 bits, groups of 128", "fp8_token": "e4m3, a scale a token",
    "fp8_g128": "e4m3, groups of 128",
}  # fmt: skip
CHOICES = {"global": "all layers together", "layer": "the same share of each layer", "random": "at random"}
TERMS = {"both": "both terms", "first": "the first-order term alone", "second": "the second-order term alone"}
ABOUT = (
    "What a small language model loses when the weights of its linear layers (all but the output layer) are quantized: perplexity of "
    "Python's language reference, the mean **KL** divergence of the next token's distribution from the 16-bit model's in nats, and how "
    "often the most likely token is the same (**top-1**). Layers compute in fp32 with the values that their quantized weights stand for. "
    "GPTQ sorts columns by activation and is calibrated, as the search for salient channels is, on docstrings of the standard library. "
    "**Bits** are of a weight, scales and zero points included. Lower is better but for top-1."
)
CAVEAT = (
    "The model is shipped in Q4_1, 4 bits with a scale and an offset for each 32 weights; dequantized, that is the 16-bit model here. "
    "Its weights lie on a grid that 4-bit formats do not share, as their zero points are whole numbers, but groups of 32 have the "
    "spacing of it: compare methods with one another, and expect other losses of a model that was never quantized."
)
ABOUT_MIXED = (
    "Some output channels in 8 bits, the others in 4: those that a global search finds most salient (MixLLM, section 3.2, equation 4, "
    "one gradient a sample). **Search** is its time in seconds."
)


def read_language_quality(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The newest row of each variant, by model and device, in the order of the files. Raises
    ``ValueError`` with file and line for a row that lacks a field."""
    found: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for _, row in json_rows(folder, FIELDS):
        row.setdefault("damping", UNSAID_DAMPING)
        row.setdefault("smooth", False)  # in rows of before it could be
        rows = found.setdefault((row["model"], row["gpu"]), {})
        key = tuple(row[name] for name in (*VARIANT, *SETTINGS))
        if key not in rows or row["date"] >= rows[key]["date"]:
            rows[key] = row
    return {where: list(rows.values()) for where, rows in found.items()}


def language_section(folder: Path) -> str:
    """Tables of each model and device; "" without rows. Raises ``ValueError`` with file and line
    for a row that lacks a field."""
    parts = []
    for (model, gpu), every in read_language_quality(folder).items():
        parts.append(f"## {model}, {gpu}")
        for settings in dict.fromkeys(tuple(row[name] for name in SETTINGS) for row in every):
            rows = [row for row in every if tuple(row[name] for name in SETTINGS) == settings]
            parts += _tables(rows)
        parts.append(f"![KL divergence against bits a weight](../plots/{quality_plot(model, gpu)}.svg)")
    return "\n\n".join([ABOUT, CAVEAT, *parts]) if parts else ""


def quality_plot(model: str, gpu: str) -> str:
    """The name of the plot of one model's rows of one device."""
    return f"{slug(gpu)}_{slug(model)}_quality"


def uniform(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one format for all channels and 16-bit activations, without the 16-bit model's."""
    return [row for row in rows if row["format"] and not row["high"] and not row["activations"]]


def searched(rows: Iterable[dict[str, Any]], method: str, activations: str = "") -> list[dict[str, Any]]:
    """Rows of two precisions with channels of the whole search (or without any to choose), by
    share."""
    wanted = [row for row in rows if row["high"] and (row["method"], row["activations"]) == (method, activations)]
    most = max((row["samples"] for row in wanted), default=0)
    whole = [row for row in wanted if (row["choice"], row["terms"], row["samples"]) == ("global", "both", most)]
    return sorted(whole, key=lambda row: row["share"])


def _tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    first = rows[0]
    commits = ", ".join(sorted({short_commit(row.get("commit")) for row in rows}))
    parts = [
        f"{first['tokens']:,} tokens in windows of {first['window']:,}; GPTQ: {first['calibration_samples']} samples of "
        f"{first['calibration_window']} tokens, damping {first['damping']:g}; search: samples of {first['search_window']} tokens. "
        f"Python {(first.get('texts') or first.get('python') or '-').removeprefix('python')}'s texts; commit {commits}."
    ]
    formats = [row for row in rows if not row["high"]]
    if formats:
        lines = [
            [
                row["format"] or "fp16",
                METHODS[row["method"]] + ", smoothed" * row["smooth"],
                ACTIVATIONS[row["activations"]],
                f"{row['bits_per_weight']:.2f}",
                *_figures(row),
            ]
            for row in sorted(formats, key=lambda row: (-row["bits_per_weight"], row["format"], *_last(row), row["smooth"]))
        ]
        parts += ["**One format for all channels**", table(["weights", "method", "activations", "bits", *FIGURES], lines)]
    mixed = [row for row in rows if row["high"]]
    if mixed:
        parts += ["**Two precisions**", ABOUT_MIXED, _mixed(mixed)]
    return parts


FIGURES = ("perplexity", "KL", "top-1")


def _figures(row: dict[str, Any]) -> list[str]:
    return [f"{row['perplexity']:.2f}", f"{row['kl']:.4f}", f"{row['top1']:.1%}"]


def _last(row: dict[str, Any]) -> tuple[int, int]:
    return list(METHODS).index(row["method"]), list(ACTIVATIONS).index(row["activations"])


def _mixed(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    order = [list(words).index for words in (CHOICES, TERMS)]
    for row in sorted(rows, key=lambda row: (*_last(row), row["share"], order[0](row["choice"]), order[1](row["terms"]), -row["samples"])):
        nothing = row["share"] in (0, 1)
        by = "-" if nothing else CHOICES[row["choice"]]
        if row["choice"] != "random" and not nothing:
            by += f", {TERMS[row['terms']]}, {row['samples']} samples"
        seconds = "-" if row["seconds_search"] is None else f"{row['seconds_search']:.0f}"
        how = METHODS[row["method"]] + ("" if not row["activations"] else f"; activations in {ACTIVATIONS[row['activations']]}")
        lines.append([f"{row['share']:.0%}", by, how, f"{row['bits_per_weight']:.2f}", *_figures(row), seconds])
    formats = f"{rows[0]['high']} beside {rows[0]['format']}"
    return table([f"channels in 8 bits ({formats})", "chosen from", "method", "bits", *FIGURES, "search"], lines)
