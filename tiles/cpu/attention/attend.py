"""Attention of a few rows of queries to 16-bit or packed tokens, block after block with an online
softmax. Importing this imports tvm.

Scores are in units of log 2 (queries arrive multiplied by scale * log2 e), maxima and sums fp32,
every sum in a fixed order. What differs between a cache and plain rows is a *source*
(``token_sources.py``): how vectors of numbers are loaded, and which other factor each meets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....layouts.kv import GRANULE, RESIDUAL
from .. import vectors as v
from ..gemm.lane_sums import max_everywhere, permute, sum_everywhere, sum_lanes
from ..numbers import exp2, splat, tanh
from ..vectors import T, tirx
from .granules import LANE_BITS, LANES, OperandVectors, lane_sums, stride

NOTHING = -1e30  # below all scores: what weights are relative to while no token has been seen


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """What a query at position p sees: tokens <= p; with ``window`` w > 0 only those > p - w and
    the first ``sink_tokens``."""

    window: int
    sink_tokens: int

    def mask(self, scores: Any, tokens: Any, position: Any) -> Any:
        """``scores`` with -inf where the query at ``position`` (in all lanes) does not see
        ``tokens``."""
        seen = tokens <= position
        if self.window:
            near = tokens > position - splat(self.window, "int32")
            seen = tirx.And(seen, tirx.Or(near, tokens < splat(self.sink_tokens, "int32")) if self.sink_tokens else near)
        return tirx.Select(seen, scores, splat(-math.inf))

    def blocks(self, position: Any, count: Any) -> tuple[Any, Any]:
        """(near, sinks): of ``count`` blocks of 128 tokens, queries from ``position`` on see blocks
        ``near`` .. and the ``sinks`` first."""
        if not self.window:
            return tirx.const(0, "int32"), tirx.const(0, "int32")
        near = T.bind(T.min(T.max(position - (self.window - 1), 0) // RESIDUAL, count))
        return near, T.bind(T.min(-(-self.sink_tokens // RESIDUAL), near))


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """A task's ``rows`` queries of one kv head and what they have seen so far, all in local memory.

    ``q`` [rows, head_dim] fp32, scaled; ``position`` int32 [rows]; ``out`` [rows, head_dim];
    ``scores`` [rows, 128] of this block. Of [rows, 16] are ``top``, the largest score, ``total``,
    the sum of weights (lane by lane), ``decay``, what the last block multiplied earlier sums by,
    and ``offset``, the weighted sum of zero points (lane by lane). ``soft_cap``: c log2 e, or 0.
    """

    rows: int
    head_dim: int
    visible: Visible
    soft_cap: float
    q: Any
    position: Any
    top: Any
    total: Any
    decay: Any
    offset: Any
    scores: Any
    out: Any

    @classmethod
    def new(cls, rows: int, head_dim: int, visible: Visible, soft_cap: float) -> RowBlock:
        """Memory for ``rows`` rows that have seen nothing; ``q`` and ``position`` are the caller's
        to fill."""
        q, out = (v.local(rows * head_dim, "float32") for _ in range(2))
        top, total, decay, offset = (v.local(rows * LANES, "float32") for _ in range(4))
        position, scores = v.local(rows, "int32"), v.local(rows * RESIDUAL, "float32")
        state = cls(rows, head_dim, visible, soft_cap, q, position, top, total, decay, offset, scores, out)
        for buffer, value in ((state.top, -math.inf), (state.total, 0.0), (state.offset, 0.0)):
            fill(buffer, rows * LANES, value)
        fill(state.out, rows * head_dim, 0.0)
        return state

    def attend(self, source: Any, begin: Any, count: Any, first_time: bool = False) -> None:
        """See granules ``begin`` .. ``begin + count - 1`` (at most 8) of the source's group.
        ``first_time``: its sums hold nothing yet."""
        highest = v.local(self.rows * LANES, "float32")
        fill(highest, self.rows * LANES, -math.inf)
        with T.serial(count) as i:
            self._score(source, T.bind(begin + i), i, highest)
        with T.serial(self.rows) as r:
            lanes, old = T.bind(r * LANES), T.bind(v.load(self.top, r * LANES, LANES))
            new = v.held(T.max(old, max_everywhere(v.load(highest, lanes, LANES))))
            base = v.held(T.max(new, splat(NOTHING)))
            decay = exp2(old - base)
            v.store(self.top, lanes, new, LANES)
            v.store(self.decay, lanes, decay, LANES)
            for sums in (self.total, self.offset) if source.has_offset else (self.total,):
                v.store(sums, lanes, v.load(sums, lanes, LANES) * decay, LANES)
            with T.serial(count) as i:
                weight = exp2(v.load(self.scores, r * RESIDUAL + i * GRANULE, LANES) - base)
                v.store(self.total, lanes, v.load(self.total, lanes, LANES) + weight, LANES)
                source.weigh(self, T.bind(begin + i), i, r, weight)
        self._add_values(source, begin, count, first_time)

    def _score(self, source: Any, j: Any, i: Any, highest: Any) -> None:
        """Scores of granule ``j``, the block's ``i``-th."""
        keys: OperandVectors = source.keys
        rows, partial = self.rows, keys.groups * keys.sums
        stage = v.local(rows * partial * LANES, "float32")
        with T.serial(keys.groups) as group:
            sums = v.local(rows * keys.sums, "float32x16")
            for slot in range(rows * keys.sums):
                T.buffer_store(sums, source.score_start(slot % rows), [slot])
            with T.serial(keys.loads) as load:
                number = source.key_numbers(j, load, group)
                for u, members in enumerate(keys.by_factor()):
                    queries = [T.bind(v.load(source.queries, ((load * keys.factors + u) * rows + r) * LANES, LANES)) for r in range(rows)]
                    _multiply(number, members, queries, sums)
            for slot in range(rows * keys.sums):
                h, r = divmod(slot, rows)
                v.store(stage, ((r * keys.groups + group) * keys.sums + h) * LANES, sums[slot], LANES)
        reduction = lane_sums(keys.tokens.transpose(1, 0, 2).reshape(partial, LANES))
        by_token = np.argsort(reduction.labels).tolist()
        scaled = source.score_scale(j)
        tokens = T.bind(splat(source.first + j * GRANULE, "int32") + v.constant(range(LANES), "int32"))
        with T.serial(rows) as r:
            score = sum_lanes([v.load(stage, (r * partial + k) * LANES, LANES) for k in range(partial)], reduction)
            score = scaled(permute(score, by_token), r)
            if self.soft_cap:
                score = tanh(score) * splat(self.soft_cap)
            score = v.held(self.visible.mask(score, tokens, splat(self.position[r], "int32")))
            v.store(self.scores, r * RESIDUAL + i * GRANULE, score, LANES)
            v.store(highest, r * LANES, T.max(score, v.load(highest, r * LANES, LANES)), LANES)

    def _add_values(self, source: Any, begin: Any, count: Any, first_time: bool) -> None:
        values: OperandVectors = source.values
        rows = self.rows
        with T.serial(values.loads) as load, T.serial(values.groups) as group:
            sums = v.local(rows * values.sums, "float32x16")
            start = T.bind((load * values.groups + group) * (values.sums * rows * LANES))
            decay = [] if first_time else [T.bind(v.load(self.decay, r * LANES, LANES)) for r in range(rows)]
            for slot in range(rows * values.sums):
                earlier = splat(0.0) if first_time else v.load(source.sums, start + slot * LANES, LANES) * decay[slot % rows]
                T.buffer_store(sums, earlier, [slot])
            with T.serial(count) as i:
                number = source.value_numbers(T.bind(begin + i), load, group)
                for u, members in enumerate(values.by_factor()):
                    weights = [T.bind(source.weight(self, i, r, u)) for r in range(rows)]
                    _multiply(number, members, weights, sums)
            for slot in range(rows * values.sums):
                v.store(source.sums, start + slot * LANES, sums[slot], LANES)

    def collect(self, source: Any, scale: Any, decay: bool) -> None:
        """out = out (* decay) + the source's sums * ``scale`` (+ its sum of zero points)."""
        values: OperandVectors = source.values
        rows, channels = self.rows, values.channels
        step = stride(channels, 1)
        ties = [b for b in LANE_BITS if np.array_equal(channels, channels[..., np.arange(LANES) ^ b])]
        order = [(group, h) for h in range(values.sums) for group in range(values.groups)]
        together = 1 << len(ties)
        with T.serial(rows) as r:
            keep = T.bind(v.load(self.decay, r * LANES, LANES)) if decay else None
            offset = T.bind(sum_everywhere(v.load(self.offset, r * LANES, LANES))) if source.has_offset else None
            with T.serial(values.loads) as load:
                for first in range(0, len(order), together):
                    chosen = order[first : first + together]
                    reduction = lane_sums(np.stack([channels[h, 0, group] for group, h in chosen]))
                    starts = [(((load * values.groups + group) * values.sums + h) * rows + r) * LANES for group, h in chosen]
                    total = sum_lanes([v.load(source.sums, start, LANES) for start in starts], reduction) * splat(scale)
                    total = T.bind(total if offset is None else total + offset)
                    for x, channel in enumerate(reduction.labels):
                        at = r * self.head_dim + load * step + channel
                        one = tirx.Shuffle([total], [x])
                        earlier = self.out[at] if keep is None else self.out[at] * tirx.Shuffle([keep], [x])
                        T.buffer_store(self.out, earlier + one, [at])


def _multiply(number: Any, members: list[tuple[int, int]], factors: list[Any], sums: Any) -> None:
    """Add the vectors ``members`` (h, slot), times each row's factor, to ``sums`` [h, row]."""
    for h, slot in members:
        x = T.bind(number(slot))
        for r, factor in enumerate(factors):
            at = h * len(factors) + r
            T.buffer_store(sums, v.fma(x, factor, sums[at]), [at])


def arrange(natural: Any, arranged: Any, vectors: OperandVectors, rows: int, head_dim: int) -> None:
    """``natural`` [rows, head_dim] into ``arranged`` [load, u, row, lane], in the order of channels
    that ``vectors`` of keys have."""
    step = stride(vectors.channels, 1)
    with T.serial(rows) as r, T.serial(vectors.loads) as load:
        for u in range(vectors.factors):
            lanes = gathered(natural, r * head_dim + load * step, vectors.channels[u, 0])
            v.store(arranged, ((load * vectors.factors + u) * rows + r) * LANES, lanes, LANES)


def gathered(buffer: Any, start: Any, offsets: Any) -> Any:
    """A vector of ``buffer[start + offsets[x]]``."""
    return tirx.Shuffle([buffer[start + int(offset)] for offset in offsets], list(range(LANES)))


def fill(buffer: Any, count: int, value: float) -> None:
    """The first ``count`` elements of an fp32 buffer, a multiple of 16."""
    with T.serial(count // LANES) as i:
        v.store(buffer, i * LANES, splat(value), LANES)
