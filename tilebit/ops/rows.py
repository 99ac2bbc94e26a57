"""The operators ``torch.ops.tilebit.add_norm`` and ``.gated`` and the functions in front of them: what
stands between the products of a decoder.

On CUDA each is one kernel. On CPUs torch computes it: products take the time there. Where ``out``
asks for codes they are other operators (``rows_to_codes.py``), one kernel everywhere.
"""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from ..accepted import expect, expect_tensors
from ..schedules.activations.glue import CHUNK, GATED, NORM, GlueWorkload
from ..schedules.activations.workload import ACTIVATIONS, EPS, OUTS, PER_TOKEN
from .direct import inference_only
from .dispatch import DTYPE_NAMES
from .plans import Key, bucket, launcher
from .rows_fit import expect_apart, expect_gates, expect_norm, expect_numbers
from .rows_to_codes import ADD_NORM_QUANTIZE, GATED_QUANTIZE

TANH = (2 / math.pi) ** 0.5  # of GELU's tanh form, here as gate * sigmoid(2 ...): 1 + tanh(...) would cancel


@overload
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = EPS,
    offset: float = 0.0,
    inplace: bool = False,
    dependent: bool = False,
    *,
    out: None = None,
    group: None = None,
    smooth: None = None,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = EPS,
    offset: float = 0.0,
    inplace: bool = False,
    dependent: bool = False,
    *,
    out: str,
    group: int | None = None,
    smooth: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]: ...
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = EPS,
    offset: float = 0.0,
    inplace: bool = False,
    dependent: bool = False,
    *,
    out: str | None = None,
    group: int | None = None,
    smooth: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor, Tensor | None]:
    """(y, the new residual) of x [..., k], fp16 or bf16: RMSNorm,

        y = s * rsqrt(mean(s^2) + eps) * (weight + offset),    s = x + residual

    s is rounded to x's dtype and is the new residual; the rest is fp32, rounded once. Without
    ``residual`` s is x, and None is returned for it. ``weight`` [k] and ``residual`` have x's dtype;
    ``offset`` 1 is Gemma's norm. With ``inplace`` the new residual is written where the old one lies
    (contiguous), and is what is returned. A row whose squares have no finite sum gives NaN.

    With ``out`` "int8" or "e4m3" (codes, scales, the new residual): y is not rounded but becomes
    codes with a scale for each token, or for each ``group`` 128 values of it, after ``smooth`` fp32
    [k] factors by column; bit for bit what ``quantize_activations`` gives for s, whose shapes and
    special cases these are. Any k.

    ``dependent`` (programmatic dependent launch): the kernel may start while the preceding kernel of
    the stream still runs, and waits for its end before it reads x and residual; ``weight`` it reads
    before. Results are the same; on CPUs and sm_80 to sm_89 it does nothing. It traces under
    torch.compile and may be captured in a CUDA graph after a first call; inference only.

    Raises ``TypeError`` and ``ValueError`` for what does not fit and ``KernelUnavailable`` when no
    kernel is at hand, all before a launch.
    """
    expect_tensors(("residual",), x=x, residual=residual, weight=weight)
    if residual is not None and not inplace:
        residual = residual.clone(memory_format=torch.contiguous_format)
        dependent = False  # the copy's is the preceding kernel, an ordinary one
    if out is not None or group is not None or smooth is not None:
        per = _expect_codes(out, group, smooth)
        return *ADD_NORM_QUANTIZE(x, residual, weight, smooth, out, per, eps, offset, dependent), residual
    return ADD_NORM(x, residual, weight, eps, offset, dependent), residual


def _expect_codes(out: str | None, group: int | None, smooth: Tensor | None) -> int:
    """The group of an op. Raises ``TypeError`` for options of codes that are none, or where none are asked for."""
    expect("out", out, str, f"{' or '.join(map(repr, OUTS))} where group or smooth is given")
    expect("group", group, int | None, "128, or None for a scale a token")
    expect_tensors(("smooth",), smooth=smooth)
    return PER_TOKEN if group is None else group


@overload
def gated(
    x: Tensor, activation: str = "silu", dependent: bool = False, *, out: None = None, group: None = None, smooth: None = None
) -> Tensor: ...
@overload
def gated(
    x: Tensor, activation: str = "silu", dependent: bool = False, *, out: str, group: int | None = None, smooth: Tensor | None = None
) -> tuple[Tensor, Tensor]: ...
def gated(
    x: Tensor,
    activation: str = "silu",
    dependent: bool = False,
    *,
    out: str | None = None,
    group: int | None = None,
    smooth: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y [..., k] of x [..., 2 k], fp16 or bf16: activation(x[..., :k]) * x[..., k:] in fp32, rounded once.

    ``activation`` is "silu", "gelu_tanh" (GELU's approximation by tanh) or "gelu". With ``out`` "int8" or "e4m3" (codes, scales) of y, as
    ``quantize_activations`` gives them (``group`` 128 or a token; ``smooth`` fp32 [k]; on CUDA k up
    to 32768). ``dependent``, tracing, capturing and errors are ``add_norm``'s.
    """
    expect_tensors(x=x)
    expect("activation", activation, str, " or ".join(map(repr, ACTIVATIONS)))
    if out is not None or group is not None or smooth is not None:
        return GATED_QUANTIZE(x, smooth, activation, out, _expect_codes(out, group, smooth), dependent)
    return GATED_ROWS(x, activation, dependent)


def _workload(key: Key) -> GlueWorkload:
    """What calls with ``key`` ask for. Raises ``ValueError`` for what no kernel supports."""
    op, m, k, dtype, residual, eps, offset, activation, _ = key
    return GlueWorkload(op, m, k, DTYPE_NAMES[dtype], residual, eps, offset, activation)


_launch = launcher(_workload, lambda workload: workload.served)


def _add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = EPS, offset: float = 0.0, dependent: bool = False) -> Tensor:
    y = _normed_like(x, residual, weight)
    expect_apart(x, residual)
    k = x.shape[-1]
    m = x.numel() // k
    if not m:
        return y
    if not x.is_cuda or k % CHUNK:
        expect_numbers(eps, offset)
        if residual is not None:
            x = residual.add_(x)
        f = x.float()
        square = f.square().sum(-1, keepdim=True)
        root = torch.where(square.isfinite(), (square / k + eps).rsqrt(), torch.nan)
        return y.copy_(f * root * (weight.float() + offset))
    rows = x.reshape(m, k)
    given = (rows.contiguous(), None if residual is None else residual.view(m, k), weight.contiguous(), y.view(m, k))
    moved = given[0].data_ptr() != x.data_ptr() or given[2].data_ptr() != weight.data_ptr()
    key = (NORM, bucket(m), k, x.dtype, residual is not None, eps, offset, ACTIVATIONS[0], x.device)
    _launch(key, given, dependent and not moved)
    return y


def _gated(x: Tensor, activation: str = "silu", dependent: bool = False) -> Tensor:
    y = _gated_like(x, activation)
    k = y.shape[-1]
    m = y.numel() // k
    if not m:
        return y
    if not x.is_cuda or k % CHUNK:
        gate, up = x.float().chunk(2, -1)
        return y.copy_(up * activated(gate, activation))
    rows = x.reshape(m, 2 * k).contiguous()
    key = (GATED, bucket(m), k, x.dtype, False, EPS, 0.0, activation, x.device)
    _launch(key, (rows, y.view(m, k)), dependent and rows.data_ptr() == x.data_ptr())
    return y


def activated(gate: Tensor, activation: str) -> Tensor:
    """``activation`` of ``gate``, computed by torch in gate's dtype."""
    if activation == "silu":
        return F.silu(gate)
    if activation == "gelu":
        return gate * (0.5 * torch.erfc(gate * -(0.5**0.5)))  # ndtr loses what is far below zero in fp32
    return gate * torch.sigmoid(2 * TANH * (gate + 0.044715 * gate**3))


def _normed_like(x: Tensor, residual: Tensor | None, weight: Tensor, *_: Any) -> Tensor:
    """A new y. Raises ``ValueError`` for operands that do not fit."""
    expect_norm(x, residual, weight)
    return x.new_empty(x.shape)


def _gated_like(x: Tensor, activation: str = "silu", *_: Any) -> Tensor:
    """A new y. Raises ``ValueError`` for what does not fit."""
    expect_gates(x, activation)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


_library = torch.library.Library("tilebit", "FRAGMENT")
_library.define(
    f"add_norm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps={EPS}, float offset=0.0, bool dependent=False) -> Tensor"
)
_library.define("gated(Tensor x, str activation='silu', bool dependent=False) -> Tensor")
_calls: dict[str, Any] = {}
for _name, _real, _fake in (("add_norm", _add_norm, _normed_like), ("gated", _gated, _gated_like)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _real, _key)
    torch.library.register_fake(f"tilebit::{_name}", _fake, lib=_library)
    _calls[_name], _derived = inference_only(getattr(torch.ops.tilebit, _name).default, _real)
    _library.impl(_name, _derived, "Autograd", with_keyset=True)

ADD_NORM, GATED_ROWS = _calls["add_norm"], _calls["gated"]
