"""The operators ``torch.ops.tilebit.attention_decode``, ``_append``, ``_append_and_rotate``,
``_pack``, ``_gather`` and ``_prefill``, with ``.out`` variants and fakes.

What they compute and take is said by the functions of the same names in ``tilebit.attention``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..layouts.kv import HEAD_DIMS
from ..layouts.kv_formats import KVFormat
from ..schedules.attention.workload import AttentionWorkload
from .attention_dispatch import check_operands, launch
from .check import CHECKED, check_append, check_decode, check_gather, check_pack, check_prefill
from .direct import inference_only
from .dispatch import DTYPE_NAMES
from .operands import describe, schema
from .plans import bucket

_LAYOUT = "str format, int page_size"
_SOFTMAX = "float? scale=None, int window=0, int sink_tokens=0, float soft_cap=0.0"
_LAUNCH = "bool dependent=False"
_LATE = "bool full_windows=False"


def _taken(op: str, **options: Any) -> str:
    """What an operator is given, in the order in which its kernels take it."""
    return ", ".join(schema(AttentionWorkload(op, 1, 1, 1, 1, 1, HEAD_DIMS[0], KVFormat(), **options).operands("cpu")))


_DECODE = f"{_taken('decode')}, {_LAYOUT}, {_SOFTMAX}"
_PREFILL = f"{_taken('prefill')}, {_SOFTMAX}"
_GATHER = f"{_taken('gather')}, {_LAYOUT}"
_ROTATE = (
    f"{_taken('append', rotary='half', queries=True)}, {_LAYOUT}, str rotary='half', float norm_eps=1e-6, float norm_offset=0.0, "
    f"{_LAUNCH}, {_LATE}"
)
SCHEMAS = {
    "attention_decode": f"({_DECODE}, bool return_lse=False, {_LAUNCH}, {_LATE}) -> (Tensor, Tensor)",
    "attention_decode.out": f"({_DECODE}, {_LAUNCH}, {_LATE}, *, Tensor(a!) out, Tensor(b!)? lse=None) -> ()",
    "attention_append": f"({_taken('append')}, {_LAYOUT}, str rotary='', {_LAUNCH}, {_LATE}) -> ()",
    "attention_append_and_rotate": f"({_ROTATE}) -> Tensor",
    "attention_append_and_rotate.out": f"({_ROTATE}, *, Tensor(c!) out) -> ()",
    "attention_pack": f"({_taken('pack')}, {_LAYOUT}, int head_dim, ScalarType dtype, {_LAUNCH}) -> ()",
    "attention_gather": f"({_GATHER}, SymInt total, int head_dim, ScalarType dtype, {_LAUNCH}) -> (Tensor, Tensor)",
    "attention_gather.out": f"({_GATHER}, {_LAUNCH}, *, Tensor(a!) out_k, Tensor(b!) out_v) -> ()",
    "attention_prefill": f"({_PREFILL}, bool return_lse=False, {_LAUNCH}) -> (Tensor, Tensor)",
    "attention_prefill.out": f"({_PREFILL}, {_LAUNCH}, *, Tensor(a!) out, Tensor(b!)? lse=None) -> ()",
}


def _decode_out(
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
    dependent: bool = False,
    full_windows: bool = False,
    *,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    if q.ndim != 4 or pages.ndim != 3 or block_tables.ndim != 2:
        _reject("decode", ("q", q, "[batch, q_len, heads_q, head_dim]"), _pages(pages), _tables(block_tables))
    batch, q_len, heads_q, head_dim = q.shape
    if not q.numel():
        return
    key = (
        "decode", bucket(batch), bucket(q_len), bucket(block_tables.shape[1] * page_size), heads_q, pages.shape[1], head_dim, format,
        q.dtype, page_size, window, sink_tokens, sinks is not None, soft_cap, scale, lse is not None, *_UNTURNED, full_windows, q.device,
    )  # fmt: skip
    tables = _dense(block_tables)
    # The kernel asks for the tables before its wait. A copy of them would be the preceding kernel;
    # one of q may be.
    early = dependent and tables is block_tables
    if CHECKED:
        check_decode(pages, windows, block_tables, slots, lengths, page_size, full_windows)
    launch(key, (_dense(q), pages, windows, tables, slots, lengths, head_scales, sinks, out, lse), early)


def _decode(
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
    out, lse = _outputs(q, return_lse)
    _decode_out(
        q, pages, windows, block_tables, slots, lengths, head_scales, sinks, format, page_size, scale, window, sink_tokens, soft_cap,
        dependent, full_windows, out=out, lse=lse if return_lse else None,
    )  # fmt: skip
    return out, lse


def _append(
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
    rows = (k, v, cu_seqlens, lengths, block_tables, slots, pages, windows, head_scales, cos_sin)
    _launch_append(*rows, None, None, None, None, format, page_size, rotary, 0.0, 0.0, dependent, full_windows)


def _append_and_rotate(
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
    out = q.new_empty(q.shape)
    rows = (k, v, cu_seqlens, lengths, block_tables, slots, pages, windows, head_scales, cos_sin)
    _launch_append(*rows, q, q_norm, k_norm, out, format, page_size, rotary, norm_eps, norm_offset, dependent, full_windows)
    return out


def _append_and_rotate_out(
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
    *,
    out: Tensor,
) -> None:
    rows = (k, v, cu_seqlens, lengths, block_tables, slots, pages, windows, head_scales, cos_sin)
    _launch_append(*rows, q, q_norm, k_norm, out, format, page_size, rotary, norm_eps, norm_offset, dependent, full_windows)


def _launch_append(
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
    q: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    out: Tensor | None,
    format: str,
    page_size: int,
    rotary: str,
    norm_eps: float,
    norm_offset: float,
    dependent: bool,
    full_windows: bool,
) -> None:
    """One launch for both operators: ``q`` None turns no queries."""
    if not rotary and (cos_sin is not None or (q is not None and q_norm is None)):
        given = "q" if cos_sin is None else "cos_sin"
        raise ValueError(f"{given} is given and rotary is ''; accepted: rotary 'half' or 'interleaved' with it, or neither")
    if k.ndim != 3 or block_tables.ndim != 2:
        _reject("append", ("k", k, "[tokens, heads_kv, head_dim]"), _tables(block_tables))
    tokens, heads_kv, head_dim = k.shape
    heads_q = heads_kv
    if q is not None:
        if q.ndim != 3:
            _reject("append_and_rotate", ("q", q, "[tokens, heads_q, head_dim]"))
        heads_q = q.shape[1]
    batch = block_tables.shape[0]
    if not tokens or not batch:
        return
    key = (
        "append", bucket(batch), bucket(-(-tokens // batch)), bucket(block_tables.shape[1] * page_size), heads_q, heads_kv, head_dim,
        format, k.dtype, page_size, 0, 0, False, 0.0, None, False, rotary, q is not None,
        0 if cos_sin is None else cos_sin.shape[-1], q_norm is not None, norm_eps, norm_offset, full_windows, k.device,
    )  # fmt: skip
    if CHECKED:
        check_append(tokens, cu_seqlens, lengths, block_tables, slots, pages, windows, cos_sin, page_size, full_windows)
    tables = _dense(block_tables)
    operands = (k, v, cu_seqlens, lengths, tables, slots, pages, windows, head_scales, cos_sin, q, q_norm, k_norm, out)
    launch(key, operands, dependent and tables is block_tables)  # a copy would be the preceding kernel, whose tables are read early


def _pack(
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
    if pages.ndim != 4 or block_tables.ndim != 2:
        _reject("pack", ("pages", pages, "int32 [layers, num_pages, heads_kv, page words]"), _tables(block_tables))
    batch, heads_kv = block_tables.shape[0], pages.shape[2]
    if not batch:
        return
    key = (
        "pack", bucket(batch), 1, 1, heads_kv, heads_kv, head_dim, format,
        dtype, page_size, 0, 0, False, 0.0, None, False, "", pages.device,
    )  # fmt: skip
    if CHECKED:
        check_pack(pages, windows, block_tables, slots, lengths, page_size)
    tables = _dense(block_tables)
    launch(key, (pages, windows, tables, slots, lengths, head_scales), dependent and tables is block_tables)


def _gather_out(
    pages: Tensor,
    windows: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    cu_kv: Tensor,
    head_scales: Tensor | None,
    format: str,
    page_size: int,
    dependent: bool = False,
    *,
    out_k: Tensor,
    out_v: Tensor,
) -> None:
    if out_k.ndim != 3 or block_tables.ndim != 2:
        _reject("gather", ("out_k", out_k, "[total, heads_kv, head_dim]"), _tables(block_tables))
    total, heads_kv, head_dim = out_k.shape
    batch = block_tables.shape[0]
    if not total or not batch:
        return
    key = (
        "gather", bucket(batch), 1, bucket(-(-total // batch)), heads_kv, heads_kv, head_dim, format,
        out_k.dtype, page_size, 0, 0, False, 0.0, None, False, "", out_k.device,
    )  # fmt: skip
    if CHECKED:
        check_gather(pages, windows, block_tables, slots, lengths, cu_kv, page_size, total)
    launch(key, (pages, windows, _dense(block_tables), slots, lengths, cu_kv, head_scales, out_k, out_v), dependent)


def _gather(
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
    if pages.ndim != 3:
        _reject("gather", _pages(pages))
    out_k, out_v = (pages.new_empty((total, pages.shape[1], head_dim), dtype=dtype) for _ in range(2))
    _gather_out(pages, windows, block_tables, slots, lengths, cu_kv, head_scales, format, page_size, dependent, out_k=out_k, out_v=out_v)
    return out_k, out_v


def _prefill_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_kv: Tensor,
    sinks: Tensor | None,
    scale: float | None = None,
    window: int = 0,
    sink_tokens: int = 0,
    soft_cap: float = 0.0,
    dependent: bool = False,
    *,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    if q.ndim != 3 or k.ndim != 3 or cu_q.ndim != 1:
        rows = "[tokens, heads, head_dim]"
        _reject("prefill", ("q", q, rows), ("k", k, rows), ("cu_q", cu_q, "[batch + 1]"))
    tokens, heads_q, head_dim = q.shape
    batch = cu_q.shape[0] - 1
    if batch < 0 or (tokens and not batch):
        _reject("prefill", ("q", q, "[tokens, heads_q, head_dim]"), ("cu_q", cu_q, "[batch + 1], bounds of q's rows"))
    if not q.numel():
        return
    key = (
        "prefill", bucket(batch), bucket(-(-tokens // batch)), bucket(-(-k.shape[0] // batch)), heads_q, k.shape[1], head_dim, _FLOAT,
        q.dtype, 128, window, sink_tokens, sinks is not None, soft_cap, scale, lse is not None, "", q.device,
    )  # fmt: skip
    if not k.shape[0]:  # nothing to attend to; a kernel cannot be given rows without memory
        check_operands(key, (q, k, v, cu_q, cu_kv, sinks, out, lse))
        out.zero_()
        if lse is not None:
            lse.copy_(sinks.expand_as(lse)) if sinks is not None else lse.fill_(-torch.inf)
        return
    if CHECKED:
        check_prefill(tokens, k.shape[0], cu_q, cu_kv)
    launch(key, (_dense(q), _dense(k), _dense(v), cu_q, cu_kv, sinks, out, lse), dependent)


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_kv: Tensor,
    sinks: Tensor | None,
    scale: float | None = None,
    window: int = 0,
    sink_tokens: int = 0,
    soft_cap: float = 0.0,
    return_lse: bool = False,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(q, return_lse)
    options = (scale, window, sink_tokens, soft_cap, dependent)
    _prefill_out(q, k, v, cu_q, cu_kv, sinks, *options, out=out, lse=lse if return_lse else None)
    return out, lse


_UNTURNED = ("", False, 0, False, 0.0, 0.0)  # what a decode does to queries and keys, in the order of a workload's fields
_FLOAT = KVFormat().name  # prefill reads 16-bit rows: whatever the cache is, the kernel is the same


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _outputs(q: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    """(out like q, log-sum-exp of every row and head, or no elements)."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1] if return_lse else (0,), dtype=torch.float32)


def _pages(pages: Tensor) -> tuple[str, Tensor, str]:
    return "pages", pages, "int32 [num_pages, heads_kv, page words]"


def _tables(block_tables: Tensor) -> tuple[str, Tensor, str]:
    return "block_tables", block_tables, "int32 [batch, max_pages]"


def _reject(op: str, *operands: tuple[str, Tensor, str]) -> NoReturn:
    got = ", ".join(f"{name} {describe(tensor)}" for name, tensor, _ in operands)
    accepted = ", ".join(f"{name} {shape}" for name, _, shape in operands)
    raise ValueError(f"{op} got {got}; accepted: {accepted}")


# ---- fakes: shapes and dtypes without data ----


def _decode_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _attend_fake(_decode, *args, **kwargs)


def _prefill_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _attend_fake(_prefill, *args, **kwargs)


def _attend_fake(op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = _bound(op, args, kwargs)
    q = call["q"]
    if q.dtype not in DTYPE_NAMES:
        raise ValueError(f"q is {describe(q)}; accepted: float16 or bfloat16; convert it with q.to(...)")
    return _outputs(q, call.get("return_lse", False))


def _append_and_rotate_fake(*args: Any, **kwargs: Any) -> Tensor:
    q = _bound(_append_and_rotate, args, kwargs)["q"]
    return q.new_empty(q.shape)


def _gather_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = _bound(_gather, args, kwargs)
    pages, shape = call["pages"], (call["total"], call["pages"].shape[1], call["head_dim"])
    return pages.new_empty(shape, dtype=call["dtype"]), pages.new_empty(shape, dtype=call["dtype"])


def _in_place(op: Any) -> Callable[..., None]:
    """The fake of an op that only writes into what it is given."""
    return lambda *args, **kwargs: (_bound(op, args, kwargs), None)[1]


def _bound(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, all tensors on one device."""
    named = inspect.signature(op).bind(*args, **kwargs).arguments
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(
                f"{name} is on {tensor.device} and {next(iter(tensors))} on {first.device}; accepted: all on one device: move them"
            )
    return named


_IMPLEMENTATIONS = {
    "attention_decode": (_decode, _decode_fake),
    "attention_decode.out": (_decode_out, _in_place(_decode_out)),
    "attention_append": (_append, _in_place(_append)),
    "attention_append_and_rotate": (_append_and_rotate, _append_and_rotate_fake),
    "attention_append_and_rotate.out": (_append_and_rotate_out, _in_place(_append_and_rotate_out)),
    "attention_pack": (_pack, _in_place(_pack)),
    "attention_gather": (_gather, _gather_fake),
    "attention_gather.out": (_gather_out, _in_place(_gather_out)),
    "attention_prefill": (_prefill, _prefill_fake),
    "attention_prefill.out": (_prefill_out, _in_place(_prefill_out)),
}
_library = torch.library.Library("tilebit", "FRAGMENT")
_calls = {}
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)
    _real, _fake = _IMPLEMENTATIONS[_name]
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _real, _key)
    torch.library.register_fake(f"tilebit::{_name}", _fake, lib=_library)
    _packet, _, _overload = _name.partition(".")
    _calls[_name], _derived = inference_only(getattr(getattr(torch.ops.tilebit, _packet), _overload or "default"), _real)
    _library.impl(_name, _derived, "Autograd", with_keyset=True)

# What tilebit.attention and the cache call: the operators, or at once the kernels behind them.
DECODE = _calls["attention_decode"]
APPEND = _calls["attention_append"]
APPEND_AND_ROTATE = _calls["attention_append_and_rotate"]
APPEND_AND_ROTATE_OUT = _calls["attention_append_and_rotate.out"]
PACK = _calls["attention_pack"]
GATHER = _calls["attention_gather"]
GATHER_OUT = _calls["attention_gather.out"]
PREFILL = _calls["attention_prefill"]
