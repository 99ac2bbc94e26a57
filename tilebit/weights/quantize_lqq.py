"""LiquidGEMM's two integer levels (LiquidQuant, section 4): int8 weights of an output channel, whose
groups are 4-bit codes with a byte of scale and a byte of offset.

    q8 = round(w / r),  r = max |w| / 119          |q8| <= 119
    q8 ~ q4 * s + o - 128,  0 <= q4 <= 15          s, o: bytes of a group

No code overflows a byte, whatever it is: let R be the group's range of q8, so R <= 238, and e = 15 s -
R. s is R / 15 rounded or rounded up, at least 1, so that -7 <= e <= 15 (e = 15: R = 0), and o = 128 +
min - floor(e / 2). Then o >= 128 - 119 - 7 = 2, and o + 15 s = 128 + max + (e - floor(e / 2)) <= 128
+ 119 + 8 = 255. So ``q4 * s + o`` of four weights is one multiplication of a register, and ``xor
0x80`` of its bytes takes 128 away. Sums of products with int8 x are below 2^31 up to k = 2^31 / (128 *
128) = 131,072.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layouts.formats import OFFSET_ZERO

LARGEST = 119  # of the first level's magnitudes: 127 less what offsets and codes out of reach need
MOST_K = 131072  # sums of more products may not fit int32
CODES = 15


def row_scales(w: Tensor) -> Tensor:
    """The first level: r of each row, fp32 [rows], of ``w`` fp32 [rows, ...]. An all-zero row has
    scale 1."""
    rows = w.abs().flatten(1).amax(1) / LARGEST
    return torch.where(rows > 0, rows, 1.0)


def two_levels(levels: Tensor, factors: Sequence[float], importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [rows, groups, group], scales and offsets uint8 [rows, groups] of ``levels``, fp32
    of the codes' shape: weights over their row's scale.

    Of each group the scale errs least among R / 15 rounded and rounded up and among ``factors`` of
    its range (1.0 first: a later one only if its squared error is smaller). Errors weigh
    ``importance``, which broadcasts to ``levels`` (0: padding, which must hold values of its
    group). Where levels exceed 119, as those that make up for others' errors may, ranges end
    there, so that the proof above holds.
    """
    low, high = (end.round_().clamp_(-LARGEST, LARGEST) for end in (levels.amin(-1), levels.amax(-1)))
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = low
    for factor in factors:
        bottom, top = (low * factor).round_(), (high * factor).round_()
        for scale in (((top - bottom) / CODES).round_().clamp_(min=1), ((top - bottom) / CODES).ceil_().clamp_(min=1)):
            offset = OFFSET_ZERO + bottom - ((CODES * scale - (top - bottom)) / 2).floor_()
            step, place = scale[..., None], offset[..., None]
            codes = nearest_levels(levels, step, place)
            squares = (codes * step).add_(place - OFFSET_ZERO).sub_(levels).square_()
            error = (squares if importance is None else squares.mul_(importance)).sum(-1)
            if best is None:
                best, least = (codes, scale, offset), error
                continue
            better = error < least
            least = torch.where(better, error, least)
            best = (
                torch.where(better[..., None], codes, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, offset, best[2]),
            )
    assert best is not None
    codes, scale, offset = (found.to(torch.uint8) for found in best)
    return codes, scale, offset


def nearest_levels(levels: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """The codes, as fp32 whole numbers, of ``levels``; all are fp32 and broadcast."""
    return ((levels - (offset - OFFSET_ZERO)) / scale).round_().clamp_(0, CODES)
