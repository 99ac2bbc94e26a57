"""``torch.ops.tilebit.gemm_int8``: a product of int8 codes of x with a packed weight, whose sums are
int32. ``tilebit.gemm`` calls it for weights of such formats."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..layouts.formats import GemmFormat
from ..schedules.gemm.workload import Workload
from . import dispatch
from .direct import inference_only
from .dispatch import DTYPE_NAMES, Plan
from .operands import check, describe, schema

_library = torch.library.Library("tilebit", "FRAGMENT")
_taken = schema(Workload(1, 1, 1, GemmFormat.parse("w4a8_lqq_g128")).operands("cpu"))
_library.define(f"gemm_int8({', '.join(_taken)}, int n, str format, ScalarType dtype, bool dependent=False) -> Tensor")


def _gemm_int8(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    token_scales: Tensor | None,
    bias: Tensor | None,
    n: int,
    format: str,
    dtype: torch.dtype,
    dependent: bool = False,
) -> Tensor:
    """y[..., n] = x[..., k] @ w[n, k]^T * token_scales[...] (+ bias[n]) in ``dtype`` (fp16 or bf16).

    ``x`` int8 with any leading dimensions, ``token_scales`` fp32 of these; rows that are not
    contiguous (on CUDA also a k that is no multiple of 16) cost one copy of x. The others are those
    of a ``PackedWeight`` of ``format``. Raises ``ValueError`` for what does not fit and
    ``KernelUnavailable``, before a launch.
    """
    _check_x(x, dtype, weight.device)
    *leading, k = x.shape
    plan = dispatch.plan_for(x.device, n, k, format, dtype, bias is not None, dependent)
    if not plan.workload.format.integer_sums:
        raise ValueError(f"format is {format}, whose x is of 16 bits; accepted: a format with int8 x, such as 'w4a8_lqq_g128'")
    y = torch.empty((*leading, n), dtype=dtype, device=x.device)
    m = x.numel() // k
    if not m:
        return y
    if token_scales is not None and token_scales.shape == x.shape[:-1]:
        token_scales = token_scales.reshape(m).contiguous()
    rows = x.reshape(m, k)
    rows = torch.nn.functional.pad(rows, (0, plan.kx - k)) if plan.kx != k else rows.contiguous()
    operands = (rows, weight, scales, zeros, row_scales, token_scales, bias, y.view(m, n))
    launch = plan.launchers.get(m)
    if launch is None:
        _check(plan, operands)
        launch = plan.launcher(m)
    try:
        if plan.guarded:
            with torch.cuda.device(plan.device):
                launch(*operands)
        else:
            launch(*operands)
    except Exception:
        _check(plan, operands)  # says what the kernel's own check found in this operator's words
        aligned = tuple(t.clone() if t is not None and i in (0, 5) else t for i, t in enumerate(operands))
        with torch.cuda.device(plan.device if plan.guarded else None):
            launch(*aligned)  # rows off a 16-byte boundary: rare, so tried first
    return y


def _check(plan: Plan, operands: tuple[Tensor | None, ...]) -> None:
    w = plan.workload
    call = f"gemm with x of int8 [..., {w.k}] on {plan.device}, n = {w.n} and {w.format.name}"
    rows, *held, token_scales, bias, y = operands
    stated = {o.name: o for o in plan.operands}
    names = [o.name for o in plan.operands]
    check([stated[name] for name in names[1:5]] + [stated["bias"]], (*held, bias), plan.device, call, dense=True)
    check([stated["x"], stated["token_scales"], stated["y"]], (rows, token_scales, y), plan.device, call)


def _check_x(x: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, DTYPE_NAMES))}")
    if x.ndim < 1 or x.dtype is not torch.int8 or not x.shape[-1]:
        _reject_x(x, device)


def _reject_x(x: Tensor, device: torch.device) -> NoReturn:
    raise ValueError(f"x is {describe(x)}; accepted: int8 [..., k] with k >= 1 on {device}, codes of rows with token_scales beside them")


def _fake(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    token_scales: Tensor | None,
    bias: Tensor | None,
    n: int,
    format: str,
    dtype: torch.dtype,
    dependent: bool = False,
) -> Tensor:
    _check_x(x, dtype, weight.device)
    GemmFormat.parse(format)
    return x.new_empty((*x.shape[:-1], n), dtype=dtype)


gemm_int8, _derived = inference_only(torch.ops.tilebit.gemm_int8.default, _gemm_int8)
for _key in ("CPU", "CUDA"):
    _library.impl("gemm_int8", _gemm_int8, _key)
_library.impl("gemm_int8", _derived, "Autograd", with_keyset=True)
torch.library.register_fake("tilebit::gemm_int8", _fake, lib=_library)
