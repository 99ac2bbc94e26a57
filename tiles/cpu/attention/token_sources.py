"""Where attention's keys and values come from: packed pages, a residual window, or plain rows.
Importing this imports tvm.

A source offers, to ``attend.RowBlock``: ``keys`` and ``values`` (which vector meets which factor),
``first`` (position of its group's first token), ``queries`` (arranged for ``keys``), ``sums`` (of
values, [load, group, h, row, lane]), and the methods of ``PackedTokens``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....layouts.kv import GRANULE, RESIDUAL, channel_parameter_bytes
from .. import vectors as v
from ..gemm.lane_sums import permute, sum_everywhere
from ..numbers import number, splat
from ..vectors import T, tirx
from .attend import RowBlock, arrange, fill, gathered
from .cache_pages import HALF_BYTES, Pages
from .granules import LANES, OperandVectors, key_rows, key_vectors, stride, value_rows, value_vectors


class PackedTokens:
    """A group of up to 128 tokens in ``pages``, for the rows of ``state``.

    ``valid``: position from which on there are no tokens and memory holds anything (a window's
    rest), or None. ``key_scale``: fp32 head scale of fp8 keys, or None.
    """

    def __init__(self, pages: Pages, state: RowBlock, key_scale: Any = None, valid: Any = None) -> None:
        self.pages, self.valid, self.key_scale = pages, valid, key_scale
        self.keys, self.values = key_vectors(pages.layout.key), value_vectors(pages.layout.value)
        rows = self.rows = state.rows
        groups = RESIDUAL // GRANULE
        self.key_scales, self.value_scales = pages.format_of("key")[2], pages.format_of("value")[2]
        self.has_offset = self.value_scales == "token"
        self.records = v.local(groups, "int64")
        self.plain_queries = v.local(rows * self.keys.loads * self.keys.factors * LANES, "float32")
        self.sums = v.local(rows * self.values.loads * self.values.groups * self.values.sums * LANES, "float32")
        self.weights = v.local(groups * rows * self.values.factors * LANES, "float32")
        arrange(state.q, self.plain_queries, self.keys, rows, state.head_dim)
        fill(self.sums, rows * self.values.loads * self.values.groups * self.values.sums * LANES, 0.0)
        self.queries = self.plain_queries
        if self.key_scales == "channel":
            self.queries = v.local(rows * self.keys.loads * self.keys.factors * LANES, "float32")
            self.parameters = v.local(2 * state.head_dim, "float16")
            self.starts = v.local(rows, "float32x16")
        if self.key_scales == "token":
            self.query_sums = v.local(rows * LANES, "float32")
            with T.serial(rows) as r:
                fill_sum = v.sums(1, LANES)
                with T.serial(state.head_dim // LANES) as i:
                    T.buffer_store(fill_sum, fill_sum[0] + v.load(state.q, r * state.head_dim + i * LANES, LANES), [0])
                v.store(self.query_sums, r * LANES, sum_everywhere(fill_sum[0]), LANES)

    def open(self, first: Any, count: Any) -> None:
        """Turn to the group whose first token is ``first`` and whose first ``count`` granules hold
        tokens."""
        self.first = first
        with T.serial(count) as j:
            T.buffer_store(self.records, self.pages.record(first + j * GRANULE), [j])
        if self.key_scales == "channel":
            self._scale_queries()

    def _scale_queries(self) -> None:
        """q . (codes * scale + zero) = (q * scale) . codes + q . zero, for the group's scales and
        zeros by channel."""
        self.pages.channel_parameters(self.first, self.parameters)
        scales, zeros = (part // HALF_BYTES for part in channel_parameter_bytes(self.keys.channels))
        step = stride(scales, 1)
        for r in range(self.rows):
            T.buffer_store(self.starts, splat(0.0), [r])
        with T.serial(self.keys.loads) as load:
            for u in range(self.keys.factors):
                scale, zero = (T.bind(gathered(self.parameters, load * step, part[u, 0]).astype("float32x16")) for part in (scales, zeros))
                for r in range(self.rows):
                    at = ((load * self.keys.factors + u) * self.rows + r) * LANES
                    query = T.bind(v.load(self.plain_queries, at, LANES))
                    v.store(self.queries, at, query * scale, LANES)
                    T.buffer_store(self.starts, v.fma(query, zero, self.starts[r]), [r])

    def key_numbers(self, j: Any, load: Any, group: Any) -> Callable[[int], Any]:
        """The vectors, by slot, of keys (load, group) of granule ``j``."""
        start = self.pages.key_word(self.records[j], self.first + j * GRANULE)
        return self._numbers("key", start, self.keys, load, group)

    def value_numbers(self, j: Any, load: Any, group: Any) -> Callable[[int], Any]:
        start = self.pages.value_word(self.records[j], self.first + j * GRANULE)
        numbers = self._numbers("value", start, self.values, load, group)
        if self.valid is None:
            return numbers
        left = T.bind(splat(self.valid - (self.first + j * GRANULE), "int32"))

        def there(slot: int) -> Any:  # a weight of 0 does not make 0 of a NaN
            return tirx.Select(
                v.constant(self.values.tokens[self.values.slots[slot][1]].tolist(), "int32") < left, numbers(slot), splat(0.0)
            )

        return there

    def _numbers(self, what: str, start: Any, vectors: OperandVectors, load: Any, group: Any) -> Callable[[int], Any]:
        bits, kind, _ = self.pages.format_of(what)
        word = T.bind(v.load(self.pages.words, start + (load * vectors.groups + group) * LANES, LANES))
        return lambda slot: number(word, slot, bits, kind, self.pages.dtype, self.pages.table)

    def score_start(self, r: int) -> Any:
        """What row ``r``'s sums of scores begin with."""
        return self.starts[r] if self.key_scales == "channel" else splat(0.0)

    def score_scale(self, j: Any) -> Callable[[Any, Any], Any]:
        """From 16 tokens' sums of products of granule ``j`` and row r to scores."""
        if self.key_scales == "head":
            return lambda score, r: score * splat(self.key_scale)
        if self.key_scales != "token":
            return lambda score, r: score
        scale, zero = self.pages.pairs(self.pages.key_half(self.records[j], self.first + j * GRANULE))
        return lambda score, r: v.fma(score, scale, zero * v.load(self.query_sums, r * LANES, LANES))

    def weigh(self, state: RowBlock, j: Any, i: Any, r: Any, weight: Any) -> None:
        """Take note of row ``r``'s softmax weights of granule ``j``, the block's ``i``-th."""
        if self.has_offset:
            scale, zero = self.pages.pairs(self.pages.value_half(self.records[j], self.first + j * GRANULE))
            v.store(state.offset, r * LANES, v.fma(weight, zero, v.load(state.offset, r * LANES, LANES)), LANES)
            weight = T.bind(weight * scale)
        for u in range(self.values.factors):
            v.store(self.weights, ((i * self.rows + r) * self.values.factors + u) * LANES, permute(weight, self.values.tokens[u]), LANES)

    def weight(self, state: RowBlock, i: Any, r: int, u: int) -> Any:
        """The factor of row ``r`` that the value vectors of factor ``u`` of the block's ``i``-th
        granule meet."""
        return v.load(self.weights, ((i * self.rows + r) * self.values.factors + u) * LANES, LANES)


class RowTokens:
    """Tokens as rows of 16-bit ``k`` and ``v``, flat views of [total, heads_kv, head_dim], from row
    ``begin`` on; ``length`` of them."""

    has_offset = False

    def __init__(self, state: RowBlock, dtype: str, k: Any, values: Any, begin: Any, length: Any, head: Any, heads: int) -> None:
        self.dtype, self.k, self.v, self.begin, self.length, self.head, self.heads = dtype, k, values, begin, length, head, heads
        self.head_dim, self.rows = state.head_dim, state.rows
        self.keys, self.values = key_rows(state.head_dim), value_rows(state.head_dim)
        self.queries = v.local(self.rows * self.head_dim, "float32")
        self.sums = v.local(self.rows * self.head_dim, "float32")
        arrange(state.q, self.queries, self.keys, self.rows, self.head_dim)
        fill(self.sums, self.rows * self.head_dim, 0.0)

    def open(self, first: Any) -> None:
        self.first = first

    def _row(self, j: Any, token: Any) -> Any:
        """Where a token's row begins; of tokens past the end, the last one's (none sees them)."""
        row = T.min(self.first + j * GRANULE + token, self.length - 1) + self.begin
        return (row.astype("int64") * self.heads + self.head) * self.head_dim

    def key_numbers(self, j: Any, load: Any, group: Any) -> Callable[[int], Any]:
        tokens = [self._row(j, group * self.keys.sums + h) + load * LANES for h in range(self.keys.sums)]
        return lambda slot: v.to_float(v.load(self.k, tokens[self.keys.slots[slot][0]], LANES), LANES)

    def value_numbers(self, j: Any, load: Any, group: Any) -> Callable[[int], Any]:
        def number_of(slot: int) -> Any:
            h, token = self.values.slots[slot]
            return v.to_float(v.load(self.v, self._row(j, token) + (load * self.values.sums + h) * LANES, LANES), LANES)

        return number_of

    def score_start(self, r: int) -> Any:
        return splat(0.0)

    def score_scale(self, j: Any) -> Callable[[Any, Any], Any]:
        return lambda score, r: score

    def weigh(self, state: RowBlock, j: Any, i: Any, r: Any, weight: Any) -> None:
        v.store(state.scores, r * RESIDUAL + i * GRANULE, weight, LANES)

    def weight(self, state: RowBlock, i: Any, r: int, u: int) -> Any:
        return splat(state.scores[r * RESIDUAL + i * GRANULE + u])
