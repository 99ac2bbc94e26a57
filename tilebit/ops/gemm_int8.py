"""``torch.ops.tilebit.gemm_int8``: a product of 8-bit codes of x with a packed weight, int8 whose sums
are int32, or e4m3 whose sums are fp32; and ``product``, which is ``tilebit.gemm`` for weights of such
formats."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor

from ..layouts.formats import FP8, INT8, GemmFormat
from ..schedules.activations.workload import EPS
from ..schedules.gemm.workload import Workload
from ..weights.packed import PackedWeight
from . import dispatch
from .direct import inference_only
from .dispatch import DTYPE_NAMES, Plan
from .launchers import Launcher
from .operands import ALIGNMENT, check, describe, schema
from .quantize import QUANTIZE

OUTS = {INT8: "int8", FP8: "e4m3"}  # what quantizing calls the codes of a format's x
OF_ROWS = ("x", "token_scales", "residual", "y")  # operands that are not a weight's
_library = torch.library.Library("tilebit", "FRAGMENT")
_taken = schema(Workload(1, 1, 1, GemmFormat.parse("w4a8_lqq_g128")).operands("cpu"))
_library.define(f"gemm_int8({', '.join(_taken)}, int n, int k, str format, ScalarType dtype, bool dependent=False) -> Tensor")


def _gemm_int8(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    token_scales: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    dependent: bool = False,
) -> Tensor:
    """y[..., n] = x[..., k] @ w[n, k]^T * token_scales[...] (+ bias[n]) in ``dtype`` (fp16 or bf16).

    ``x`` int8, of a format with e4m3 x float8_e4m3fn, with any leading dimensions, ``token_scales`` fp32 of these; of a format whose groups
    of x have scales (``w4a8_g128_asym``) fp32 [ceil(k / 128), ...], by which sums of groups are
    multiplied. Rows of x may be as wide as
    kernels read them, on CUDA k rounded up to a multiple of 16 with zeros behind k
    (``torch.ops.tilebit.quantize`` makes them so); narrower ones, and rows that are not contiguous,
    cost one copy of x. The others are those
    of a ``PackedWeight`` of ``format``. Raises ``ValueError`` for what does not fit and
    ``KernelUnavailable``, before a launch.
    """
    check_x(x, dtype, weight.device, codes_of(format))
    *leading, columns = x.shape
    plan = dispatch.plan_for(x.device, n, k, format, dtype, bias is not None, dependent)
    if columns not in (k, plan.kx):
        reject_x(x, weight.device, k, x.dtype)
    y = torch.empty(*leading, n, dtype=dtype, device=x.device)
    m = x.numel() // columns
    if not m:
        return y
    rows, token_scales = as_read(plan, x, token_scales, m)
    launch(plan, m, (rows, weight, scales, zeros, row_scales, token_scales, bias, y.view(m, n) if len(leading) != 1 else y))
    return y


def as_read(plan: Plan, x: Tensor, token_scales: Tensor | None, m: int) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of ``m`` rows as the kernels of ``plan`` read them; scales of another shape
    as they are, which ``launch`` refuses. Of a matrix nothing is reshaped: that costs 1 us a tensor."""
    *leading, columns = x.shape
    if len(leading) != 1:
        x = x.reshape(m, columns)
        if token_scales is not None:
            groups = token_scales.shape[:1] if plan.workload.format.x_grouped else ()
            if token_scales.shape == (*groups, *leading):
                token_scales = token_scales.reshape(*groups, m)
    if token_scales is not None:
        token_scales = token_scales.contiguous()
    if columns != plan.kx:  # as bytes: torch pads no e4m3
        return torch.nn.functional.pad(x.view(torch.int8), (0, plan.kx - columns)).view(x.dtype), token_scales
    return x.contiguous(), token_scales


def ready(plan: Plan, m: int, operands: tuple[Tensor | None, ...]) -> Launcher:
    """The kernel for ``m`` rows; where there is none yet, operands are checked first."""
    found = plan.launchers.get(m)
    if found is None:
        _check(plan, operands)
        found = plan.launcher(m)
    return found


def launch(plan: Plan, m: int, operands: tuple[Tensor | None, ...]) -> None:
    """Launch the kernel for ``m`` rows on operands in the plan's order."""
    for place in plan.absent:  # which the kernel does not take, and so does not check
        if operands[place] is not None:
            _check(plan, operands)
    run = plan.launchers.get(m) or ready(plan, m, operands)
    try:
        if plan.guarded:
            with torch.cuda.device(plan.device):
                run(*operands)
        else:
            run(*operands)
    except Exception:
        _check(plan, operands)  # says what the kernel's own check found in this operator's words
        own = [t.clone() if t is not None and t.data_ptr() % ALIGNMENT else t for t in operands[:-1]]
        if all(a is b for a, b in zip(own, operands, strict=False)):
            raise
        with torch.cuda.device(plan.device) if plan.guarded else nullcontext():
            run(*own, operands[-1])  # rows off a 16-byte boundary: rare, so tried first


def product(x: Tensor, packed: PackedWeight, bias: Tensor | None, dependent: bool, token_scales: Tensor | None) -> Tensor:
    """``tilebit.gemm`` for a weight whose format has 8-bit x: of codes with ``token_scales``, or of x
    in ``packed.dtype``, which is smoothed, where the weight has factors, and quantized first, a scale
    for each row or each group of it."""
    held = (packed.weight, packed.scales, packed.zeros, packed.row_scales)
    rest = (packed.n, packed.k, packed.format_name, packed.dtype, dependent)
    wanted = codes_of(packed.format_name)
    codes = x.dtype is wanted
    if codes != (token_scales is not None):
        given = "without" if codes else "with"
        group, shape = packed.format.x_group, "[groups, ...]" if packed.format.x_grouped else "[...]"
        options = [f"out={OUTS[packed.format.x]!r}"] * (wanted is not torch.int8) + [f"group={group}"] * packed.format.x_grouped
        made = "tilebit.quantize_activations" + (f"(x, {', '.join(options)})" if options else "")
        floats = str(packed.dtype).removeprefix("torch.")
        raise ValueError(
            f"x is {describe(x)}, {given} token_scales; accepted by {packed.format_name}: {packed.format.x} codes with fp32 token_scales "
            f"{shape} ({made} gives both), or {floats} [..., {packed.k}] without"
        )
    if packed.perm is not None:
        if x.ndim < 1 or x.shape[-1] < packed.k or x.device != packed.device:
            reject_x(x, packed.device, packed.k, wanted)
        if codes and (packed.format.x_grouped or packed.smooth is not None):
            of = "factors" if packed.smooth is not None else f"groups of {packed.format.x_group}"
            raise ValueError(
                f"x is {describe(x)} and the weight's columns are reordered (act order): {of} are those of "
                f"x[..., packed.perm]; accepted: {str(packed.dtype).removeprefix('torch.')} [..., {packed.k}] without token_scales"
            )
        x = x.view(torch.int8).index_select(-1, packed.perm).view(x.dtype) if codes else x.index_select(-1, packed.perm)
    return gemm_int8(x, *held, token_scales, bias, *rest) if codes else of_rows(x, *held, packed.smooth, bias, *rest)


def of_rows(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    smooth: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    dependent: bool,
) -> Tensor:
    """``gemm_int8`` of x [..., k] in ``dtype``, quantized first with a scale for each row, or
    for each group of it where the format says so; times ``smooth`` fp32 [k] before, in the same kernel."""
    if x.ndim < 1 or x.device != weight.device or x.dtype is not dtype or x.shape[-1] != k:
        accepted = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"x is {describe(x)}; accepted: {accepted} [..., {k}] on {weight.device}; convert it with x.to(...) or pass what fits"
        )
    parsed = GemmFormat.parse(format)
    codes, token_scales = QUANTIZE(x, None, smooth, OUTS[parsed.x], parsed.x_group, EPS, dependent)
    return gemm_int8(codes, weight, scales, zeros, row_scales, token_scales, bias, n, k, format, dtype, dependent)


def _check(plan: Plan, operands: tuple[Tensor | None, ...]) -> None:
    w = plan.workload
    call = f"gemm with x of {w.x_dtype} [..., {w.k}] on {plan.device}, n = {w.n} and {w.format.name}"
    given = list(zip(plan.operands, operands, strict=True))
    for dense in (True, False):  # first what belongs to the weight
        some = [(o, tensor) for o, tensor in given if (o.name not in OF_ROWS) == dense]
        check([o for o, _ in some], [tensor for _, tensor in some], plan.device, call, dense=dense)


@cache
def codes_of(format: str) -> torch.dtype:
    """Of x. Raises ``ValueError`` for a format whose x is of 16 bits."""
    x = GemmFormat.parse(format).x
    if not x:
        raise ValueError(f"format is {format}, whose x is of 16 bits; accepted: a format with int8 x, such as 'w4a8_lqq_g128', or e4m3 x")
    return getattr(torch, x)


def check_x(x: Tensor, dtype: torch.dtype, device: torch.device, codes: torch.dtype = torch.int8) -> None:
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, DTYPE_NAMES))}")
    if x.ndim < 1 or x.dtype is not codes or not x.shape[-1]:
        reject_x(x, device, None, codes)


def reject_x(x: Tensor, device: torch.device, k: int | None = None, codes: torch.dtype = torch.int8) -> NoReturn:
    shape, named = "[..., k] with k >= 1" if k is None else f"[..., {k}]", str(codes).removeprefix("torch.")
    raise ValueError(f"x is {describe(x)}; accepted: {named} {shape} on {device}, codes of rows with token_scales beside them")


def _fake(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    token_scales: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    dependent: bool = False,
) -> Tensor:
    check_x(x, dtype, weight.device, codes_of(format))
    return x.new_empty((*x.shape[:-1], n), dtype=dtype)


gemm_int8, _derived = inference_only(torch.ops.tilebit.gemm_int8.default, _gemm_int8)
for _key in ("CPU", "CUDA"):
    _library.impl("gemm_int8", _gemm_int8, _key)
_library.impl("gemm_int8", _derived, "Autograd", with_keyset=True)
torch.library.register_fake("tilebit::gemm_int8", _fake, lib=_library)
