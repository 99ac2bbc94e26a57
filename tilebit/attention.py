"""Attention over a low-bit KV cache: the operators ``torch.ops.tilebit.attention_*`` and the
functions that call them.

A cache's tensors, all on one device (``tilebit.KVCache`` makes and keeps them; a server with a
block manager of its own passes its own):

    pages         int32 [num_pages, heads_kv, page words]   packed tokens (layouts/kv.py), page_size of them a page
    windows       int32 [slots, heads_kv, window words]     a sequence's last 0..127 tokens in 16 bits
    block_tables  int32 [batch, max_pages]                  page of tokens page_size * i ..; unread beyond a sequence's packed tokens
    slots         int32 [batch]                             each sequence's row of windows
    lengths       int32 [batch]                             its tokens; the first floor(length / 128) * 128 are packed
    head_scales   fp32 [2, heads_kv]                        of keys and values; fp8 formats need it, others ignore it

``format`` is the name of a ``KVFormat`` ("kv4_channel"). q, k, v and outputs are fp16 or bf16.
Lengths, tables and slots are read on the device: nothing waits for it, and a captured CUDA graph
replays with changed ones. The ops trace under torch.compile; inference only: what asks for a
derivative is an error. They raise
``ValueError`` for operands that do not fit and ``KernelUnavailable`` when there is no kernel,
before a launch; operands that are read only may have any strides (one copy each). What lies in
lengths, tables and slots is not checked, because that would wait for the device: with
``TILEBIT_CHECK=1`` in the environment of the process it is, at every call that no graph captures,
and what would be read or written outside of the operands is a ``ValueError``.

``dependent`` of an op (programmatic dependent launch): the kernel may start while the preceding
kernel of the stream still runs, and waits for its end before it writes anything and before it reads
what that kernel may write; each op says what that is. Everything else it may read at once, so that
must be older: its writers had ended when the preceding kernel started (one that was itself launched
so starts before the end of the kernel before it, which then counts as preceding too, and so on). It
hides the start of a launch, and decode's first requests to the cache, behind the end of the
preceding kernel.
Results are the same. Decode's, append's and pack's kernels for sm_90a start early; elsewhere
(gather, prefill, sm_80 to sm_89, CPU), and where an operand but q, k or v must be copied first, the
option does nothing.

``full_windows`` of ``append`` and ``decode``, for steps of one new token a sequence through many
layers: an append leaves a window that it fills as it is, a decode takes all 128 newest tokens of a
sequence whose length is a multiple of 128 from its window, and one ``pack`` behind all layers
packs these windows, in one launch. Until then nothing else may read or append to the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .accepted import expect, expect_tensors
from .cache.counts import score_options
from .cache.kvcache import Batch, KVCache
from .ops import attention as attention_ops  # registers torch.ops.tilebit.attention_*
from .ops.operands import describe


def decode(
    q: Tensor,
    pages: Tensor,
    windows: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    head_scales: Tensor | None,
    sinks: Tensor | None,
    format: str,
    page_size: int,
    scale: float | None = None,
    window: int = 0,
    sink_tokens: int = 0,
    soft_cap: float = 0.0,
    return_lse: bool = False,
    dependent: bool = False,
    full_windows: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out [batch, q_len, heads_q, head_dim], log-sum-exp fp32 [batch, q_len, heads_q]) of ``q``
    [batch, q_len, heads_q, head_dim]: each sequence's ``q_len`` newest tokens, which are in the
    cache already, attend to it.

    Query i stands at position length - q_len + i and sees positions up to its own; with ``window``
    w > 0 only those above its own - w and the first ``sink_tokens``. Scores are ``scale`` q.k
    (None: head_dim^-0.5), c tanh(s / c) with ``soft_cap`` c > 0; ``sinks`` (fp32 [heads_q]) adds
    exp(sink) to the denominator. A query that sees nothing gets 0 and -inf (or its sink). The
    log-sum-exp is natural; without ``return_lse`` it has no elements. Query head h reads head h //
    (heads_q / heads_kv) of the cache. The same input gives the same bits.
    ``torch.ops.tilebit.attention_decode.out`` writes into ``out`` and ``lse``.

    ``dependent``: the preceding kernel may write ``q``, ``windows``, and of the pages each
    sequence's groups of 128 tokens that the newest ``q_len`` tokens reach. So it may be the
    ``append`` of these tokens, or what computes q after it; it may be neither an append of more
    tokens nor what sets lengths or tables.
    """
    return attention_ops.DECODE(
        q, pages, windows, block_tables, slots, lengths, head_scales, sinks, format, page_size,
        *score_options(scale, window, sink_tokens, soft_cap), return_lse, dependent, full_windows,
    )  # fmt: skip


def append(
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    pages: Tensor,
    windows: Tensor,
    head_scales: Tensor | None,
    cos_sin: Tensor | None,
    format: str,
    page_size: int,
    rotary: str = "",
    dependent: bool = False,
    full_windows: bool = False,
) -> None:
    """Put rows ``cu_seqlens[b]`` .. ``cu_seqlens[b + 1]`` (int32 [batch + 1]) of ``k`` and ``v``
    [tokens, heads_kv, head_dim] at the end of sequence b, whose length with them is ``lengths[b]``;
    changes ``pages`` and ``windows``.

    A residual window that fills up is quantized and packed at once: token by token or all at once,
    the cache holds the same bits. ``rotary`` "half" (pairs i, i + head_dim / 2) or "interleaved" (2
    i, 2 i + 1) turns k at its position by ``cos_sin`` (fp32 [max_position, head_dim]: cosines, then
    sines) in fp32, rounded once. ``dependent``: the preceding kernel may write every operand but
    ``cu_seqlens``, ``lengths``, ``block_tables`` and ``slots``.
    """
    attention_ops.APPEND(
        k, v, cu_seqlens, lengths, block_tables, slots, pages, windows, head_scales, cos_sin, format, page_size, rotary, dependent,
        full_windows,
    )  # fmt: skip


def append_and_rotate(
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    pages: Tensor,
    windows: Tensor,
    head_scales: Tensor | None,
    cos_sin: Tensor | None,
    q: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    format: str,
    page_size: int,
    rotary: str = "half",
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    dependent: bool = False,
    full_windows: bool = False,
) -> Tensor:
    """``append``, and the new tokens' queries in the same launch: ``q`` [tokens, heads_q,
    head_dim], rows as k's, turned at the same positions; a new tensor of its shape.

    ``q_norm`` and ``k_norm`` [head_dim], both or neither, in q's dtype: each head of q and of k is
    first divided by sqrt(mean of squares + ``norm_eps``) and multiplied by the weights plus
    ``norm_offset``; all of it in fp32, rounded once. Then ``rotary`` may be "", with no ``cos_sin``.
    ``cos_sin`` may be narrower than head_dim, a multiple of 32: the first channels are turned.

    ``torch.ops.tilebit.attention_append_and_rotate.out`` writes into ``out`` (other memory than
    q's). Rows that belong to no sequence stay undefined. Rows of q, k and v may lie any multiple of
    16 bytes apart, as slices of a fused projection's output do. ``dependent``: the preceding kernel
    may write what ``append``'s may, ``q`` and the norms' weights.
    """
    return attention_ops.APPEND_AND_ROTATE(
        k, v, cu_seqlens, lengths, block_tables, slots, pages, windows, head_scales, cos_sin, q, q_norm, k_norm, format, page_size, rotary,
        norm_eps, norm_offset, dependent, full_windows,
    )  # fmt: skip


def pack(
    pages: Tensor,
    windows: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    head_scales: Tensor | None,
    format: str,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    dependent: bool = False,
) -> None:
    """Pack the windows that appends with ``full_windows`` left full: the last 128 tokens of each
    sequence whose length is a multiple of 128, in every layer, with the bits that a plain append gives.

    ``pages`` int32 [layers, num_pages, heads_kv, page words], which it changes, ``windows`` int32
    [layers, slots, heads_kv, window words] and ``head_scales`` [layers, 2, heads_kv] are those of all
    layers, which share tables and slots (``KVCache.all_pages``, ``all_windows``). ``dtype`` is the one
    the cache was filled with. ``dependent``: the preceding kernel may write every operand.
    """
    attention_ops.PACK(pages, windows, block_tables, slots, lengths, head_scales, format, page_size, head_dim, dtype, dependent)


def gather(
    pages: Tensor,
    windows: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    cu_kv: Tensor,
    head_scales: Tensor | None,
    format: str,
    page_size: int,
    total: int,
    head_dim: int,
    dtype: torch.dtype,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    """(k, v), each [total, heads_kv, head_dim] in ``dtype``: what the cache holds, dequantized in
    fp32 and rounded once.

    Rows ``cu_kv[b]`` (int32 [batch + 1]) .. are the first ``lengths[b]`` tokens of sequence b; rows
    that belong to no token stay undefined. ``dtype`` is the one the cache was filled with.
    ``dependent``: the preceding kernel may write every operand.
    """
    return attention_ops.GATHER(
        pages, windows, block_tables, slots, lengths, cu_kv, head_scales, format, page_size, total, head_dim, dtype, dependent
    )


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_kv: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    sink_tokens: int = 0,
    soft_cap: float = 0.0,
    return_lse: bool = False,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out [tokens, heads_q, head_dim], log-sum-exp fp32 [tokens, heads_q]) of causal attention
    over 16-bit rows, sequences end to end.

    Sequence b has rows ``cu_q[b]`` .. ``cu_q[b + 1]`` of ``q`` [tokens, heads_q, head_dim] and
    ``cu_kv[b]`` .. of ``k`` and ``v`` [total, heads_kv, head_dim]; its queries are its newest
    tokens. ``cu_q``, ``cu_kv``: int32 [batch + 1]. ``dependent``: the preceding kernel may write
    every operand. The rest as ``decode``.
    """
    options = score_options(scale, window, sink_tokens, soft_cap)
    return attention_ops.PREFILL(q, k, v, cu_q, cu_kv, sinks, *options, return_lse, dependent)


def scaled_dot_product_decode(
    query: Tensor,
    cache: KVCache,
    sequences: Sequence[int] | Batch,
    key: Tensor | None = None,
    value: Tensor | None = None,
    layer: int = 0,
    scale: float | None = None,
    window: int = 0,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
    dependent: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` for decoding, in its layout: [batch, heads_q, q_len,
    head_dim] of ``query`` of the same shape.

    ``key`` and ``value`` [batch, heads_kv, q_len, head_dim] are the new tokens' and join the cache
    first; None: they have been appended. Attention is causal within the new tokens, and heads are
    grouped as with ``enable_gqa``. ``dependent`` as in ``KVCache.append`` and ``KVCache.attend``,
    other arguments as in ``decode``.
    """
    expect_tensors(("key", "value"), query=query, key=key, value=value)
    expect("cache", cache, KVCache, "a KVCache")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is not None and tensor.ndim != 4:
            raise ValueError(f"{name} is {describe(tensor)}; accepted: [batch, heads, q_len, head_dim]")
    if (key is None) != (value is None):
        raise ValueError("one of key and value is missing; accepted: both (they are appended first) or neither (they have been)")
    q = query.transpose(1, 2)
    if key is not None and value is not None:
        if key.shape[2] != query.shape[2]:
            raise ValueError(f"key has {key.shape[2]} new tokens and query {query.shape[2]}; accepted: as many")
        cache.check_attend(sequences, q, sinks, scale, window, sink_tokens, soft_cap, layer)  # before the tokens join, for good
        cache.append(sequences, key.transpose(1, 2), value.transpose(1, 2), layer=layer, dependent=dependent)
    try:
        out, _ = cache.attend(
            sequences, q, sinks=sinks, scale=scale, window=window, sink_tokens=sink_tokens, soft_cap=soft_cap, layer=layer,
            dependent=dependent,
        )  # fmt: skip
    except Exception as error:
        if key is not None:
            error.add_note("the new tokens have joined the cache; to try again, pass query alone")
        raise
    return out.transpose(1, 2)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp fp32) of attention over two disjoint sets of tokens, from the results over
    each.

    ``out_*`` [..., head_dim] of one dtype and shape, ``lse_*`` [...] natural (Milakov and
    Gimelshein, 2018). A side that saw nothing (lse -inf) counts for nothing. Computed in fp32.
    Learned sinks must be in one of the sides only.
    """
    expect_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype or lse_a.shape != out_a.shape[:-1] or lse_b.shape != lse_a.shape:
        raise ValueError(
            f"got out {describe(out_a)} and {describe(out_b)}, lse {describe(lse_a)} and {describe(lse_b)}; accepted: two outs "
            f"[..., head_dim] of one shape and dtype, and their lse [...]"
        )
    lse = torch.logaddexp(lse_a.float(), lse_b.float())
    nothing = lse == -torch.inf  # -inf - -inf is nan
    out = torch.zeros_like(out_a, dtype=torch.float32)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        unseen = (part_lse == -torch.inf)[..., None]  # whatever its out is: 0 * nan is nan
        out += part.float().masked_fill(unseen, 0.0) * torch.exp(part_lse.float() - lse).masked_fill(nothing, 0.0)[..., None]
    return out.to(out_a.dtype), lse
