"""Quantizing and packing keys and values on the host, bit for bit as the kernels do: the twin that
they are tested against.

Numbers are float32 arrays whose every element is a number of the model's type (``dtype``: "float16"
or "bfloat16"), so that nothing is rounded before it is quantized. Integer codes, all steps in fp32
and IEEE, no fused multiply-add:

    scale = fp16((max - min) / (2^bits - 1)), or 1 where that is 0;   zero = fp16(min + 0)
    q = clamp(rint((x - zero) * (1 / scale)), 0, 2^bits - 1);         x' = q * scale + zero
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from .kv import RESIDUAL, KVLayout, channel_parameter_bytes
from .kv_formats import KVFormat

DTYPES = ("float16", "bfloat16")
E4M3_NAN = 0x7F
Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class KVGroup:
    """128 tokens of one kv head as a cache holds them.

    ``keys``, ``values``: codes [128, head_dim], uint8 (of "float": the numbers' 16 bits, uint16).
    ``key_parameters``, ``value_parameters``: fp16 [2, n], scales then zeros, n = head_dim
    ("channel"), 128 ("token") or 0 (float and fp8).
    """

    keys: np.ndarray
    values: np.ndarray
    key_parameters: np.ndarray
    value_parameters: np.ndarray


def quantize_codes(x: np.ndarray, bits: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 codes like ``x``, fp16 [2, n] scales and zeros) of float32 [rows, cols] ``x``;
    ``axis`` is the one that shares parameters."""
    steps = np.float32((1 << bits) - 1)
    with np.errstate(over="ignore", invalid="ignore"):  # numbers outside of fp16's range have no finite zero point
        low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
        scale = ((high - low) / steps).astype(np.float16)
        scale[scale == 0] = 1
        # + 0: of +0 and -0 a reduction's order decides which is the minimum; a stored zero point
        # has no sign.
        zero = (low + np.float32(0)).astype(np.float16)
        q = np.rint((x - zero.astype(np.float32)) * (np.float32(1) / scale.astype(np.float32)))
    codes = np.fmin(np.fmax(q, np.float32(0)), steps).astype(np.uint8)  # as fmaxf and fminf: not-a-number becomes 0
    return codes, np.stack([scale.ravel(), zero.ravel()])


def dequantize_codes(codes: np.ndarray, parameters: np.ndarray, axis: int) -> np.ndarray:
    """float32 ``q * scale + zero``, the product and the sum each rounded once; arguments as
    ``quantize_codes`` gives them."""
    scale, zero = (np.expand_dims(row.astype(np.float32), axis) for row in parameters)
    return codes.astype(np.float32) * scale + zero


@cache
def _e4m3_table() -> np.ndarray:
    """float32 [128]: the numbers of e4m3's codes 0..127 (sign clear); the last is not a number."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    table = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)).astype(np.float32)
    table[E4M3_NAN] = np.nan
    return table


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """float32 -> uint8 codes of OCP e4m3 ("fn": no infinity): to nearest, ties to even, saturating
    at 448; not-a-number is 0x7f."""
    x = np.asarray(x, dtype=np.float32)
    table = _e4m3_table()[:E4M3_NAN]
    middles = (table[1:] + table[:-1]) / 2  # exact: e4m3 numbers have 4 bits
    size = np.abs(x)
    code = np.searchsorted(middles, size, side="left")
    tie = (code < middles.size) & (size == middles[np.minimum(code, middles.size - 1)])
    code = code + (tie & (code % 2 == 1))
    return np.where(np.isnan(x), E4M3_NAN, code | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 codes of e4m3 -> float32."""
    size = _e4m3_table()[codes & 0x7F]
    return np.where(codes & 0x80, -size, size)


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """uint16: the 16 bits of each number of ``x`` in ``dtype``. Raises ``ValueError`` for a number
    that ``dtype`` does not have."""
    _checked_dtype(dtype)
    x = np.ascontiguousarray(x, dtype=np.float32)
    with np.errstate(over="ignore"):
        bits = x.astype(np.float16).view(np.uint16) if dtype == "float16" else (x.view(np.uint32) >> 16).astype(np.uint16)
    if not np.array_equal(from_bits(bits, dtype), x, equal_nan=True):
        raise ValueError(f"numbers are not all of {dtype}; round them first")
    return bits


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse of ``to_bits``: uint16 -> float32."""
    _checked_dtype(dtype)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantize_group(
    k: np.ndarray, v: np.ndarray, format: KVFormat, dtype: str = "float16", head_scales: tuple[float, float] = (1.0, 1.0)
) -> KVGroup:
    """Quantize 128 tokens of one kv head: ``k``, ``v`` float32 [128, head_dim], numbers of
    ``dtype``; ``head_scales`` are fp8's (key, value). Raises ``ValueError`` for other shapes or
    numbers."""
    if k.shape != v.shape or k.ndim != 2 or k.shape[0] != RESIDUAL:
        raise ValueError(f"k is {list(k.shape)} and v {list(v.shape)}; accepted: two arrays [{RESIDUAL}, head_dim]")
    parts = []
    for x, operand, bits, scales, head_scale in (
        (k, format.key, format.key_bits, format.key_scales, head_scales[0]),
        (v, format.value, format.value_bits, format.value_scales, head_scales[1]),
    ):
        x_bits = to_bits(x, dtype)
        x = from_bits(x_bits, dtype)
        if scales in ("channel", "token"):
            parts.append(quantize_codes(x, bits, 0 if scales == "channel" else 1))
        else:
            codes = x_bits if operand == "float" else encode_e4m3(x / np.float32(head_scale))
            parts.append((codes, np.zeros((2, 0), dtype=np.float16)))
    (keys, key_parameters), (values, value_parameters) = parts
    return KVGroup(keys, values, key_parameters, value_parameters)


def dequantize_group(group: KVGroup, format: KVFormat, dtype: str = "float16", head_scales: tuple[float, float] = (1.0, 1.0)) -> Arrays:
    """(k, v), float32 [128, head_dim]: what the codes of ``group`` mean, in fp32 arithmetic."""

    def meaning(codes: np.ndarray, parameters: np.ndarray, operand: str, scales: str, head_scale: float) -> np.ndarray:
        if operand == "float":
            return from_bits(codes, dtype)
        if operand == "fp8":
            return decode_e4m3(codes) * np.float32(head_scale)
        return dequantize_codes(codes, parameters, 0 if scales == "channel" else 1)

    return (
        meaning(group.keys, group.key_parameters, format.key, format.key_scales, head_scales[0]),
        meaning(group.values, group.value_parameters, format.value, format.value_scales, head_scales[1]),
    )


def pack_pages(groups: Sequence[KVGroup], layout: KVLayout) -> np.ndarray:
    """int32 [pages, layout.page_words]: the pages, in order, of consecutive ``groups`` of one kv
    head. What the last groups leave of a page of 256 tokens is 0."""
    pages = -(-len(groups) * RESIDUAL // layout.page_size)
    tokens = pages * layout.page_size

    def by_page(rows: list[np.ndarray]) -> np.ndarray:
        joined = np.concatenate(rows)
        return np.pad(joined, ((0, tokens - len(joined)), (0, 0))).reshape(pages, layout.page_size, -1)

    def parameters(records: list[np.ndarray], page_bytes: int) -> np.ndarray:
        joined = np.concatenate(records)
        return np.pad(joined, (0, pages * page_bytes - joined.size)).reshape(pages, page_bytes)

    keys, values = by_page([g.keys for g in groups]), by_page([g.values for g in groups])
    sections = [
        np.stack([layout.key.pack(page).ravel() for page in keys]).view(np.uint8),
        np.stack([layout.value.pack(page.T).ravel() for page in values]).view(np.uint8),
        parameters([_record(g.key_parameters, layout.format.key_scales) for g in groups], layout.key_parameter_bytes),
        parameters([_record(g.value_parameters, layout.format.value_scales) for g in groups], layout.value_parameter_bytes),
    ]
    return np.concatenate(sections, axis=1).view(np.int32)


def unpack_pages(pages: np.ndarray, layout: KVLayout, groups: int) -> list[KVGroup]:
    """The inverse of ``pack_pages``: the first ``groups`` groups of int32 [pages,
    layout.page_words], a sequence's pages in order. Raises ``ValueError`` for another shape or too
    few pages."""
    if pages.ndim != 2 or pages.shape[1] != layout.page_words or len(pages) * layout.page_size < groups * RESIDUAL:
        raise ValueError(f"pages are {list(pages.shape)}; accepted: [at least {groups * RESIDUAL} tokens' pages, {layout.page_words}]")
    data = np.ascontiguousarray(pages).view(np.uint8)
    ends = (layout.value_offset, layout.key_parameter_offset, layout.value_parameter_offset)
    keys, values, key_parameters, value_parameters = np.split(data, ends, axis=1)
    size, head_dim = layout.page_size, layout.head_dim
    keys = np.concatenate([layout.key.unpack(np.ascontiguousarray(row).view(np.uint32), size, head_dim) for row in keys])
    values = np.concatenate([layout.value.unpack(np.ascontiguousarray(row).view(np.uint32), head_dim, size).T for row in values])
    key_parameters, value_parameters = key_parameters.ravel(), value_parameters.ravel()

    def group(index: int) -> KVGroup:
        tokens = slice(index * RESIDUAL, (index + 1) * RESIDUAL)

        def own(data: np.ndarray) -> np.ndarray:
            share = data.size * RESIDUAL // (len(pages) * size)
            return data[index * share : (index + 1) * share]

        return KVGroup(
            keys[tokens], values[tokens],
            _parameters(own(key_parameters), layout.format.key_scales), _parameters(own(value_parameters), layout.format.value_scales),
        )  # fmt: skip

    return [group(index) for index in range(groups)]


def pack_window(k: np.ndarray, v: np.ndarray, dtype: str = "float16") -> np.ndarray:
    """int32 [window_words]: a residual window of one kv head that holds ``k``, ``v``, float32
    [tokens, head_dim] of up to 128 tokens, numbers of ``dtype``; the rest is 0."""
    if k.shape != v.shape or k.ndim != 2 or len(k) > RESIDUAL:
        raise ValueError(f"k is {list(k.shape)} and v {list(v.shape)}; accepted: two arrays [up to {RESIDUAL}, head_dim]")
    layout = _window_layout(k.shape[1])
    missing = ((0, RESIDUAL - len(k)), (0, 0))
    return pack_pages([quantize_group(np.pad(k, missing), np.pad(v, missing), layout.format, dtype)], layout)[0]


def unpack_window(window: np.ndarray, tokens: int, head_dim: int, dtype: str = "float16") -> Arrays:
    """The inverse of ``pack_window``: (k, v), float32 [tokens, head_dim]."""
    layout = _window_layout(head_dim)
    k, v = dequantize_group(unpack_pages(window[None], layout, 1)[0], layout.format, dtype)
    return k[:tokens], v[:tokens]


def _window_layout(head_dim: int) -> KVLayout:
    return KVLayout(KVFormat(), head_dim, RESIDUAL)


def _record(parameters: np.ndarray, scales: str) -> np.ndarray:
    """uint8: the bytes of a group's parameters, fp16 [2, n], in the order of ``KVLayout``."""
    halves = np.empty(parameters.size, dtype=np.float16)
    halves[_record_order(parameters.shape[1], scales)] = parameters.ravel()
    return halves.view(np.uint8)


def _parameters(record: np.ndarray, scales: str) -> np.ndarray:
    """The inverse of ``_record``."""
    halves = np.ascontiguousarray(record).view(np.float16)
    return halves[_record_order(halves.size // 2, scales)].reshape(2, -1)


def _record_order(count: int, scales: str) -> np.ndarray:
    """int64 [2 * count]: where in a group's record, counted in fp16 numbers, each scale and then
    each zero lies."""
    if scales == "channel":
        return np.concatenate(channel_parameter_bytes(np.arange(count))) // 2
    return np.concatenate([2 * np.arange(count), 2 * np.arange(count) + 1])


def _checked_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; accepted: {', '.join(DTYPES)}")
