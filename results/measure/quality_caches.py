"""What ``results.measure.quality`` does to a model's attention: keys and values as a low-bit cache
holds them, in one forward call of a whole window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from tilebit.layouts.kv import RESIDUAL
from tilebit.layouts.kv_formats import KVFormat

NAME = "simulated_cache"
SHARED = {"channel": -2, "token": -1}  # the axis whose numbers share a scale
LARGEST = 448.0  # of e4m3
AT_ONCE = -1  # of ``kept``: a token is quantized when it comes


def cached(x: Tensor, y: Tensor, format: KVFormat) -> tuple[Tensor, Tensor]:
    """Keys ``x`` and values ``y`` [heads, tokens, head_dim] as the codes of ``format`` stand for them, fp32, bit
    for bit as ``layouts.kv_quantize`` has it. The last group is filled up with zeros: it may be used only
    where each token has its own parameters."""
    key = _coded(x, format.key, format.key_bits, format.key_scales)
    return key, _coded(y, format.value, format.value_bits, format.value_scales)


def _coded(x: Tensor, operand: str, bits: int, scales: str) -> Tensor:
    tokens = x.shape[1]
    groups = pad(x.half().float(), (0, 0, 0, -tokens % RESIDUAL)).unflatten(1, (-1, RESIDUAL))
    if scales in SHARED:
        steps = float((1 << bits) - 1)
        low, high = groups.amin(SHARED[scales], keepdim=True), groups.amax(SHARED[scales], keepdim=True)
        scale, zero = ((high - low) / steps).half().float(), low.half().float()
        scale = torch.where(scale == 0, 1.0, scale)
        groups = ((groups - zero) * (1.0 / scale)).round_().clamp_(0, steps) * scale + zero
    elif operand != "float":
        groups = groups.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
    return groups.flatten(1, 2)[:, :tokens]


def packed_tokens(tokens: int, kept: int) -> list[int]:
    """How many tokens are packed when the query of each of ``tokens`` places attends: groups of 128 are,
    once they are complete and ``kept`` tokens more have come."""
    return [max(0, there - kept) // RESIDUAL * RESIDUAL for there in range(1, tokens + 1)]


def attended(q: Tensor, k: Tensor, v: Tensor, format: KVFormat, kept: int, scale: float | None) -> Tensor:
    """Causal attention [1, heads, tokens, head_dim] of ``q`` to ``k`` and ``v`` [1, key heads, tokens,
    head_dim] as a cache of ``format`` holds them: what ``packed_tokens`` says in its codes, the newer
    ones in fp16 (``AT_ONCE``: all in codes). A prompt is read as if its tokens had come one by one."""
    k, v = k.half().to(k.dtype), v.half().to(v.dtype)
    coded_k, coded_v = (x[None].to(q.dtype) for x in cached(k[0], v[0], format))
    if kept == AT_ONCE:
        return scaled_dot_product_attention(q, coded_k, coded_v, is_causal=True, scale=scale, enable_gqa=True)
    out, packed = torch.empty_like(q), packed_tokens(q.shape[2], kept)
    for count in sorted(set(packed)):  # queries that read the same codes
        first, end = packed.index(count), len(packed) - packed[::-1].index(count)
        keys, values = (torch.cat([c[:, :, :count], x[:, :, count:end]], 2) for c, x in ((coded_k, k), (coded_v, v)))
        places = torch.arange(end, device=q.device)
        seen = places <= places[first:, None]
        out[:, :, first:end] = scaled_dot_product_attention(q[:, :, first:end], keys, values, seen, scale=scale, enable_gqa=True)
    return out


@contextmanager
def simulated_cache(model: Any, name: str, kept: int = 0) -> Iterator[None]:
    """``model`` with a cache of the format ``name`` behind its attention, while this is open; windows have
    no padding. fp8 has head scales of 1, as ``TilebitCache`` has unless it is told others. Raises
    ``ValueError`` for a format that has no parameters of its own for each token where ``kept`` is
    ``AT_ONCE``, and for attention that is not plain."""
    format, before = KVFormat.from_name(name), model.config._attn_implementation
    if kept < AT_ONCE or (kept == AT_ONCE and format.key_scales == "channel"):
        raise ValueError(
            f"kept is {kept} of {name}; accepted: 0 and more, or {AT_ONCE} for a format whose keys do not share parameters over tokens"
        )

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float | None = None, **others: Any) -> Any:
        left = [word for word in ("sliding_window", "softcap", "s_aux") if others.get(word) is not None]
        if left or mask is not None:
            raise ValueError(f"attention has {', '.join(left) or 'a mask'}; accepted: plain causal attention")
        return attended(q, k, v, format, kept, scaling).transpose(1, 2), None

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
