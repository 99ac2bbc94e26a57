"""SmoothQuant's factors (Xiao et al. 2022, arXiv:2211.10438): columns of x are divided, and those of
the weight multiplied, by what makes both easy to round, with the strength that a search finds.

    y = x w^T = (x / s) (w s)^T,   s_j = max |x_j|^a / max |w_j|^(1 - a)        (equation 4)

LiquidGEMM searches the strength a on a grid (section 4); so does this, for the least error of the
layer's output, x rounded to 8 bits a token (or a group of it) and the weight in its format, as they
will be multiplied. ``calibrate_smooth.py`` does it for all layers of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor, nn

from ..accepted import expect, expect_tensors, format_of
from ..layouts.formats import INT8, GemmFormat
from .layers import Quantized
from .mixed_tensor import MixedTensor
from .quantize import QuantizedTensor, check_finite, quantize, scale_dtype_of

STRENGTHS = tuple(step / 20 for step in range(21))
LARGEST, E4M3 = 127, torch.float8_e4m3fn  # of an int8 code of x; the type of the others


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
        return w.detach().float() * self.factors.to(w.device)

    @overload
    def applied(self, q: QuantizedTensor) -> QuantizedTensor: ...
    @overload
    def applied(self, q: Quantized) -> Quantized: ...
    def applied(self, q: Quantized) -> Quantized:
        """``q``, which a folded weight became, with what its x is multiplied by; without, where all factors are 1."""
        if bool((self.factors == 1).all()):
            return q
        if isinstance(q, MixedTensor):
            low, high = (None if part is None else self.applied(part) for part in (q.low, q.high))
            return replace(q, low=low, high=high)
        smooth = self.reciprocals.to(q.device)
        return replace(q, smooth=smooth if q.perm is None else smooth[q.perm])

    def fold_products(self, products: Tensor) -> Tensor:
        """X^T X of the divided x, from ``products`` [k, k] of x itself: the Hessian that ``gptq``
        takes with the folded weight."""
        factors = self.reciprocals.to(products.device)
        return products * factors[:, None] * factors


def search_smoothing(
    w: Tensor,
    x: Tensor,
    format: GemmFormat | str,
    strengths: Iterable[float] = STRENGTHS,
    clip_search: bool = False,
    largest: Tensor | None = None,
) -> Smoothing:
    """The factors that make the product of 8-bit x and ``w`` (floating point [n, k]) in ``format``,
    one with int8 or e4m3 x, err least on the inputs ``x``, floating point [rows, k] on the device of ``w``:
    those of the best of ``strengths``, and of no factors, which come first; a later one only if its
    error is smaller, so that it is never worse on ``x``. A column of x or of w that is all zeros
    has factor 1 before the mean is divided away. ``largest``, floating point [k]: the largest magnitude of
    each column of more inputs than ``x``, of which factors are made instead.

    The weight is rounded to nearest, with ``clip_search`` as in ``quantize``. Each strength costs
    that and two products with x. Raises ``TypeError`` and ``ValueError`` as ``quantize`` does, and
    ``ValueError`` for a format with 16-bit x, an x or a ``largest`` of another width or device, or with NaN or
    infinite values, and strengths outside 0 to 1.
    """
    expect_tensors(("largest",), w=w, x=x, largest=largest)
    format, strengths = format_of(format), tuple(strengths)
    _check(w, x, format, strengths, largest)
    w, x = w.detach().float(), x.detach().float()
    seen = x if largest is None else largest.detach().float()[None]
    expected = x @ w.t()
    size = float(expected.double().square().sum()) or 1.0

    def error(factors: Tensor) -> float:
        got = _rounded(x / factors, format) @ quantize(w * factors, format, clip_search, torch.float32).dequantize().t()
        return float(got.sub_(expected).double().square().sum()) / size

    best, strength = torch.ones(w.shape[1], device=w.device), None
    without = least = error(best)
    for candidate in strengths:
        factors = smoothing_factors(w, seen, candidate)
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


def quantize_smoothed(
    w: Tensor, format: GemmFormat, smoothing: Smoothing | None, clip_search: bool = False, scale_dtype: torch.dtype | None = None
) -> QuantizedTensor:
    """``quantize`` of ``w`` [n, k] with the factors of ``smoothing`` folded in, which its x is then divided by;
    ``scale_dtype`` as there, of ``w`` itself by default. Raises as ``quantize`` does, ``TypeError`` for what is
    no ``Smoothing``, and ``ValueError`` for one of another width or for a format with 16-bit x."""
    if smoothing is None:
        return quantize(w, format, clip_search, scale_dtype)
    expect_smoothing("smoothing", smoothing, w.shape[-1], format)
    return smoothing.applied(quantize(smoothing.fold(w), format, clip_search, scale_dtype_of(w, scale_dtype, format)))


def smoothing_of(
    layers: Mapping[str, nn.Linear], smoothing: Mapping[str, Smoothing], given: Mapping[nn.Linear, Quantized]
) -> dict[nn.Linear, Smoothing]:
    """``smoothing`` by layer. Raises ``TypeError`` and ``ValueError`` for one that is of no layer or of
    another width, and of a layer that has a ``given`` weight."""
    found: dict[nn.Linear, Smoothing] = {}
    for name, own in smoothing.items():
        if name not in layers:
            raise ValueError(f"smoothing names {name!r}; accepted: layers that are replaced: {', '.join(list(layers)[:5])}, ...")
        if layers[name] in given:
            raise ValueError(
                f"smoothing and weights both name {name!r}; accepted: one of them: tilebit.calibrate(model, calibration, smoothing=...) "
                "gives weights with the factors"
            )
        expect_smoothing(f"smoothing[{name!r}]", own, layers[name].in_features)
        found[layers[name]] = own
    return found


def expect_smoothing(name: str, smoothing: Smoothing, k: int, format: GemmFormat | None = None) -> None:
    """Raise ``TypeError`` and ``ValueError`` for what is no ``Smoothing`` of ``k`` columns, or is of a format with
    16-bit x."""
    expect(name, smoothing, Smoothing, "a Smoothing, as search_smoothing and calibrate_smoothing give it")
    if tuple(smoothing.factors.shape) != (k,):
        raise ValueError(f"{name} has factors {list(smoothing.factors.shape)}; the layer needs [{k}]")
    if format is not None:
        expect_smoothed(format)


def expect_smoothed(format: GemmFormat) -> None:
    """Raise ``ValueError`` for a format with 16-bit x."""
    if not format.x:
        raise ValueError(f"format is {format.name}; accepted: formats with int8 or e4m3 x, such as 'w4a8_lqq_g64' and 'w8a8_channel'")


def _rounded(x: Tensor, format: GemmFormat) -> Tensor:
    """``x`` fp32 [rows, k] as ``tilebit.quantize_activations`` has it: int8 or e4m3, a scale for each row, or
    for each group of it where ``format`` says so."""
    rows, k = x.shape
    group = format.x_group if format.x_grouped else k
    blocks = torch.nn.functional.pad(x, (0, -k % group)).view(rows, -1, group)
    largest = LARGEST if format.x == INT8 else torch.finfo(E4M3).max
    scale = blocks.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = (blocks / scale).clamp_(-largest, largest)
    codes = scaled.round_() if format.x == INT8 else scaled.to(E4M3).float()
    return codes.mul_(scale).view(rows, -1)[:, :k]


def _check(w: Tensor, x: Tensor, format: GemmFormat, strengths: Sequence[float], largest: Tensor | None) -> None:
    expect_smoothed(format)
    if w.ndim != 2 or not w.is_floating_point() or w.numel() == 0:
        raise ValueError(f"w is {w.dtype} {list(w.shape)}; accepted: a floating point [n, k] tensor with n >= 1 and k >= 1")
    if x.ndim != 2 or x.shape[1] != w.shape[1] or not x.shape[0] or not x.is_floating_point() or x.device != w.device:
        raise ValueError(
            f"x is {x.dtype} {list(x.shape)} on {x.device}; accepted for this w: floating point [rows, {w.shape[1]}] on {w.device}"
        )
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x has NaN or infinite values; accepted: finite inputs (fp16 overflow is the usual cause)")
    if largest is not None:
        if tuple(largest.shape) != (w.shape[1],) or not largest.is_floating_point() or largest.device != w.device:
            raise ValueError(
                f"largest is {largest.dtype} {list(largest.shape)} on {largest.device}; accepted for this w: floating point [{w.shape[1]}] "
                f"on {w.device}"
            )
        if not bool(torch.isfinite(largest).all()):
            raise ValueError("largest has NaN or infinite values; accepted: magnitudes of finite inputs")
    check_finite(w, 0)
    if any(not 0 <= strength <= 1 for strength in strengths):
        raise ValueError(f"strengths are {list(strengths)}; accepted: numbers from 0 to 1")
