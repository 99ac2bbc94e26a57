"""Speculative decoding from one store: ``python -m results.measure.any_drafts --model FOLDER`` appends rows
to results/rows/any_drafts: how many tokens of a model's 3- and 4-bit views its 8-bit view accepts, and
what both take.

Greedy, by transformers' assisted generation in float16: the narrow view drafts a fixed number of tokens,
the 8-bit view of the same weights checks them in one step. Tokens must be those of the 8-bit view alone
(in bfloat16 they often are not: results/notes/any-drafts.md). The store is made with every value alike
and by squared gradients of calibration text. The model is that of ``results.measure.quality``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilebit import precision_view, quantize_model_any, set_precision
from tilebit.autotune.provenance import now, source_commit
from tilebit.schedules.target import detect_target
from tilebit.weights.layers import linears_of, once

from ..report.markdown import slug
from ..report.rows import ROWS
from . import quality_model
from .any_quality import SAMPLES, SENSITIVITIES

WINDOW = 1024  # tokens of text that the calibration's is kept apart from
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Water boils at", "Once upon a time there was")


@dataclass(frozen=True, slots=True)
class Drafted:
    """``tokens`` int64 [1, new], of which drafts gave ``accepted`` of ``drafted``; ``alone`` says
    whether the model alone gives the same. Seconds of both, the first calls' compilation included
    unless kernels are there."""

    tokens: Tensor
    drafted: int
    accepted: int
    same: bool
    seconds: float
    seconds_alone: float


def drafted(model: Any, draft: Any, ids: Tensor, new: int, ahead: int) -> Drafted:
    """``new`` tokens after ``ids`` int64 [1, tokens], ``ahead`` drafts a step."""
    greedy: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    start = time.perf_counter()
    alone = model.generate(ids, **greedy)
    between = time.perf_counter()
    settings = draft.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule, settings.assistant_confidence_threshold = ahead, "constant", 0.0
    counts = {"model": 0, "draft": 0}

    def counting(name: str) -> Any:
        def count(*_: Any) -> None:
            counts[name] += 1

        return count

    hooks = [one.register_forward_hook(counting(name)) for name, one in (("model", model), ("draft", draft))]
    try:
        together = model.generate(ids, **greedy, assistant_model=draft)
    finally:
        for hook in hooks:
            hook.remove()
    end = time.perf_counter()
    made = together.shape[1] - ids.shape[1]
    # Each step of the model gives a token of its own beside the drafts that it accepts.
    same = torch.equal(alone, together)
    return Drafted(together[:, ids.shape[1] :], counts["draft"], made - counts["model"], same, end - between, between - start)


def stored(folder: Path, sensitivity: str) -> tuple[Any, Any]:
    """(the model in float16, its linear layers one store that serves 8 bits, its tokenizer)."""
    model, tokenizer = quality_model.load(folder, torch.device("cpu"))
    given = None
    if sensitivity == "fisher":
        texts = quality_model.texts(tokenizer, WINDOW, WINDOW)
        given = quality_model.squared_gradients(model, once(linears_of(model, ("lm_head",))), texts.samples(*SAMPLES))
    quantize_model_any(model, sensitivity=given, skip=("lm_head",))
    set_precision(model.to(torch.float16), 8)
    return model, tokenizer


def measured(model: Any, tokenizer: Any, bits: int, ahead: int, new: int) -> dict[str, Any]:
    """Sums over ``PROMPTS``."""
    draft = precision_view(model, bits)
    ids = [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in PROMPTS]
    drafted(model, draft, ids[0], ahead + 1, ahead)  # kernels are compiled
    found = [drafted(model, draft, one, new, ahead) for one in ids]
    return {
        "bits": bits,
        "ahead": ahead,
        "drafted": sum(one.drafted for one in found),
        "accepted": sum(one.accepted for one in found),
        "same": sum(one.same for one in found),
        "prompts": len(found),
        "new": new * len(found),
        "seconds": round(sum(one.seconds for one in found), 3),
        "seconds_alone": round(sum(one.seconds_alone for one in found), 3),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.any_drafts", description="Draft in 3 and 4 bits for 8 of one store.")
    default = os.environ.get("TILEBIT_QUALITY_MODEL")
    parser.add_argument("--model", type=Path, default=default, help="the model's folder (default: $TILEBIT_QUALITY_MODEL)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each prompt (default: 48)")
    parser.add_argument("--ahead", type=int, nargs="+", default=[2, 4], help="drafts a step (default: 2 4)")
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4], help="of the drafts (default: 3 4)")
    parser.add_argument("--out", type=Path, help="the file to append to (default: results/rows/any_drafts/DEVICE.jsonl)")
    options = parser.parse_args(arguments)
    if options.model is None:
        parser.error("--model FOLDER or $TILEBIT_QUALITY_MODEL is needed: python -m results.measure.quality --convert makes it")
    gpu = detect_target("cpu").name
    out = options.out or ROWS / "any_drafts" / f"{slug(gpu)}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    right = True
    for sensitivity in SENSITIVITIES:
        model, tokenizer = stored(options.model, sensitivity)
        for bits, ahead in product(options.bits, options.ahead):
            found = {"sensitivity": sensitivity, **measured(model, tokenizer, bits, ahead, options.tokens)}
            fields = {
                "model": quality_model.MODEL,
                "gpu": gpu,
                "torch": torch.__version__,
                "commit": source_commit() or None,
                "date": now(),
            }
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"op": "any_drafts", **found, **fields}) + "\n")
            print(found, flush=True)
            right &= found["same"] == found["prompts"]
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
