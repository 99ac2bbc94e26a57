"""Derivatives: those of a product with respect to x and bias, and the refusal of all others.

dx = dy @ w with w dequantized to the dtype of x ([n, k] of memory while it is computed), dbias =
the sum of dy over rows; forward mode is the product of x's tangent. They are made of torch's own
operators, so they may be differentiated again, traced and mapped (torch.func, torch.compile).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import Function, forward_ad

from ..layouts.formats import GemmFormat
from ..weights.packed import PackedWeight
from .dispatch import device_target

Named = Iterable[tuple[str, "Tensor | None"]]


def wanted(tensor: Tensor | None) -> bool:
    """Whether a derivative with respect to this operand is asked for: by ``backward`` or
    ``torch.func``, or by a tangent of forward mode."""
    if tensor is None or not tensor.is_floating_point():
        return False
    if tensor.requires_grad and is_grad_enabled():
        return True
    # Forward mode says so nowhere else.
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def refuse(call: str, has: str, operands: Named) -> None:
    """Raise ``ValueError`` for the first of ``operands`` that a derivative is asked of."""
    for name, tensor in operands:
        if wanted(tensor):
            raise ValueError(
                f"a derivative with respect to {name} is asked for; {call} has {has}: pass {name}.detach(), or call it under "
                f"torch.no_grad() or torch.inference_mode()"
            )


class Product(Function):
    """``torch.ops.tilebit.gemm`` with its derivatives; the arguments are the operator's."""

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> Tensor:  # type: ignore[override]
        return torch.ops.tilebit.gemm.default(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, scales, zeros, row_scales, _, *options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, scales, zeros, row_scales)
        ctx.save_for_forward(weight, scales, zeros, row_scales)
        ctx.options, ctx.k, ctx.shape = options, x.shape[-1], output.shape

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx = dbias = None
        if dy is not None and ctx.needs_input_grad[0]:
            n, format, _ = ctx.options
            dx = dy @ torch.ops.tilebit.gemm_weight.default(*ctx.saved_tensors, n, ctx.k, format)
        if dy is not None and ctx.needs_input_grad[5]:
            dbias = dy.sum(tuple(range(dy.ndim - 1))) if dy.ndim > 1 else dy
        return dx, None, None, None, None, dbias, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, *others: Any) -> Tensor | None:  # type: ignore[override]
        dbias, (n, format, _) = others[4], ctx.options
        if dx is None:
            return None if dbias is None else dbias.expand(ctx.shape)
        return torch.ops.tilebit.gemm.default(dx, *ctx.saved_tensors, dbias, n, format)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], x: Tensor, *rest: Any) -> tuple[Tensor, int]:  # type: ignore[override]
        if all(dim is None for dim in in_dims[1:]):  # one product of all rows
            return product(x.movedim(in_dims[0] or 0, 0), *rest), 0
        calls = [
            # Copied: a slice may be neither contiguous nor aligned.
            [value if dim is None else value.select(dim, i).clone() for value, dim in zip((x, *rest), in_dims, strict=True)]
            for i in range(info.batch_size)
        ]
        return torch.stack([product(*call) for call in calls]), 0


def product(
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
    """``Product`` of operands with respect to which it has derivatives. Raises ``ValueError`` for
    others."""
    named = (("weight", weight), ("scales", scales), ("zeros", zeros), ("row_scales", row_scales))
    refuse("tilebit.gemm", "derivatives with respect to x and bias", named)
    return Product.apply(x, weight, scales, zeros, row_scales, bias, n, format, dependent)  # type: ignore[return-value]


def _weight(weight: Tensor, scales: Tensor, zeros: Tensor | None, row_scales: Tensor | None, n: int, k: int, format: str) -> Tensor:
    arch = device_target(weight.device).arch
    held = PackedWeight(weight, scales, zeros, n, k, GemmFormat.parse(format), scales.dtype, arch, row_scales=row_scales)
    return held.dequantize()


def _weight_fake(weight: Tensor, scales: Tensor, zeros: Tensor | None, row_scales: Tensor | None, n: int, k: int, format: str) -> Tensor:
    return scales.new_empty((n, k))


# An operator, because it looks at codes: a tracer cannot.
_library = torch.library.Library("tilebit", "FRAGMENT")
_library.define("gemm_weight(Tensor weight, Tensor scales, Tensor? zeros, Tensor? row_scales, int n, int k, str format) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("gemm_weight", _weight, _key)
torch.library.register_fake("tilebit::gemm_weight", _weight_fake, lib=_library)
