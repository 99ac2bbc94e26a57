"""One packed weight for the two formats of a mixed layer (MixLLM, Zheng et al. 2024,
arXiv:2412.14590, section 3.4): an 8-bit code is two 4-bit codes, its high and its low nibble, so
that an 8-bit output channel is the sum of two 4-bit ones, exactly.

With q = 16 h + l and the middle 128 as zero point, (q - 128) s = (h - 8) 16 s + l s.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..accepted import expect, expect_tensors
from ..layouts.formats import FORMATS, OFFSET_ZERO, GemmFormat
from ..ops.gemm_mixed import check_channels
from ..ops.operands import describe
from ..schedules.gemm.parts import ADDED, GATE_ROWS, NIBBLE, NOWHERE
from .gated import in_turn
from .mixed_tensor import MixedTensor
from .quantize import QuantizedTensor

# By a 4-bit format that 8-bit one whose channels are pairs of its rows: both take the same int8 x, and
# have scales of the same groups, or of channels.
HIGH_OF = {
    FORMATS["w4a8_g128_asym"]: FORMATS["w8a8_g128"],
    FORMATS["w4a8_channel_asym"]: FORMATS["w8a8_channel"],
    FORMATS["w4a8_lqq_g64"]: FORMATS["w8a8_channel"],
    FORMATS["w4a8_lqq_g128"]: FORMATS["w8a8_channel"],
}
BLOCK_ROWS = 2 * GATE_ROWS  # of rows, high nibbles and their low nibbles
_FIELDS = ("codes", "scales", "zeros", "row_scales")


def split_nibbles(weight: MixedTensor, low: GemmFormat | None = None) -> tuple[QuantizedTensor, Tensor]:
    """``weight`` [n, k] as one weight [rows, k] in its 4-bit format, and ``channels`` int32 [rows]: the
    output channel of each row.

    First the 4-bit channels in the order in which ``weight`` has them, padded to a multiple of 16
    rows; then for every 8 of the 8-bit channels 8 rows of high nibbles and the same 8 channels' low
    nibbles (padded where fewer are left). Of low nibbles ``channels`` says ADDED (-1): they belong
    to the row 8 before; of padding, whose weights are 0, NOWHERE (-2). ``low`` is the 4-bit format
    of a weight that has no channels in one; by default the first of ``HIGH_OF`` that fits. Scales
    are of the wider of both parts' dtypes.

    Raises ``TypeError`` and ``ValueError`` for two formats that make no pair, reordered columns
    (``perm``), and scales that are not finite 16 times as large.
    """
    expect("weight", weight, MixedTensor, "a MixedTensor, as calibrate(model, batches, precision=...) gives it")
    expect("low", low, GemmFormat | None, "a GemmFormat, for example GemmFormat.parse('w4a8_g128_asym'), or None")
    format = _format_of_rows(weight, low)
    if any(part.perm is not None for part in weight.parts):
        raise ValueError("a part's columns are reordered (act order); accepted: weights without: quantize with act_order=False")
    dtype = torch.uint8 if format.offset else _widest(weight)
    count, channels, found = 0 if weight.low is None else weight.low.n, weight.channels.to(torch.int32), []
    if weight.low is not None:
        own = {name: held for name in _FIELDS if (held := getattr(weight.low, name)) is not None}
        found.append(_padded({**own, "scales": own["scales"].to(dtype), "channels": channels[:count]}, BLOCK_ROWS, format))
    if weight.high is not None:
        high, second = _nibbles(weight.high, format, dtype)
        added = torch.full_like(channels[count:], ADDED)
        upper = _padded({**high, "channels": channels[count:]}, GATE_ROWS, format)
        lower = _padded({**second, "channels": added}, GATE_ROWS, format)
        found.append({name: in_turn(held, lower[name]) for name, held in upper.items()})
    rows = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    of_rows = rows.pop("channels")
    smooth = weight.parts[0].smooth
    return QuantizedTensor(rows["codes"], rows["scales"], rows.get("zeros"), format, None, rows.get("row_scales"), smooth), of_rows


def dequantize_rows(rows: QuantizedTensor, channels: Tensor) -> Tensor:
    """The weight fp32 [n, k] of ``rows`` [rows, k] and ``channels`` int32 [rows] as ``split_nibbles`` gives
    them, output channels in order: exact with scales of fp16 and bf16 (row scales round as
    ``QuantizedTensor.dequantize`` says). Raises ``TypeError`` and ``ValueError`` for channels that are
    not of these rows."""
    expect("rows", rows, QuantizedTensor, "a QuantizedTensor")
    expect_tensors(channels=channels)
    if channels.shape != (rows.n,) or channels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"channels are {describe(channels)}; accepted: int32 [{rows.n}]")
    stored, added = (where.nonzero().flatten() for where in (channels >= 0, channels == ADDED))
    check_channels(channels, len(stored))
    w = rows.dequantize()
    w[added - GATE_ROWS] += w[added]
    return torch.empty(len(stored), rows.k, device=w.device).index_copy_(0, channels[stored].long(), w[stored])


def holds_nibbles(format: GemmFormat, channels: Tensor, n: int, held: Mapping[str, Tensor | None]) -> bool:
    """Whether rows of the 4-bit ``format`` and ``channels`` [rows], which are right for ``n`` output
    channels, are as ``split_nibbles`` gives them, so that kernels may put the nibbles of a byte together.
    ``held``: the packed weight's scales and zero points [groups, rows or more] and row scales, and the
    rows' bias. Waits for the device."""
    low, rows = (channels == ADDED).nonzero().flatten(), len(channels)
    high, first = low - GATE_ROWS, int(low[0]) // BLOCK_ROWS * BLOCK_ROWS if len(low) else rows
    if rows % BLOCK_ROWS or not 0 <= first - (n - len(low)) < BLOCK_ROWS:  # the single rows, padded
        return False
    upper, lower = channels[first:].view(-1, 2, GATE_ROWS).unbind(1)
    if bool(((upper >= 0) != (lower == ADDED)).any()) or bool((lower >= 0).any()) or len(upper) * GATE_ROWS - len(low) >= GATE_ROWS:
        return False
    there = {name: tensor.to(channels.device) for name, tensor in held.items() if tensor is not None}
    scales, zeros = there["scales"], there["zeros"]
    if format.offset:
        stored = [(scales, high, NIBBLE), (scales, low, 1), (zeros, high, 0), (zeros, low, OFFSET_ZERO)]
    else:
        stored = [(scales, high, scales[..., low] * NIBBLE), (zeros, high, format.symmetric_zero_point), (zeros, low, 0)]
    if "row_scales" in there:
        stored.append((there["row_scales"], high, there["row_scales"][low]))
    if "bias" in there:
        stored.append((there["bias"], low, 0))
    return all(bool((tensor[..., where] == value).all()) for tensor, where, value in stored)


def row_count(low: int, high: int) -> int:
    """Rows of a weight with ``low`` output channels in 4 bits and ``high`` in 8, padding included."""
    return -(-low // BLOCK_ROWS) * BLOCK_ROWS + -(-high // GATE_ROWS) * BLOCK_ROWS


def check_pair(low: GemmFormat, high: GemmFormat) -> None:
    """Raise ``ValueError`` unless channels of ``high`` are pairs of rows of ``low``."""
    if HIGH_OF.get(low) != high:
        accepted = ", ".join(f"'{one.name}' with '{other.name}'" for one, other in HIGH_OF.items())
        raise ValueError(f"the formats are {low.name} and {high.name}; accepted: {accepted}, which take the same int8 x")


def _format_of_rows(weight: MixedTensor, low: GemmFormat | None) -> GemmFormat:
    """The 4-bit format of ``weight``, checked; ``low`` where it has no part in one."""
    if weight.low is not None:
        if low not in (None, weight.low.format):
            raise ValueError(f"low is {low} and the weight's low part {weight.low.format}; accepted: the same, or None")
        low = weight.low.format
    if low is None:
        low = next((one for one, other in HIGH_OF.items() if other == weight.parts[0].format), weight.parts[0].format)
    check_pair(low, HIGH_OF.get(low, low) if weight.high is None else weight.high.format)
    return low


def _widest(weight: MixedTensor) -> torch.dtype:
    """Of both parts' scales."""
    first, *others = (part.scales.dtype for part in weight.parts)
    for other in others:
        first = torch.promote_types(first, other)
    return first


def _nibbles(high: QuantizedTensor, format: GemmFormat, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(rows of high nibbles, rows of low ones) of 8-bit channels, in ``format`` with scales of ``dtype``."""
    shape = (high.n, format.groups(high.k))

    def filled(value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.uint8, device=high.device)

    codes = high.codes >> 4, high.codes & (NIBBLE - 1)
    if format.offset:  # bytes 16 h and l + 128, less 128 each
        both, row_scales = ((NIBBLE, 0), (1, OFFSET_ZERO)), high.scales[:, 0].float()
        found = [
            {"codes": own, "scales": filled(scale), "zeros": filled(offset), "row_scales": row_scales}
            for own, (scale, offset) in zip(codes, both, strict=True)
        ]
        return found[0], found[1]
    scales = high.scales.to(dtype)
    lost = ~torch.isfinite(scales * NIBBLE)
    if bool(lost.any()):
        channel, group = lost.nonzero()[0].tolist()
        raise ValueError(
            f"{int(lost.sum())} of the 8-bit part's scales are not finite in {dtype} when they are {NIBBLE} times as large, the first at "
            f"[{channel}, {group}]: {float(scales[channel, group]):g}; accepted: up to {torch.finfo(dtype).max / NIBBLE:g}: quantize with "
            "scale_dtype=torch.bfloat16, or divide the weight"
        )
    zeros = filled(format.symmetric_zero_point), filled(0)
    return (
        {"codes": codes[0], "scales": scales * NIBBLE, "zeros": zeros[0]},
        {"codes": codes[1], "scales": scales, "zeros": zeros[1]},
    )


def _padded(rows: dict[str, Tensor], multiple: int, format: GemmFormat) -> dict[str, Tensor]:
    """``rows`` and, up to a ``multiple`` of them, rows whose weights are 0."""
    fills = {"zeros": OFFSET_ZERO if format.offset else 0, "channels": NOWHERE}
    more = -len(rows["codes"]) % multiple
    return {name: torch.cat([held, held.new_full((more, *held.shape[1:]), fills.get(name, 0))]) for name, held in rows.items()}
