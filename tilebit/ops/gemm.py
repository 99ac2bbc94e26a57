"""The functional door: ``tilebit.gemm`` and the operator behind it, ``torch.ops.tilebit.gemm``.

The operator is registered with ``Library.define``/``impl`` and a fake implementation, so that it
traces (torch.compile, export) with a dynamic number of rows; its derivatives are in
``derivatives.py``. Everything is checked before a kernel is launched; a call that passes costs a
few microseconds of host time, which is also why an eager call goes past the dispatcher where
nothing can tell (``call``).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling

from ..layouts.formats import GemmFormat
from ..schedules.activations.workload import EPS
from ..schedules.gemm.workload import Workload
from ..weights.packed import PackedWeight
from . import dispatch
from .derivatives import product, wanted
from .dispatch import DTYPE_NAMES, Plan
from .gemm_int8 import product as of_codes
from .gemm_parts import product as with_parts
from .known import PLAIN, known, plain, remembered
from .operands import ALIGNMENT, check, check_memory, describe, schema

try:
    from torch._C import _is_tracing, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._functorch import peek_interpreter_stack
    from torch.autograd.forward_ad import _current_level  # noqa: F401  read from its module at each call: it changes
    from torch.autograd.profiler import _is_profiler_enabled  # noqa: F401  likewise
except ImportError:  # a torch that does not say who observes operators: then someone may, and ``call`` takes the operator

    def _len_torch_dispatch_stack() -> int:
        return 1


_library = torch.library.Library("tilebit", "DEF")
_taken = schema(Workload(1, 1, 1).operands("cpu"))
_library.define(f"gemm({', '.join(_taken)}, int n, str format, bool dependent=False) -> Tensor")
_operator = torch.ops.tilebit.gemm.default  # looking it up costs 0.3 us
_redispatch = _operator.redispatch


def gemm(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None = None,
    dependent: bool = False,
    token_scales: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    inplace: bool = False,
    gate: str | None = None,
    gate_halves: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """y[..., n] = x[..., k] @ w[n, k]^T (+ bias[n]), accumulated in fp32.

    ``x`` is fp16 or bf16 (``packed.dtype``) on the weight's device, with any leading dimensions and
    strides: rows that are not contiguous or not 16-byte aligned (on CUDA also a k that is no
    multiple of 8, and ``packed.perm``) cost one copy of x. ``bias`` is [n] in the same dtype. No
    rows give an empty result. Peak memory is y, that copy where one is made, and the workspace of
    ``tilebit.ops.workspace``.

    ``dependent`` (programmatic dependent launch): the kernel may start while the previous kernel of
    the stream still runs. It requests the weight at once and touches x and y only when that kernel
    has finished, so everything but x must have been written before that previous kernel was
    launched. It hides the start of a launch behind the end of the previous one; where the kernel or
    the device has no dependent launch (CPU, sm_80 to sm_89) it does nothing. Results are the same.

    A weight whose format has int8 x (``w4a8_lqq_g128``, ``w4a8_channel_asym``) multiplies codes, summed in
    int32: ``x`` int8 with ``token_scales`` fp32 [...], a scale for each row, as
    ``tilebit.quantize_activations`` gives them; or x in ``packed.dtype``, which is quantized so
    first, by a launch of its own. Group-wise formats (``w8a8_g128``, ``w4a8_g128_asym``) take
    ``token_scales`` [ceil(k / 128), ...], those of ``quantize_activations(x, group=128)``; their
    sums are int32 within a group and fp32 over groups. Formats of e4m3 (``w8a8_fp8``, ``w8a8_fp8_g128``,
    ``w4a8_fp8``) take x and scales of ``quantize_activations(x, "e4m3")`` likewise; they run on sm_89,
    sm_90a and CPUs. Their sums are fp32; those of ``w8a8_fp8`` may keep the 14 bits of tensor cores' sums,
    a relative error of 2^-15 times the root of k. ``token_scales`` is for weights of 8-bit x alone. A weight
    of smoothed inputs (``packed.smooth``) multiplies x by its factors in the kernel that quantizes it; codes are
    those of the smoothed x: ``quantize_activations(x, smooth=packed.smooth)``.

    In the same kernel, each alone or a norm with one of the others:

    ``residual`` [..., n] in ``packed.dtype``: y + residual, in fp32, rounded once (the product by itself
    is not rounded). With ``inplace`` y is written where residual lies (contiguous), and is residual.

    ``gate`` "silu", "gelu_tanh" (GELU's approximation by tanh) or "gelu": y [..., n / 2] is
    activation(gate) * up, in fp32, rounded once, of a weight whose rows are gates and ups in turn,
    eight of each (``tilebit.weights.gated.interleaved`` makes it of two). n is a multiple of 16. With
    ``gate_halves`` the first n / 2 rows are gates and the others ups, n a multiple of 64: on GPUs for
    decode steps, as with a norm.

    ``norm_weight`` [k] in ``packed.dtype``, of x of 16 bits: x is normed first, y = ((x * norm_weight) @ w^T) *
    rsqrt(mean(x^2) + ``eps``) (RMSNorm; Zhang and Sennrich, 2019). x * norm_weight is rounded to x's
    dtype, the rest is fp32; a row where it or the sum of squares is not finite gets no finite y. On
    GPUs every further 16 rows of x read the weight again: it is for decode steps.

    Differentiable (but for 8-bit x, and with what is in the same kernel) with respect to x and bias, in
    reverse and forward mode (``derivatives.py``).
    Raises ``ValueError`` when another derivative is asked for, ``TypeError`` and ``ValueError`` for
    anything else and ``KernelUnavailable`` when no kernel is at hand, all before a launch.
    """
    if not isinstance(x, Tensor) or not isinstance(packed, PackedWeight) or not (bias is None or isinstance(bias, Tensor)):
        raise TypeError(
            f"got gemm({type(x).__name__}, {type(packed).__name__}, {type(bias).__name__}); accepted: a torch.Tensor, a PackedWeight (make "
            f"one with tilebit.pack) and a torch.Tensor or None"
        )
    if residual is not None or gate is not None or norm_weight is not None or gate_halves:
        return with_parts(x, packed, bias, dependent, token_scales, residual, inplace, gate, norm_weight, eps, gate_halves)
    if packed.takes_codes or token_scales is not None:
        if packed.takes_codes:
            return of_codes(x, packed, bias, dependent, token_scales)
        raise ValueError(f"token_scales are given; {packed.format_name} has none: pass codes to a weight whose format has 8-bit x")
    shape = x.shape
    if packed.perm is not None:
        if not shape or shape[-1] != packed.k or x.device != packed.device:
            _reject_x(x, packed.k, packed.device)
        x = x.index_select(-1, packed.perm)
    elif shape and shape[-1] != packed.k:
        _reject_x(x, packed.k, packed.device)
    return call(x, packed.weight, packed.scales, packed.zeros, packed.row_scales, bias, packed.n, packed.format_name, dependent)


def call(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    bias: Tensor | None,
    n: int,
    format: str,
    dependent: bool,
    below: Any = None,
) -> Tensor:
    """``torch.ops.tilebit.gemm``, or at once the kernel behind it where nothing could tell the two
    apart.

    The dispatcher takes a third of a call's host time (4 of 12 us), only to arrive at ``_gemm``. It
    is needed where something observes operators: a tracer (dynamo, torch.jit), a mode (fake
    tensors, make_fx, FLOP counts), a transform (vmap), the profiler, a tensor subclass, autograd;
    and for a ``dependent`` that is no bool, which the schema refuses. Asking for all of them takes
    half a microsecond; dynamo takes the first answer for a constant and traces the operator.

    What is rare would cost as much again to ask for, and is refused by ``_gemm`` before it
    launches: it comes to the operator that way. An x of another device (meta: its fake answers),
    operands with lazy signs (which the dispatcher writes out) or of a subclass.
    """
    if (
        not is_dynamo_compiling()
        and type(x) in PLAIN
        and type(dependent) is bool
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and peek_interpreter_stack() is None
        and not _is_tracing()
        and not profiler._is_profiler_enabled
        and forward_ad._current_level < 0
        and not (
            is_grad_enabled()
            and (
                x.requires_grad
                or scales.requires_grad
                or (zeros is not None and zeros.requires_grad)
                or (row_scales is not None and row_scales.requires_grad)
                or (bias is not None and bias.requires_grad)
            )
        )
    ):
        try:
            return _gemm(x, weight, scales, zeros, row_scales, bias, n, format, dependent, True)
        except (RuntimeError, ValueError):
            if (x.is_cuda or x.is_cpu) and plain(x, weight, scales, zeros, row_scales, bias):
                raise
    if below is not None:
        return _redispatch(below, x, weight, scales, zeros, row_scales, bias, n, format, dependent)
    return _operator(x, weight, scales, zeros, row_scales, bias, n, format, dependent)


def _gemm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    bias: Tensor | None,
    n: int,
    format: str,
    dependent: bool = False,
    direct: bool = False,
) -> Tensor:
    """The operator's kernel; ``direct``: the dispatcher was passed by, and has resolved nothing."""
    shape = x.shape
    k = shape[-1] if shape else 0
    flat = len(shape) == 2
    m = shape[0] if flat else x.numel() // (k or 1)
    key = (id(weight), k, n, format, bias is None, dependent)
    held = known.get(key)
    if (
        held is None
        or held.scales is not scales
        or held.bias is not bias
        or held.zeros is not zeros
        or held.row_scales is not row_scales
        or (launch := held.plan.launchers.get(m)) is None
    ):
        if direct and not plain(weight, scales, zeros, row_scales, bias):
            raise ValueError("these operands are the dispatcher's to resolve")  # for ``call`` alone
        launch = held.plan.launchers.get(m) if held is not None and held.joined(scales, zeros, row_scales, bias) else None
        plan = _checked_plan(key, x, weight, scales, zeros, row_scales, bias) if held is None or launch is None else held.plan
        if launch is None and m:
            launch = plan.launcher(m)
    else:
        plan = held.plan
    if flat:
        rows = x
        y = out = x.new(m, n)  # new_empty costs 0.15 us more, and lengths in a tuple half a microsecond
    else:
        y = x.new(*shape[:-1], n)
        rows, out = x.reshape(m, k), y.view(m, n)
    if launch is None:  # no rows
        return y
    if plan.kx != k:
        rows = torch.nn.functional.pad(rows, (0, plan.kx - k))
    elif not rows.is_contiguous():
        rows = rows.contiguous()
    try:
        if plan.guarded:
            with torch.cuda.device(plan.device):
                launch(rows, weight, scales, zeros, row_scales, bias, out)
        else:
            launch(rows, weight, scales, zeros, row_scales, bias, out)
    except Exception:
        # Says what the kernel's own check found in this operator's words.
        again = _checked_plan(key, x, weight, scales, zeros, row_scales, bias)
        if again is not plan:  # found by a weight whose company has since been cast or moved
            return _gemm(x, weight, scales, zeros, row_scales, bias, n, format, dependent, direct)
        check_memory("x", x)
        if rows.data_ptr() % ALIGNMENT == 0:
            raise
        with torch.cuda.device(plan.device) if plan.guarded else nullcontext():
            # A kernel refuses rows off a 16-byte boundary: rare, so tried first.
            launch(rows.clone(), weight, scales, zeros, row_scales, bias, out)
    return y


def _checked_plan(key: tuple[Any, ...], x: Tensor, weight: Tensor, *rest: Tensor | None) -> Plan:
    """The plan of a call, which later calls with these operands find under ``key``. Raises
    ``ValueError`` for what does not fit.

    Kernels check their operands in C before they launch, at no cost that shows: so this runs once
    per weight, its company and number of rows, and again when a kernel refuses. For the same reason
    ``key`` holds neither x's dtype nor its device, which would cost 0.2 us.
    """
    _, k, n, format, no_bias, dependent = key
    if not k or x.dtype not in DTYPE_NAMES:
        _reject_x(x, None, weight.device)
    plan = dispatch.plan_for(x.device, n, k, format, x.dtype, not no_bias, dependent)
    w = plan.workload
    if w.format.x:
        raise ValueError(
            f"format is {format}, whose x is {w.format.x}; accepted: a format with x of 16 bits; use torch.ops.tilebit.gemm_int8"
        )
    call = f"gemm with x of {w.dtype} [..., {w.k}] on {plan.device}, n = {w.n} and {w.format.name}"
    check(plan.operands[1:-1], (weight, *rest), plan.device, call, dense=True)  # x and y are this operator's own
    remembered(key, plan, weight, *rest)
    return plan


def _derived(
    keys: Any,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    bias: Tensor | None,
    n: int,
    format: str,
    dependent: bool = False,
) -> Tensor:
    """The operator where autograd stands. Python here costs a trip through the dispatcher, which
    ``call`` saves further down: the sum is as before."""
    if any(map(wanted, (x, scales, zeros, row_scales, bias))):
        return product(x, weight, scales, zeros, row_scales, bias, n, format, dependent)
    below = keys & torch._C._after_autograd_keyset
    return call(x, weight, scales, zeros, row_scales, bias, n, format, dependent, below)


def _gemm_fake(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    bias: Tensor | None,
    n: int,
    format: str,
    *_: bool,
) -> Tensor:
    if x.ndim < 1 or x.dtype not in DTYPE_NAMES:
        _reject_x(x, None, weight.device)
    for name, operand in (("weight", weight), ("scales", scales), ("zeros", zeros), ("row_scales", row_scales), ("bias", bias)):
        if operand is not None and operand.device != x.device:
            raise ValueError(f"{name} is on {operand.device} and x on {x.device}; accepted: all on one device: move them there")
    GemmFormat.parse(format)
    return x.new_empty((*x.shape[:-1], n))


for _key in ("CPU", "CUDA"):
    _library.impl("gemm", _gemm, _key)
_library.impl("gemm", _derived, "Autograd", with_keyset=True)
_library.impl("gemm", product, "FuncTorchDynamicLayerFrontMode")  # transforms of torch.func; reached where one is active
torch.library.register_fake("tilebit::gemm", _gemm_fake, lib=_library)


def _reject_x(x: Tensor, k: int | None, device: torch.device) -> NoReturn:
    accepted = f"float16 or bfloat16 [..., {'k' if k is None else k}] on {device}"
    raise ValueError(
        f"x is {describe(x)}; accepted: {accepted}{' with k >= 1' if k is None else ''}; convert it with x.to(...) or "
        f"pass the weight that fits"
    )
