"""Whole caches as torch tensors, on any device: what a packed cache means, in fp64, and caches of
random numbers.

The reference attends to ``unpack_cache``'s keys and values; tests and the tuner fill caches with
``random_pages``. Both go through ``KVLayout``, page by page at once, never token by token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...layouts.kv import RESIDUAL, KVLayout, channel_parameter_bytes
from ...layouts.kv_formats import KVFormat
from ...layouts.packing import WORD_BITS, PackedLayout

DTYPES = (torch.float16, torch.bfloat16)
WORD_BYTES = WORD_BITS // 8


def unpack_cache(
    pages: Tensor,
    windows: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    layout: KVLayout,
    dtype: torch.dtype,
    head_scales: Tensor | None = None,
    full_windows: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """(k, v) of each sequence, float64 [length, heads_kv, head_dim], exactly as the cache means
    them.

    ``pages`` int32 [num_pages, heads_kv, page words], ``windows`` int32 [slots, heads_kv, window
    words] with numbers of ``dtype`` (float16 or bfloat16), ``block_tables`` int32 [batch,
    max_pages], ``slots`` and ``lengths`` int32 [batch], ``head_scales`` fp32 [2, heads_kv] (needed
    for fp8: keys, values); with ``full_windows`` the last 128 tokens of a length that is a multiple of
    128 are in the window still. Raises ``ValueError`` for pages of another size, another dtype or
    missing head scales.
    """
    if pages.shape[-1] != layout.page_words:
        raise ValueError(f"pages of {pages.shape[-1]} words; pages of {layout} have {layout.page_words}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; accepted: torch.float16, torch.bfloat16")
    if layout.format.has_head_scales and head_scales is None:
        raise ValueError(f"{layout.format.name} needs head_scales; give the fp32 [2, heads_kv] tensor of the cache")
    window_layout = KVLayout(KVFormat(), layout.head_dim, RESIDUAL)
    sequences = []
    for table, slot, length in zip(block_tables.long(), slots.tolist(), lengths.tolist(), strict=True):
        packed = max(length - full_windows, 0) // RESIDUAL * RESIDUAL
        own = pages[table[: -(-packed // layout.page_size)].to(pages.device)]
        in_pages = unpack_pages(own, layout, dtype, head_scales)
        in_window = unpack_pages(windows[slot : slot + 1], window_layout, dtype)
        k, v = (torch.cat((a[:packed], b[: length - packed])) for a, b in zip(in_pages, in_window, strict=True))
        sequences.append((k, v))
    return sequences


def unpack_pages(pages: Tensor, layout: KVLayout, dtype: torch.dtype, head_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(k, v), float64 [pages * page_size, heads_kv, head_dim], of int32 [pages, heads_kv, page
    words]: consecutive pages of one sequence that hold whole groups of 128 tokens. Arguments as
    ``unpack_cache``."""
    form, ends = layout.format, (layout.value_offset, layout.key_parameter_offset, layout.value_parameter_offset)
    keys, values, key_parameters, value_parameters = pages.tensor_split([end // WORD_BYTES for end in ends], dim=2)
    k_codes = _codes(keys, layout.key, layout.granules).flatten(2, 3)  # [pages, heads, page_size, head_dim]
    v_codes = _codes(values, layout.value, layout.granules).transpose(3, 4).flatten(2, 3)
    numbers = []
    for codes, operand, scales, parameters, row in (
        (k_codes, form.key, form.key_scales, key_parameters, 0),
        (v_codes, form.value, form.value_scales, value_parameters, 1),
    ):
        codes = codes.transpose(1, 2).flatten(0, 1)  # [tokens, heads, head_dim]
        if operand == "float":
            numbers.append(codes.to(torch.int16).view(dtype).double())
        elif operand == "fp8":
            assert head_scales is not None
            numbers.append(codes.to(torch.uint8).view(torch.float8_e4m3fn).double() * head_scales[row].double()[:, None])
        else:
            scale, zero = _parameters(parameters, scales, layout.head_dim)
            groups = codes.double().unflatten(0, scale.shape[:2] if scales == "token" else (-1, RESIDUAL))
            numbers.append((groups * scale + zero).flatten(0, 1))
    return numbers[0], numbers[1]


def random_pages(num_pages: int, heads_kv: int, layout: KVLayout, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """int32 [num_pages, heads_kv, page words] on the generator's device: keys and values of mean
    about 0 and deviation about 1 (fp8: before the head scale), every code point of integer formats
    in use, no infinities. With ``num_pages`` slots and a layout of ``KVLayout(KVFormat(), head_dim,
    128)`` these are windows."""
    form, device = layout.format, generator.device
    sections = [
        _random_codes((num_pages, heads_kv, size // WORD_BYTES), operand, dtype, generator)
        for operand, size in ((form.key, layout.key_bytes), (form.value, layout.value_bytes))
    ]
    for bits, scales, size in (
        (form.key_bits, form.key_scales, layout.key_parameter_bytes),
        (form.value_bits, form.value_scales, layout.value_parameter_bytes),
    ):
        if not size:
            continue
        by_channel = scales == "channel"  # pairs of zeros, then of scales; of a token its scale, then its zero
        run = 2 if by_channel else 1
        shape = (num_pages, heads_kv, size // (4 * run), run)
        top = (1 << bits) - 1
        jitter = torch.rand(shape, generator=generator, device=device) * 0.5 + 0.75
        scale = jitter * (12 / (top * (top + 2))) ** 0.5  # codes 0..top are equally likely: variance top (top + 2) / 12
        zero = torch.randn(shape, generator=generator, device=device) * 0.1 - scale * top / 2
        sections.append(torch.stack((zero, scale) if by_channel else (scale, zero), dim=3).half().flatten(2).view(torch.int32))
    return torch.cat(sections, dim=2)


def _codes(words: Tensor, packed: PackedLayout, tiles: int) -> Tensor:
    """int32 [..., tiles, tile_n, tile_k]: the codes of int32 [..., tiles * words of a tile]."""
    device = words.device
    shifts = torch.arange(packed.slots, dtype=torch.int32, device=device) * packed.bits
    slots = (words.unflatten(-1, (tiles, packed.words))[..., None] >> shifts) & ((1 << packed.bits) - 1)
    order = torch.from_numpy(packed.inverse_order().astype(np.int64)).to(device)
    return slots.flatten(-2).index_select(-1, order).unflatten(-1, (packed.tile_n, packed.tile_k))


def _parameters(words: Tensor, scales: str, head_dim: int) -> tuple[Tensor, Tensor]:
    """(scales, zeros), float64, of consecutive pages' parameters, int32 [pages, heads, words]:
    "channel" [groups, 1, heads, head_dim], "token" [pages, tokens of a page, heads, 1]."""
    halves = words.contiguous().view(torch.float16).double()
    if scales == "token":
        scale, zero = halves.transpose(1, 2).unflatten(1, (-1, 2)).unbind(2)
        return scale[..., None], zero[..., None]
    records = halves.transpose(0, 1).reshape(halves.shape[1], -1, 2 * head_dim).transpose(0, 1)[:, None]  # pages join to whole records
    scale, zero = (records[..., torch.from_numpy(part // 2).to(words.device)] for part in channel_parameter_bytes(np.arange(head_dim)))
    return scale, zero


def _random_codes(shape: tuple[int, int, int], operand: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    device = generator.device
    if operand in ("float", "fp8"):
        per_word = 2 if operand == "float" else 4
        numbers = torch.randn((*shape[:2], shape[2] * per_word), generator=generator, device=device)
        return numbers.to(dtype if operand == "float" else torch.float8_e4m3fn).view(torch.int32)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, device=device, dtype=torch.int32)
