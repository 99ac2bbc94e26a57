"""How well a language model predicts a text: perplexity over overlapping windows, and how far its
predictions are from another model's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

STEP = 16  # new tokens at once where a cache is read: as many as decoding takes


@dataclass(frozen=True, slots=True)
class Window:
    """``ids`` int64 [1, tokens], of which the last ``scored`` are predicted from all before them."""

    ids: Tensor
    scored: int


def windows(ids: Tensor, window: int, stride: int) -> list[Window]:
    """``ids`` int64 [tokens] in windows of up to ``window`` tokens, ``stride`` apart: every token but
    the first is scored once, in the first window that holds it. Raises ``ValueError`` for sizes
    without such windows and for a text of fewer than two tokens."""
    if window < 2 or not 1 <= stride < window:
        raise ValueError(f"windows of {window} tokens, {stride} apart; accepted: windows of 2 and more, at a stride of 1 to window - 1")
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; accepted: 2 and more, of which the second is predicted")
    found, seen = [], 1
    for start in range(0, len(ids), stride):
        end = min(start + window, len(ids))
        found.append(Window(ids[None, start:end], end - seen))
        seen = end
        if end == len(ids):
            break
    return found


def log_probabilities(model: Any, ids: Tensor, last: int | None = None, cache: Any = None) -> Tensor:
    """Of every next token of the vocabulary after each of the ``last`` of ``ids`` int64 [1, tokens] (None:
    after each): fp32 [last, vocabulary], natural logarithms. With ``cache`` (a ``TilebitCache``; it is
    reset) the tokens before them are put into it at once, and these read it in steps of 16, as
    decoding does: what a prompt's own tokens see of one another is never quantized."""
    ids = ids.to(next(model.parameters()).device)
    count = ids.shape[1]
    last = count if last is None else last
    with torch.inference_mode():
        if cache is None:
            return model(ids, use_cache=False, logits_to_keep=last).logits[0].float().log_softmax(-1)
        cache.reset()
        if last < count:
            model(ids[:, : count - last], past_key_values=cache, use_cache=True, logits_to_keep=1)
        pieces = [model(piece, past_key_values=cache, use_cache=True).logits[0] for piece in ids[:, count - last :].split(STEP, dim=1)]
        return torch.cat(pieces).float().log_softmax(-1)


class Score:
    """Sums over what was predicted; ``perplexity``, and where predictions were compared with another
    model's ``kl``, the mean KL divergence from it in nats, and ``top1``, how often the most likely
    token is the same."""

    def __init__(self) -> None:
        self._loss = self._kl = self._same = 0.0
        self._predicted = self._compared = 0

    def add(self, got: Tensor, following: Tensor, expected: Tensor | None = None) -> None:
        """``got`` fp32 [rows, vocabulary] are ``log_probabilities``, ``expected`` the other model's;
        ``following`` int64 the tokens that came after the first rows (the last row's may be missing)."""
        following = following.to(got.device)
        self._loss += float(functional.nll_loss(got[: len(following)], following, reduction="sum"))
        self._predicted += len(following)
        if expected is not None:
            self._kl += float(functional.kl_div(got, expected, reduction="sum", log_target=True))
            self._same += float((got.argmax(-1) == expected.argmax(-1)).sum())
            self._compared += len(got)

    @property
    def perplexity(self) -> float:
        return math.exp(self._loss / self._predicted)

    @property
    def kl(self) -> float | None:
        return self._kl / self._compared if self._compared else None

    @property
    def top1(self) -> float | None:
        return self._same / self._compared if self._compared else None
