"""Where in a cache the CPU programs find a token: pages through a block table, and the residual
window. Importing this imports tvm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....layouts.kv import GRANULE, PAIR_BYTES, RESIDUAL, KVLayout
from ....layouts.kv_formats import KVFormat
from ....schedules.attention.workload import AttentionWorkload
from .. import vectors as v
from ..vectors import T, tirx
from .granules import LANES

WORD_BYTES, HALF_BYTES = 4, 2


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Granules and parameters of one kv head: ``words``, a flat int32 view of pages or windows,
    ``halves``, the same memory in fp16.

    ``record(token)`` is the first word, int64, of the record (a page or a window of ``layout``)
    that holds a token.
    """

    layout: KVLayout
    dtype: str
    table: bool
    words: Any
    halves: Any
    record: Callable[[Any], Any]

    def key_word(self, record: Any, token: Any) -> Any:
        """First word of the key granule of ``token`` (a multiple of 16) in ``record``."""
        return record + self._granule(token) * self.layout.key.words

    def value_word(self, record: Any, token: Any) -> Any:
        return record + (self._granule(token) * self.layout.value.words + self.layout.value_offset // WORD_BYTES)

    def key_half(self, record: Any, token: Any) -> Any:
        """First fp16 number of the parameters of ``token``'s key, scaled by token."""
        return self._pair(record, token, self.layout.key_parameter_offset)

    def value_half(self, record: Any, token: Any) -> Any:
        return self._pair(record, token, self.layout.value_parameter_offset)

    def _granule(self, token: Any) -> Any:
        return (token % self.layout.page_size // GRANULE).astype("int64")

    def _pair(self, record: Any, token: Any, offset: int) -> Any:
        pairs = (token % self.layout.page_size).astype("int64") * (PAIR_BYTES // HALF_BYTES)
        return record * (WORD_BYTES // HALF_BYTES) + (pairs + offset // HALF_BYTES)

    def pairs(self, half: Any) -> tuple[Any, Any]:
        """(scales, zeros) of 16 tokens, fp32, whose pairs begin at ``half``."""
        both = T.bind(v.load(self.halves, half, 2 * LANES))
        return tuple(T.bind(tirx.Shuffle([both], list(range(part, 2 * LANES, 2))).astype("float32x16")) for part in range(2))

    def share_channel_parameters(self, first: Any, move: Callable[[Any, Any], None]) -> None:
        """Call ``move(half of the pages, half of the record)`` for every 16 fp16 numbers of the
        record of key parameters of the group of 128 tokens from ``first`` on: the group's pages
        hold a share of it each."""
        share = 2 * self.layout.head_dim // self.layout.group_pages
        begin = (first % max(self.layout.page_size, RESIDUAL)).astype("int64") // RESIDUAL * (2 * self.layout.head_dim)
        with T.serial(self.layout.group_pages) as page:
            record = T.bind(self.record(first + page * self.layout.page_size))
            half = T.bind(record * (WORD_BYTES // HALF_BYTES) + (begin + self.layout.key_parameter_offset // HALF_BYTES))
            with T.serial(share // LANES) as i:
                move(half + i * LANES, page * share + i * LANES)

    def channel_parameters(self, first: Any, into: Any) -> None:
        """Copy that record into ``into``, fp16 [2 * head_dim]."""
        self.share_channel_parameters(first, lambda half, at: v.store(into, at, v.load(self.halves, half, LANES), LANES))

    def format_of(self, what: str) -> tuple[int, str, str]:
        """(bits, kind, scales) of "key" or "value"."""
        form = self.layout.format
        if what == "key":
            return form.key_bits, form.key, form.key_scales
        return form.value_bits, form.value, form.value_scales


def cache_pages(w: AttentionWorkload, arg: dict[str, Any], b: Any, head: Any, max_pages: Any, table: bool, first_page: Any = 0) -> Pages:
    """The pages of sequence ``b`` and kv head ``head``, of which the cache's, or its layer's, first is
    ``first_page``; ``arg`` has views of ``pages`` (and ``halves``, the same in fp16) and
    ``block_tables`` [batch, max_pages]."""

    def record(token: Any) -> Any:
        page = arg["block_tables"][b.astype("int64") * max_pages + token // w.page_size]
        return ((page.astype("int64") + first_page) * w.heads_kv + head) * w.layout.page_words

    return Pages(w.layout, w.dtype, table, arg["pages"], arg["halves"], record)


def window_pages(head_dim: int, dtype: str, words: Any, start: Any) -> Pages:
    """The residual window whose first word is ``start`` as a page."""
    return Pages(KVLayout(KVFormat(), head_dim, RESIDUAL), dtype, False, words, None, lambda token: start)
