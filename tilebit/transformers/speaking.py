"""``generate`` with its text handed on as it comes, and its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, TextStreamer

from ..ops.prepare import prepare
from ..weights.mixed import MixedLinear
from ..weights.modules import QuantLinear
from .cache import TilebitCache, cache_bytes
from .compiled import compile
from .opening import expect_tokens, most_tokens


@dataclass(frozen=True, slots=True)
class Spoken:
    """What was generated. ``prefill_s`` is the time until the first token, ``decode_s`` that of all others."""

    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    cache_bytes: int

    @property
    def prefill_rate(self) -> float:
        """Tokens of the prompt a second."""
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first; None without any."""
        return (self.new_tokens - 1) / self.decode_s if self.new_tokens > 1 else None


class _Timed(TextStreamer):
    """Notes when the prompt and each new token came."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def fitting_ids(model: PreTrainedModel, tokenizer: Any, prompt: str, max_tokens: int) -> Tensor:
    """The tokens of ``prompt``, int64 [1, tokens] on the model's device. Raises ``ValueError`` where it has
    none, or one that the model has not, and where it has no room for it and ``max_tokens`` more."""
    ids: Tensor = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens; accepted: a text of one or more")
    expect_tokens(ids, model.config)
    most = most_tokens(model.config)
    if most is not None and ids.shape[1] + max_tokens > most:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens and {max_tokens} are to follow; accepted: at most {most} together, which is what the "
            "model was made for: shorten the prompt, or ask for fewer"
        )
    return ids.to(model.device)


def speak(
    model: PreTrainedModel,
    tokenizer: Any,
    ids: Tensor,
    max_tokens: int,
    write: Callable[[str], None],
    kv_format: str | None = None,
    temperature: float = 0.0,
) -> Spoken:
    """Continue ``ids`` int64 [1, tokens] by up to ``max_tokens`` tokens, greedily or, above ``temperature``
    0, by sampling; ``write`` is given the text piece by piece. ``kv_format`` names a cache's
    ("kv4_channel"), over which steps are fused (``compile``) where the model's kind is known; None is
    transformers' own in 16 bits. Three tokens are generated and dropped first: kernels compile (in
    parallel, with a bar on a terminal's standard error) and load, and steps are captured, outside of
    what is timed."""
    cache: Any = None
    if kv_format is not None:
        cache = TilebitCache(model.config, format=kv_format, max_tokens=ids.shape[1] + max_tokens, sequences=1)
        model.set_attn_implementation("tilebit")
        if getattr(model, "tilebit_steps", None) is None:
            compile(model, (1,))
    if getattr(model, "tilebit_steps", None) is None and any(isinstance(layer, QuantLinear | MixedLinear) for layer in model.modules()):
        prepare(model, [1, ids.shape[1]])
    options: dict[str, Any] = {"do_sample": temperature > 0, "pad_token_id": tokenizer.pad_token_id or tokenizer.eos_token_id or 0}
    options |= {"temperature": temperature} if temperature > 0 else {"temperature": None, "top_p": None, "top_k": None}
    options["attention_mask"] = torch.ones_like(ids)
    warm = cache or DynamicCache(config=model.config)
    state = torch.get_rng_state()
    model.generate(ids, past_key_values=warm, max_new_tokens=min(3, max_tokens), **options)  # pyright: ignore[reportCallIssue]
    torch.set_rng_state(state)
    if cache is not None:
        cache.reset()
    own = cache or DynamicCache(config=model.config)
    pieces: list[str] = []

    def hear(text: str) -> None:
        pieces.append(text)
        write(text)

    streamer = _Timed(tokenizer, hear)
    model.generate(ids, past_key_values=own, streamer=streamer, max_new_tokens=max_tokens, **options)  # pyright: ignore[reportCallIssue]
    times = streamer.times
    return Spoken("".join(pieces), ids.shape[1], len(times) - 1, times[1] - times[0], times[-1] - times[1], cache_bytes(own))
