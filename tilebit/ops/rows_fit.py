"""What a norm of the residual sum and a gate accept, said before anything is launched or changed."""

from __future__ import annotations

from torch import Tensor

from ..schedules.activations.workload import ACTIVATIONS
from .dispatch import DTYPE_NAMES
from .operands import describe, overlap


def expect_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Raise ``ValueError`` for operands of a norm that do not fit."""
    if x.ndim < 1 or x.shape[-1] < 1 or x.dtype not in DTYPE_NAMES:
        raise ValueError(f"x is {describe(x)}; accepted: float16 or bfloat16 [..., k] with k >= 1; convert it with x.to(...)")
    for name, tensor, shape in (("weight", weight, x.shape[-1:]), ("residual", residual, x.shape)):
        if tensor is not None and (tensor.dtype is not x.dtype or tensor.shape != shape or tensor.device != x.device):
            raise ValueError(
                f"{name} is {describe(tensor)}; accepted with x of {describe(x)}: {str(x.dtype).removeprefix('torch.')} {list(shape)} on "
                f"{x.device}; convert it with .to(...)"
            )
    if residual is not None and not residual.is_contiguous():
        raise ValueError(f"residual is {describe(residual)} with strides {residual.stride()}; accepted in place: a contiguous one")


def expect_apart(x: Tensor, residual: Tensor | None) -> None:
    """Raise ``ValueError`` where the new residual would be written over elements of x that are
    still to be read."""
    if residual is None or not overlap(x, residual):
        return
    if x.data_ptr() != residual.data_ptr() or not x.is_contiguous():
        raise ValueError("x and residual lie in the same memory in part; accepted in place: memory of their own, or one tensor for both")


def expect_numbers(eps: float, offset: float) -> None:
    """Raise ``ValueError`` for numbers of a norm that no kernel would be made for; what has a kernel's
    plan was asked already."""
    if not 0 <= eps < float("inf") or not abs(offset) < float("inf"):
        raise ValueError(f"(eps, offset) is ({eps!r}, {offset!r}); accepted: finite numbers, eps from 0")


def expect_gates(x: Tensor, activation: str) -> None:
    """Raise ``ValueError`` for what does not fit a gate."""
    if x.ndim < 1 or x.shape[-1] < 2 or x.shape[-1] % 2 or x.dtype not in DTYPE_NAMES:
        raise ValueError(
            f"x is {describe(x)}; accepted: float16 or bfloat16 [..., 2 k], gates before what they gate; convert it with x.to(...)"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; accepted: {', '.join(map(repr, ACTIVATIONS))}")
