"""Quantized weights and round-to-nearest quantization.

Grouped round to nearest with an optional clipping search: per group, the shrink factor of its range
that minimizes the squared error of the weights (the weight-clipping step of AWQ, arXiv:2306.00978,
with the weights themselves as the objective, so that no calibration data is needed).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..accepted import expect, expect_tensors, scaled
from ..layouts.formats import PER_CHANNEL, GemmFormat
from .quantize_float import numbers, round_floats, row_scale
from .quantize_lqq import MOST_K, nearest_levels, row_scales, two_levels

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Shrink factors tried by the clipping search, 1.0 first: a factor replaces an earlier one only if
# its error is smaller.
CLIP_FACTORS = tuple(1.0 - 0.025 * step for step in range(21))
# Elements quantized at once: bounds the fp32 temporaries to about 4 x 64 MiB whatever the weight's
# size.
_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """An unpacked quantized weight, w' = (value(codes) - zeros) * scales (* row_scales), with the
    values ``format.weight.values``; of a format with offsets (codes * scales + zeros - 128) *
    row_scales.

    ``codes`` uint8 [n, k]; ``scales`` fp16, bf16 or fp32 [n, groups], one per ``format.group_size``
    values of k (the last group may be shorter); ``zeros`` uint8 [n, groups], or None for a
    symmetric format (the zero point is then ``format.symmetric_zero_point``: ``2 ** (bits - 1)`` of
    integers); with offsets both are uint8. ``perm`` int64 [k] (act-order checkpoints): column j of the codes is column
    ``perm[j]`` of the weight, so that groups are contiguous: y = x[:, perm] @ w'^T. ``row_scales``
    fp32 [n] of a format whose scales have two levels (``format.row_scaled``), else None. ``smooth``
    fp32 [k] of a weight for smoothed inputs, in the order of the codes' columns: x (after ``perm``) is
    multiplied by it before it is quantized, y = (x * smooth) @ w'^T; of formats with 8-bit x alone. All
    tensors are on one device. Raises ``ValueError`` for anything else, codes and zero points above
    ``2 ** bits - 1`` and factors that are not positive and finite included.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: GemmFormat
    perm: Tensor | None = None
    row_scales: Tensor | None = None
    smooth: Tensor | None = None

    def __post_init__(self) -> None:
        optional = {"zeros": self.zeros, "perm": self.perm, "row_scales": self.row_scales, "smooth": self.smooth}
        expect_tensors(tuple(optional), codes=self.codes, scales=self.scales, **optional)
        expect("format", self.format, GemmFormat, "a QuantFormat, for example QuantFormat.parse('w4a16_g128')")
        scaled(self.format)
        if self.codes.ndim != 2 or self.codes.dtype != torch.uint8 or 0 in self.codes.shape:
            raise ValueError(f"codes are {_describe(self.codes)}; accepted: uint8 [n, k] with n >= 1 and k >= 1")
        shape = (self.n, self.format.groups(self.k))
        accepted = (torch.uint8,) if self.format.offset else SCALE_DTYPES
        if tuple(self.scales.shape) != shape or self.scales.dtype not in accepted:
            needed = "uint8" if self.format.offset else "float16, bfloat16 or float32"
            raise ValueError(
                f"scales are {_describe(self.scales)}; {self.format.name} codes [{self.n}, {self.k}] need {needed} {list(shape)}"
            )
        if (self.zeros is None) != self.format.symmetric:
            raise ValueError(
                f"zeros are {'absent' if self.zeros is None else 'given'} but the format is {self.format.name}; "
                "a symmetric format has none, an asymmetric one needs them: pass the format that fits"
            )
        if self.zeros is not None and (tuple(self.zeros.shape) != shape or self.zeros.dtype != torch.uint8):
            raise ValueError(f"zeros are {_describe(self.zeros)}; accepted: uint8 {list(shape)}")
        if (self.row_scales is None) == self.format.row_scaled:
            raise ValueError(
                f"row_scales are {'absent' if self.row_scales is None else 'given'} but the format is {self.format.name}, which "
                f"{'needs them' if self.format.row_scaled else 'has none'}: pass the format that fits"
            )
        if self.row_scales is not None and (tuple(self.row_scales.shape) != (self.n,) or self.row_scales.dtype != torch.float32):
            raise ValueError(f"row_scales are {_describe(self.row_scales)}; accepted: float32 [{self.n}]")
        if self.perm is not None and (tuple(self.perm.shape) != (self.k,) or self.perm.dtype != torch.int64):
            raise ValueError(f"perm is {_describe(self.perm)}; accepted: int64 [{self.k}]")
        devices = {tensor.device for tensor in (self.codes, self.scales, *optional.values()) if tensor is not None}
        if len(devices) > 1:
            named = "codes, scales, zeros, row_scales and perm" if self.format.row_scaled else "codes, scales, zeros and perm"
            raise ValueError(f"{named} are on {sorted(map(str, devices))}; move them to one device")
        if self.smooth is not None:
            expect_factors(self.smooth, self.k, self.format)
        if self.perm is not None:
            expect_order(self.perm, self.k)
        if self.format.bits < 8:
            for what, values in (("codes", self.codes), ("zeros", None if self.format.offset else self.zeros)):
                if values is not None and (top := int(values.max())) > self.format.max_code:
                    raise ValueError(f"{what} reach {top}; {self.format.bits} bits hold 0 to {self.format.max_code}")
        if self.format.offset and self.zeros is not None:
            top = int((self.scales.int() * self.format.max_code + self.zeros).max())
            if top > 255:
                raise ValueError(f"scale and offset of a group make bytes up to {top}; accepted: 255, or one weight carries into the next")

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        return self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same weight on ``device``."""
        held = (self.zeros, self.perm, self.row_scales, self.smooth)
        zeros, perm, rows, smooth = (None if t is None else t.to(device) for t in held)
        return QuantizedTensor(self.codes.to(device), self.scales.to(device), zeros, self.format, perm, rows, smooth)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [n, k] with its columns in their original order, so that y = x @ w^T; exact in
        fp32 (with fp16 or bf16 scales; row scales round each weight once, and so do factors, of an x
        that is not divided)."""
        weight = dequantized(self.codes, self.scales, self.zeros, self.format, self.row_scales)
        if self.smooth is not None:
            weight = weight * self.smooth
        if self.perm is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.perm, weight)
        return weight.to(dtype)


def dequantized(codes: Tensor, scales: Tensor, zeros: Tensor | None, format: GemmFormat, row_scales: Tensor | None = None) -> Tensor:
    """fp32 [n, k] of codes [n, k], ``scales`` and ``zeros`` [n, groups] and ``row_scales`` [n], which are of
    any dtypes."""
    k = codes.shape[1]
    at = None if zeros is None else _per_column(zeros.float(), format, k)
    rows = None if row_scales is None else row_scales[:, None]
    return format.weight_of(numbers(codes, format), _per_column(scales.float(), format, k), at, rows)


def expect_order(perm: Tensor, k: int) -> None:
    """Raise ``ValueError`` for an int64 [k] that is no order of k columns (which is not asked of
    one on meta)."""
    if not perm.is_meta and not torch.equal(perm.sort().values, torch.arange(k, device=perm.device)):
        raise ValueError(f"perm does not hold each of the columns 0..{k - 1} once; accepted: a permutation of them")


def expect_factors(smooth: Tensor, k: int, format: GemmFormat) -> None:
    """Raise ``ValueError`` for factors that are not [k] of a format with 8-bit x, fp32, positive and finite
    (which is not asked of those on meta)."""
    if not format.x:
        raise ValueError(f"smooth is given; {format.name} multiplies 16-bit x, which is not smoothed: pass None, or a format with 8-bit x")
    if smooth.dtype is not torch.float32 or tuple(smooth.shape) != (k,):
        raise ValueError(f"smooth is {_describe(smooth)}; accepted: float32 [{k}]")
    if not smooth.is_meta and not bool(((smooth > 0) & smooth.isfinite()).all()):
        raise ValueError("smooth has factors that are zero, negative, infinite or NaN; accepted: positive, finite ones")


def quantize(w: Tensor, format: GemmFormat, clip_search: bool = False, scale_dtype: torch.dtype | None = None) -> QuantizedTensor:
    """Round ``w`` (floating point [n, k], any device, any strides) to the nearest codes of
    ``format``.

    ``scale_dtype`` is the dtype scales are stored in: by default that of ``w`` if it is fp16 or
    bf16, else float16. Codes are rounded with the *stored* scale, so nothing is lost when it is
    read back. A group's range always includes 0; an all-zero group gets scale 1 and dequantizes to
    0. ``clip_search`` picks each group's shrink factor among ``CLIP_FACTORS`` by squared error:
    never worse than without. Extra memory is bounded (about 0.25 GiB). The result has no graph,
    whatever ``w`` requires. Raises ``ValueError`` for NaN or infinite weights, an empty or
    non-matrix ``w``, scales above the largest of ``scale_dtype``, and a ``w`` so small that all of
    it would be 0. Where only some channels or groups are below the least number of ``scale_dtype``
    (fp16: 6e-8), they may become 0, as a cast to it makes them.

    4-bit floats (ties to even codes, magnitudes above the last code to it): scales of "e8m0" are
    the better of two powers of two (``round_floats``); with row scales, a factor of the whole
    weight makes its largest magnitude the largest code times the largest scale.

    Two integer levels (``w4a8_lqq_*``): as ``quantize_lqq.py`` says; k up to 131,072, for int32
    sums; ``scale_dtype`` says nothing.

    e4m3 (``w8a8_fp8*``): as 4-bit floats with any scales, which are fp32 whatever ``scale_dtype``
    says: one of a channel, or of each 128 values of it.
    """
    expect_tensors(w=w)
    expect("format", format, GemmFormat, "a QuantFormat, for example QuantFormat.parse('w4a16_g128')")
    scaled(format)
    if w.ndim != 2 or not w.is_floating_point() or w.numel() == 0:
        raise ValueError(f"w is {_describe(w)}; accepted: a floating point [n, k] tensor with n >= 1 and k >= 1")
    scale_dtype = scale_dtype_of(w, scale_dtype, format)
    n, k = w.shape
    check_sums(format, k)
    groups, w = format.groups(k), w.detach()
    if format.offset:
        return _two_levels(w, format, CLIP_FACTORS if clip_search else CLIP_FACTORS[:1])
    codes = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    scales = torch.empty(n, groups, dtype=scale_dtype, device=w.device)
    zeros = None if format.symmetric else torch.empty(n, groups, dtype=torch.uint8, device=w.device)
    row = row_scale(w, format) if format.row_scaled else 1.0
    group = k if format.group_size == PER_CHANNEL else format.group_size
    rows = max(1, _CHUNK_ELEMENTS // (groups * group))
    for start in range(0, n, rows):
        part = slice(start, min(n, start + rows))
        block = w[part].float()
        check_finite(block, start)
        # Padding a short last group with zeros changes neither its range (which includes 0) nor its
        # error (0 is represented exactly).
        block = torch.nn.functional.pad(block, (0, groups * group - k)).view(-1, groups, group)
        chosen = search_groups(block, format, scale_dtype, row, CLIP_FACTORS if clip_search else CLIP_FACTORS[:1])
        check_scales(chosen[1], start)
        codes[part] = chosen[0].view(block.shape[0], -1)[:, :k]
        scales[part] = chosen[1]
        if zeros is not None:
            zeros[part] = chosen[2]
    rows_held = torch.full((n,), row, dtype=torch.float32, device=w.device) if format.row_scaled else None
    return kept(w, QuantizedTensor(codes, scales, zeros, format, row_scales=rows_held))


def kept(w: Tensor, q: QuantizedTensor) -> QuantizedTensor:
    """``q``, which ``w`` became. Raises ``ValueError`` where scales did not reach down to it: some
    of ``w`` is not 0, and all of ``q`` is."""
    info = torch.finfo(q.scales.dtype)
    low, high = torch.aminmax(w.detach())
    largest, least = max(-float(low), float(high)), info.smallest_normal * info.eps
    if 0 < largest < least and not bool(q.dequantize().any()):
        raise ValueError(
            f"w has magnitudes up to {largest:g}, which scales of {q.scales.dtype}, from {least:g} on, make 0, all of them; rescale the "
            f"weight or pass scale_dtype=torch.bfloat16"
        )
    return q


def _two_levels(w: Tensor, format: GemmFormat, factors: tuple[float, ...]) -> QuantizedTensor:
    (n, k), group = w.shape, format.group_size
    groups = format.groups(k)
    codes = torch.empty(n, k, dtype=torch.uint8, device=w.device)
    scales, zeros = (torch.empty(n, groups, dtype=torch.uint8, device=w.device) for _ in range(2))
    rows_held = torch.empty(n, dtype=torch.float32, device=w.device)
    columns = torch.arange(groups * group, device=w.device)
    valid = (columns < k).view(groups, group).float()
    rows = max(1, _CHUNK_ELEMENTS // (groups * group))
    for start in range(0, n, rows):
        part = slice(start, min(n, start + rows))
        block = w[part].float()
        check_finite(block, start)
        rows_held[part] = row_scales(block)
        # a short last group repeats its last weight, which is in its range
        levels = (block / rows_held[part, None]).index_select(1, columns.clamp(max=k - 1)).view(-1, groups, group)
        found, scales[part], zeros[part] = two_levels(levels, factors, valid)
        codes[part] = found.view(block.shape[0], -1)[:, :k]
    return QuantizedTensor(codes, scales, zeros, format, row_scales=rows_held)


def scale_dtype_of(w: Tensor, chosen: torch.dtype | None, format: GemmFormat) -> torch.dtype:
    """The dtype that scales of ``w`` are stored in: ``chosen``, else as ``quantize`` says. Raises
    ``ValueError`` for one that is none of ``SCALE_DTYPES``."""
    if chosen is not None and chosen not in SCALE_DTYPES:
        raise ValueError(f"scale_dtype is {chosen}; accepted: {', '.join(map(str, SCALE_DTYPES))}")
    if format.parameter_dtype("") == "float32":
        return torch.float32
    return chosen or (w.dtype if w.dtype in (torch.float16, torch.bfloat16) else torch.float16)


def search_groups(
    block: Tensor,
    format: GemmFormat,
    scale_dtype: torch.dtype,
    row: float = 1.0,
    factors: tuple[float, ...] = CLIP_FACTORS,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [rows, groups, group], scales [rows, groups], zero points or offsets uint8 [rows,
    groups]) of ``block`` fp32 [rows, groups, group] with the least squared error over ``factors``;
    errors weigh ``importance`` fp32 [group] where it is given. Of a format with offsets ``block`` is
    of weights over their row's scale."""
    if format.offset:
        return two_levels(block, factors, importance)
    low, high = block.amin(-1).clamp_(max=0), block.amax(-1).clamp_(min=0)
    best = _round(block, low, high, format, scale_dtype, row)
    if len(factors) == 1:
        return best
    best_error = _error(block, *best, format, row, importance)
    for factor in factors[1:]:
        trial = _round(block, low * factor, high * factor, format, scale_dtype, row)
        error = _error(block, *trial, format, row, importance)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = (
            torch.where(better[..., None], trial[0], best[0]),
            torch.where(better, trial[1], best[1]),
            torch.where(better, trial[2], best[2]),
        )
    return best


def _round(
    block: Tensor, low: Tensor, high: Tensor, format: GemmFormat, scale_dtype: torch.dtype, row: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, stored scales and zero points of ``block`` for the range [low, high] of each group."""
    if not format.integer:
        codes, scale = round_floats(block, torch.maximum(-low, high), format, scale_dtype, row)
        return codes, scale, torch.zeros_like(scale, dtype=torch.uint8)
    # Symmetric: half the code range on either side. The positive end lies half a step above the
    # last code, an error rounding has anyway.
    exact = torch.maximum(-low, high) * (2.0 / format.max_code) if format.symmetric else (high - low) / format.max_code
    info = torch.finfo(scale_dtype)
    scale = torch.where(exact > 0, exact.clamp(min=info.smallest_normal * info.eps), 1.0).to(scale_dtype)
    step = scale.float()
    if format.symmetric:
        zero = torch.full_like(step, float(format.symmetric_zero_point))
    else:
        zero = (-low / step).round_().clamp_(0, format.max_code)
    return nearest_codes(block, step[..., None], zero[..., None], format).to(torch.uint8), scale, zero.to(torch.uint8)


def nearest_codes(values: Tensor, step: Tensor, zero: Tensor, format: GemmFormat) -> Tensor:
    """The codes, as fp32 whole numbers, of integer weights: ``values``, ``step`` (the stored scale)
    and ``zero`` are fp32 and broadcast. With offsets, ``zero`` is one, and values are over their
    row's scale."""
    if format.offset:
        return nearest_levels(values, step, zero)
    return (values / step).round_().add_(zero).clamp_(0, format.max_code)


def check_sums(format: GemmFormat, k: int) -> None:
    """Raise ``ValueError`` where int32 sums of ``k`` products may overflow."""
    if format.integer_sums and not format.x_grouped and k > MOST_K:
        raise ValueError(f"k is {k}; accepted for int32 sums: up to {MOST_K}")


def check_scales(scales: Tensor, first_row: int = 0) -> None:
    """Raise ``ValueError`` for a scale of [rows, groups] that its dtype cannot hold."""
    if not bool(torch.isfinite(scales).all()):
        raise ValueError(
            f"a group of rows {first_row}..{first_row + len(scales) - 1} needs a scale above {torch.finfo(scales.dtype).max:g}, the "
            f"largest {scales.dtype}; rescale the weight or pass scale_dtype=torch.bfloat16"
        )


def _error(
    block: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, format: GemmFormat, row: float, importance: Tensor | None = None
) -> Tensor:
    """Squared error of each group, fp32 [rows, groups]."""
    restored = format.weight_of(numbers(codes, format), scale[..., None].float() * row, zero[..., None])
    squares = restored.sub_(block).square_()
    return (squares if importance is None else squares.mul_(importance)).sum(-1)


def _per_column(values: Tensor, format: GemmFormat, k: int) -> Tensor:
    """[n, groups] -> something that broadcasts against [n, k]."""
    return values if format.group_size == PER_CHANNEL else values.repeat_interleave(format.group_size, dim=1)[:, :k]


def check_finite(block: Tensor, first_row: int) -> None:
    finite = torch.isfinite(block)
    if not bool(finite.all()):
        bad = (~finite).nonzero()
        row, column = bad[0].tolist()
        raise ValueError(
            f"w has {len(bad)} NaN or infinite values in rows {first_row}..{first_row + len(block) - 1}, the first at [{first_row + row}, "
            f"{column}]; "
            "only finite weights can be quantized (fp16 overflow while loading is the usual cause)"
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
