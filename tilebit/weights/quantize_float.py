"""Rounding to 4- and 8-bit floats and to tables of numbers: the scales that a group of weights gets, and
the codes nearest under them."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from ..layouts.formats import GemmFormat

# Stored scales of "e4m3" are such a number / E4M3_UNIT and row scales E4M3_UNIT times their factor:
# kernels take scales up to 2.
E4M3_UNIT = 256.0
E4M3 = torch.finfo(torch.float8_e4m3fn)
_E4M3_SMALLEST = 2.0**-9  # the smallest subnormal


def row_scale(w: Tensor, format: GemmFormat) -> float:
    """The factor that all rows of ``w`` share, so that its largest weight is the largest code times
    the largest scale."""
    low, high = torch.aminmax(w)
    largest = float(torch.maximum(-low.float(), high.float()))
    factor = torch.tensor(largest / (format.largest * E4M3.max), dtype=torch.float32)
    return float(factor.clamp(min=torch.finfo(torch.float32).smallest_normal)) * E4M3_UNIT if largest > 0 else 1.0


def round_floats(block: Tensor, largest: Tensor, format: GemmFormat, scale_dtype: torch.dtype, row: float) -> tuple[Tensor, Tensor]:
    """(codes uint8, stored scales) of ``block`` fp32 [rows, groups, group] for groups whose
    magnitudes reach ``largest``.

    "e8m0": of the power of two that the standard names, under which the largest weight may
    saturate, and the next one, that of smaller squared error. "e4m3": the number nearest to what
    makes the largest weight the largest code; "" and "float32" (any scales): just that. A group of
    zeros has scale 1.
    """
    inner = format.weight.scales[0].of
    if inner == "e4m3":
        exact = (largest / (format.largest * (row / E4M3_UNIT))).clamp(_E4M3_SMALLEST, E4M3.max)
        scale = (exact.to(torch.float8_e4m3fn).float() / E4M3_UNIT).masked_fill_(largest == 0, 1.0).to(scale_dtype)
        return _nearest(block, scale, format, row), scale
    info = torch.finfo(scale_dtype)
    if inner in ("", "float32"):
        scale = (largest / format.largest).clamp(min=info.smallest_normal * info.eps).masked_fill_(largest == 0, 1.0).to(scale_dtype)
        return _nearest(block, scale, format, row), scale
    if inner != "e8m0":
        raise ValueError(f"{format.name} has scales {inner!r}; accepted: 'e8m0', 'e4m3', 'float32', or '' for any")
    lowest = max(-127, torch.frexp(torch.tensor(info.smallest_normal * info.eps, dtype=torch.float64)).exponent.item() - 1)
    # frexp: largest = mantissa 2^exponent with a mantissa in [1/2, 1); the largest code lies
    # between 2^2 and 2^3.
    exponent = torch.frexp(largest).exponent - 3
    found = []
    for above in (0, 1):
        scale = power_of_two((exponent + above).clamp_(lowest, 127))
        scale = scale.masked_fill_(largest == 0, 1.0).to(scale_dtype)
        codes = _nearest(block, scale, format, row)
        error = (numbers(codes, format) * scale.float()[..., None]).sub_(block).square_().sum(-1)
        found.append((codes, scale, error))
    (codes, scale, error), (other_codes, other_scale, other_error) = found
    better = other_error < error
    return torch.where(better[..., None], other_codes, codes), torch.where(better, other_scale, scale)


def power_of_two(exponents: Tensor) -> Tensor:
    """2 ** exponents (int32, -127 to 127), fp32: the least is a subnormal."""
    return torch.where(exponents == -127, 1 << 22, (exponents + 127) << 23).view(torch.float32)


def numbers(codes: Tensor, format: GemmFormat) -> Tensor:
    """The number of each code, fp32."""
    return codes.float() if format.integer else torch.tensor(format.weight.values, device=codes.device)[codes.int()]


def _nearest(block: Tensor, scale: Tensor, format: GemmFormat, row: float) -> Tensor:
    """The nearest codes under the stored scales. Of floats the even one of two as near, the largest
    for all above it, and zero is code 0; of a table any of two as near."""
    if format.weight.codebook:
        table, code = torch.tensor(format.weight.codebook, device=block.device).sort()
        return code[torch.bucketize(block / (scale.float() * row)[..., None], (table[1:] + table[:-1]) / 2)].to(torch.uint8)
    values = torch.tensor([v for v in format.weight.values[: 1 << (format.bits - 1)] if isfinite(v)], device=block.device)
    middles = (values[1:] + values[:-1]) / 2
    # A middle below an even code belongs to it: the codes are counted by the bounds that a
    # magnitude exceeds.
    bounds = torch.where(torch.arange(len(middles), device=block.device) % 2 == 1, middles.nextafter(torch.zeros_like(middles)), middles)
    magnitude = block.abs() / (scale.float() * row)[..., None]
    codes = torch.bucketize(magnitude, bounds, out_int32=True).to(torch.uint8)
    return codes | ((block < 0) & (codes > 0)).to(torch.uint8) << (format.bits - 1)
