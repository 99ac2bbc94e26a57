"""Weights that were checked, each with the operands that came along: what later calls compare by
identity alone, which costs less than asking each tensor."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from .dispatch import Plan

MAX_KNOWN = 65536  # weights whose check is remembered

PLAIN = (Tensor, nn.Parameter)  # types of tensors that observe nothing


class Known:
    """``plan`` serves calls with this weight. ``scales``, ``zeros``, ``row_scales`` and ``bias``
    are those of the last call, and ``plain``: no subclass and without lazy signs. They are kept
    alive as long as the weight is."""

    __slots__ = ("bias", "plan", "row_scales", "scales", "weight", "zeros")

    plan: Plan
    scales: Tensor
    zeros: Tensor | None
    row_scales: Tensor | None
    bias: Tensor | None

    def __init__(self, key: tuple[Any, ...], weight: Tensor) -> None:
        self.weight = weakref.ref(weight, lambda _: known.pop(key, None))

    def joined(self, scales: Tensor, zeros: Tensor | None, row_scales: Tensor | None, bias: Tensor | None) -> bool:
        """Whether these, found to be plain, may come along in their place: the kernel itself checks
        tensors, but not what it does not take."""
        if (zeros is None) != (self.zeros is None) or (row_scales is None) != (self.row_scales is None):
            return False
        self.scales, self.zeros, self.row_scales, self.bias = scales, zeros, row_scales, bias
        return True


known: dict[tuple[Any, ...], Known] = {}  # by the id of a weight that lives, and what else a call says


def remembered(key: tuple[Any, ...], plan: Plan, weight: Tensor, *rest: Tensor | None) -> Known:
    """What later calls find under ``key``; ``rest`` are scales, zeros, row scales and bias."""
    if len(known) >= MAX_KNOWN:
        known.clear()
    new = Known(key, weight)
    new.plan = plan
    new.scales, new.zeros, new.row_scales, new.bias = rest  # type: ignore[assignment]
    known[key] = new
    return new


def plain(*tensors: Tensor | None) -> bool:
    """Whether a kernel may be given these tensors as they lie. A lazy sign (of a negated view, or of
    the imaginary part of a conjugate) is not in the memory that a kernel reads."""
    return all(tensor is None or (type(tensor) in PLAIN and not tensor.is_neg()) for tensor in tensors)
