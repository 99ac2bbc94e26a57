"""Dropping the newest tokens of a cache again, when a model has rejected them.

Packed tokens cannot be taken apart. So before drafted tokens fill a residual window, its rows are
kept, and the newest rows of the draft in 16 bits: what was accepted is written once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache.kvcache import KVCache
from ..layouts.kv import RESIDUAL

MOST_REJECTED = 256  # rows of a step that can be dropped again


class Undo:
    """What a step of ``counts`` new tokens of each sequence needs to be taken back in part: made
    before it, told each layer's rows in it."""

    def __init__(self, cache: KVCache, handles: Sequence[int], counts: Sequence[int]) -> None:
        self.cache, self._handles, self._counts = cache, list(handles), list(counts)
        self.before = [cache.length(handle) for handle in handles]
        self.fills = any(n % RESIDUAL + count >= RESIDUAL for n, count in zip(self.before, counts, strict=True))
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        if self.fills:
            slots = [cache.table.sequence(handle).slot for handle in handles]
            self._windows = [windows[slots] for windows in cache.windows]

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """``k``, ``v`` [tokens, heads, head_dim]: the step's rows, sequence after sequence."""
        if self.fills:
            tails = zip(k.split(self._counts), v.split(self._counts), strict=True)
            self._rows[layer] = [(own_k[-MOST_REJECTED:].clone(), own_v[-MOST_REJECTED:].clone()) for own_k, own_v in tails]

    def reaches(self, row: int, length: int) -> bool:
        """Whether sequence ``row`` can be as long as ``length`` again."""
        oldest = self.before[row] + self._counts[row] - min(self._counts[row], MOST_REJECTED)
        return self.fills and length >= self.before[row] and max(length // RESIDUAL * RESIDUAL, self.before[row]) >= oldest

    def restore(self, row: int, length: int) -> None:
        cache, handle = self.cache, self._handles[row]
        base = length // RESIDUAL * RESIDUAL
        if base > self.before[row]:
            cache.truncate(handle, base)
        else:  # the group is the one that was open before the step
            base = self.before[row]
            cache.table.retract([handle], [cache.length(handle) - base])
            slot = cache.table.sequence(handle).slot
            for windows, kept in zip(cache.windows, self._windows, strict=True):
                windows[slot].copy_(kept[row])
        if length == base:
            return
        first = self._counts[row] - min(self._counts[row], MOST_REJECTED)
        own = slice(base - self.before[row] - first, length - self.before[row] - first)
        batch = cache.advance(cache.batch([handle]), length - base)
        for layer, rows in self._rows.items():
            k, v = rows[row]
            cache.append(batch, k[own], v[own], layer=layer)


def drop(cache: KVCache, handles: Sequence[int], removed: Sequence[int], undo: Undo | None) -> None:
    """Make each sequence shorter by as many tokens as ``removed`` says. Raises ``ValueError`` where
    packed tokens would have to be taken apart; then nothing has changed."""
    targets = [cache.length(handle) - count for handle, count in zip(handles, removed, strict=True)]
    plain = []
    for row, (handle, target) in enumerate(zip(handles, targets, strict=True)):
        length = cache.length(handle)
        plain.append(target >= length // RESIDUAL * RESIDUAL or target % RESIDUAL == 0)
        if not plain[row] and (undo is None or not undo.reaches(row, target)):
            raise ValueError(
                f"sequence {row} has {length} tokens and cannot be cut to {target}: {length // RESIDUAL * RESIDUAL} are packed, and packed "
                f"tokens cannot be taken apart; accepted: at least as many, a multiple of {RESIDUAL}, or, after activate_past_recording(), "
                f"the newest {MOST_REJECTED - RESIDUAL} of the last step"
            )
    with torch.no_grad():
        for row, (handle, target) in enumerate(zip(handles, targets, strict=True)):
            if plain[row]:
                cache.truncate(handle, target)
            elif undo is not None:
                undo.restore(row, target)
