"""One stored layer of 4-bit floats -> ``QuantizedTensor``: compressed-tensors' mxfp4 and nvfp4
storage, and gpt-oss's."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..layouts.checkpoints import checkpoint_layout
from ..layouts.formats import GemmFormat
from .checkpoint_config import CheckpointError
from .packed import unpack_words
from .quantize import QuantizedTensor
from .quantize_float import E4M3_UNIT, power_of_two

MXFP4, NVFP4 = GemmFormat.parse("w4a16_mxfp4"), GemmFormat.parse("w4a16_nvfp4")
_NAN = 0xFF  # of e8m0
_SCALES = {MXFP4: torch.uint8, NVFP4: torch.float8_e4m3fn}


def decode_floats(name: str, weight: Tensor | None, scales: Tensor | None, factor: Tensor | None, format: GemmFormat) -> QuantizedTensor:
    """``weight`` uint8 [n, k/2] or [n, groups, 16], two codes a byte, that of the lower k in the
    low bits.

    ``scales`` [n, groups]: uint8, exponents biased by 127 (mxfp4), or float8_e4m3fn (nvfp4), whose
    scales are divided by ``factor`` fp32 [1]. Raises ``CheckpointError`` for anything else.
    """
    refuse_stack(name, weight if weight is None else tuple(weight.shape))
    if weight is None or weight.dtype != torch.uint8 or weight.ndim < 2 or 0 in weight.shape:
        _refuse(name, "the packed weight", weight, "uint8 [n, k / 2] or [n, groups, 16]")
    weight = weight.reshape(len(weight), -1)
    n, k = len(weight), 2 * weight.shape[1]
    if scales is None or scales.dtype != _SCALES[format] or k % format.group_size or tuple(scales.shape) != (n, k // format.group_size):
        accepted = str(_SCALES[format]).removeprefix("torch.")
        _refuse(name, "scales", scales, f"{accepted} {[n, k // format.group_size]} for {format.name} [{n}, {k}], k whole groups")
    codes = unpack_words(weight.contiguous().view(torch.int32), checkpoint_layout("compressed-tensors", 4).weight, n, k)
    bad = scales == _NAN if format == MXFP4 else ~torch.isfinite(scales.float())
    if bool(bad.any()):
        raise CheckpointError(f"{name}: {int(bad.sum())} scales are NaN; accepted: finite ones: copy or quantize the model again")
    if format == MXFP4:
        return QuantizedTensor(codes, power_of_two(scales.int() - 127), None, format)
    if factor is None or factor.dtype != torch.float32 or factor.numel() != 1:
        _refuse(name, "weight_global_scale", factor, "float32 [1]")
    divisor = float(factor)
    if not 0 < divisor < float("inf"):
        raise CheckpointError(
            f"{name}: weight_global_scale is {divisor:g}; accepted: a positive, finite one: copy or quantize the model again"
        )
    rows = torch.full((n,), E4M3_UNIT / divisor, dtype=torch.float32, device=codes.device)
    return QuantizedTensor(codes, (scales.float() / E4M3_UNIT).half(), None, format, row_scales=rows)


def float_format(scales: Tensor | None) -> GemmFormat:
    """What the dtype of the scales implies, for a checkpoint without a config."""
    return NVFP4 if scales is not None and scales.dtype == _SCALES[NVFP4] else MXFP4


def refuse_stack(name: str, shape: tuple[int, ...] | None) -> None:
    """Raise ``CheckpointError`` for the packed weights of all experts in one tensor; gpt-oss's
    dense layers have three axes."""
    if shape and len(shape) > (3 if shape[-1] == 16 else 2):
        raise CheckpointError(
            f"{name} is a stack of {shape[0]} experts, {list(shape)}; accepted: layers of one weight, [n, k / 2] or [n, groups, 16]: "
            "products of expert stacks are not supported yet; leave it out"
        )


def _refuse(name: str, what: str, got: Tensor | None, accepted: str) -> NoReturn:
    described = "absent" if got is None else f"{str(got.dtype).removeprefix('torch.')} {list(got.shape)}"
    raise CheckpointError(f"{name}: {what} is {described}; accepted: {accepted}: copy the checkpoint again")
