"""Shared by the tests of the cache: small caches, rows, and what a cache must hold of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilebit.cache.kvcache import KVCache
from tilebit.layouts import kv_quantize
from tilebit.layouts.kv_formats import KVFormat

HEADS, DIM = 2, 64


def rows(count: int, heads: int = HEADS, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    return torch.randn(count, heads, DIM).to(dtype), torch.randn(count, heads, DIM).to(dtype)


def cache_of(format: str = "kv4_channel", page_size: int = 128, tokens: int = 4096, slots: int = 6, **options) -> KVCache:
    if KVFormat.from_name(format).has_head_scales:
        options.setdefault("head_scales", torch.tensor([[0.5, 0.25], [0.125, 2.0]]))
    return KVCache(tokens // page_size, slots, HEADS, DIM, format, page_size=page_size, **options)


def meant(k: Tensor, v: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """What the cache must hold of these rows, fp32: whole groups of 128 quantized, the others as they are."""
    k, v = k.float(), v.float()
    name = str(cache.dtype).removeprefix("torch.")
    for first in range(0, len(k) // 128 * 128, 128):
        for head in range(k.shape[1]):
            own = k[first : first + 128, head], v[first : first + 128, head]
            scales = (1.0, 1.0) if cache.head_scales is None else tuple(cache.head_scales[0, :, head].tolist())
            group = kv_quantize.quantize_group(own[0].numpy(), own[1].numpy(), cache.format, name, scales)
            for x, quantized in zip(own, kv_quantize.dequantize_group(group, cache.format, name, scales), strict=True):
                x.copy_(torch.from_numpy(np.asarray(quantized)))
    return k, v


def same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Whether the cache's rows are the expected ones, rounded once."""
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, expected, strict=True))
