"""The rotary embedding of keys that are attended to before they join the cache. It is computed in
fp32, as the append kernels do; where these fuse a product and a sum, some elements differ in their
last bit."""

from __future__ import annotations

from torch import Tensor

KINDS = ("half", "interleaved")


def rotated(k: Tensor, positions: Tensor, cos_sin: Tensor, kind: str) -> Tensor:
    """``k`` [rows, heads, head_dim], its first rows turned at int64 ``positions``, rounded once
    from fp32 to its dtype.

    ``cos_sin`` fp32 [max_position, d]: cosines, then sines, of the first d channels. ``kind``
    "half" turns pairs (i, i + d / 2), "interleaved" (2 i, 2 i + 1).
    """
    if kind not in KINDS:
        raise ValueError(f"rotary is {kind!r}; accepted: 'half' and 'interleaved'")
    dim = cos_sin.shape[1]
    half = dim // 2
    cos, sin = cos_sin[positions, None].split(half, dim=-1)
    turned = k.clone()
    rows = k[: positions.numel()].float()
    first, second = (slice(None, half), slice(half, dim)) if kind == "half" else (slice(0, dim, 2), slice(1, dim, 2))
    a, b = rows[..., first], rows[..., second]
    turned[: positions.numel(), :, first] = (a * cos - b * sin).to(k.dtype)
    turned[: positions.numel(), :, second] = (b * cos + a * sin).to(k.dtype)
    return turned
