"""What calls of a cache are given, compared with what the cache was made for, before anything
changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from ..accepted import expect_tensors
from ..layouts.kv_formats import KVFormat
from ..ops.dispatch import DTYPE_NAMES
from ..ops.operands import describe, overlap
from ..schedules.attention.workload import ROTARY_STEP, AttentionWorkload
from .batch import Batch
from .counts import real, score_options, whole
from .rotary import KINDS
from .sequences import SequenceTable

if TYPE_CHECKING:
    from .kvcache import KVCache


def check_layer(cache: KVCache, layer: int) -> None:
    if type(layer) is not int or not 0 <= layer < cache.num_layers:
        whole("layer", layer, 0, cache.num_layers - 1)


def flat_rows(cache: KVCache, name: str, rows: Tensor) -> Tensor:
    """[tokens, heads_kv, head_dim] of new keys or values, which may come as [batch, rows, ...]."""
    if not isinstance(rows, Tensor):
        expect_tensors(**{name: rows})
    flat = rows.flatten(0, 1) if rows.ndim == 4 else rows
    if flat.ndim != 3 or flat.shape[1:] != (cache.heads_kv, cache.head_dim) or rows.dtype != cache.dtype or rows.device != cache.device:
        raise ValueError(
            f"{name} is {describe(rows)}; accepted: {cache.dtype} [tokens, {cache.heads_kv}, {cache.head_dim}] or [batch, rows, "
            f"{cache.heads_kv}, {cache.head_dim}] on {cache.device}"
        )
    return flat


def counts_of(batch: Batch, rows: int, cu_seqlens: Sequence[int] | Tensor | None) -> list[int]:
    """How many of ``rows`` new rows each sequence of ``batch`` gets."""
    live = len(batch.handles)
    if cu_seqlens is None:
        if live == 0 or rows % live:
            raise ValueError(f"k has {rows} rows for {live} sequences; accepted: as many for each, or with cu_seqlens")
        return [rows // live] * live
    given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if not isinstance(given, Iterable):
        raise ValueError(f"cu_seqlens is {cu_seqlens!r}; accepted: {live + 1} numbers from 0 to k's {rows} rows")
    bounds = [whole("a number of cu_seqlens", bound) for bound in given]
    counts = [end - start for start, end in pairwise(bounds)]
    if len(counts) != live or bounds[0] != 0 or bounds[-1] != rows or min(counts, default=0) < 0:
        raise ValueError(f"cu_seqlens is {bounds[:10]}; accepted: {live + 1} numbers from 0 to k's {rows} rows, none below the last")
    return counts


def check_rows(
    cache: KVCache,
    batch: Batch,
    k: Tensor,
    v: Tensor,
    given: tuple[Tensor, Tensor],
    counts: list[int] | None,
    cos_sin: Tensor | None,
    rotary: str,
    layer: int,
) -> None:
    """New rows ``k`` and ``v``, ``given`` as the caller had them, of which each sequence gets as
    many as ``counts`` says (None: what the batch was advanced by)."""
    check_layer(cache, layer)
    if k.shape != v.shape:
        raise ValueError(f"k is {describe(k)} and v {describe(v)}; accepted: the same shape")
    if counts is None:
        batch.refresh()
        batch.reject_rows(layer)
        if k.shape[0] < sum(batch.counts):
            raise ValueError(f"k has {k.shape[0]} rows and the batch was advanced by {sum(batch.counts)}; accepted: at least as many")
    added = batch.counts if counts is None else counts
    for name, rows in zip(("k", "v"), given, strict=True):
        if rows.ndim == 4 and any(added) and (rows.shape[0] < len(added) or any(count != rows.shape[1] for count in added)):
            raise ValueError(
                f"{name} is {list(rows.shape)} and the sequences get {added[:10]} rows; accepted: [batch, rows, heads_kv, head_dim] with "
                f"as many rows for each of {len(added)} sequences, or [tokens, heads_kv, head_dim]"
            )
    if cos_sin is None:
        if rotary not in ("", KINDS[0]):  # the default
            raise ValueError(f"rotary is {rotary!r} and cos_sin is None; accepted: cos_sin with it, which says by how much k is turned")
        return
    if not isinstance(cos_sin, Tensor):
        expect_tensors(("cos_sin",), cos_sin=cos_sin)
    if rotary not in KINDS:
        raise ValueError(f"rotary is {rotary!r}; accepted: 'half' and 'interleaved'")
    longest = max((cache.length(h) + (0 if counts is None else n) for h, n in zip(batch.handles, added, strict=True)), default=0)
    dim = cos_sin.shape[1] if cos_sin.ndim == 2 else 0
    fits = 0 < dim <= cache.head_dim and dim % ROTARY_STEP == 0 and cos_sin.shape[0] >= longest
    if not fits or cos_sin.dtype != torch.float32 or cos_sin.device != cache.device:
        accepted = f"float32 [{longest} positions or more, {cache.head_dim}, or fewer in steps of {ROTARY_STEP}] on {cache.device}"
        raise ValueError(f"cos_sin is {describe(cos_sin)}; accepted: {accepted}")


def check_one_each(batch: Batch, counts: list[int] | None) -> None:
    """That ``batch`` was advanced by a token each and no layer was appended to otherwise, for
    appends with full_windows."""
    if counts is not None or any(count != 1 for count in batch.counts):
        got = "handles are" if counts is not None else f"a batch that was advanced by {batch.counts[:8]} tokens is"
        raise ValueError(f"{got} given with full_windows; accepted: a Batch that was advanced by one token each, and pack(batch) behind")
    if not batch.written <= batch.unpacked and not batch.capturing:  # a capture repeats a step that was packed
        plain = sorted(batch.written - batch.unpacked)
        raise ValueError(
            f"layers {plain[:8]} were appended to without full_windows in this step; accepted: all layers with it, or none, until the next "
            f"advance(batch)"
        )


def check_packed(table: SequenceTable, handles: Sequence[int]) -> None:
    """That no windows of ``handles`` wait for a pack."""
    if table.unpacked and not table.unpacked.isdisjoint(handles):
        waiting = sorted(table.unpacked.intersection(handles))
        raise ValueError(
            f"sequences {waiting[:8]} were appended to with full_windows; accepted: pack of that batch before anything else, or free them"
        )


def reject_windows(batch: Batch, layer: int, full_windows: bool) -> NoReturn:
    """``attend`` and the append before it differ."""
    appended = "with" if layer in batch.unpacked else "without"
    raise ValueError(
        f"full_windows is {full_windows} and layer {layer} was appended to {appended} it in this step; accepted: the same for both, until "
        "pack(batch)"
    )


@dataclass(frozen=True, slots=True)
class Turning:
    """What an append does to the new tokens' queries: q [tokens, heads_q, head_dim] and the weights
    of the norms, as the operator takes them, (eps, offset), and where the result goes (None: new
    memory)."""

    operands: tuple[Tensor, Tensor | None, Tensor | None]
    norm: tuple[float, float]
    out: Tensor | None


def turning_of(
    cache: KVCache,
    q: Tensor | None,
    out: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    norm_offset: float,
) -> Turning:
    """Of an append of ``k`` and ``v`` as they were given."""
    if q is None:
        given = next(name for name, tensor in (("out", out), ("q_norm", q_norm), ("k_norm", k_norm)) if tensor is not None)
        raise ValueError(f"{given} is given and q is not; accepted: with q, the new tokens' queries, or without both")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("one of q_norm and k_norm is missing; accepted: both or neither, since queries and keys are normalized together")
    if cos_sin is None and q_norm is None:
        raise ValueError("q is given without cos_sin and without norms; accepted: with cos_sin, q_norm and k_norm, or all three")
    expect_tensors(("q_norm", "k_norm", "out"), q=q, q_norm=q_norm, k_norm=k_norm, out=out)
    heads_q = q.shape[-2] if q.ndim == k.ndim else 0
    fits = q.shape[:-2] == k.shape[:-2] and q.shape[-1] == cache.head_dim and heads_q > 0 and heads_q % cache.heads_kv == 0
    if not fits or q.dtype is not cache.dtype or q.device != cache.device:
        _reject_query(cache, q, f"[{', '.join(map(str, k.shape[:-2]))}, heads_q, {cache.head_dim}], its rows those of k,")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (weight.shape != (cache.head_dim,) or weight.dtype is not cache.dtype or weight.device != cache.device):
            raise ValueError(f"{name} is {describe(weight)}; accepted: {cache.dtype} [{cache.head_dim}] on {cache.device}")
    if out is not None and (out.shape != q.shape or out.dtype is not q.dtype or out.device != q.device or not out.is_contiguous()):
        raise ValueError(f"out is {describe(out)}; accepted: {cache.dtype} {list(q.shape)} on {cache.device}, contiguous: q's shape")
    if out is not None:
        for name, rows in (("q", q), ("k", k), ("v", v)):
            if overlap(out, rows):
                raise ValueError(f"out lies in the memory of {name}, which is still read when out is written; accepted: other memory")
    norm = (real("norm_eps", norm_eps), real("norm_offset", norm_offset)) if q_norm is not None else (0.0, 0.0)
    return Turning((q.flatten(0, -3), q_norm, k_norm), norm, None if out is None else out.flatten(0, -3))


def check_query(cache: KVCache, batch: Batch, q: Tensor) -> int:
    """q_len of ``q`` for each sequence's newest tokens."""
    try:
        size, q_len, _, head_dim = q.shape  # at once: asking again costs host time
    except AttributeError:
        expect_tensors(q=q)
        raise
    except ValueError:
        size = q_len = head_dim = -1
    if size != batch.size or head_dim != cache.head_dim or q.dtype is not cache.dtype or q.device != cache.device:
        _reject_query(cache, q, f"[{batch.size}, q_len, heads_q, {cache.head_dim}]")
    return q_len


def check_query_rows(cache: KVCache, q: Tensor, rows: int, name: str = "q", heads: str = "heads_q") -> None:
    """``q`` of ``rows`` new rows, which the caller knows as ``name`` of ``heads`` heads."""
    if not isinstance(q, Tensor):
        expect_tensors(**{name: q})
    if q.dtype is not cache.dtype or q.ndim != 3 or q.shape[0] != rows or q.shape[2] != cache.head_dim or q.device != cache.device:
        _reject_query(cache, q, f"[{rows}, {heads}, {cache.head_dim}]", name)


def _reject_query(cache: KVCache, q: Tensor, shape: str, name: str = "q") -> NoReturn:
    raise ValueError(
        f"{name} is {describe(q)}; accepted: {cache.dtype} {shape} on {cache.device}, as this cache was made, with heads_q a multiple of "
        f"{cache.heads_kv}"
    )


def check_scores(
    cache: KVCache, heads_q: int, sinks: Tensor | None, scale: float | None, window: int, sink_tokens: int, soft_cap: float
) -> tuple[float | None, int, int, float]:
    """What attention says of its scores, for calls that change something before they attend;
    (scale, window, sink_tokens, soft_cap) as ``score_options``."""
    scale, window, sink_tokens, soft_cap = options = score_options(scale, window, sink_tokens, soft_cap)
    _check_options(heads_q, cache.heads_kv, cache.head_dim, DTYPE_NAMES[cache.dtype], window, sink_tokens, soft_cap, scale)
    expect_tensors(("sinks",), sinks=sinks)
    if sinks is not None and (sinks.dtype != torch.float32 or tuple(sinks.shape) != (heads_q,) or sinks.device != cache.device):
        raise ValueError(f"sinks is {describe(sinks)}; accepted: float32 [{heads_q}] on {cache.device}")
    return options


@lru_cache(maxsize=64)
def _check_options(
    heads_q: int, heads_kv: int, head_dim: int, dtype: str, window: int, sink_tokens: int, soft_cap: float, scale: float | None
) -> None:
    """The workload says what is accepted."""
    sizes = (1, 1, 1, heads_q, heads_kv, head_dim)
    AttentionWorkload("prefill", *sizes, KVFormat(), dtype, window=window, sink_tokens=sink_tokens, soft_cap=soft_cap, scale=scale)
