"""A whole prompt of an 8B model: ``python -m results.measure.prompt`` appends rows to
results/rows/prompt.

The model is that of ``results.measure.step``, with weights of 16 bits and of each format; prompts go
through ``tilebit.transformers.compile``'s fused prompts into a tilebit cache. The 16-bit model takes
them two ways: fused likewise ("cublas": the same kernels between cuBLAS products), and as
transformers runs it ("transformers": its own layers, sdpa and cache). Rounds of all alternate.

Nothing is timed before it is checked: the logits of the last token must be those of the same model
as it runs uncompiled, to 2 %, of activations of 8 bits to 1.25 times what moving the embeddings by
their rounding does.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import tilebit.transformers
from tilebit.command.bench import process_fields, write_rows
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.target import detect_target, file_stem
from tilebit.transformers import TilebitCache

from ..report.rows import ROWS
from .step import MODEL, TOLERANCE, accepted_error, made_model, relative, spread_of, timed

DENSE = "fp16"
ROUNDS = 7
Prompt = Callable[[], Tensor]


@torch.no_grad()
def fused(model: Any, cache: TilebitCache, ids: Tensor) -> Tensor:
    """Logits [batch, vocabulary] behind the prompts."""
    cache.reset()
    return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


@torch.no_grad()
def unfused(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """The same, as the model ran before ``compile``."""
    if isinstance(cache, TilebitCache):
        cache.reset()
    return model.tilebit_steps.original(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


def measure(models: dict[str, Any], kv_format: str, batch: int, tokens: int, device: str) -> list[dict[str, Any]]:
    """The rows of ``batch`` prompts of ``tokens`` tokens. Raises ``ValueError`` where logits are not what they must be."""
    prompts: dict[str, Prompt] = {}
    fields: dict[str, dict[str, Any]] = {}
    for format, model in models.items():
        ids = torch.randint(model.config.vocab_size, (batch, tokens), device=device, generator=torch.Generator(device).manual_seed(1))
        cache = TilebitCache(model.config, format=kv_format, max_tokens=tokens, sequences=batch)
        expected = unfused(model, cache, ids)
        bound = TOLERANCE
        if format != DENSE and GemmFormat.parse(format).x:
            bound = accepted_error(model, ids, expected, lambda model=model, cache=cache, ids=ids: unfused(model, cache, ids))
        common = {"format": format, "kv_format": kv_format, "batch": batch, "prompt": tokens, "layers": model.config.num_hidden_layers}
        ways: dict[str, Prompt] = {format: lambda model=model, cache=cache, ids=ids: fused(model, cache, ids)}
        fields[format] = {"impl": "cublas" if format == DENSE else "tilebit", **common}
        if format == DENSE:
            ways["transformers"] = lambda model=model, ids=ids: unfused(model, DynamicCache(config=model.config), ids)
            fields["transformers"] = {"impl": "transformers", **common, "kv_format": None}
        for name, prompt in ways.items():
            error = relative(prompt(), expected)
            if not error <= bound:
                raise ValueError(f"the relative error of the logits of {name} is {error}, and {bound} is accepted; no row is written")
            fields[name] |= {"rel_err": error, "rel_err_accepted": bound}
        prompts |= ways
    return [{**fields[name], **spread_of(us)} for name, us in timed(prompts, device, ROUNDS, 1).items()]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m results.measure.prompt", description="Time whole prompts of an 8B model.")
    parser.add_argument("--device", help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--formats", default="w4a16_g128,w4a8_lqq_g128", help="of weights (default: w4a16_g128,w4a8_lqq_g128)")
    parser.add_argument("--kv", default="kv4_channel", help="format of the cache (default: kv4_channel)")
    parser.add_argument("--points", default="1x8192", help="batches and tokens (default: 1x8192)")
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"], help="of the model (default: 32)")
    parser.add_argument("--out", type=Path, default=ROWS / "prompt", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    target = detect_target(options.device)
    device = "cuda:0" if target.is_cuda else "cpu"
    points = [tuple(int(part) for part in point.split("x")) for point in options.points.split(",")]
    models = {}
    for format in (DENSE, *options.formats.split(",")):
        start = time.perf_counter()
        model = made_model(None if format == DENSE else format, options.layers, device)
        models[format] = tilebit.transformers.compile(model, (1,), max(tokens for _, tokens in points) + 1)
        print(f"{format}: made, quantized and compiled in {time.perf_counter() - start:.1f} s", flush=True)
    common = {**process_fields(target), "op": "prompt"}
    path = options.out / f"{file_stem(target.name)}.jsonl"
    for batch, tokens in points:
        try:
            rows = [{**common, **row} for row in measure(models, options.kv, batch, tokens, device)]
        except (ValueError, torch.OutOfMemoryError) as error:
            print(f"{batch} x {tokens}: {error}", flush=True)
            continue
        write_rows(path, rows)
        print(f"{batch} x {tokens}: " + "  ".join(f"{r['impl']} {r['format']} {r['us'] / 1e3:.1f} ms" for r in rows), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
