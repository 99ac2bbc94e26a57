"""Problems of a GEMM as they are drawn: one whose every sum is exact, and one of random floats such as
a model's layer has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, isfinite, log2
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from ...layouts.formats import E4M3, FP8, OFFSET_ZERO, GemmFormat
from ...layouts.planes import pack_planes
from ...schedules.gemm.codecs import codec_of, packed_layout
from ...schedules.gemm.joined import MOST_PADDING
from ...schedules.gemm.parts import ADDED, CHANNELS, GATE_ROWS, NIBBLE, NOWHERE, RESIDUAL, TOKEN_SCALES
from ...schedules.gemm.workload import Workload
from ...schedules.operands import present
from .gemm import NORM_WEIGHT, NORM_WEIGHTS, Problem

LARGEST_INT8 = 127
# Of e4m3: 128 products up to 64 stay below 2^13, and are summed exactly where tensor cores keep 14 bits.
LARGEST_FP8 = 8
LARGEST_SHORT_SUM = 2**13
_APART = (2, 4, 8, 16, 32, 64, 128, 256)  # columns of x from one that is not zero to the next
LARGEST_FACTOR = 17  # 15 times it is the largest byte
EXACT_INTEGERS = 1 << 24  # every integer up to here is a float32
MAX_HALF = 65504.0
MAX_BIAS = 64  # of the exact problem, an integer
# (largest activation, scales), the most demanding first: scales far apart leave low bits that
# 16-bit sums lose even at small k.
_EXACT_CHOICES = tuple((a, s) for s in ((1 / 16, 1 / 2, 4.0), (1 / 4, 1.0, 4.0), (1.0, 2.0, 4.0), (1.0, 2.0), (1.0,)) for a in (4, 2, 1))
_EXACT_ROW_SCALES = (1 / 4, 1 / 2, 1.0)  # none above 1: sums grow no larger; of tokens too


def exact_problem(workload: Workload, seed: int, arch: str = "cpu", device: str = "cpu") -> Problem:
    """A problem whose every fp32 partial sum is exact, whatever the order of summation, so that a
    right kernel returns the reference rounded once and comparing is ``torch.equal``; but of a gate,
    whose activation rounds in fp32: then a result may be the next number (``Problem.units``).

    Activations are integers |a| <= 4, codes any (of e4m3 whole numbers to LARGEST_FP8), scales powers of two from 1/16 to 4 (less of both
    where k is so long that sums would need more than 24 bits, or an fp16 result would pass 65504).
    Where scales differ within a sum of int8, or sums of e4m3 keep few bits, and k is long, each row of x
    is zero but for one column of a few, others in the next row. Raises ``ValueError`` when k is too long for any of that.
    """
    generator = torch.Generator(device).manual_seed(seed)
    row_scales, apart = torch.tensor(_EXACT_ROW_SCALES, device=device), 1  # and token scales
    summed = replace(workload, k=2 * workload.k) if workload.width else workload  # two rows may be added up
    if workload.format.codebook:
        largest, scales = _exact_codebooks(summed)
    elif workload.format.x:
        largest, unit, apart = _exact_integers(summed)
        row_scales = row_scales * unit
        scales = row_scales.tolist()  # of channels, where they have no row scales
    else:
        largest, scales = _exact_ranges(summed)
    x = torch.randint(-largest, largest + 1, (workload.m, workload.k), generator=generator, device=device)
    if workload.norm:
        x = _normed_rows(workload, x, generator)
    if apart > 1:
        places = torch.arange(workload.k, device=device) + torch.arange(workload.m, device=device)[:, None] + seed
        x *= places % apart == 0
    bias = torch.randint(-MAX_BIAS, MAX_BIAS + 1, (workload.n,), generator=generator, device=device)
    return _problem(workload, arch, generator, x, torch.tensor(scales, device=device), row_scales, bias, _drawn_index, LARGEST_FP8)


def random_problem(workload: Workload, seed: int, arch: str = "cpu", device: str = "cpu") -> Problem:
    """A problem of random floats such as a model's layer has: x (or its codes, 3 deviations at
    their largest) and bias normal, w of deviation about 1 / sqrt(k), any codes and zeros."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(workload.m, workload.k, generator=generator, device=device)
    bias = torch.randn(workload.n, generator=generator, device=device)
    unit = 2.0 / (workload.k**0.5 * (1 << workload.format.bits))
    if workload.format.x:
        top = E4M3[-2] if workload.format.x == FP8 else LARGEST_INT8
        x = (x * (top / 3)).clamp(-top, top)
        x = x if workload.format.x == FP8 else x.round()
        unit = 1.0 / (
            workload.k**0.25 * (64 if workload.format.x != FP8 else 128 if workload.format.bits == 8 else 32)
        )  # of row scales and of token scales, which are multiplied
    scales = unit * (0.5 + torch.rand(1024, generator=generator, device=device))
    if workload.format.codebook:
        scales = torch.randn(1024, generator=generator, device=device) / workload.k**0.5
    scaled = workload.format.row_scaled or workload.token_scales
    row_scales = 0.5 + torch.rand(1024, generator=generator, device=device) if scaled else scales
    if workload.format.x:
        row_scales = row_scales * unit
    return _problem(workload, arch, generator, x, scales, row_scales, bias, layer_index)


def _drawn_index(workload: Workload, generator: torch.Generator) -> Tensor:
    """int32 [n]: of the rows that may be ADDED about half or as many as there are too many of, one
    NOWHERE, and the others columns of y, in no order."""
    if workload.nibbles:
        return _nibbles_index(workload, generator, in_order=False)
    n, width, device = workload.n, workload.width, generator.device
    rows = torch.arange(n, device=device)
    may = rows[rows % (2 * GATE_ROWS) >= GATE_ROWS]
    may = may[torch.randperm(len(may), generator=generator, device=device)]
    added = may[: max(len(may) // 2, n - width)]
    index = torch.full((n,), ADDED, dtype=torch.int32, device=device)
    others = torch.ones(n, dtype=torch.bool, device=device)
    others[added] = False
    count = int(others.sum())
    index[others] = torch.randperm(max(width, count), generator=generator, device=device)[:count].to(torch.int32)
    if len(may) > len(added):
        index[may[-1]] = NOWHERE
    return index.where(index < width, NOWHERE)


def layer_index(workload: Workload, generator: torch.Generator) -> Tensor:
    """int32 [n] as a mixed layer has it (``weights.paired``): columns drawn and ascending, of the last
    rows two for each column where there are more rows than columns."""
    if workload.nibbles:
        return _nibbles_index(workload, generator, in_order=True)
    n, width, device = workload.n, workload.width, generator.device
    groups = max(0, -(-(n - width) // GATE_ROWS))  # of 16 rows, whose last 8 are added to the first
    rows = torch.arange(n, device=device)
    whole, half = n // (2 * GATE_ROWS) * 2 * GATE_ROWS, rows % (2 * GATE_ROWS) < GATE_ROWS
    pairs = (rows >= whole - groups * 2 * GATE_ROWS) & (rows < whole)
    counts = [int(chosen.sum()) for chosen in (~pairs, pairs & half)]
    drawn = torch.randperm(max(width, sum(counts)), generator=generator, device=device)[: sum(counts)].to(torch.int32)
    index = torch.full((n,), ADDED, dtype=torch.int32, device=device)
    index[~pairs], index[pairs & half] = (part.sort().values for part in drawn.split(counts))
    return index.where(index < width, NOWHERE)


def _nibbles_index(workload: Workload, generator: torch.Generator, in_order: bool) -> Tensor:
    """int32 [n] of rows whose pairs are nibbles of bytes: one of the numbers of pairs that so many rows and
    columns may have, with the padding that this leaves; columns ascending ``in_order``, else in none."""
    n, width, device = workload.n, workload.width, generator.device

    def one_of(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator, device=device))

    spare = max(0, n - width)
    most = min(spare // GATE_ROWS, n // (2 * GATE_ROWS))
    least = -(-(spare - MOST_PADDING) // GATE_ROWS) if spare > MOST_PADDING else int(spare >= 2 * GATE_ROWS)
    pairs = one_of(min(least, most), most)
    rest, singles = spare - GATE_ROWS * pairs, n - pairs * 2 * GATE_ROWS
    behind = one_of(max(0, rest - (2 * GATE_ROWS - 1)), min(GATE_ROWS - 1, rest)) if pairs else 0  # of both rows of the last pairs
    padding = rest - behind
    counts = [singles - padding, pairs * GATE_ROWS - behind]
    drawn = torch.randperm(width, generator=generator, device=device)[: sum(counts)].to(torch.int32)
    parts = [part.sort().values if in_order else part for part in drawn.split(counts)]
    index = torch.full((n,), NOWHERE, dtype=torch.int32, device=device)
    of_pairs = torch.arange(singles, n, device=device).view(pairs, 2, GATE_ROWS)
    index[: counts[0]] = parts[0]
    index[of_pairs[:, 0].flatten()[: counts[1]]] = parts[1]
    index[of_pairs[:, 1].flatten()[: counts[1]]] = ADDED
    return index


def _make_nibbles(workload: Workload, operands: dict[str, Tensor]) -> None:
    """Scales and zero points of pairs of rows as nibbles of bytes have them (``weights.paired``), from those
    of the second row."""
    low = (operands[CHANNELS] == ADDED).nonzero().flatten()
    high, f = low - GATE_ROWS, workload.format
    if f.offset:
        operands["scales"][..., low], operands["scales"][..., high] = 1, NIBBLE
        operands["zeros"][..., low], operands["zeros"][..., high] = OFFSET_ZERO, 0
    else:
        operands["scales"][..., high] = operands["scales"][..., low] * NIBBLE
        operands["zeros"][..., low], operands["zeros"][..., high] = 0, f.symmetric_zero_point
    if f.row_scaled:
        operands["row_scales"][high] = operands["row_scales"][low]
    if workload.bias:
        operands["bias"][low] = 0


def _exact_ranges(workload: Workload) -> tuple[int, tuple[float, ...]]:
    """(largest activation, scales) that keep every sum of this workload exact in fp32 and, where
    possible, finite in fp16."""
    f = workload.format
    widest, unit, limit = f.largest, f.unit, codec_of(f).largest_scale
    smallest = min(_EXACT_ROW_SCALES) ** (f.row_scaled + workload.token_scales)
    offset = _most_added(workload) / smallest  # of the sum that row and token scales make smallest
    choices = [(a, s) for a, s in _EXACT_CHOICES if not workload.norm or a == 2 * NORM_WEIGHTS]
    tried = [(a, kept) for a, s in choices if (kept := tuple(value for value in s if value <= limit))]
    exact = [(a, s) for a, s in tried if (workload.k * a * widest * max(s) + offset) / (min(s) * unit) < EXACT_INTEGERS]
    if not exact:
        longest = int((EXACT_INTEGERS * unit - offset - 1) / widest)
        raise ValueError(f"k is {workload.k}; accepted by the exact oracle for {f.name}: up to {longest}")
    finite = [(a, s) for a, s in exact if workload.dtype != "float16" or 5 * _deviation(workload.k, f, a, s) < _largest_sum(workload)]
    return (finite or exact[-1:])[0]


def _exact_codebooks(workload: Workload) -> tuple[int, list[int]]:
    """(largest activation, numbers of codebooks), all integers, so few that sums are exact in fp32
    and, where possible, finite in fp16."""
    for largest, number in ((4, 8), (4, 2), (1, 1)):
        most = workload.k * largest * number + _most_added(workload)
        deviation = (workload.k * largest * (largest + 1) * number * (number + 1)) ** 0.5 / 3
        if most / min(_EXACT_ROW_SCALES) < EXACT_INTEGERS and (workload.dtype != "float16" or 5 * deviation < _largest_sum(workload)):
            return largest, list(range(-number, number + 1))
    raise ValueError(f"k is {workload.k}; accepted by the exact oracle for {workload.format.name}: up to {EXACT_INTEGERS // 8}")


def _exact_integers(workload: Workload) -> tuple[int, float, int]:
    """(largest x, unit of row and token scales, columns from one that is not zero to the next) of
    codes for x: int32 sums that fp32 holds (of e4m3 fp32 sums of whole numbers), with the bias at the
    unit that scales make, and where possible results that fp16 holds. All of int8 where k is short
    enough. Of groups, whose scales differ, sums are multiples of the least of them."""
    f, smallest = workload.format, min(_EXACT_ROW_SCALES) ** 2
    scaled, widest = f.step_sums, LARGEST_FP8 if f.x == FP8 else 128 if workload.nibbles else f.largest
    tried = [(largest, 1) for largest in ((LARGEST_FP8,) if f.x == FP8 else (LARGEST_INT8, 31, 7)) + (4, 2, 1)]
    for largest, apart in tried + [(1, apart) for apart in _APART if scaled or f.short_sums]:
        most = -(-workload.k // apart) * largest * (widest / smallest if scaled else widest if f.x == FP8 else 128)
        if f.short_sums and most > LARGEST_SHORT_SUM:
            continue
        unit = 2.0 ** -max(0, ceil(log2(most / 8 / _largest_sum(workload)) / 2)) if workload.dtype == "float16" else 1.0
        if most + _most_added(workload) / (smallest * unit * unit) < EXACT_INTEGERS:
            return largest, unit, apart
    raise ValueError(f"k is {workload.k}; accepted by the exact oracle for {f.name}: up to {EXACT_INTEGERS // 256}")


def _codes_among(words: Tensor, f: GemmFormat, whole_to: int) -> Tensor:
    """``words`` of 8-bit codes with a finite number for each; with ``whole_to`` a whole one up to it."""
    kept = [q for q, v in enumerate(f.weight.values) if isfinite(v) and (not whole_to or (v == int(v) and abs(v) <= whole_to))]
    table = torch.tensor(kept, dtype=torch.uint8, device=words.device)
    return table[words.view(torch.uint8).int() % len(kept)].view(torch.int32)


def _most_added(workload: Workload) -> int:
    """By bias and residual of the exact problem."""
    return MAX_BIAS * (1 + workload.residual)


def _largest_sum(workload: Workload) -> float:
    """Of which an fp16 y may be made: of a gate and of what it gates the product is one."""
    return MAX_HALF**0.5 if workload.gate else MAX_HALF


def _normed_rows(workload: Workload, x: Tensor, generator: torch.Generator) -> Tensor:
    """Signs of x times 0, one and two units, in no order, so many of each that the mean square is a unit's,
    which is a power of four, other ones in neighbouring rows, and so large that eps is lost in it: what
    the norm divides by is that unit."""
    unit, twos = 16, workload.k // 8
    while unit * unit < workload.eps * EXACT_INTEGERS * 4:
        unit *= 2
    sizes = torch.zeros(workload.k, dtype=torch.int64, device=x.device)
    sizes[:twos], sizes[twos : workload.k - 3 * twos] = 2, 1
    order = torch.rand(x.shape, generator=generator, device=x.device).argsort(-1)
    rows = unit << (torch.arange(workload.m, device=x.device) % 3)
    return torch.where(x < 0, -sizes[order], sizes[order]) * rows[:, None]


def _deviation(k: int, f: GemmFormat, largest: int, scales: tuple[float, ...]) -> float:
    """Standard deviation of one output of the exact problem."""
    codes = (f.max_code + 1) ** 2 / (12 if f.symmetric else 6) if f.integer else fmean(value * value for value in f.weight.values)
    activations = largest * (largest + 1) / 3
    return (k * codes * activations * sum(s * s for s in scales) / len(scales)) ** 0.5


def _problem(
    workload: Workload,
    arch: str,
    generator: torch.Generator,
    x: Tensor,
    scales: Tensor,
    row_scales: Tensor,
    bias: Tensor,
    index: Callable[[Workload, torch.Generator], Tensor],
    whole_to: int = 0,
) -> Problem:
    """Random packed codes and zero points beside the given x and bias, with scales and row scales
    (and token scales) drawn from the values given; ``index`` draws channels. ``whole_to``: of e4m3 only whole numbers up to it
    (0: any finite ones)."""
    f, device, dtype = workload.format, x.device, getattr(torch, workload.dtype)
    layout, stated = packed_layout(arch, f), {o.name: o for o in present(workload.operands(arch))}
    words = torch.randint(-(1 << 31), 1 << 31, stated["weight"].shape, generator=generator, device=device).to(torch.int32)
    if f.weight.kind == "e4m3":
        words = _codes_among(words, f, whole_to)
    if layout.padded(workload.n, workload.k) != (workload.n, workload.k):
        ones = np.full((workload.n, workload.k), f.max_code, dtype=np.uint8)
        inside = pack_planes(ones, f.bits, layout) if f.codebook else layout.pack(ones)
        words &= torch.from_numpy(inside.view(np.int32)).to(device)  # padding codes are 0

    def drawn(name: str, values: Tensor) -> Tensor:
        picked = torch.randint(0, values.numel(), stated[name].shape, generator=generator, device=device)
        parameters = values[picked].to(getattr(torch, stated[name].dtype))
        if f.codebook and name == "scales":
            parameters[workload.n :] = 0
        else:
            parameters[..., workload.n :] = 0
        return parameters

    operands = {"weight": words}
    if f.offset:
        # whatever a quantizer could store: the largest code's byte is at most 255
        factors = torch.arange(LARGEST_FACTOR + 1, device=device)
        operands["scales"] = drawn("scales", factors)
        room = 255 - 15 * operands["scales"].int()
        share = torch.rand(room.shape, generator=generator, device=device)
        operands["zeros"] = (share * (room + 1)).int().clamp(max=255).to(torch.uint8)
    else:
        operands["scales"] = drawn("scales", scales)
    if not (f.symmetric or f.offset):
        operands["zeros"] = drawn("zeros", torch.arange(f.max_code + 1, device=device))
    if f.row_scaled:
        operands["row_scales"] = drawn("row_scales", row_scales)
    if workload.token_scales:
        rows = (f.groups(workload.k), workload.m) if f.x_grouped else (workload.m,)
        picked = torch.randint(0, row_scales.numel(), rows, generator=generator, device=device)
        operands[TOKEN_SCALES] = row_scales[picked]
    if workload.bias:
        operands["bias"] = bias.to(dtype)
    if workload.norm:  # powers of two, by which x remains exact
        weights = torch.tensor([1.0, NORM_WEIGHTS], device=device)
        picked = torch.randint(0, len(weights), (workload.k,), generator=generator, device=device)
        columns = stated[NORM_WEIGHT].shape[0]
        operands[NORM_WEIGHT] = torch.nn.functional.pad(weights[picked], (0, int(columns) - workload.k)).to(dtype)
    if workload.residual:
        picked = torch.randint(0, bias.numel(), (workload.m, workload.n), generator=generator, device=device)
        operands[RESIDUAL] = bias[picked].to(dtype)
    if workload.width:
        operands[CHANNELS] = index(workload, generator)
    if workload.nibbles:
        _make_nibbles(workload, operands)
    return Problem(workload, layout, x.to(getattr(torch, workload.x_dtype)), operands)
