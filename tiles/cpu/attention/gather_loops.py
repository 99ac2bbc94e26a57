"""The loop body of the CPU's gather: one group of tokens of one kv head. See
``attention_gather.py``. Importing this imports tvm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....layouts.kv import GRANULE, RESIDUAL, channel_parameter_bytes, window_words
from ....schedules.attention.workload import AttentionWorkload
from .. import vectors as v
from ..numbers import number, splat
from ..vectors import T, tirx
from .attend import gathered
from .cache_pages import HALF_BYTES, Pages, cache_pages, window_pages
from .granules import LANES, OperandVectors, key_vectors, stride, value_vectors

Meaning = Callable[[Any, int, int, Any, Any], Any]  # (codes, h, u, load, group) -> numbers


def gather_group(w: AttentionWorkload, arg: dict[str, Any], b: Any, group: Any, head: Any, max_pages: Any, table: bool) -> None:
    """Rows 128 ``group`` .. of sequence ``b``, as many as it has, of kv head ``head``: from pages,
    or the last ones from the window."""
    first, length = T.bind(group * RESIDUAL), T.bind(arg["lengths"][b])
    row = T.bind(arg["cu_kv"][b] + first)
    with T.If(first + RESIDUAL <= length):
        with T.Then():
            pages = cache_pages(w, arg, b, head, max_pages, table)
            _gather(w, arg, pages, first, RESIDUAL, row, head)
        with T.Else():
            slot = arg["slots"][b].astype("int64")
            start = T.bind((slot * w.heads_kv + head) * window_words(w.head_dim))
            _gather(w, arg, window_pages(w.head_dim, w.dtype, arg["windows"], start), first, T.bind(length - first), row, head)


def _gather(w: AttentionWorkload, arg: dict[str, Any], pages: Pages, first: Any, count: Any, row: Any, head: Any) -> None:
    """``count`` tokens from ``first`` (a multiple of 128) on to rows from ``row`` on."""
    keys, values = key_vectors(pages.layout.key), value_vectors(pages.layout.value)
    channel_scales = _arranged_scales(pages, keys, first) if pages.format_of("key")[2] == "channel" else None
    with T.serial((count + (GRANULE - 1)) // GRANULE) as j:
        token, left = T.bind(first + j * GRANULE), T.bind(T.min(count - j * GRANULE, GRANULE))
        record = T.bind(pages.record(token))
        tile = v.local(GRANULE * w.head_dim, str(arg["out_k"].dtype))
        for what, vectors, out in (("key", keys, "out_k"), ("value", values, "out_v")):
            start = T.bind(pages.key_word(record, token) if what == "key" else pages.value_word(record, token))
            meaning = _meaning(pages, what, vectors, record, token, channel_scales, arg, head, w.heads_kv)
            _fill_tile(w, pages, what, vectors, start, meaning, tile)
            with T.serial(left) as t, T.serial(w.head_dim // LANES) as i:
                to = ((row + j * GRANULE + t).astype("int64") * w.heads_kv + head) * w.head_dim + i * LANES
                v.store(arg[out], to, v.load(tile, t * w.head_dim + i * LANES, LANES), LANES)


def _fill_tile(w: AttentionWorkload, pages: Pages, what: str, vectors: OperandVectors, start: Any, meaning: Meaning, tile: Any) -> None:
    """The numbers of a granule whose words begin at ``start`` as rows [16, head_dim] of the
    workload's dtype."""
    bits, kind, _ = pages.format_of(what)
    places, load_step, group_step = vectors.places(what, w.head_dim)
    with T.serial(vectors.loads) as load, T.serial(vectors.groups) as group:
        word = T.bind(v.load(pages.words, start + (load * vectors.groups + group) * LANES, LANES))
        corner = T.bind(load * load_step + group * group_step)
        for slot, (h, u) in enumerate(vectors.slots):
            codes = number(word, slot, bits, kind, pages.dtype, pages.table)
            rounded = v.held(v.from_float(meaning(codes, h, u, load, group), w.dtype, LANES))
            for x, place in enumerate(places[slot].tolist()):
                T.buffer_store(tile, tirx.Shuffle([rounded], [x]), [corner + place])


def _arranged_scales(pages: Pages, keys: OperandVectors, first: Any) -> tuple[Any, Any]:
    """Scales and zeros by channel of the group at ``first``, fp32, in the order of the vectors
    (load, u)."""
    record, arranged = v.local(2 * pages.layout.head_dim, "float16"), [v.local(keys.loads * keys.factors * LANES, "float32") for _ in "sz"]
    pages.channel_parameters(first, record)
    with T.serial(keys.loads) as load:
        for places, into in zip(channel_parameter_bytes(keys.channels), arranged, strict=True):
            halves = places // HALF_BYTES
            for u in range(keys.factors):
                value = gathered(record, load * stride(halves, 1), halves[u, 0]).astype("float32x16")
                v.store(into, (load * keys.factors + u) * LANES, value, LANES)
    return arranged[0], arranged[1]


def _meaning(
    pages: Pages,
    what: str,
    vectors: OperandVectors,
    record: Any,
    token: Any,
    channel_scales: Any,
    arg: dict[str, Any],
    head: Any,
    heads: int,
) -> Meaning:
    scales = pages.format_of(what)[2]
    if scales == "head":
        scale = T.bind(splat(arg["head_scales"][head if what == "key" else head + heads]))
        return lambda codes, h, u, load, group: codes * scale
    if scales == "channel":

        def by_channel(codes: Any, h: int, u: int, load: Any, group: Any) -> Any:
            scale, zero = (v.load(buffer, (load * vectors.factors + u) * LANES, LANES) for buffer in channel_scales)
            return v.fma(codes, scale, zero)

        return by_channel
    if scales == "token":
        by_token = [v.local(GRANULE, "float32") for _ in "sz"]
        pairs = pages.pairs(pages.key_half(record, token) if what == "key" else pages.value_half(record, token))
        for buffer, value in zip(by_token, pairs, strict=True):
            v.store(buffer, 0, value, LANES)

        def of_token(codes: Any, h: int, u: int, load: Any, group: Any) -> Any:
            tokens, start = (vectors.tokens[h, 0], group * stride(vectors.tokens, 1)) if what == "key" else (vectors.tokens[u], 0)
            scale, zero = (gathered(buffer, start, tokens) for buffer in by_token)
            return v.fma(codes, scale, zero)

        return of_token
    return lambda codes, h, u, load, group: codes
