"""One stored layer of QServe (arXiv:2405.04532; what its library and DeepCompressor write) ->
``QuantizedTensor``.

Per channel (``w4a8_channel_asym``): w = q * s1 - s1_szeros, where s1_szeros is z * s1, rounded; z is
found again and w = (q - z) * s1 without that rounding.

By groups of 128, two levels (``w4a8_lqq_g128``): w = q8 * s1, and the byte q8 = q * s2 + s2_zeros,
modulo 256 and signed, for the codes of the group. LiquidGEMM's bytes are q * s + o - 128, modulo
nothing, in 0..255 before 128 is taken away for all 16 codes, met or not. So o = s2_zeros + 128, less
256 where that wraps for every code met; and where a code that is not met would leave 0..255, all
codes of the group move by d and o by -d * s2: the weights stay what they are. With s2 up to 16, the
most that ranges of -119..119 take, there is always such a d.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from ..layouts.checkpoints import qserve_layout
from ..layouts.formats import OFFSET_ZERO, GemmFormat
from .checkpoint_config import QSERVE_GROUPS, CheckpointError
from .packed import unpack_words
from .quantize import QuantizedTensor

CHANNEL, GROUPED = (GemmFormat.parse(name) for name in QSERVE_GROUPS.values())
_GROUP = GROUPED.group_size
_LAST, _MOST = GROUPED.max_code, 255  # a code, a byte


def decode_qserve(name: str, tensors: Mapping[str, Tensor], format: GemmFormat | None) -> QuantizedTensor:
    """``qweight`` int8 [n, k / 2] (``qserve_layout``), n and k multiples of 32; ``s1_scales`` fp16 or bf16
    [n]; per channel ``s1_szeros`` [n] of the same type, by groups ``s2_scales`` and ``s2_zeros`` int8 [k
    / 128, n]. ``format``: what the config says, None for none. Raises ``CheckpointError`` where the
    tensors do not fit each other or the config, or hold weights that the format has not."""
    qweight, s1 = tensors.get("qweight"), tensors.get("s1_scales")
    whole = qweight is not None and qweight.dtype == torch.int8 and qweight.ndim == 2 and 0 not in qweight.shape
    if qweight is None or not whole or len(qweight) % 32 or qweight.shape[1] % 16:
        _refuse(name, "qweight", qweight, "int8 [n, k / 2], n and k multiples of 32")
    n, k = len(qweight), 2 * qweight.shape[1]
    if s1 is None or s1.dtype not in (torch.float16, torch.bfloat16) or list(s1.shape) != [n]:
        _refuse(name, "s1_scales", s1, f"float16 or bfloat16 [{n}]")
    if not bool(torch.isfinite(s1).all()) or bool(s1.lt(0).any()):
        raise CheckpointError(
            f"{name}: s1_scales hold negative, NaN or infinite values; accepted: finite ones from 0 on: copy the checkpoint again"
        )
    stored = CHANNEL if "s1_szeros" in tensors else GROUPED
    if format not in (None, stored) or ("s1_szeros" in tensors and "s2_scales" in tensors):
        said = next(group for group, name in QSERVE_GROUPS.items() if format is None or name == format.name)
        raise CheckpointError(
            f"{name} holds {', '.join(sorted(tensors))}; accepted: s1_szeros, or s2_scales and s2_zeros, as group_size says "
            f"({'no config' if format is None else said}; -1: s1_szeros): correct group_size or copy the checkpoint again"
        )
    codes = unpack_words(qweight.contiguous().view(torch.int32), qserve_layout(), n, k)
    if stored is CHANNEL:
        return QuantizedTensor(codes, s1[:, None].contiguous(), _zero_points(name, s1, tensors["s1_szeros"])[:, None], CHANNEL)
    if k % _GROUP:
        raise CheckpointError(f"{name}: k is {k}; accepted by groups of {_GROUP}: multiples of it: copy the checkpoint again")
    s2, zeros = (_by_group(name, part, tensors.get(part), n, k // _GROUP) for part in ("s2_scales", "s2_zeros"))
    codes, scales, offsets, misfit = two_levels(codes.view(n, -1, _GROUP), s2, zeros)
    if bool(misfit.any()):
        row, group = misfit.nonzero()[0].tolist()
        raise CheckpointError(
            f"{name}: {int(misfit.sum())} groups have a scale and a zero point (channel {row}, group {group}: {int(s2[row, group])}, "
            f"{int(zeros[row, group])}) whose weights are not int8 or that {GROUPED.name} does not hold; accepted: first-level weights "
            "from -119 to 119 (scales up to 16): quantize the model again with that range"
        )
    return QuantizedTensor(codes.view(n, k), scales, offsets, GROUPED, row_scales=s1.float())


def _zero_points(name: str, s1: Tensor, scaled: Tensor) -> Tensor:
    """uint8 [n]: the whole numbers that ``scaled`` are of ``s1``, both rounded to their 16 bits."""
    if scaled.dtype != s1.dtype or scaled.shape != s1.shape:
        _refuse(name, "s1_szeros", scaled, f"{str(s1.dtype).removeprefix('torch.')} {list(s1.shape)}")
    info = torch.finfo(s1.dtype)
    scale, product = s1.double(), scaled.double()
    zeros = (product / torch.where(scale > 0, scale, 1.0)).round()
    half_units = [torch.clamp(value.abs() * info.eps, min=info.tiny * info.eps) / 2 for value in (scale, product)]
    wrong = ~((product - zeros * scale).abs() <= 1.01 * (zeros.abs() * half_units[0] + half_units[1])) | (zeros < 0) | (zeros > _LAST)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise CheckpointError(
            f"{name}: s1_szeros of {int(wrong.sum())} channels are no zero point of 0 to {_LAST} times the scale (channel {row}: "
            f"{float(scaled[row]):g} of {float(s1[row]):g}); accepted: zero points that are quantized as codes are: quantize the model "
            "again with them"
        )
    return zeros.to(torch.uint8)


def _by_group(name: str, part: str, stored: Tensor | None, n: int, groups: int) -> Tensor:
    """int32 [n, groups] of int8 [groups, n], in which of 32 channels come 0, 8, 16, 24, 1, 9, ..."""
    if stored is None or stored.dtype != torch.int8 or list(stored.shape) != [groups, n]:
        _refuse(name, part, stored, f"int8 {[groups, n]}")
    return stored.view(groups, n // 32, 8, 4).permute(1, 3, 2, 0).reshape(n, groups).int()


def two_levels(codes: Tensor, s2: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes uint8 [n, groups, group], scales and offsets uint8 [n, groups] of the same weights, and bool
    [n, groups]: groups that have none, whose weights are no int8 or whose scale is above 16 and too
    large. ``codes`` as they are stored, ``s2`` and ``zeros`` int32 [n, groups]."""
    low, high = codes.amin(-1).int(), codes.amax(-1).int()
    offset = zeros + OFFSET_ZERO
    wraps = offset + high * s2 > _MOST
    misfit = (s2 < 0) | (high * s2 > _MOST) | (wraps & (offset + low * s2 <= _MOST))
    offset = torch.where(wraps, offset - _MOST - 1, offset)
    step = s2.clamp(min=1)
    up, down = ((amount.clamp(min=0) + step - 1) // step for amount in (offset + _LAST * s2 - _MOST, -offset))
    move = up - down
    offset = offset - move * s2
    misfit |= (low + move < 0) | (high + move > _LAST) | (offset < 0) | (offset + _LAST * s2 > _MOST)
    return (codes.int() + move[..., None]).to(torch.uint8), s2.to(torch.uint8), offset.to(torch.uint8), misfit


def _refuse(name: str, what: str, got: Tensor | None, accepted: str) -> NoReturn:
    described = "absent" if got is None else f"{str(got.dtype).removeprefix('torch.')} {list(got.shape)}"
    raise CheckpointError(f"{name}: {what} is {described}; accepted: {accepted}: copy the checkpoint again")
