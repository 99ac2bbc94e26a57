"""What sharing one store costs each of its widths, in squared error: ``python -m results.measure.any_errors``
appends rows to results/rows/any_errors, on any machine.

Layers are random, with the same seed everywhere: normal values in rows of several lengths, Laplace's,
and normal ones of which 0.5 % are 20 times as large. Values count alike, or by weights that stand
for squared gradients: squares of normal numbers. ``error`` is the weighted squared error of a width
of one store of 3 to 8 bits (``quantize_any``), ``error_exact`` that of the exact k-means of that
width alone, both with codebooks in fp16, summed over the layer in fp64, as shares of the layer's own
weighted square. ``ratio`` is the one over the other, ``ratio_worst`` that of the worst row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.provenance import now, source_commit
from tilebit.schedules.target import detect_target
from tilebit.weights.quantize_any import quantize_any

from ..report.markdown import slug
from ..report.rows import ROWS
from .any_exact import independent

WIDTHS = range(3, 9)
ROWS_OF_LAYER = 64
OUTLIERS, OUTLIER_SIZE = 0.005, 20.0  # their share of the values, and times as large
SENSITIVITIES = ("none", "squares")


@dataclass(frozen=True, slots=True)
class Layer:
    """``n`` rows of ``k`` values: "normal", "laplace" or "outliers"."""

    values: str
    k: int
    n: int = ROWS_OF_LAYER
    seed: int = 0

    def drawn(self) -> tuple[Tensor, Tensor]:
        """(weight, what a squared error of each value costs), both fp32 [n, k], drawn on the CPU: on every device the same."""
        generator = torch.Generator().manual_seed(self.seed)
        w = torch.randn(self.n, self.k, generator=generator)
        places = torch.rand(self.n, self.k, generator=generator)
        if self.values == "outliers":
            w[places < OUTLIERS] *= OUTLIER_SIZE
        elif self.values == "laplace":
            w = w.sign() * places.clamp(min=torch.finfo(torch.float32).tiny).log()
        return w, torch.randn(self.n, self.k, generator=generator) ** 2


LAYERS = (
    Layer("normal", 4096), Layer("normal", 576), Layer("normal", 1024), Layer("normal", 14336), Layer("laplace", 4096),
    Layer("outliers", 4096),
)  # fmt: skip


def errors(w: Tensor, found: Tensor, weights: Tensor) -> Tensor:
    """fp64 [n]: the squared error of each row of ``found``, weighted with ``weights``; all fp32 [n, k]."""
    return ((w.double() - found.double()) ** 2 * weights.double()).sum(1)


def compared(layer: Layer, sensitivity: str, device: str, widths: Sequence[int] = WIDTHS) -> list[dict[str, Any]]:
    """The rows of one layer, one for each width; ``sensitivity`` is one of ``SENSITIVITIES``."""
    w, costs = (tensor.to(device) for tensor in layer.drawn())
    given = costs if sensitivity == "squares" else None
    weights = torch.ones_like(w) if given is None else given
    store = quantize_any(w, min(WIDTHS), max(WIDTHS), given)
    own = float((w.double() ** 2 * weights.double()).sum())
    rows = []
    for bits in widths:
        shared, alone = errors(w, store.dequantize(bits), weights), errors(w, independent(w, bits, given), weights)
        found = {
            "error": float(shared.sum()) / own,
            "error_exact": float(alone.sum()) / own,
            "ratio": float(shared.sum() / alone.sum()),
            "ratio_worst": float((shared / alone).max()),
        }
        numbers = {name: float(f"{value:.5g}") for name, value in found.items()}
        rows.append({"op": "any_errors", **asdict(layer), "sensitivity": sensitivity, "bits": bits, **numbers})
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.any_errors", description="Measure the squared error of every width.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--rows", type=int, default=ROWS_OF_LAYER, help=f"of each layer (default: {ROWS_OF_LAYER})")
    parser.add_argument("--out", type=Path, help="the file to append to (default: results/rows/any_errors/DEVICE.jsonl)")
    options = parser.parse_args(arguments)
    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else detect_target("cpu").name
    out = options.out or ROWS / "any_errors" / f"{slug(gpu)}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    fields = {"gpu": gpu, "torch": torch.__version__, "commit": source_commit() or None}
    for layer in LAYERS:
        one = replace(layer, n=options.rows)
        for sensitivity in SENSITIVITIES:
            rows = compared(one, sensitivity, options.device)
            with out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({**row, **fields, "date": now()}) + "\n" for row in rows)
            print(one, sensitivity, {row["bits"]: row["ratio"] for row in rows}, flush=True)
    print(f"any_errors: rows in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
