"""What every width of one store costs a language model: ``python -m results.measure.any_quality
--model FOLDER`` appends rows to results/rows/any_quality, on any machine.

Model and texts are those of ``results.measure.quality``, which says how the folder is made; layers
compute in fp32 with the values of their codebooks. "upscaled" is a width of one store of 3 to 8 bits
(``quantize_any``), "upscaled_4" of one of 4 to 8 bits, "exact" the k-means of that width alone, of the
least error there is. (Earlier rows have "independent" ones, by Lloyd's algorithm above 4 bits.) Values
count alike, or by the squared gradients of calibration text, summed over samples (the Fisher information's diagonal).
``megabytes`` are what a token reads of linear layers: planes and codebooks. A row that is there, of
the same settings and the same kind of device, is not measured again. Exact widths take a CPU's core
an hour or so, a GPU minutes.
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
from tilebit.weights.layers import linears_of, once
from tilebit.weights.quantize_any import quantize_any

from ..report.markdown import slug
from ..report.rows import ROWS
from . import quality_model
from .any_exact import independent
from .quality import compared

WIDTHS = range(3, 9)
SEEDS = {"upscaled": 3, "upscaled_4": 4}  # bits of the store's narrowest width
METHODS = (*SEEDS, "exact")
SENSITIVITIES = ("none", "fisher")
SAMPLES = 16, 128  # of calibration text, and tokens of each


def weights_of(
    originals: dict[str, Tensor], method: str, sensitivity: dict[str, Tensor] | None, widths: list[int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(bits, the values of all layers) of each of ``widths``."""
    if seed := SEEDS.get(method):
        given = sensitivity or dict.fromkeys(originals)
        held = {name: quantize_any(w, seed, sensitivity=given[name]) for name, w in originals.items()}
        for bits in widths:
            yield bits, {name: one.dequantize(bits) for name, one in held.items()}
        return
    alike: dict[int, list[str]] = {}  # layers by the length of their rows: a GPU needs many at once
    for name, w in originals.items():
        alike.setdefault(w.shape[1], []).append(name)
    for bits in widths:
        found = {}
        for names in alike.values():
            weights = None if sensitivity is None else torch.cat([sensitivity[name] for name in names])
            every = independent(torch.cat([originals[name] for name in names]), bits, weights)
            found |= zip(names, every.split([len(originals[name]) for name in names]), strict=True)
        yield bits, found


def megabytes(originals: dict[str, Tensor], bits: int) -> float:
    """Of planes and codebooks of ``bits`` bits."""
    return sum(w.numel() * bits / 8 + len(w) * (2 << bits) for w in originals.values()) / 1e6


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Those that are there; earlier ones name Python's version, not whose texts they are of."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return [{"texts": "python" + ".".join(row["python"].split(".")[:2])} | row for row in rows]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.any_quality", description="Measure the quality of every width.")
    default = os.environ.get("TILEBIT_QUALITY_MODEL")
    parser.add_argument("--model", type=Path, default=default, help="the model's folder (default: $TILEBIT_QUALITY_MODEL)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--only", choices=METHODS, help="measure no other clusters (default: all)")
    parser.add_argument("--tokens", type=int, default=16_384, help="evaluated (default: 16384)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument("--library", type=Path, default=quality_model.LIBRARY, help="lib/pythonX.Y of texts (default: this Python's)")
    parser.add_argument("--out", type=Path, help="the file to append to (default: results/rows/any_quality/DEVICE.jsonl)")
    options = parser.parse_args(arguments)
    if options.model is None:
        parser.error("--model FOLDER or $TILEBIT_QUALITY_MODEL is needed: python -m results.measure.quality --convert makes it")
    on_gpu = options.device.startswith("cuda")
    gpu = torch.cuda.get_device_name() if on_gpu else detect_target("cpu").name
    model, tokenizer = quality_model.load(options.model, torch.device(options.device))
    texts = quality_model.texts(tokenizer, options.tokens, options.window, options.library)
    layers = once(linears_of(model, ("lm_head",)))
    originals = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    out = options.out or ROWS / "any_quality" / f"{slug(gpu)}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": quality_model.MODEL, "tokens": options.tokens, "window": options.window, "texts": options.library.name, "gpu": gpu,
        "samples": SAMPLES[0], "sample_tokens": SAMPLES[1],
    }  # fmt: skip
    there = rows_of(out)
    fields = {
        **settings, "threads": None if on_gpu else torch.get_num_threads(), "python": platform.python_version(),
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
    for method in METHODS if options.only is None else (options.only,):
        for kind in SENSITIVITIES:
            wanted = {
                bits: {"bits": bits, "method": method, "sensitivity": kind, "megabytes": round(megabytes(originals, bits), 1)}
                for bits in WIDTHS
                if bits >= SEEDS.get(method, 0)
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
