"""Time of prompts and of decode steps of a whole model, beside the 16-bit model in the same process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ..weights.any_kind import AnyKind
from ..weights.any_modules import quantize_model_any, set_precision
from ..weights.modules import quantize_model
from .cache import TilebitCache, cache_bytes
from .compiled import compile
from .config import TilebitConfig
from .opening import most_tokens, open_model, quantized_by, read_config

ROUNDS = 5
DENSE = "16 bits"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what is measured: rows of a batch, tokens of each prompt, decode steps of a round."""

    batches: Sequence[int]
    prompt: int
    steps: int


@dataclass(slots=True, eq=False)
class _Contender:
    model: PreTrainedModel
    kv_format: str | None
    prefill: list[float]
    decode: list[float]
    cache_bytes: int = 0

    def cache(self, rows: int, tokens: int) -> Any:
        if self.kv_format is None:
            return DynamicCache(config=self.model.config)
        return TilebitCache(self.model.config, format=self.kv_format, max_tokens=tokens, sequences=rows)


def bench_model(
    source: Path, format: str | None, kv_formats: Sequence[str], sizes: Sizes, dtype: torch.dtype | None, device: torch.device
) -> list[dict[str, Any]]:
    """Rows of ``impl`` ("16 bits", "tilebit"), ``format``, ``kv_format``, ``batch``, ``prompt``, ``prefill_tokens_per_s``,
    ``decode_ms`` (a step of all rows), ``decode_tokens_per_s``, ``weight_bytes`` and ``cache_bytes``.

    ``source`` is a model's directory, or a config.json, of which a model of random weights is made. What
    is not quantized is, to ``format``, and the 16-bit model is timed beside it, as transformers runs it:
    its own attention and cache. Of a packed directory there is none. tilebit's is compiled
    (``tilebit.transformers.compile``). Rounds of all alternate; medians of each are given. Raises
    ``ValueError`` for what cannot be, before memory is taken.
    """
    config, total = _config(source), sizes.prompt + sizes.steps + 4
    most = most_tokens(config)
    if most is not None and total > most:
        raise ValueError(
            f"prompts of {sizes.prompt} tokens and {sizes.steps} steps need {total} places; accepted: at most {most}, which is what the "
            "model was made for"
        )
    packed = quantized_by(config) is not None
    if packed and format is not None:
        raise ValueError(f"{source} is quantized already, and to be {format}; accepted: a 16-bit model, or no format")
    wanted = TilebitConfig(format or "w4a16_g128")
    own = low_bit_model(source, wanted, dtype, device)
    dense = None if packed else _random(config, None, dtype, device) if _is_config(source) else open_model(source, None, dtype, device)
    compile(own, sizes.batches, total)
    if getattr(own, "tilebit_steps", None) is None:
        own.set_attn_implementation("tilebit")
    rows = []
    for batch in sizes.batches:
        contenders = [_Contender(own, name, [], []) for name in kv_formats]
        if dense is not None:
            contenders.insert(0, _Contender(dense, None, [], []))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.get_text_config(decoder=True).vocab_size, (batch, sizes.prompt), generator=generator).to(device)
        caches = [contender.cache(batch, total) for contender in contenders]
        for contender, cache in zip(contenders, caches, strict=True):
            _round(contender, cache, ids, 3)  # kernels compile and load, steps are captured
            contender.prefill.clear()
            contender.decode.clear()
        for _ in range(ROUNDS):
            for contender, cache in zip(contenders, caches, strict=True):
                held = cache if contender.kv_format is not None else contender.cache(batch, total)
                _round(contender, held, ids, sizes.steps)
                contender.cache_bytes = cache_bytes(held)
        rows += [_row(contender, "packed" if packed else wanted.format, batch, sizes) for contender in contenders]
    return rows


def low_bit_model(source: Path, wanted: TilebitConfig, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    """The model of a directory, packed, or quantized as ``wanted`` says; or of a config.json one with random
    weights. Raises ``ValueError`` for the config of a packed model."""
    config = _config(source)
    packed = quantized_by(config) is not None
    if not _is_config(source):
        return open_model(source, None if packed else wanted, dtype, device)
    if packed:
        raise ValueError(f"{source} is of a packed model, whose weights are not there; accepted: its directory, or a 16-bit model's config")
    return _random(config, wanted, dtype, device)


def _is_config(source: Path) -> bool:
    return source.name == "config.json"


def _config(source: Path) -> Any:
    return read_config(source.parent if _is_config(source) else source)


@torch.no_grad()
def _round(contender: _Contender, cache: Any, ids: Tensor, steps: int) -> None:
    """A prompt, then ``steps`` tokens, each the likeliest."""
    model, device = contender.model, ids.device
    if isinstance(cache, TilebitCache):
        cache.reset()
    start = _now(device)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    middle = _now(device)
    for _ in range(steps):
        logits = model(input_ids=logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True).logits
    contender.prefill.append(middle - start)
    contender.decode.append((_now(device) - middle) / steps)


def _row(contender: _Contender, format: str, batch: int, sizes: Sizes) -> dict[str, Any]:
    prefill, decode = statistics.median(contender.prefill), statistics.median(contender.decode)
    dense = contender.kv_format is None
    return {
        "impl": DENSE if dense else "tilebit", "format": None if dense else format, "kv_format": contender.kv_format, "batch": batch,
        "prompt": sizes.prompt, "prefill_tokens_per_s": batch * sizes.prompt / prefill, "decode_ms": decode * 1e3,
        "decode_tokens_per_s": batch / decode, "weight_bytes": contender.model.get_memory_footprint(), "cache_bytes": contender.cache_bytes,
    }  # fmt: skip


def _random(config: Any, quantization: TilebitConfig | None, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16).eval()
    if quantization is not None:
        kind = AnyKind.parse(quantization.format)
        if kind is None:
            quantize_model(model, quantization.format)
        else:
            quantize_model_any(model, kind.seed_bits, kind.max_bits)
            set_precision(model, kind.bits)
    return model


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
