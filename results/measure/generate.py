"""A token of an 8B model in ``model.generate``: ``python -m results.measure.generate`` appends rows to
results/rows/step.

The model is that of ``results.measure.step``, compiled by ``tilebit.transformers.compile``; ``generate``
continues random prompts greedily over a tilebit cache. Timed is what a token takes from one look of
``generate`` at its stopping criteria to the next: the step, the next token, and all of the host's work
between them. Beside it stands the captured step alone, replayed as ``generate`` left it; on a CPU, which
captures nothing, the row repeats the token's time.

Nothing is timed before it is checked: the logits of ``generate``'s last token must be those of the model
as it runs uncompiled, token after token, to 2 % over a 16-bit cache. Where numbers differ by rounding,
codes of activations, and of keys and values, become their neighbours, and random weights make much of
that (results/notes/step-codes.md): there to what ``results.measure.step`` accepts.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

import tilebit
import tilebit.transformers
from tilebit.command.bench import process_fields, write_rows
from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.target import detect_target, file_stem
from tilebit.transformers import TilebitCache

from ..report.rows import ROWS
from .step import MODEL, TOLERANCE, accepted_error, made_model, relative, spread_of, timed

ROUNDS, TOKENS, REPLAYS = 5, 64, 8
CHECKED = 4  # tokens whose logits are compared, and that come before the clock starts: the step is captured meanwhile


class Clock(StoppingCriteria):
    """Stops nothing: notes when each token has been chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generated(model: Any, cache: TilebitCache, ids: Tensor, tokens: int, clock: Clock | None = None) -> Any:
    """``tokens`` tokens behind the prompts ``ids`` [batch, columns], the likeliest each; no row ends before."""
    cache.reset()
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens, do_sample=False,
        eos_token_id=model.config.vocab_size, pad_token_id=0, return_dict_in_generate=True, output_logits=clock is None,
        stopping_criteria=StoppingCriteriaList([] if clock is None else [clock]),
    )  # fmt: skip


@torch.no_grad()
def uncompiled(model: Any, cache: TilebitCache, tokens: Tensor, prompt: int) -> Tensor:
    """The logits behind all of ``tokens`` [batch, columns] but the last, of the model as it ran before ``compile``: the first
    ``prompt`` columns at once, the others one after another."""
    cache.reset()
    logits = model.tilebit_steps.original(input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    for column in range(prompt, tokens.shape[1] - 1):
        logits = model.tilebit_steps.original(input_ids=tokens[:, column : column + 1], past_key_values=cache, use_cache=True).logits
    return logits[:, -1]


def measure(model: Any, kv_format: str, format: str, batch: int, context: int, device: str) -> dict[str, Any]:
    """The row of ``batch`` prompts of ``context`` tokens. Raises ``ValueError`` where logits are not what they must be."""
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (batch, context), device=device, generator=generator)
    cache = TilebitCache(model.config, format=kv_format, max_tokens=context + TOKENS + CHECKED, sequences=batch)
    found = generated(model, cache, ids, CHECKED)
    tokens: Tensor = found.sequences
    expected = uncompiled(model, cache, tokens, context)
    error, accepted = relative(found.logits[-1], expected), TOLERANCE
    if GemmFormat.parse(format).x or KVFormat.from_name(kv_format).value_bits < 16:
        accepted = accepted_error(model, tokens.unique(), expected, lambda: uncompiled(model, cache, tokens, context))
    if not error <= accepted:
        raise ValueError(f"the relative error of generate's logits over {kv_format} is {error}, accepted {accepted}; no row is written")
    us = []
    for _ in range(ROUNDS):
        clock = Clock()
        generated(model, cache, ids, CHECKED + TOKENS, clock)
        us.append((clock.times[-1] - clock.times[CHECKED - 1]) / TOKENS * 1e6)
    own = spread_of(us)
    alone = own["us"]
    if device != "cpu":
        steps, step = model.tilebit_steps, cache.step
        assert step is not None
        replays = timed({"replay": lambda: steps.replay(step.batch)}, device, ROUNDS, REPLAYS)["replay"]
        alone = round(statistics.median(replays), 1)
    return {
        "impl": "tilebit", "format": format, "kv_format": kv_format, "batch": batch, "kv_len": context,
        "layers": model.config.num_hidden_layers, **own, "graph_us": alone, "rel_err": error, "rel_err_accepted": accepted,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m results.measure.generate", description="Time tokens of generate, of an 8B model.")
    parser.add_argument("--device", help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--format", default="w4a16_g128", help="of weights (default: w4a16_g128)")
    parser.add_argument("--kv", default="kv16,kv4_channel", help="formats of caches (default: kv16,kv4_channel)")
    parser.add_argument("--points", default="1x4096,16x4096", help="batches and tokens of prompts (default: 1x4096,16x4096)")
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"], help="of the model (default: 32)")
    parser.add_argument("--out", type=Path, default=ROWS / "step", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    target = detect_target(options.device)
    device = "cuda:0" if target.is_cuda else "cpu"
    points = [tuple(int(part) for part in point.split("x")) for point in options.points.split(",")]
    model = made_model(options.format, options.layers, device)
    batches, room = sorted({batch for batch, _ in points}), max(context for _, context in points) + TOKENS + CHECKED
    tilebit.transformers.compile(model, batches, room)
    tilebit.prepare(model, batches)
    common = {**process_fields(target), "op": "generate"}
    path = options.out / f"{file_stem(target.name)}.jsonl"
    for batch, context in points:
        for kv_format in options.kv.split(","):
            try:
                row = measure(model, kv_format, options.format, batch, context, device)
            except (ValueError, torch.OutOfMemoryError) as error:
                print(f"batch {batch}, context {context}, {kv_format}: {error}", flush=True)
                continue
            write_rows(path, [{**common, **row}])
            print(f"batch {batch}, context {context}, {kv_format}: {row['us']} us a token, its graph {row['graph_us']}", flush=True)
            gc.collect()  # the cache and its graph, before the next
            if target.is_cuda:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
