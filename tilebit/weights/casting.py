"""What a move or cast would make of a packed layer, found before any of its tensors has changed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..accepted import expect_tensors
from .packed import DTYPES


class PackedLayer(nn.Module):
    """A layer of packed codes, which computes in fp16 or bf16."""

    def expect_cast(self, dtype: torch.dtype) -> None:
        """Raise ``ValueError`` where the layer's numbers do not fit ``dtype``."""
        raise NotImplementedError


def dtype_after(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What ``fn``, as ``nn.Module._apply`` takes it, makes of numbers in ``dtype`` on ``device``.
    Raises ``ValueError`` where products are not computed in it, and for an ``fn`` that casts
    integers, too."""
    cast, codes = (fn(torch.empty(0, dtype=held, device=device)).dtype for held in (dtype, torch.int32))
    if codes is not torch.int32:
        raise ValueError(f"the layer's int32 codes would become {codes}; accepted: casts that leave integers as they are: use .to({cast})")
    if cast not in DTYPES:
        raise ValueError(
            f"the layer would be cast to {cast}; accepted: {', '.join(map(str, DTYPES))}, which products are computed in: cast the "
            f"model's other modules alone"
        )
    return cast


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """``bias`` in ``dtype``. Raises ``ValueError`` where a number becomes infinite."""
    cast = bias.to(dtype)
    if cast.dtype != bias.dtype and not bias.is_meta:
        lost = bias.isfinite() & ~cast.isfinite()
        if bool(lost.any()):
            raise ValueError(
                f"bias has {int(lost.sum())} values that do not fit {dtype}, the first {float(bias[lost][0]):g}; accepted: up to "
                f"{torch.finfo(dtype).max:g}: {'compute in torch.bfloat16' if dtype == torch.float16 else 'make them smaller'}"
            )
    return cast


def expect_bias(bias: Tensor, n: int) -> Tensor:
    """``bias``. Raises ``TypeError`` for what is no tensor, ``ValueError`` for one that is not
    floating point [n]."""
    expect_tensors(bias=bias)
    if tuple(bias.shape) != (n,) or not bias.is_floating_point():
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}; accepted: floating point [{n}]")
    return bias


def own_bias(bias: Tensor | None, n: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """A copy of ``bias`` [n] in ``dtype`` on ``device``, None of None. Raises as ``expect_bias``
    and ``cast_bias``."""
    expect_tensors(("bias",), bias=bias)
    if bias is None:
        return None
    return cast_bias(expect_bias(bias, n).detach().to(device), dtype).contiguous().clone()
