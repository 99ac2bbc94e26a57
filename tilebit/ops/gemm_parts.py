"""``torch.ops.tilebit.gemm_parts`` and ``.gemm_add_``: a product with what stands before and behind it
in a decoder, in one kernel; ``product`` is ``tilebit.gemm`` where any of that is asked for."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..accepted import expect, expect_tensors
from ..layouts.formats import GemmFormat
from ..schedules.activations.workload import EPS
from ..schedules.gemm.parts import ACTIVATIONS
from ..schedules.gemm.workload import Workload
from ..weights.packed import PackedWeight
from . import dispatch
from .direct import inference_only
from .dispatch import DTYPE_NAMES, Plan
from .gemm_int8 import OUTS, as_read, codes_of, launch
from .operands import ALIGNMENT, describe, schema
from .quantize import QUANTIZE

_library = torch.library.Library("tilebit", "FRAGMENT")
_taken = schema(Workload(1, 1, 1, GemmFormat.parse("w4a8_lqq_g128")).operands("cpu"))
_options = f"Tensor? norm_weight, int n, int k, str format, ScalarType dtype, float eps={EPS}, bool dependent=False"
_library.define(f"gemm_parts({', '.join(_taken)}, Tensor? residual, {_options}, str gate='', bool gate_halves=False) -> Tensor")
_library.define(f"gemm_add_({', '.join(_taken)}, Tensor(a!) residual, {_options}) -> ()")


def product(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    dependent: bool,
    token_scales: Tensor | None,
    residual: Tensor | None,
    inplace: bool,
    gate: str | None,
    norm_weight: Tensor | None,
    eps: float,
    gate_halves: bool,
) -> Tensor:
    """``tilebit.gemm`` with a residual, a gate or a norm."""
    expect_tensors(("token_scales", "residual", "norm_weight"), token_scales=token_scales, residual=residual, norm_weight=norm_weight)
    expect("gate", gate, str | None, f"{' or '.join(map(repr, ACTIVATIONS))}, or None for no gate")
    expect("gate_halves", gate_halves, bool, "True where the weight's first half are gates")
    if packed.perm is not None:
        if x.ndim < 1 or x.shape[-1] != packed.k or x.device != packed.device:
            _reject_x(x, packed.k, packed.dtype, packed.device)
        if norm_weight is not None or (token_scales is not None and (packed.format.x_grouped or packed.smooth is not None)):
            raise ValueError(
                "the weight's columns are reordered (act order), and norm_weight or token_scales of groups and of smoothed x are not; "
                "accepted: call without them, after tilebit.add_norm"
            )
        x = (x.view(torch.int8) if x.itemsize == 1 else x).index_select(-1, packed.perm).view(x.dtype)
    if packed.takes_codes and x.dtype is not codes_of(packed.format_name):
        if norm_weight is not None:
            raise ValueError(
                f"norm_weight is given; {packed.format_name} multiplies codes of x: pass those of tilebit.add_norm(..., out='int8')"
            )
        if x.ndim < 1 or x.shape[-1] != packed.k or x.dtype is not packed.dtype or token_scales is not None:
            _reject_x(x, packed.k, packed.dtype, packed.device)
        x, token_scales = QUANTIZE(x, None, packed.smooth, OUTS[packed.format.x], packed.format.x_group, EPS, dependent)
    held = (x, packed.weight, packed.scales, packed.zeros, packed.row_scales, token_scales, bias)
    rest = (norm_weight, packed.n, packed.k, packed.format_name, packed.dtype, eps, dependent)
    if residual is not None and inplace:
        if gate is not None:
            raise ValueError(f"gate is {gate!r} with a residual; accepted: one of them")
        GEMM_ADD(*held, residual, *rest)
        return residual
    return GEMM_PARTS(*held, residual, *rest, "" if gate is None else gate, gate_halves)


def _gemm_parts(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    token_scales: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    eps: float = EPS,
    dependent: bool = False,
    gate: str = "",
    gate_halves: bool = False,
) -> Tensor:
    """y [..., n] in ``dtype`` (fp16 or bf16) as ``tilebit.gemm`` says, of a gate [..., n / 2]; x of 16 bits in ``dtype``, or
    codes with ``token_scales`` as ``gemm_int8`` takes them. Raises ``ValueError`` for what does not fit and
    ``KernelUnavailable``, before a launch."""
    plan = _plan(x, weight, bias, residual, norm_weight, n, k, format, dtype, eps, dependent, gate, gate_halves)
    y = torch.empty((*x.shape[:-1], plan.workload.columns), dtype=dtype, device=x.device)
    _run(plan, x, (weight, scales, zeros, row_scales), token_scales, bias, residual, norm_weight, y)
    return y


def _gemm_add(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    token_scales: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    eps: float = EPS,
    dependent: bool = False,
) -> None:
    """``gemm_parts`` whose y is written where ``residual`` lies, which is contiguous and on a 16-byte boundary."""
    plan = _plan(x, weight, bias, residual, norm_weight, n, k, format, dtype, eps, dependent, "")
    if not residual.is_contiguous() or residual.data_ptr() % ALIGNMENT:
        raise ValueError(f"residual is {describe(residual)}; accepted in place: a contiguous one on a {ALIGNMENT}-byte boundary")
    if x.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr() and x.numel():
        raise ValueError("x and residual share memory, of which y would overwrite x while it is read; accepted in place: memory of its own")
    _run(plan, x, (weight, scales, zeros, row_scales), token_scales, bias, residual, norm_weight, residual)


def _plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    eps: float,
    dependent: bool,
    gate: str,
    gate_halves: bool = False,
) -> Plan:
    """Raises ``ValueError`` for an x, residual or norm_weight that does not fit, and for parts that no product has together."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, DTYPE_NAMES))}")
    coded = GemmFormat.parse(format).x != ""
    own = codes_of(format) if coded else dtype
    norm = {"norm": True, "eps": float(eps)} if norm_weight is not None else {}
    parts = {"residual": residual is not None, "gate": gate, "gate_halves": gate_halves, **norm}
    plan = dispatch.plan_for(x.device, n, k, format, dtype, bias is not None, dependent, **parts)
    if x.ndim < 1 or x.dtype is not own or x.device != weight.device or x.shape[-1] not in ((k, plan.kx) if coded else (k,)):
        _reject_x(x, k, own, weight.device)
    columns = plan.workload.columns
    for name, tensor, shape in (("residual", residual, (*x.shape[:-1], columns)), ("norm_weight", norm_weight, (k,))):
        if tensor is not None and (tensor.dtype is not dtype or tuple(tensor.shape) != shape or tensor.device != x.device):
            raise ValueError(
                f"{name} is {describe(tensor)}; accepted with x of {describe(x)} and {columns} columns of y: "
                f"{str(dtype).removeprefix('torch.')} {list(shape)} on {x.device}; convert it with .to(...)"
            )
    return plan


def _run(
    plan: Plan,
    x: Tensor,
    held: tuple[Tensor | None, ...],
    token_scales: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    y: Tensor,
) -> None:
    columns = plan.workload.columns
    m = x.numel() // x.shape[-1]
    if not m:
        return
    rows, token_scales = as_read(plan, x, token_scales, m)
    if norm_weight is not None:
        norm_weight = torch.nn.functional.pad(norm_weight, (0, plan.kx - len(norm_weight))).contiguous()
    given = {
        "token_scales": token_scales,
        "residual": None if residual is None else residual.reshape(m, columns).contiguous(),
        "norm_weight": norm_weight,
    }
    there = {o.name for o in plan.operands}
    unasked = [name for name, tensor in given.items() if tensor is not None and name not in there]
    if unasked:
        raise ValueError(f"{unasked[0]} are given; a product of {plan.workload.format.name} has none: pass None")
    own = tuple(tensor for name, tensor in given.items() if name in there)
    tokens, after = (own[:1], own[1:]) if "token_scales" in there else ((), own)
    launch(plan, m, (rows, *held, *tokens, bias, *after, y.view(m, columns)))


def _reject_x(x: Tensor, k: int, dtype: torch.dtype, device: torch.device) -> NoReturn:
    accepted = f"{str(dtype).removeprefix('torch.')} [..., {k}] on {device}"
    raise ValueError(f"x is {describe(x)}; accepted: {accepted}; convert it with x.to(...) or pass what fits")


def _one_device(x: Tensor, **operands: Tensor | None) -> None:
    for name, operand in operands.items():
        if operand is not None and operand.device != x.device:
            raise ValueError(f"{name} is on {operand.device} and x on {x.device}; accepted: all on one device: move them there")


def _fake_parts(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    token_scales: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    eps: float = EPS,
    dependent: bool = False,
    gate: str = "",
    gate_halves: bool = False,
) -> Tensor:
    _one_device(
        x, weight=weight, scales=scales, zeros=zeros, row_scales=row_scales, token_scales=token_scales, bias=bias, residual=residual,
        norm_weight=norm_weight,
    )  # fmt: skip
    parts = {"residual": residual is not None, "gate": gate, "gate_halves": gate_halves, "norm": norm_weight is not None}
    Workload(1, int(n), int(k), GemmFormat.parse(format), **parts)
    return x.new_empty((*x.shape[:-1], n // 2 if gate else n), dtype=dtype)


def _fake_add(*given: Any) -> None:
    _fake_parts(*given)


_calls = {}
for _name, _real, _fake in (("gemm_parts", _gemm_parts, _fake_parts), ("gemm_add_", _gemm_add, _fake_add)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _real, _key)
    torch.library.register_fake(f"tilebit::{_name}", _fake, lib=_library)
    _calls[_name], _derived = inference_only(getattr(torch.ops.tilebit, _name).default, _real)
    _library.impl(_name, _derived, "Autograd", with_keyset=True)

GEMM_PARTS, GEMM_ADD = _calls["gemm_parts"], _calls["gemm_add_"]
