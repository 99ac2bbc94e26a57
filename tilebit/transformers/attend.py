"""tilebit's entry of transformers' ``AttentionInterface``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .cache import TilebitLayer
from .masks import Visible

MOST_AT_ONCE = 16  # new tokens of a sequence that decoding takes


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """(out [rows, columns, heads, head_dim], None) of ``query`` [rows, heads, columns, head_dim]. Keys
    of a ``TilebitCache`` are put into it and attended to there; others are attended to by
    transformers' own function. Raises ``ValueError`` for what neither can do right."""
    layer = getattr(key, "tilebit_layer", None)
    if layer is None:
        return _elsewhere(module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, s_aux, **others)
    assert isinstance(layer, TilebitLayer)
    layer.taken()
    if not isinstance(attention_mask, Visible) or dropout or others.get("position_bias") is not None:
        what = "dropout" if dropout else "a position bias" if isinstance(attention_mask, Visible) else "a mask that is no causal one"
        raise ValueError(
            f"a layer has {what}, which a TilebitCache has no attention for; accepted: causal masks, sliding windows and padding: use "
            "another cache"
        )
    if (sliding_window or 0) != attention_mask.window:
        raise ValueError(
            f"a layer has a window of {sliding_window} and its mask one of {attention_mask.window}; accepted: the same: use another cache"
        )
    return _own(layer, query, key, value, attention_mask, scaling, softcap or 0.0, s_aux), None


def _own(
    layer: TilebitLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Visible,
    scale: float | None,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    owner = layer.owner
    step = owner.begin(mask, key) if layer.seen == owner.seen else owner.step
    assert step is not None
    rows, heads, columns, head_dim = query.shape
    cache, index = owner.pool.cache, layer.index
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    sinks = None if sinks is None else sinks.detach().float()
    try:
        if step.places is None and columns <= MOST_AT_ONCE:
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            cache.append(step.batch, k, v, layer=index)
            out, _ = cache.attend(step.batch, q, sinks, scale, mask.window, 0, soft_cap, layer=index)
        else:
            q, k, v = (x.flatten(0, 1) if step.places is None else x.flatten(0, 1)[step.places] for x in (q, k, v))
            found, _ = cache.prefill(step.batch, q, k, v, sinks=sinks, scale=scale, window=mask.window, soft_cap=soft_cap, layer=index)
            if step.places is not None:
                found = found.new_zeros(rows * columns, heads, head_dim).index_copy_(0, step.places, found)
            out = found.view(rows, columns, heads, head_dim)
    except Exception:
        owner.abandon()
        raise
    owner.keep(index, k, v)
    layer.seen = owner.seen
    return out


def _elsewhere(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Visible | Tensor | None,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """sdpa, or, for what sdpa leaves out without a word (soft cap and sinks), the model's own."""
    if softcap is None and s_aux is None:
        dense = mask.dense() if isinstance(mask, Visible) else mask
        return sdpa_attention_forward(module, query, key, value, dense, dropout, scaling, **others)
    if mask is None:
        raise ValueError(
            "a layer has a soft cap or sinks and no mask, which says nothing of its order; accepted: attn_implementation='eager'"
        )
    added = mask.additive() if isinstance(mask, Visible) else _additive(mask, query.dtype)
    own = sys.modules[type(module).__module__].eager_attention_forward
    return own(
        module,
        query,
        key,
        value,
        added,
        scaling=scaling,
        dropout=dropout,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
    )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores for ``mask``, bool (true where a row sees a column) or that
    already."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min) if mask.dtype == torch.bool else mask
