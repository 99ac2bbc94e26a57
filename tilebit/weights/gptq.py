"""GPTQ: rounding that makes up for its own error (Frantar et al. 2022, arXiv:2210.17323).

Columns are rounded one after the other; what a column's rounding does to the layer's output is
taken up by the columns that are still to come, as far as the inputs of the layer are correlated.
"""

from __future__ import annotations

from functools import partial
from math import inf

import torch
from torch import Tensor

from ..accepted import expect_tensors, format_of
from ..layouts.formats import PER_CHANNEL, GemmFormat
from .mixed_tensor import MixedTensor, split_channels
from .quantize import (
    CLIP_FACTORS,
    QuantizedTensor,
    check_finite,
    check_scales,
    check_sums,
    kept,
    nearest_codes,
    scale_dtype_of,
    search_groups,
)
from .quantize_lqq import row_scales
from .replayed import Replayed

BLOCK = 128  # columns whose errors reach the columns behind them in one product (section 4, step 2)
# Of the mean of the Hessian's diagonal (section 4, step 3). The paper's 0.01 is for hundreds of thousands of tokens: with a few for each
# column, what is made up for by chance costs other inputs more than it saves, and 0.1 is still no worse with several times as many.
DAMPING = 0.1


def gptq(
    w: Tensor,
    hessian: Tensor,
    format: GemmFormat | str,
    act_order: bool = True,
    clip_search: bool = False,
    damping: float = DAMPING,
    scale_dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """``w`` (floating point [n, k]) in ``format``, one of integers, so that x @ w'^T is close to
    x @ w^T for inputs x whose ``hessian`` X^T X is given: floating point [k, k] on the device of
    ``w``, of any scale: what matters is how its entries compare.

    Everything is computed there, the factorization in fp64, the rest in fp32; the result is the
    same at each call. Scales are those of ``quantize``, of the group's values as they are when its
    first column is reached; ``clip_search`` picks their shrink factors by the squared error, each
    column's weighted with what the columns behind it cannot make up for. ``act_order`` takes the
    columns with the largest diagonal first. Where groups share scales, they are groups of that
    order, and ``perm`` of the result says it; a format with one scale for each channel needs no
    ``perm``. The last group may be shorter. A column that no input reached (its diagonal is 0) is
    rounded to nearest. ``damping`` times the mean of the diagonal is added to the diagonal: more
    where there are fewer inputs for each column (0.2 for two thousand of 1,536 columns), down to
    0.01 with many.

    Two integer levels (``w4a8_lqq_*``): the scale of a row is that of the whole weight, as
    ``quantize`` has it; scale and offset of a group are found when its first column is reached,
    within the row's 119 levels on either side, so that every code stays a byte.

    Raises ``TypeError`` and ``ValueError`` as ``quantize`` does, and ``ValueError`` for a format of
    other than integers, a ``hessian`` of another shape or device, with NaN or infinite values, or
    one that is not positive definite with this damping, and for a ``damping`` that is negative or
    not finite.
    """
    expect_tensors(w=w, hessian=hessian)
    format = format_of(format)
    scale_dtype = _checked(w, hessian, format, damping, scale_dtype)
    q = _of_factor(w, *_ordered_factor(hessian, act_order, damping), format, act_order, clip_search, scale_dtype)
    return q if format.offset else kept(w, q)


def gptq_mixed(
    w: Tensor,
    hessian: Tensor,
    channels: Tensor,
    low: GemmFormat | str,
    high: GemmFormat | str,
    act_order: bool = True,
    clip_search: bool = False,
    damping: float = DAMPING,
    scale_dtype: torch.dtype | None = None,
) -> MixedTensor:
    """``w`` [n, k] with its output ``channels`` (whole numbers) in ``high`` and the others in ``low``,
    each as ``gptq`` has it, with one factorization of ``hessian`` for both: channels do not make up
    for each other's errors.

    One x serves both parts, so that columns keep their places: ``act_order`` is for two formats with
    one scale for each channel, and says nothing where groups share scales. Raises as ``gptq`` does,
    and ``ValueError`` for channels that are not some of 0 to n - 1, each at most once.
    """
    expect_tensors(w=w, hessian=hessian, channels=channels)
    formats = (format_of(low), format_of(high))
    for format in formats:
        held = _checked(w, hessian, format, damping, scale_dtype)
    act_order = act_order and all(format.group_size == PER_CHANNEL for format in formats)
    order, count = split_channels(channels.to(w.device), len(w))
    factored = _ordered_factor(hessian, act_order, damping)
    low_part, high_part = (
        _of_factor(w[rows], *factored, format, act_order, clip_search, held) if len(rows) else None
        for format, rows in zip(formats, (order[:count], order[count:]), strict=True)
    )
    return MixedTensor(low_part, high_part, order)


def _ordered_factor(hessian: Tensor, act_order: bool, damping: float) -> tuple[Tensor, Tensor]:
    """(the order in which columns are rounded, int64 [k]; ``_inverse_factor`` in it)."""
    hessian = hessian.detach().double()
    largest = float(hessian.diagonal().max())
    hessian = hessian / largest if largest > 0 else hessian  # its square root, and that of its inverse, may be out of fp32
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(len(hessian), device=hessian.device)
    return order, _inverse_factor(hessian, diagonal, order, damping)


def _of_factor(
    w: Tensor, order: Tensor, factor: Tensor, format: GemmFormat, act_order: bool, clip_search: bool, scale_dtype: torch.dtype
) -> QuantizedTensor:
    """``gptq`` with the Hessian's factor, columns in ``order``."""
    columns = w.detach().float().t()[order].contiguous()  # [k, n]: a column of the weight is a contiguous row
    rows: Tensor | None = None
    if format.offset:  # the row's scale is a factor of all its errors: what is compensated are levels
        rows = row_scales(w.detach().float())
        columns /= rows
    codes, scales, zeros = _compensated(columns, factor, format, scale_dtype, CLIP_FACTORS if clip_search else CLIP_FACTORS[:1])
    perm: Tensor | None = order if act_order else None
    if perm is not None and format.group_size == PER_CHANNEL:
        codes, perm = torch.empty_like(codes).index_copy_(0, perm, codes), None
    return QuantizedTensor(codes.t().contiguous(), scales, None if format.symmetric else zeros, format, perm, rows)


def _checked(w: Tensor, hessian: Tensor, format: GemmFormat, damping: float, scale_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the scales, after everything that ``gptq`` refuses at once."""
    if not format.integer or (format.row_scaled and not format.offset):
        raise ValueError(
            f"format is {format.name}; accepted: formats of integers, such as 'w4a16_g128' and 'w4a8_lqq_g64' (others: "
            "tilebit.weights.quantize)"
        )
    if w.ndim != 2 or not w.is_floating_point() or w.numel() == 0:
        raise ValueError(f"w is {w.dtype} {list(w.shape)}; accepted: a floating point [n, k] tensor with n >= 1 and k >= 1")
    k = w.shape[1]
    check_sums(format, k)
    if tuple(hessian.shape) != (k, k) or not hessian.is_floating_point() or hessian.device != w.device:
        raise ValueError(
            f"hessian is {hessian.dtype} {list(hessian.shape)} on {hessian.device}; accepted for this w: floating point [{k}, {k}] on "
            f"{w.device}"
        )
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("hessian has NaN or infinite values; accepted: X^T X of finite inputs (fp16 overflow is the usual cause)")
    if not 0 <= damping < inf:
        raise ValueError(f"damping is {damping!r}; accepted: a finite number from 0")
    check_finite(w, 0)
    return scale_dtype_of(w, scale_dtype, format)


def _inverse_factor(hessian: Tensor, diagonal: Tensor, order: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor U of the damped Hessian's inverse, U^T U = H^-1, columns in
    ``order``; fp32 [k, k]. Row j holds, over its diagonal, what a unit of column j's error asks of
    the columns behind it."""
    h = hessian[order][:, order]
    reached = diagonal > 0
    mean = float(diagonal[reached].mean()) if bool(reached.any()) else 1.0
    h.diagonal().add_((~reached)[order].double() * mean + damping * mean)
    h.div_(1 + damping)
    lower, failed = torch.linalg.cholesky_ex(h)
    if int(failed):
        raise ValueError(f"hessian is not positive definite with damping {damping}; accepted: X^T X of any x, with a larger damping")
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()


def _compensated(
    columns: Tensor, factor: Tensor, format: GemmFormat, scale_dtype: torch.dtype, factors: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 [k, n], scales [n, groups], zero points or offsets uint8 [n, groups]) of
    ``columns`` fp32 [k, n], which is overwritten (algorithm 1 of the paper)."""
    k, n = columns.shape
    width = k if format.group_size == PER_CHANNEL else format.group_size
    codes = torch.empty(k, n, dtype=torch.uint8, device=columns.device)
    scales = torch.empty(n, format.groups(k), dtype=torch.uint8 if format.offset else scale_dtype, device=columns.device)
    zeros = torch.empty(n, format.groups(k), dtype=torch.uint8, device=columns.device)
    # What the output loses is the sum of the columns' squared errors over those of the factor's diagonal: what the columns behind
    # cannot make up for. The Hessian's own diagonal would be their weight if nothing were made up for.
    importance = factor.diagonal() ** -2
    # A dozen launches for each column and some hundred for the search in a group are what quantizing takes on a GPU.
    search = Replayed(lambda block, importance: search_groups(block, format, scale_dtype, factors=factors, importance=importance))
    rounds = Replayed(partial(_rounded, format=format))
    columns_at_once = min(width, BLOCK)
    for start in range(0, k, columns_at_once):
        own = slice(start, min(k, start + columns_at_once))
        group = start // width
        if start % width == 0:  # the columns of this group hold all that those before them left to make up for
            shared = slice(start, min(k, start + width))
            block = columns[shared].t()[:, None, :].contiguous()
            _, scale, zero = search(block, importance[shared])
            check_scales(scale)
            scales[:, group : group + 1], zeros[:, group : group + 1] = scale, zero
        codes[own], errors = rounds(columns[own], factor[own, own], scales[:, group].float(), zeros[:, group].float())
        columns[own.stop :].addmm_(factor[own, own.stop :].t(), errors, alpha=-1)
    return codes, scales, zeros


def _rounded(left: Tensor, within: Tensor, step: Tensor, zero: Tensor, format: GemmFormat) -> tuple[Tensor, Tensor]:
    """(codes uint8, errors over the factor's diagonal fp32) of ``left`` fp32 [columns, n], which is overwritten, with
    the factor's part ``within`` [columns, columns]."""
    codes, errors = torch.empty_like(left, dtype=torch.uint8), torch.empty_like(left)
    for j in range(left.shape[0]):
        chosen = nearest_codes(left[j], step, zero, format)
        codes[j] = chosen.to(torch.uint8)
        errors[j] = (left[j] - format.weight_of(chosen, step, zero)) / within[j, j]
        left[j + 1 :].addr_(within[j, j + 1 :], errors[j], alpha=-1)
    return codes, errors
