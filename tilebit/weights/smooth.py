"""SmoothQuant's factors (Xiao et al. 2022, arXiv:2211.10438): columns of x are divided, and those of
the weight multiplied, by what makes both easy to round, with the strength that a search finds.

    y = x w^T = (x / s) (w s)^T,   s_j = max |x_j|^a / max |w_j|^(1 - a)        (equation 4)

LiquidGEMM searches the strength a on a grid (section 4); so does this, for the least error of the
layer's output, x rounded to int8 a token (or a group of it) and the weight in its format, as they
will be multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accepted import expect_tensors, format_of
from ..layouts.formats import GemmFormat
from .quantize import check_finite, quantize

STRENGTHS = tuple(step / 20 for step in range(21))
LARGEST = 127  # of an int8 code of x


@dataclass(frozen=True, slots=True, eq=False)
class Smoothing:
    """``factors`` fp32 [k], positive, of geometric mean 1: ``fold`` multiplies a weight by them;
    x is multiplied by ``reciprocals``. ``strength`` is the exponent a of x, None where no factors
    are best. ``error`` is the squared error of the output over the output's own square,
    ``error_without`` that without factors."""

    factors: Tensor
    strength: float | None
    error: float
    error_without: float

    @property
    def reciprocals(self) -> Tensor:
        """fp32 [k]: ``smooth`` of ``tilebit.quantize_activations``."""
        return 1 / self.factors

    def fold(self, w: Tensor) -> Tensor:
        """``w`` [n, k] for the divided x, fp32."""
        return w.detach().float() * self.factors

    def fold_products(self, products: Tensor) -> Tensor:
        """X^T X of the divided x, from ``products`` [k, k] of x itself: the Hessian that ``gptq``
        takes with the folded weight."""
        return products * self.reciprocals[:, None] * self.reciprocals


def search_smoothing(
    w: Tensor, x: Tensor, format: GemmFormat | str, strengths: Sequence[float] = STRENGTHS, clip_search: bool = False
) -> Smoothing:
    """The factors that make the product of int8 x and ``w`` (floating point [n, k]) in ``format``,
    one with int8 x, err least on the inputs ``x``, floating point [rows, k] on the device of ``w``:
    those of the best of ``strengths``, and of no factors, which come first; a later one only if its
    error is smaller, so that it is never worse on ``x``. A column of x or of w that is all zeros
    has factor 1 before the mean is divided away.

    The weight is rounded to nearest, with ``clip_search`` as in ``quantize``. Each strength costs
    that and two products with x. Raises ``TypeError`` and ``ValueError`` as ``quantize`` does, and
    ``ValueError`` for a format with 16-bit x, an x of another width or device, or with NaN or
    infinite values, and strengths outside 0 to 1.
    """
    expect_tensors(w=w, x=x)
    format = format_of(format)
    _check(w, x, format, strengths)
    w, x = w.detach().float(), x.detach().float()
    expected = x @ w.t()
    size = float(expected.double().square().sum()) or 1.0

    def error(factors: Tensor) -> float:
        got = _rounded(x / factors, format) @ quantize(w * factors, format, clip_search, torch.float32).dequantize().t()
        return float(got.sub_(expected).double().square().sum()) / size

    best, strength = torch.ones(w.shape[1], device=w.device), None
    without = least = error(best)
    for candidate in strengths:
        factors = smoothing_factors(w, x, candidate)
        found = error(factors)
        if found < least:
            best, strength, least = factors, candidate, found
    return Smoothing(best, strength, least, without)


def smoothing_factors(w: Tensor, x: Tensor, strength: float) -> Tensor:
    """SmoothQuant's factors for ``w`` fp32 [n, k] and ``x`` fp32 [rows, k] with exponent
    ``strength``: fp32 [k] of geometric mean 1."""
    inputs, weights = x.abs().amax(0).double(), w.abs().amax(0).double()
    logs = strength * inputs.log() - (1 - strength) * weights.log()
    logs = torch.where((inputs > 0) & (weights > 0), logs, 0.0)
    return (logs - logs.mean()).exp().float()


def _rounded(x: Tensor, format: GemmFormat) -> Tensor:
    """``x`` fp32 [rows, k] as ``tilebit.quantize_activations`` has it: int8, a scale for each row, or
    for each group of it where ``format`` says so."""
    rows, k = x.shape
    group = format.x_group if format.x_grouped else k
    blocks = torch.nn.functional.pad(x, (0, -k % group)).view(rows, -1, group)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    return (blocks / scale).round_().clamp_(-LARGEST, LARGEST).mul_(scale).view(rows, -1)[:, :k]


def _check(w: Tensor, x: Tensor, format: GemmFormat, strengths: Sequence[float]) -> None:
    if not format.integer_sums:
        raise ValueError(f"format is {format.name}; accepted: formats with int8 x, such as 'w4a8_lqq_g64' and 'w8a8_channel'")
    if w.ndim != 2 or not w.is_floating_point() or w.numel() == 0:
        raise ValueError(f"w is {w.dtype} {list(w.shape)}; accepted: a floating point [n, k] tensor with n >= 1 and k >= 1")
    if x.ndim != 2 or x.shape[1] != w.shape[1] or not x.shape[0] or not x.is_floating_point() or x.device != w.device:
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} on {x.device}; accepted for this w: floating point [rows, {w.shape[1]}] on {w.device}"
        )
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x has NaN or infinite values; accepted: finite inputs (fp16 overflow is the usual cause)")
    check_finite(w, 0)
    if any(not 0 <= strength <= 1 for strength in strengths):
        raise ValueError(f"strengths are {list(strengths)}; accepted: numbers from 0 to 1")
