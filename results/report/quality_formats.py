"""The page of what every format of weights and of caches costs a language model: rows of
``quality_formats``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.kv import KVLayout
from tilebit.layouts.kv_formats import KVFormat

from .cells import commits_of
from .markdown import slug, table
from .quality import ACTIVATIONS
from .rows import json_rows

FIELDS = (
    "model", "format", "method", "high", "share", "choice", "terms", "samples", "activations", "kv_format", "kept", "bits_per_weight",
    "perplexity", "kl", "top1", "tokens", "window", "gpu", "commit", "date",
)  # fmt: skip
HEAD_DIM = 64  # of the model; scales of each token weigh half as much where it is 128
FIGURES = ("perplexity", "KL", "top-1")
KEPT = {-1: "none", 0: "0 to 127", 128: "128 to 255", 384: "384 to 511"}  # newest tokens in 16 bits
ABOUT = (
    "Weights of all linear layers but the output layer, rounded to nearest; caches as tilebit holds them; both together. Measured are "
    "perplexity of Python's language reference, the mean **KL** divergence of the next token's distribution from the 16-bit model's in "
    "nats, and how often the most likely token is the same (**top-1**). All computing is fp32 with the values that codes stand for; "
    "every token is predicted as if those before it had come one by one: groups of 128 are "
    "read from their codes, the newest 0 to 127 tokens in fp16. Cache formats are the codes that kernels are tested against. fp8 has a "
    "scale of 1 for each head."
)
ABOUT_WEIGHTS = (
    "**Weights**: of two precisions the output channels in 8 bits are the most salient ones of all layers. Any precision (`_any`) is "
    "one store of 3 to 8 bits, and one of 2 to 8 for 2 bits; values count alike, or by the squared gradients of the loss on "
    "calibration text. Bits include its codebooks, which weigh much where channels are as short as here ([every width](any_quality.md))."
)
CAVEAT = (
    "The model has heads of 64 channels and was shipped in 4 bits, as [quality](quality.md) says: compare formats with one another. The "
    "text is short, so that small differences are not to be trusted: the same tokens are predicted in every row. Another kind of CPU sums "
    "in another order, which codes amplify: an earlier run on an AMD EPYC had KL divergences up to 7% away with 8-bit activations or a "
    "cache, and the same to four digits without either."
)


def read_formats(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The newest row of each variant with the most text, by model and device, in the order of the files.
    Raises ``ValueError`` with file and line for a row that lacks a field."""
    rows = [row for _, row in json_rows(folder, FIELDS)]
    found: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for row in rows:
        most = max(other["tokens"] for other in rows if (other["model"], other["gpu"]) == (row["model"], row["gpu"]))
        if row["tokens"] == most:
            found.setdefault((row["model"], row["gpu"]), {})[tuple(row[name] for name in FIELDS[1:11])] = row
    return {where: list(kept.values()) for where, kept in found.items()}


def formats_quality_section(folder: Path) -> str:
    """Tables of each model and device; "" without rows."""
    parts = []
    for (model, gpu), rows in read_formats(folder).items():
        first = rows[0]
        parts += [
            f"## {model}, {gpu}",
            f"{first['tokens']:,} tokens in windows of {first['window']:,}; commit {commits_of(rows)}.",
            *_tables(rows),
            f"![KL divergence of caches and weights](../plots/{formats_plot(model, gpu)}.svg)",
        ]
    return "\n\n".join([ABOUT, CAVEAT, *parts]) if parts else ""


def formats_plot(model: str, gpu: str) -> str:
    """The name of the plot of one model's rows of one device."""
    return f"{slug(gpu)}_{slug(model)}_formats"


def cache_bits(name: str) -> float:
    """Of a number in a cache of the format, scales and zero points included."""
    return 8 * KVLayout(KVFormat.from_name(name), HEAD_DIM).token_bytes / (2 * HEAD_DIM)


def caches(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a cache alone, the most bits first."""
    return sorted((row for row in rows if row["kv_format"] and not row["format"]), key=lambda row: -cache_bits(row["kv_format"]))


def weights(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of weights alone, the most bits first."""
    return sorted((row for row in rows if row["format"] and not row["kv_format"]), key=lambda row: -row["bits_per_weight"])


def any_precision(row: dict[str, Any]) -> bool:
    """Its weights are a width of a store of many."""
    return bool(row["format"]) and GemmFormat.parse(row["format"]).codebook


def weight_name(row: dict[str, Any]) -> str:
    """What a row's weights are called in tables."""
    if row["high"]:
        return f"{row['format']}, {row['share']:.0%} {row['high']}"
    return row["format"] + ", squared gradients" * bool(row["samples"])


def _tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    dense = [row for row in rows if not row["format"] and not row["kv_format"]]
    usual = [row for row in caches(rows) if row["kept"] == 0]
    windowed = {row["kv_format"] for row in caches(rows) if row["kept"]}
    windows = sorted((row for row in caches(rows) if row["kv_format"] in windowed), key=lambda row: (row["kv_format"], row["kept"]))
    together = [row for row in rows if row["format"] and row["kv_format"]]
    alone = {weight_name(row): row for row in weights(rows)}
    parts = [
        "**Caches**",
        table(
            ["cache", "bits a number", *FIGURES],
            [["none", "-", *_figures(row)] for row in dense]
            + [[row["kv_format"], f"{cache_bits(row['kv_format']):.2f}", *_figures(row)] for row in usual],
        ),
        "**Residual windows**: how many of the newest tokens stay in 16 bits. tilebit's are 0 to 127; without one, tokens are quantized "
        "as they come, which only formats can whose scales are each token's.",
        table(
            ["cache", "newest tokens in 16 bits", *FIGURES], [[row["kv_format"], KEPT[row["kept"]], *_figures(row)] for row in windows]
        ),
        ABOUT_WEIGHTS,
        table(
            ["weights", "activations", "bits a weight", *FIGURES],
            [["fp16", "16 bits", "16.00", *_figures(row)] for row in dense]
            + [
                [weight_name(row), ACTIVATIONS[row["activations"]], f"{row['bits_per_weight']:.2f}", *_figures(row)]
                for row in weights(rows)
            ],
        ),
    ]  # fmt: skip
    if together:
        lines = []
        for row in together:
            own = alone.get(weight_name(row))
            lines.append([weight_name(row), row["kv_format"], *_figures(row), "-" if own is None else _nats(own["kl"])])
        parts += ["**Both together**", table(["weights", "cache", *FIGURES, "KL of the weights alone"], lines)]
    return parts


def _figures(row: dict[str, Any]) -> list[str]:
    return [f"{row['perplexity']:.2f}", _nats(row["kl"]), f"{row['top1']:.1%}"]


def _nats(kl: float) -> str:
    return f"{kl:.4f}" if kl >= 0.001 or kl == 0 else f"{kl:.1e}"
