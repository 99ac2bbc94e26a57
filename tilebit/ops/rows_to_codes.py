"""The operators ``torch.ops.tilebit.add_norm_quantize`` and ``.gated_quantize``: what stands between
products whose x is in 8 bits. ``add_norm`` and ``gated`` (``rows.py``) call them where ``out`` is
given; on CUDA and CPUs each is one kernel, that of ``quantize_activations``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..schedules.activations.workload import EPS, PER_TOKEN
from .direct import inference_only
from .plans import bucket
from .quantize import launch, outputs
from .rows_fit import expect_apart, expect_gates, expect_norm, expect_numbers

ALIGNED = 8  # columns of x that CUDA kernels read at once


def _add_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    smooth: Tensor | None = None,
    out: str = "int8",
    group: int = PER_TOKEN,
    eps: float = EPS,
    offset: float = 0.0,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    codes, scales = _new_norm(x, residual, weight, smooth, out, group)
    expect_apart(x, residual)
    k = x.shape[-1]
    m = x.numel() // k
    if m:
        if x.is_cuda and k % ALIGNED:
            expect_numbers(eps, offset)
            x = x if residual is None else residual.add_(x)
            x, weight = (pad(tensor, (0, -k % ALIGNED)) for tensor in (x, weight))
            smooth = None if smooth is None else pad(smooth, (0, -k % ALIGNED))
            residual, dependent = None, False  # the copies' is the preceding kernel, an ordinary one
        rows = x if x.ndim == 2 else x.reshape(m, x.shape[-1])
        if not rows.is_contiguous():
            rows = rows.contiguous()
        held = residual if residual is None or residual.ndim == 2 else residual.view(m, k)
        key = ("quantize", bucket(m), k, x.dtype, out, group, True, eps, smooth is not None, held is not None, offset, "", x.device)
        written = (codes, scales) if x.ndim == 2 else _by_rows(codes, scales, m, group)
        launch(key, (rows, held, weight, smooth, *written), dependent and rows.data_ptr() == x.data_ptr())
    return _typed(codes, out), scales


def _gated_quantize(
    x: Tensor,
    smooth: Tensor | None = None,
    activation: str = "silu",
    out: str = "int8",
    group: int = PER_TOKEN,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    codes, scales = _new_gated(x, smooth, activation, out, group)
    k = x.shape[-1] // 2
    m = x.numel() // (2 * k)
    if m:
        if x.is_cuda and k % ALIGNED:
            x = pad(x.unflatten(-1, (2, k)), (0, -k % ALIGNED)).flatten(-2)
            smooth = None if smooth is None else pad(smooth, (0, -k % ALIGNED))
            dependent = False
        rows = x if x.ndim == 2 else x.reshape(m, x.shape[-1])
        if not rows.is_contiguous():
            rows = rows.contiguous()
        key = ("quantize", bucket(m), k, x.dtype, out, group, False, EPS, smooth is not None, False, 0.0, activation, x.device)
        written = (codes, scales) if x.ndim == 2 else _by_rows(codes, scales, m, group)
        launch(key, (rows, None, None, smooth, *written), dependent and rows.data_ptr() == x.data_ptr())
    return _typed(codes, out), scales


def _by_rows(codes: Tensor, scales: Tensor, m: int, group: int) -> tuple[Tensor, Tensor]:
    return codes.view(m, codes.shape[-1]), scales.view(m) if group == PER_TOKEN else scales.view(scales.shape[0], m)


def _typed(codes: Tensor, out: str) -> Tensor:
    return codes if out == "int8" else codes.view(torch.float8_e4m3fn)


def _new_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, smooth: Tensor | None = None, out: str = "int8", group: int = PER_TOKEN, *_: Any
) -> tuple[Tensor, Tensor]:
    """New codes, as bytes, and scales. Raises ``ValueError`` for operands that do not fit."""
    expect_norm(x, residual, weight)
    return outputs(x, None, smooth, out, group)


def _new_gated(
    x: Tensor, smooth: Tensor | None = None, activation: str = "silu", out: str = "int8", group: int = PER_TOKEN, *_: Any
) -> tuple[Tensor, Tensor]:
    expect_gates(x, activation)
    return outputs(x, None, smooth, out, group, rows=2)


def _fake_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, smooth: Tensor | None = None, out: str = "int8", *options: Any
) -> tuple[Tensor, Tensor]:
    codes, scales = _new_norm(x, residual, weight, smooth, out, *options)
    return _typed(codes, out), scales


def _fake_gated(
    x: Tensor, smooth: Tensor | None = None, activation: str = "silu", out: str = "int8", *options: Any
) -> tuple[Tensor, Tensor]:
    codes, scales = _new_gated(x, smooth, activation, out, *options)
    return _typed(codes, out), scales


_options = f"str out='int8', int group={PER_TOKEN}"
_library = torch.library.Library("tilebit", "FRAGMENT")
_library.define(
    f"add_norm_quantize(Tensor x, Tensor(a!)? residual, Tensor weight, Tensor? smooth=None, {_options}, float eps={EPS}, float offset=0.0, "
    f"bool dependent=False) -> (Tensor, Tensor)"
)
_library.define(
    f"gated_quantize(Tensor x, Tensor? smooth=None, str activation='silu', {_options}, bool dependent=False) -> (Tensor, Tensor)"
)
_calls: dict[str, Any] = {}
for _name, _real, _fake in (("add_norm_quantize", _add_norm_quantize, _fake_norm), ("gated_quantize", _gated_quantize, _fake_gated)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _real, _key)
    torch.library.register_fake(f"tilebit::{_name}", _fake, lib=_library)
    _calls[_name], _derived = inference_only(getattr(torch.ops.tilebit, _name).default, _real)
    _library.impl(_name, _derived, "Autograd", with_keyset=True)

ADD_NORM_QUANTIZE, GATED_QUANTIZE = _calls["add_norm_quantize"], _calls["gated_quantize"]
