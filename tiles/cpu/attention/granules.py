"""A granule of the KV cache as the CPU programs read it: vectors of 16 words, and the token and
channel that each lane then holds.

Storage is ``KVLayout``'s, which mma.m16n8k16's fragments induce. Read 16 consecutive words at a
time, number ``slot`` of all of them is a vector of 16 codes whose tokens and channels are fixed
numbers: keys are multiplied with a query whose channels were permuted once to match (as the GPU
programs rearrange theirs), values with weights whose tokens were. Pure numpy: everything is read
off the ``PackedLayout``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....layouts.kv import GRANULE
from ....layouts.packing import PackedLayout

LANES = 16
LANE_BITS = (1, 2, 4, 8)
ROWS_TOGETHER = 4  # of a row-major operand: neighbouring vectors that share one load of the other factor


@dataclass(frozen=True, slots=True, eq=False)
class OperandVectors:
    """Vectors (load, group, slot) of 16 codes of one operand's granule of 16 tokens.

    ``slots[slot]`` is (h, u). Of keys, ``channels`` [u, load, lane] do not depend on the group and
    ``tokens`` [h, group, lane] not on the load; of values, ``tokens`` [u, lane] depend on the slot
    alone and ``channels`` are [h, load, group, lane]. So u counts the different other factors that
    a vector's slots meet, and h the different sums they are added to.
    """

    loads: int
    groups: int
    slots: tuple[tuple[int, int], ...]
    tokens: np.ndarray
    channels: np.ndarray

    @property
    def sums(self) -> int:
        """How many h there are."""
        return 1 + max(h for h, _ in self.slots)

    @property
    def factors(self) -> int:
        """How many u there are."""
        return 1 + max(u for _, u in self.slots)

    def by_factor(self) -> list[list[tuple[int, int]]]:
        """For each u, the (h, slot) that it meets."""
        return [[(h, slot) for slot, (h, u) in enumerate(self.slots) if u == factor] for factor in range(self.factors)]

    def places(self, what: str, head_dim: int) -> tuple[np.ndarray, int, int]:
        """(int64 [slot, lane], step of a load, step of a group): where the codes of a vector of
        ``what`` ("key" or "value") lie in rows [16, head_dim]."""
        if what == "key":
            tokens = np.stack([self.tokens[h, 0] for h, _ in self.slots])
            channels = np.stack([self.channels[u, 0] for _, u in self.slots])
            return tokens * head_dim + channels, stride(self.channels, 1), stride(self.tokens, 1) * head_dim
        tokens = np.stack([self.tokens[u] for _, u in self.slots])
        channels = np.stack([self.channels[h, 0, 0] for h, _ in self.slots])
        return tokens * head_dim + channels, stride(self.channels, 1), stride(self.channels, 2)


def key_vectors(packed: PackedLayout) -> OperandVectors:
    """Of a key granule, 16 tokens (n) x head_dim channels (k)."""
    tokens, channels = _coordinates(packed)
    which_u, channel_sets = _distinct(channels[:, 0])
    which_h, token_sets = _distinct(tokens[0])
    loads, groups = tokens.shape[:2]
    return OperandVectors(loads, groups, tuple(zip(which_h, which_u, strict=True)), token_sets, channel_sets)


def value_vectors(packed: PackedLayout) -> OperandVectors:
    """Of a value granule, head_dim channels (n) x 16 tokens (k)."""
    channels, tokens = _coordinates(packed)
    which_u, token_sets = _distinct(tokens[0, 0])
    which_h, channel_sets = _distinct(channels)
    loads, groups = tokens.shape[:2]
    return OperandVectors(loads, groups, tuple(zip(which_h, which_u, strict=True)), token_sets, channel_sets)


def key_rows(head_dim: int) -> OperandVectors:
    """Of 16 tokens' rows of ``head_dim`` numbers: load l of group g holds channels 16 l .. of the 4
    tokens 4 g .. 4 g + 3."""
    groups = GRANULE // ROWS_TOGETHER
    tokens = np.broadcast_to(np.arange(GRANULE).reshape(groups, ROWS_TOGETHER).T[:, :, None], (ROWS_TOGETHER, groups, LANES))
    channels = np.arange(head_dim).reshape(1, -1, LANES)
    return OperandVectors(channels.shape[1], groups, tuple((h, 0) for h in range(ROWS_TOGETHER)), tokens, channels)


def value_rows(head_dim: int) -> OperandVectors:
    """Of 16 tokens' rows of ``head_dim`` numbers: load l holds channels 64 l .. 64 l + 63 of all of
    them."""
    channels = np.arange(head_dim).reshape(-1, 1, ROWS_TOGETHER, LANES).transpose(2, 0, 1, 3)
    tokens = np.repeat(np.arange(GRANULE)[:, None], LANES, axis=1)
    slots = tuple((h, u) for u in range(GRANULE) for h in range(ROWS_TOGETHER))
    return OperandVectors(channels.shape[1], 1, slots, tokens, channels)


@dataclass(frozen=True, slots=True)
class LaneSums:
    """How to sum 2^k vectors over the lanes that share a label: ``steps`` of lane bits, each
    halving the number of vectors, leave one whose lane x is the sum labelled ``labels[x]``."""

    steps: tuple[int, ...]
    labels: tuple[int, ...]


def lane_sums(labels: np.ndarray) -> LaneSums:
    """Of vectors with ``labels`` [2^k, 16] in which 2^k lanes share each. Step with lane bit b
    joins neighbours (a, c): lane x becomes a[x] + a[x ^ b] where bit b of x is clear, c[x] + c[x ^
    b] where it is set. Raises ``ValueError`` if lanes cannot be summed so."""
    lane = np.arange(LANES)
    steps = tuple(b for b in LANE_BITS if np.array_equal(labels, labels[:, lane ^ b]))
    if len(labels) != 1 << len(steps):
        raise ValueError(f"{len(labels)} vectors in which lane bits {steps} do not change the label; accepted: 2^{len(steps)} vectors")
    for b in steps:
        labels = np.where(lane & b, labels[1::2], labels[::2])
    return LaneSums(steps, tuple(int(label) for label in labels[0]))


def stride(table: np.ndarray, axis: int) -> int:
    """By how much the entries of ``table`` grow along ``axis``, where they grow evenly (0 where
    there is one). Raises ``ValueError`` otherwise."""
    steps = np.unique(np.diff(table, axis=axis))
    if steps.size > 1:
        raise ValueError(f"entries grow by {steps.tolist()} along axis {axis}; accepted: one step")
    return int(steps[0]) if steps.size else 0


def _coordinates(packed: PackedLayout) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) of every code, int64 [loads, groups, slots, 16]; a load is what all 32 lanes of a warp
    read at once."""
    per_load = 32 * min(4, packed.words // 32)
    order = packed.order.astype(np.int64).reshape(-1, per_load // LANES, LANES, packed.slots).transpose(0, 1, 3, 2)
    return order // packed.tile_k, order % packed.tile_k


def _distinct(table: np.ndarray) -> tuple[Sequence[int], np.ndarray]:
    """(number of the slot's set, the distinct sets [sets, ..., lane]) of ``table`` [..., slots,
    lane]."""
    by_slot = np.moveaxis(table, -2, 0)
    sets, which = [], []
    for entries in by_slot:
        found = next((i for i, known in enumerate(sets) if np.array_equal(known, entries)), len(sets))
        if found == len(sets):
            sets.append(entries)
        which.append(found)
    return which, np.stack(sets)
