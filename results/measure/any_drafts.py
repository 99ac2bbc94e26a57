"""Speculative decoding from one store: ``python -m results.measure.any_drafts --model FOLDER`` prints how
many tokens of a model's 3-bit view its 8-bit view accepts, and what both take.

Greedy, by transformers' assisted generation: the 3-bit view drafts a fixed number of tokens, the 8-bit
view of the same weights checks them in one step. Tokens must be those of the 8-bit view alone. The
model is that of ``results.measure.quality``, or any folder that transformers reads.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilebit import precision_view, quantize_model_any, set_precision

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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.any_drafts", description="Draft in 3 bits for 8 of the same store.")
    parser.add_argument("--model", type=Path, required=True, help="the model's folder")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each prompt (default: 48)")
    parser.add_argument("--ahead", type=int, default=4, help="drafts a step (default: 4)")
    parser.add_argument("--bits", type=int, default=3, help="of the drafts (default: 3)")
    options = parser.parse_args(arguments)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    quantize_model_any(model)
    set_precision(model, 8)
    draft = precision_view(model, options.bits)
    sums = [0, 0, 0]
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        found = drafted(model, draft, ids, options.tokens, options.ahead)
        text = f"{found.accepted} of {found.drafted} drafts accepted; {found.seconds:.1f} s, alone {found.seconds_alone:.1f} s"
        print(f"{prompt!r}: {'the same tokens' if found.same else 'OTHER TOKENS'}; {text}", flush=True)
        sums = [a + b for a, b in zip(sums, (found.accepted, found.drafted, found.same), strict=True)]
    print(f"any_drafts: {sums[0] / max(1, sums[1]):.1%} of {sums[1]} drafts accepted, {sums[2]} of {len(PROMPTS)} prompts the same")
    return 0 if sums[2] == len(PROMPTS) else 1


if __name__ == "__main__":
    sys.exit(main())
