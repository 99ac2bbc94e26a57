"""The loop bodies of the CPU's append and pack: one kv head of one sequence. See ``append.py`` and
``pack.py``. Importing this imports tvm.

``arg`` holds flat views of the operands by name, and of pages in fp16 (``halves``) and windows in
the model's type (``rows``); ``pitch``, by how much rows of k, v and q lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....layouts.kv import GRANULE, RESIDUAL, KVLayout, channel_parameter_bytes, window_words
from ....layouts.kv_formats import KVFormat
from ....schedules.attention.workload import AttentionWorkload
from .. import vectors as v
from ..gemm.lane_sums import max_everywhere, min_everywhere
from ..numbers import splat, to_e4m3
from ..vectors import T, tirx
from .attend import gathered
from .cache_pages import HALF_BYTES, Pages, cache_pages
from .granules import LANES, OperandVectors, key_vectors, stride, value_vectors
from .turned_rows import TurnedRows

WORD_HALVES = 2


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlaces:
    """Where a window, counted in 16-bit numbers, holds channel 16 i + x of token t: ``token[t's
    bits]`` + i * ``step`` + ``lanes[x]``."""

    token: tuple[int, ...]
    step: int
    lanes: np.ndarray

    @classmethod
    def of(cls, what: str, head_dim: int) -> WindowPlaces:
        """Of "key" or "value". Raises ``ValueError`` if the places are not such sums."""
        layout = KVLayout(KVFormat(), head_dim, RESIDUAL)
        position = layout.key_position if what == "key" else layout.value_position
        word, bit = position(np.arange(RESIDUAL)[:, None], np.arange(head_dim)[None])
        places = (word * WORD_HALVES + bit // 16).reshape(RESIDUAL, -1, LANES)
        origin = int(places[0, 0, 0])
        token = tuple(int(places[1 << k, 0, 0]) - origin for k in range(RESIDUAL.bit_length() - 1))
        step = stride(places, 1)
        bits = np.arange(RESIDUAL)[:, None] >> np.arange(len(token)) & 1
        by_token = bits @ np.array(token)
        if not np.array_equal(places, by_token[:, None, None] + step * np.arange(places.shape[1])[:, None] + places[0, 0]):
            raise ValueError(f"places of {what}s in a window of {head_dim} channels are no sums over bits of the token")
        return cls(token, step, places[0, 0])

    def start(self, token: Any, i: Any) -> Any:
        """Of vector ``i`` of ``token`` (0 .. 127)."""
        return sum((((token >> k) & 1) * part for k, part in enumerate(self.token)), start=i * self.step)


def append_rows(w: AttentionWorkload, arg: dict[str, Any], pitch: dict[str, Any], b: Any, head: Any, max_pages: Any) -> None:
    """Append sequence ``b``'s new rows of kv head ``head``, and turn the queries of its group."""
    row, length = T.bind(arg["cu_seqlens"][b]), T.bind(arg["lengths"][b])
    begin = T.bind(length - (arg["cu_seqlens"][b + 1] - row))
    window = T.bind((arg["slots"][b].astype("int64") * w.heads_kv + head) * (window_words(w.head_dim) * WORD_HALVES))
    pages = cache_pages(w, arg, b, head, max_pages, False)
    operands = _operands(w, pages, arg, head, window, pitch, row - begin)
    start = begin
    if not w.full_windows:
        group = v.local(RESIDUAL * w.head_dim, "float32")
        first_group, whole = T.bind(begin // RESIDUAL), T.bind(length // RESIDUAL)
        with T.serial(whole - first_group) as i:
            first = T.bind((first_group + i) * RESIDUAL)
            for operand in operands:
                operand.load_group(first, begin, group)
                operand.pack_group(first, group)
        start = T.bind(T.max(begin, whole * RESIDUAL))
    for operand in operands:
        operand.fill_window(start, T.bind(length - start))
    if w.queries:
        _turn_queries(w, arg, pitch["q"], head, row, begin, length)


def pack_window(w: AttentionWorkload, arg: dict[str, Any], sizes: dict[str, Any], layer: Any, b: Any, head: Any) -> None:
    """Pack the window of sequence ``b`` and kv head ``head`` in ``layer``, if it is full."""
    length = T.bind(arg["lengths"][b])
    with T.If(tirx.And(length > 0, length % RESIDUAL == 0)), T.Then():
        of = layer.astype("int64")
        slot = T.bind(of * sizes["slots"] + arg["slots"][b])
        window = T.bind((slot * w.heads_kv + head) * (window_words(w.head_dim) * WORD_HALVES))
        pages = cache_pages(w, arg, b, head, sizes["max_pages"], False, T.bind(of * sizes["num_pages"]))
        group = v.local(RESIDUAL * w.head_dim, "float32")
        for operand in _operands(w, pages, arg, head, window, scales_from=layer * (2 * w.heads_kv)):
            operand.load_window(group)
            operand.pack_group(T.bind(length - RESIDUAL), group)


def _turn_queries(w: AttentionWorkload, arg: dict[str, Any], pitch: Any, head: Any, row: Any, begin: Any, length: Any) -> None:
    queries = TurnedRows(w, arg, "q")
    with T.serial(length - begin) as t, T.serial(w.group) as mine:
        at, query = T.bind((row + t).astype("int64")), T.bind(head * w.group + mine)
        start, to = T.bind(at * pitch + query * w.head_dim), T.bind((at * w.heads_q + query) * w.head_dim)
        factor = queries.factor(start)
        with T.serial(w.head_dim // LANES) as i:
            v.store(arg["out"], to + i * LANES, queries.channels(start, factor, begin + t, i), LANES)


def _operands(
    w: AttentionWorkload, pages: Pages, arg: dict[str, Any], head: Any, window: Any, pitch: dict[str, Any] | None = None, shift: Any = 0,
    scales_from: Any = 0,
) -> list[_Operand]:  # fmt: skip
    """Keys and values."""
    vectors = (("key", key_vectors(w.layout.key)), ("value", value_vectors(w.layout.value)))
    return [_Operand(w, what, pages, arg, head, window, its, pitch or {}, shift, scales_from) for what, its in vectors]


class _Operand:
    """Keys or values of one kv head of one sequence: rows come from token ``t``'s row ``t + shift``
    of k or v, where there are such, or from ``window``; ``scales_from`` is where head scales begin."""

    def __init__(
        self,
        w: AttentionWorkload,
        what: str,
        pages: Pages,
        arg: dict[str, Any],
        head: Any,
        window: Any,
        vectors: OperandVectors,
        pitch: dict[str, Any],
        shift: Any,
        scales_from: Any,
    ) -> None:
        self.w, self.what, self.pages, self.arg, self.head = w, what, pages, arg, head
        self.shift, self.window, self.vectors, self.scales_from = shift, window, vectors, scales_from
        self.pitch = pitch.get("k" if what == "key" else "v")
        self.turned = TurnedRows(w, arg, "k")
        self.bits, self.kind, self.scales = pages.format_of(what)
        self.places = WindowPlaces.of(what, w.head_dim)
        self.steps = w.head_dim // LANES

    def start_of(self, token: Any) -> Any:
        """The element at which a new token's row begins."""
        return T.bind((token + self.shift).astype("int64") * self.pitch + self.head * self.w.head_dim)

    def factor(self, start: Any) -> Any:
        return self.turned.factor(start) if self.what == "key" else None

    def new_row(self, start: Any, factor: Any, token: Any, i: Any) -> Any:
        """Channels 16 i .. of a new token, in the model's type (bf16 as its bits)."""
        if self.what == "value":
            return v.load(self.arg["v"], start + i * LANES, LANES)
        return self.turned.channels(start, factor, token, i)

    def load_group(self, first: Any, begin: Any, group: Any) -> None:
        """The 128 tokens from ``first``, those below ``begin`` from the window, into ``group``,
        fp32 [128, head_dim]."""
        with T.serial(RESIDUAL) as t, T.If(first + t < begin):
            with T.Then():
                self._load_waiting(t, group)
            with T.Else():
                token = T.bind(first + t)
                start = self.start_of(token)
                factor = self.factor(start)
                with T.serial(self.steps) as i:
                    row = self.new_row(start, factor, token, i)
                    v.store(group, T.bind((t * self.steps + i) * LANES), v.to_float(row, LANES), LANES)

    def load_window(self, group: Any) -> None:
        """All 128 tokens of the window, likewise."""
        with T.serial(RESIDUAL) as t:
            self._load_waiting(t, group)

    def _load_waiting(self, t: Any, group: Any) -> None:
        with T.serial(self.steps) as i:
            waiting = gathered(self.arg["rows"], self.window + self.places.start(t, i), self.places.lanes)
            v.store(group, T.bind((t * self.steps + i) * LANES), v.to_float(waiting, LANES), LANES)

    def fill_window(self, start: Any, count: Any) -> None:
        """Tokens ``start`` .. into the window."""
        with T.serial(count) as t:
            token = T.bind(start + t)
            begin = self.start_of(token)
            factor = self.factor(begin)
            with T.serial(self.steps) as i:
                row = v.held(self.new_row(begin, factor, token, i))
                to = T.bind(self.window + self.places.start(token % RESIDUAL, i))
                for x, place in enumerate(self.places.lanes.tolist()):
                    T.buffer_store(self.arg["rows"], tirx.Shuffle([row], [x]), [to + place])

    def pack_group(self, first: Any, group: Any) -> None:
        """Quantize ``group`` and write its codes and parameters to the pages of the tokens from
        ``first`` on."""
        scales, zeros = (v.local(max(self.w.head_dim, RESIDUAL), "float32") for _ in range(2))
        if self.scales == "channel":
            self._channel_parameters(first, group, scales, zeros)
        if self.scales == "token":
            self._token_parameters(first, group, scales, zeros)
        codes = v.local(GRANULE * self.w.head_dim, "int32")
        with T.serial(RESIDUAL // GRANULE) as j:
            with T.serial(GRANULE) as t, T.serial(self.steps) as i:
                token = T.bind(j * GRANULE + t)
                x = v.load(group, (token * self.steps + i) * LANES, LANES)
                v.store(codes, (t * self.steps + i) * LANES, self._codes(x, token, i, scales, zeros), LANES)
            record = T.bind(self.pages.record(T.bind(first + j * GRANULE)))
            word = self.pages.key_word if self.what == "key" else self.pages.value_word
            self._pack(codes, T.bind(word(record, first + j * GRANULE)))

    def _codes(self, x: Any, token: Any, i: Any, scales: Any, zeros: Any) -> Any:
        """int32 codes of 16 channels of ``token`` of the group."""
        if self.kind == "float":
            rounded = v.from_float(x, self.w.dtype, LANES)
            return (rounded if self.w.dtype == "bfloat16" else T.reinterpret("uint16x16", rounded)).astype("int32x16")
        if self.kind == "fp8":
            at = self.scales_from + (self.head if self.what == "key" else self.head + self.w.heads_kv)
            return to_e4m3(v.held(x / splat(self.arg["head_scales"][at])))
        if self.scales == "channel":
            scale, zero = (v.load(buffer, i * LANES, LANES) for buffer in (scales, zeros))
        else:
            scale, zero = (splat(buffer[token]) for buffer in (scales, zeros))
        q = tirx.call_llvm_pure_intrin("float32x16", "llvm.rint", (x - zero) * (splat(1.0) / scale))
        bounded = tirx.call_llvm_pure_intrin("float32x16", "llvm.maxnum", q, splat(0.0))
        return tirx.call_llvm_pure_intrin("float32x16", "llvm.minnum", bounded, splat(float((1 << self.bits) - 1))).astype("int32x16")

    def _pack(self, codes: Any, word: Any) -> None:
        """A granule's ``codes`` [16, head_dim] as words from ``word`` on."""
        places, load_step, group_step = self.vectors.places(self.what, self.w.head_dim)
        with T.serial(self.vectors.loads) as load, T.serial(self.vectors.groups) as group:
            corner, packed = T.bind(load * load_step + group * group_step), None
            for slot, lanes in enumerate(places):
                code = gathered(codes, corner, lanes) << splat(self.bits * slot, "int32")
                packed = v.held(code if packed is None else packed | code)
            v.store(self.pages.words, word + (load * self.vectors.groups + group) * LANES, packed, LANES)

    def _channel_parameters(self, first: Any, group: Any, scales: Any, zeros: Any) -> None:
        head_dim = self.w.head_dim
        record = v.local(2 * head_dim, "float16")
        scale_places, zero_places = (part // HALF_BYTES for part in channel_parameter_bytes(np.arange(head_dim).reshape(-1, LANES)))
        with T.serial(self.steps) as i:
            low, high = v.local(1, "float32x16"), v.local(1, "float32x16")
            for bound in (low, high):
                T.buffer_store(bound, v.load(group, i * LANES, LANES), [0])
            with T.serial(RESIDUAL - 1) as t:
                x = v.held(v.load(group, ((t + 1) * self.steps + i) * LANES, LANES))
                T.buffer_store(low, T.min(x, low[0]), [0])
                T.buffer_store(high, T.max(x, high[0]), [0])
            pair = self._parameters(low[0], high[0])
            for values, half, places in zip((scales, zeros), pair, (scale_places, zero_places), strict=True):
                v.store(values, i * LANES, half.astype("float32x16"), LANES)
                for x, place in enumerate(places[0].tolist()):
                    T.buffer_store(record, tirx.Shuffle([half], [x]), [i * stride(places, 0) + place])
        self.pages.share_channel_parameters(first, lambda half, at: v.store(self.pages.halves, half, v.load(record, at, LANES), LANES))

    def _token_parameters(self, first: Any, group: Any, scales: Any, zeros: Any) -> None:
        place = self.pages.key_half if self.what == "key" else self.pages.value_half
        with T.serial(RESIDUAL) as t:
            low, high = v.local(1, "float32x16"), v.local(1, "float32x16")
            for bound in (low, high):
                T.buffer_store(bound, v.load(group, t * self.w.head_dim, LANES), [0])
            with T.serial(self.steps - 1) as i:
                x = v.held(v.load(group, (t * self.steps + i + 1) * LANES, LANES))
                T.buffer_store(low, T.min(x, low[0]), [0])
                T.buffer_store(high, T.max(x, high[0]), [0])
            pair = self._parameters(min_everywhere(low[0]), max_everywhere(high[0]))
            token = T.bind(first + t)
            at = T.bind(place(self.pages.record(token), token))
            for part, (values, half) in enumerate(zip((scales, zeros), pair, strict=True)):
                T.buffer_store(values, tirx.Shuffle([half.astype("float32x16")], [0]), [t])
                T.buffer_store(self.pages.halves, tirx.Shuffle([half], [0]), [at + part])

    def _parameters(self, low: Any, high: Any) -> tuple[Any, Any]:
        """(scale, zero), fp16, of numbers between ``low`` and ``high``."""
        scale = v.held(((high - low) / splat(float((1 << self.bits) - 1))).astype("float16x16"))
        one, nothing = (splat(tirx.const(value, "float16"), "float16") for value in (1.0, 0.0))
        return v.held(tirx.Select(scale == nothing, one, scale)), v.held(low.astype("float16x16"))
