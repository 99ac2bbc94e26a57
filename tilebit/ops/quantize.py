"""The operator ``torch.ops.tilebit.quantize`` and the function in front of it,
``tilebit.quantize_activations``: rows of activations to 8-bit codes and their scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..accepted import expect, expect_tensors
from ..schedules.activations.workload import EPS, GROUPS, OUTS, PER_TOKEN, QuantizeWorkload
from .direct import inference_only
from .dispatch import DTYPE_NAMES
from .operands import describe, schema
from .plans import Key, bucket, launcher

_taken = ", ".join(schema([o for o in QuantizeWorkload(1, 1).operands("cpu") if o.name != "residual"]))  # which another op has
_SCHEMA = f"quantize({_taken}, str out='int8', int group={PER_TOKEN}, float eps={EPS}, bool dependent=False) -> (Tensor, Tensor)"


def quantize_activations(
    x: Tensor,
    out: str = "int8",
    group: int | None = None,
    norm_weight: Tensor | None = None,
    eps: float = EPS,
    smooth: Tensor | None = None,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of ``x`` [..., k], fp16 or bf16: x is about codes * scales.

    ``out`` "int8": scale = amax / 127, codes torch.int8 from -127 to 127, to nearest, ties to even.
    "e4m3": scale = amax / 448, codes torch.float8_e4m3fn. One scale for each token (``group`` None),
    fp32 [...], which is what a product takes as ``token_scales``; or one for each 128 values of a
    token (``group`` 128; the last group may be shorter), fp32 [ceil(k / 128), ...]: the scales of
    neighbouring tokens at one group lie side by side, as a product reads them.

    codes are [..., k] on a CPU. On CUDA they are [..., k rounded up to a multiple of 16] with zeros
    behind k, rows of whole 16 bytes as products read them.

    ``norm_weight`` [k] in x's dtype: what is quantized is RMSNorm(x), x * rsqrt(mean(x^2) + ``eps``) *
    norm_weight, in fp32 all the way: it is not rounded to x's dtype before. ``smooth`` fp32 [k]:
    factors that x (after the norm) is multiplied by, the reciprocals of SmoothQuant's, which divide.

    Tokens or groups of zeros have codes 0. Where a token or group (with a norm: the token) holds NaN
    or infinity, its scale is NaN and its codes are 0, so that a product with it is NaN.

    x may have any leading dimensions and strides: rows that are not contiguous or not 16-byte
    aligned, and on CUDA a k that is no multiple of 8, cost one copy of x (such a k of norm_weight and
    smooth, too). No rows give empty results. It traces under torch.compile and may be captured in a
    CUDA graph after a first call; inference only: a derivative that is asked for is an error.

    ``dependent`` (programmatic dependent launch): the kernel may start while the preceding kernel of
    the stream still runs, and waits for its end before it reads or writes anything. Results are the
    same; on CPUs and sm_80 to sm_89 it does nothing.

    Raises ``TypeError`` and ``ValueError`` for what does not fit and ``KernelUnavailable`` when no
    kernel is at hand, all before a launch.
    """
    expect_tensors(("norm_weight", "smooth"), x=x, norm_weight=norm_weight, smooth=smooth)
    expect("out", out, str, " or ".join(map(repr, OUTS)))
    expect("group", group, int | None, "128, or None for a scale a token")
    return QUANTIZE(x, norm_weight, smooth, out, PER_TOKEN if group is None else group, eps, dependent)


def _workload(key: Key) -> QuantizeWorkload:
    """What calls with ``key`` ask for. Raises ``ValueError`` for what no kernel supports."""
    _, m, k, dtype, *options, _ = key
    return QuantizeWorkload(m, k, DTYPE_NAMES[dtype], *options)


launch = launcher(_workload, lambda workload: workload.served)


def _quantize(
    x: Tensor,
    norm_weight: Tensor | None,
    smooth: Tensor | None,
    out: str = "int8",
    group: int = PER_TOKEN,
    eps: float = EPS,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    codes, scales = outputs(x, norm_weight, smooth, out, group)
    k = x.shape[-1]
    m = x.numel() // k
    if m:
        norm = norm_weight is not None
        key = ("quantize", bucket(m), k, x.dtype, out, group, norm, eps if norm else EPS, smooth is not None, x.device)
        flat = x.ndim == 2
        rows = x if flat else x.reshape(m, k)
        padding = -k % 8 if x.is_cuda else 0
        if padding:
            rows = torch.nn.functional.pad(rows, (0, padding))
            norm_weight, smooth = (t if t is None else torch.nn.functional.pad(t, (0, padding)) for t in (norm_weight, smooth))
        elif not rows.is_contiguous():
            rows = rows.contiguous()
        moved = padding > 0 or rows.data_ptr() != x.data_ptr()  # a copy is then the preceding kernel, an ordinary one
        if flat:
            written = codes, scales
        else:
            written = codes.view(m, codes.shape[-1]), scales.view(m) if group == PER_TOKEN else scales.view(scales.shape[0], m)
        launch(key, (rows, None, norm_weight, smooth, *written), dependent and not moved)
    return codes if out == "int8" else codes.view(torch.float8_e4m3fn), scales


def _fake(
    x: Tensor,
    norm_weight: Tensor | None,
    smooth: Tensor | None,
    out: str = "int8",
    group: int = PER_TOKEN,
    eps: float = EPS,
    dependent: bool = False,
) -> tuple[Tensor, Tensor]:
    codes, scales = outputs(x, norm_weight, smooth, out, group)
    return codes if out == "int8" else codes.view(torch.float8_e4m3fn), scales


def outputs(x: Tensor, norm_weight: Tensor | None, smooth: Tensor | None, out: str, group: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """New codes, as bytes, and scales of a call, whose x [..., rows * k] holds ``rows`` side by side that
    become one. Raises ``ValueError`` for operands that do not fit."""
    if x.ndim < 1 or x.shape[-1] < 1 or x.dtype not in DTYPE_NAMES:
        raise ValueError(f"x is {describe(x)}; accepted: float16 or bfloat16 [..., k] with k >= 1; convert it with x.to(...)")
    if out not in OUTS or group not in GROUPS:
        outs = " or ".join(map(repr, OUTS))
        raise ValueError(f"out is {out!r} and group {group}; accepted: out {outs}, group 128 or {PER_TOKEN} (a token)")
    k = x.shape[-1] // rows
    for name, tensor, dtype in (("norm_weight", norm_weight, x.dtype), ("smooth", smooth, torch.float32)):
        if tensor is not None and (tensor.dtype is not dtype or tensor.shape != (k,) or tensor.device != x.device):
            wanted = f"{str(dtype).removeprefix('torch.')} [{k}] on {x.device}"
            raise ValueError(f"{name} is {describe(tensor)}; accepted with x of {describe(x)}: {wanted}; convert it with .to(...)")
    columns = -(-k // 16) * 16 if x.is_cuda else k
    shape = x.shape[:-1] if group == PER_TOKEN else (-(-k // group), *x.shape[:-1])
    return x.new_empty((*x.shape[:-1], columns), dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)


_library = torch.library.Library("tilebit", "FRAGMENT")
_library.define(_SCHEMA)
for _key in ("CPU", "CUDA"):
    _library.impl("quantize", _quantize, _key)
torch.library.register_fake("tilebit::quantize", _fake, lib=_library)
QUANTIZE: Any
QUANTIZE, _derived = inference_only(torch.ops.tilebit.quantize.default, _quantize)
_library.impl("quantize", _derived, "Autograd", with_keyset=True)
