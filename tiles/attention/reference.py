"""Attention in fp64, straight from its definition: what every program must compute on the
dequantized cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible(rows: int, length: int, window: int = 0, sink_tokens: int = 0) -> Tensor:
    """bool [rows, length]: which of a sequence's ``length`` tokens its newest ``rows`` queries see.

    Query i stands at position p = length - rows + i and sees positions <= p (none when p < 0); with
    ``window`` w > 0 of these only positions > p - w and the first ``sink_tokens``.
    """
    position = torch.arange(length - rows, length)[:, None]
    token = torch.arange(length)[None, :]
    seen = token <= position
    if window:
        seen &= (token > position - window) | (token < sink_tokens)
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window: int = 0,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out [rows, heads_q, head_dim], log-sum-exp [rows, heads_q]), fp64, of one sequence.

    ``q`` [rows, heads_q, head_dim] are its newest tokens' queries, ``k`` and ``v`` [length,
    heads_kv, head_dim] all its tokens, any dtype; query head h reads key head h // (heads_q /
    heads_kv). Scores are ``scale`` q.k (default: head_dim^-0.5), then c tanh(s / c) for a
    ``soft_cap`` c > 0; ``sinks`` [heads_q] adds exp(sink) to the softmax's denominator. Natural
    logarithm. A query that sees nothing gets out 0 and -inf (its sink, where there are sinks).
    """
    rows, heads_q, head_dim = q.shape
    group = heads_q // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * (head_dim**-0.5 if scale is None else scale)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = visible(rows, k.shape[0], window, sink_tokens).to(scores.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(heads_q, rows, 1)
        lse = torch.logsumexp(torch.cat((scores, column), dim=2), dim=2)
    else:
        lse = torch.logsumexp(scores, dim=2)
    # -inf - -inf is nan: where nothing is seen every weight is 0.
    weights = torch.exp(scores - lse[..., None]).masked_fill(~seen, 0.0)
    return torch.einsum("hij,jhd->ihd", weights, values), lse.T.contiguous()


def decode(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], **options) -> tuple[Tensor, Tensor]:
    """(out [batch, q_len, heads_q, head_dim], log-sum-exp [batch, q_len, heads_q]) of ``q`` [batch,
    q_len, heads_q, head_dim].

    ``keys[b]`` and ``values[b]`` [length, heads_kv, head_dim] are all tokens of sequence b, the
    q_len newest included; ``options`` are ``attend``'s.
    """
    parts = [attend(*sequence, **options) for sequence in zip(q, keys, values, strict=True)]
    if not parts:
        return q.double(), q.new_zeros(q.shape[:3], dtype=torch.float64)
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def prefill(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor, **options) -> tuple[Tensor, Tensor]:
    """(out [tokens, heads_q, head_dim], log-sum-exp [tokens, heads_q]) of a batch of sequences laid
    end to end.

    Sequence b has rows ``cu_q[b]`` .. ``cu_q[b + 1]`` of ``q`` [tokens, heads_q, head_dim] and
    ``cu_kv[b]`` .. of ``k`` and ``v`` [total, heads_kv, head_dim], its queries being its newest
    tokens; ``options`` are ``attend``'s.
    """
    out, lse = q.new_zeros(q.shape, dtype=torch.float64), q.new_zeros(q.shape[:2], dtype=torch.float64)
    rows, tokens = cu_q.tolist(), cu_kv.tolist()
    for b in range(len(rows) - 1):
        mine, its = slice(rows[b], rows[b + 1]), slice(tokens[b], tokens[b + 1])
        out[mine], lse[mine] = attend(q[mine], k[its], v[its], **options)
    return out, lse


def rotate(k: Tensor, positions: Tensor, cos_sin: Tensor, kind: str) -> Tensor:
    """``k`` [tokens, heads, head_dim] with the rotary embedding of ``positions`` [tokens], fp64.

    ``cos_sin`` [max_position, d] holds the cosines, then the sines, of d / 2 angles, by which the
    first d channels are turned. ``kind`` "half" turns the pairs (i, i + d / 2) by angle i,
    "interleaved" the pairs (2 i, 2 i + 1).
    """
    dim = cos_sin.shape[1]
    half = dim // 2
    cos, sin = cos_sin.double()[positions, None, :half], cos_sin.double()[positions, None, half:]
    if dim < k.shape[-1]:
        return torch.cat((rotate(k[..., :dim], positions, cos_sin, kind), k[..., dim:].double()), dim=-1)
    x = k.double()
    if kind == "half":
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    if kind != "interleaved":
        raise ValueError(f"kind is {kind!r}; accepted: 'half' and 'interleaved'")
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def normalize(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """``x`` [tokens, heads, head_dim], each head divided by its root mean square and multiplied by
    ``weight`` [head_dim] plus ``offset``, fp64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)
