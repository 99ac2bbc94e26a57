"""The tensors of each attention operation, in call order (``tilebit.attention`` says what they
hold)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...layouts.kv import window_words
from ..operands import Operand

if TYPE_CHECKING:
    from .workload import AttentionWorkload

_WORDS = "bytes become int32 by .view(torch.int32)"


def attention_operands(w: AttentionWorkload) -> tuple[Operand, ...]:
    """What calls of ``w.op`` are given; head_scales are absent where no operand is fp8, sinks,
    cos_sin and lse where none is asked for, and an append's q, norms and out where it has none."""
    rows = Operand("k", w.dtype, ("tokens" if w.op == "append" else "total_kv", w.heads_kv, w.head_dim), apart=w.op == "append")
    q_rows = ("batch", "q_len") if w.op == "decode" else ("tokens",)
    q = Operand("q", w.dtype, (*q_rows, w.heads_q, w.head_dim))
    out = Operand("out", w.dtype, q.shape, written=True, read=False)
    lse = Operand("lse", "float32", (*q_rows, w.heads_q), written=True, read=False, optional=True, absent=not w.lse)
    sinks = Operand("sinks", "float32", (w.heads_q,), optional=True, absent=not w.sinks, advice="pass one fp32 logit for each query head")
    if w.op == "prefill":
        return (q, rows, _like(rows, "v"), _bounds("cu_q"), _bounds("cu_kv"), sinks, out, lse)
    pages, windows, tables, slots, lengths, scales = _cache(w)
    if w.op == "pack":  # of all layers at once
        layered = [replace(o, shape=("layers", *o.shape)) for o in (pages, windows, scales)]
        return (*layered[:2], tables, slots, lengths, layered[2])
    if w.op == "decode":
        return (q, pages, windows, tables, slots, lengths, scales, sinks, out, lse)
    if w.op == "append":
        angles = Operand("cos_sin", "float32", ("max_position", w.turned_channels), optional=True, absent=not w.rotary)
        norms = [Operand(name, w.dtype, (w.head_dim,), optional=w.queries, absent=not w.qk_norm) for name in ("q_norm", "k_norm")]
        q, out = replace(q, absent=not w.queries, apart=True), replace(out, absent=not w.queries)
        return (rows, _like(rows, "v"), _bounds("cu_seqlens"), lengths, tables, slots, pages, windows, scales, angles, q, *norms, out)
    out_k, out_v = (_like(rows, name, written=True, read=False) for name in ("out_k", "out_v"))
    return (pages, windows, tables, slots, lengths, _bounds("cu_kv"), scales, out_k, out_v)


def _cache(w: AttentionWorkload) -> tuple[Operand, ...]:
    """The cache's own tensors; an append changes the first two, a pack the first."""
    appended = w.op == "append"
    made = "make the cache with tilebit.KVCache, or with this"
    return (
        Operand(
            "pages", "int32", ("num_pages", w.heads_kv, w.layout.page_words), w.op in ("append", "pack"),
            advice=f"{made} format, head_dim and page_size; {_WORDS}",
        ),
        Operand("windows", "int32", ("slots", w.heads_kv, window_words(w.head_dim)), appended, advice=f"{made} head_dim; {_WORDS}"),
        Operand("block_tables", "int32", ("batch", "max_pages")),
        Operand("slots", "int32", ("batch",)),
        Operand("lengths", "int32", ("batch",)),
        Operand(
            "head_scales", "float32", (2, w.heads_kv), optional=True, absent=not w.format.has_head_scales,
            advice="fp8 formats need one fp32 scale for each head's keys and one for its values",
        ),
    )  # fmt: skip


def _bounds(name: str) -> Operand:
    """Where each sequence's rows begin, and where the last one's end."""
    return Operand(name, "int32", ("batch + 1",))


def _like(rows: Operand, name: str, written: bool = False, read: bool = True) -> Operand:
    return replace(rows, name=name, written=written, read=read)
