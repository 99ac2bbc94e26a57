"""What every width of one store costs a language model: ``python -m results.measure.any_quality
--model FOLDER`` appends rows to results/rows/any_quality, on any machine.

Model and texts are those of ``results.measure.quality``, which says how the folder is made; layers
compute in fp32 with the values of their codebooks. "upscaled" is a width of one store of 3 to 8 bits
(``quantize_any``), "independent" the k-means of that width alone, by Lloyd's algorithm. Values count
alike, or by the squared gradients of calibration text, summed over samples (the Fisher
information's diagonal). ``megabytes`` are what a token reads of linear layers: planes and codebooks.
A row that is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.provenance import now, source_commit
from tilebit.quality import log_probabilities
from tilebit.schedules.target import detect_target
from tilebit.weights.kmeans import SortedRows, cluster, lloyd, segments, spread
from tilebit.weights.layers import linears_of, once
from tilebit.weights.nested import density_of, even
from tilebit.weights.quantize_any import quantize_any

from ..report.markdown import slug
from ..report.rows import ROWS
from . import quality_model
from .quality import compared

WIDTHS = range(3, 9)
METHODS = ("upscaled", "independent")
SENSITIVITIES = ("none", "fisher")
ROWS_AT_ONCE = 32  # of a weight: as ``quantize_any`` takes them
SAMPLES = 16, 128  # of calibration text, and tokens of each


def independent(w: Tensor, bits: int, sensitivity: Tensor | None) -> Tensor:
    """``w`` [n, k] with 2^bits numbers a row, rounded to fp16, of clusters that lie in no others."""
    found = torch.empty_like(w)
    for start in range(0, len(w), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        rows = SortedRows.of(w[part], None if sensitivity is None else sensitivity[part])
        edges = cluster(rows, 1 << bits) if bits <= 4 else lloyd(rows, even(density_of(rows), 1 << bits))
        numbers = spread(rows.means(edges, rows.first(edges)), segments(edges, rows.k), rows.k).half().to(w.dtype)
        found[part] = torch.empty_like(w[part]).scatter_(1, rows.order, numbers)
    return found


def weights_of(
    originals: dict[str, Tensor], method: str, sensitivity: dict[str, Tensor] | None, widths: list[int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(bits, the values of all layers) of each of ``widths``."""
    given: dict[str, Tensor | None] = {name: None if sensitivity is None else sensitivity[name] for name in originals}
    if method == "upscaled":
        held = {name: quantize_any(w, sensitivity=given[name]) for name, w in originals.items()}
        for bits in widths:
            yield bits, {name: one.dequantize(bits) for name, one in held.items()}
        return
    for bits in widths:
        yield bits, {name: independent(w, bits, given[name]) for name, w in originals.items()}


def megabytes(originals: dict[str, Tensor], bits: int) -> float:
    """Of planes and codebooks of ``bits`` bits."""
    return sum(w.numel() * bits / 8 + len(w) * (2 << bits) for w in originals.values()) / 1e6


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.any_quality", description="Measure the quality of every width.")
    default = os.environ.get("TILEBIT_QUALITY_MODEL")
    parser.add_argument("--model", type=Path, default=default, help="the model's folder (default: $TILEBIT_QUALITY_MODEL)")
    parser.add_argument("--tokens", type=int, default=16_384, help="evaluated (default: 16384)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument("--out", type=Path, help="the file to append to (default: results/rows/any_quality/DEVICE.jsonl)")
    options = parser.parse_args(arguments)
    if options.model is None:
        parser.error("--model FOLDER or $TILEBIT_QUALITY_MODEL is needed: python -m results.measure.quality --convert makes it")
    model, tokenizer = quality_model.load(options.model, torch.device("cpu"))
    texts = quality_model.texts(tokenizer, options.tokens, options.window)
    layers = once(linears_of(model, ("lm_head",)))
    originals = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    gpu = detect_target("cpu").name
    out = options.out or ROWS / "any_quality" / f"{slug(gpu)}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    there = [json.loads(line) for line in lines if line.strip()]
    settings = {"model": quality_model.MODEL, "tokens": options.tokens, "window": options.window}
    fields = {
        **settings, "gpu": gpu, "samples": SAMPLES[0], "sample_tokens": SAMPLES[1], "python": platform.python_version(),
        "torch": torch.__version__, "commit": source_commit() or None,
    }  # fmt: skip
    reference = [log_probabilities(model, window) for window in texts.windows]

    def measure(what: dict[str, Any]) -> None:
        found = {name: float(f"{value:.5g}") for name, value in compared(model, texts.windows, reference).items()}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"op": "any_quality", **what, **found, **fields, "date": now()}) + "\n")
        print(what, found, flush=True)

    def missing(what: dict[str, Any]) -> bool:
        return not any((what | settings).items() <= row.items() for row in there)

    dense = {"bits": 16, "method": "", "sensitivity": "", "megabytes": round(sum(w.numel() for w in originals.values()) * 2 / 1e6, 1)}
    if missing(dense):
        measure(dense)
    fisher: dict[str, Tensor] | None = None
    for method in METHODS:
        for kind in SENSITIVITIES:
            wanted = {
                bits: {"bits": bits, "method": method, "sensitivity": kind, "megabytes": round(megabytes(originals, bits), 1)}
                for bits in WIDTHS
            }
            wanted = {bits: what for bits, what in wanted.items() if missing(what)}
            if not wanted:
                continue
            if kind == "fisher" and fisher is None:
                fisher = quality_model.squared_gradients(model, layers, texts.samples(*SAMPLES))
            for bits, values in weights_of(originals, method, fisher if kind == "fisher" else None, list(wanted)):
                for name, layer in layers.items():
                    layer.weight.data.copy_(values[name])
                measure(wanted[bits])
            for name, layer in layers.items():
                layer.weight.data.copy_(originals[name])
    print(f"any_quality: rows in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
