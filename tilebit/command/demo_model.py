"""The first part of ``make demo``: a whole model, quantized while it loads, that writes text over a
low-bit cache."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

MODEL = "TILEBIT_QUALITY_MODEL"  # the folder of a real model, as results.measure.quality makes it
FORMAT, KV_FORMAT = "w4a16_g64", "kv4_channel"
PROMPT, NEW_TOKENS = "The capital of France is", 24


def run_model(console: Console, scratch: Path, device: str) -> None:
    """Load, generate, memory, speed: of the model in ``$TILEBIT_QUALITY_MODEL``, else of a random one that
    is made in the folder ``scratch``. Raises what a step raises."""
    if find_spec("transformers") is None:
        console.print("  whole models are left out: transformers is not installed (pip install 'tilebit\\[transformers]')\n")
        return
    from transformers.utils.logging import disable_progress_bar

    from ..transformers import TilebitConfig
    from ..transformers.opening import open_model, open_tokenizer
    from ..transformers.speaking import fitting_ids, speak
    from ..transformers.synthetic import write_model
    from .folders import weight_bytes

    disable_progress_bar()
    real = os.environ.get(MODEL)
    folder = Path(real) if real else write_model(scratch / "model")
    which = escape(str(real)) if real else f"a random one, made on the spot (${MODEL} names a real one)"
    console.print(f"  ... a whole model on {device}: {which}")
    model, tokenizer = open_model(folder, TilebitConfig(FORMAT), torch.bfloat16, torch.device(device)), open_tokenizer(folder)
    ids = fitting_ids(model, tokenizer, PROMPT, NEW_TOKENS)
    spoken = speak(model, tokenizer, ids, NEW_TOKENS, lambda _: None, KV_FORMAT)
    console.print(f"      {escape(repr(PROMPT))} -> {escape(repr(spoken.text))}")
    console.print(
        f"      weights {model.get_memory_footprint() / 1e6:.1f} MB as {FORMAT} and 16-bit embeddings, "
        f"{weight_bytes(folder) / 1e6:.1f} MB before; cache {spoken.cache_bytes / 1e6:.1f} MB as {KV_FORMAT}"
    )
    decode = f", decode {spoken.decode_rate:.1f} tokens/s" if spoken.decode_rate is not None else ""
    console.print(f"      prefill {spoken.prefill_rate:.1f} tokens/s{decode}: a second call, kernels compiled and steps captured before\n")
