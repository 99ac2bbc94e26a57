"""One stored layer of compressed-tensors' int-quantized W8A8 -> ``QuantizedTensor``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..layouts.formats import GemmFormat
from .checkpoint_config import CheckpointError
from .quantize import SCALE_DTYPES, QuantizedTensor

W8A8 = GemmFormat.parse("w8a8_channel")


def decode_int8(name: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """``weight`` int8 [n, k]; ``weight_scale`` fp16, bf16 or fp32 [n, 1], or [n], or one for the whole
    weight. Codes are the weight plus 128, the zero point that the format has everywhere. Raises
    ``CheckpointError`` for anything else, scales of activations among it: they are quantized at a
    call."""
    weight, scales, zeros = (tensors.get(part) for part in ("weight", "weight_scale", "weight_zero_point"))
    if weight is None or weight.dtype != torch.int8 or weight.ndim != 2 or 0 in weight.shape:
        raise CheckpointError(f"{name}: the weight is {_describe(weight)}; accepted: int8 [n, k]: copy the checkpoint again")
    n = len(weight)
    if scales is None or scales.dtype not in SCALE_DTYPES or scales.numel() not in (1, n) or scales.ndim > 2 or n not in (*scales.shape, n):
        raise CheckpointError(
            f"{name}: weight_scale is {_describe(scales)}; accepted: float16, bfloat16 or float32 [{n}, 1] or [1]: copy the checkpoint "
            "again"
        )
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{name}: weight_scale holds NaN or infinite values; accepted: finite ones: copy the checkpoint again")
    if zeros is not None and bool(zeros.ne(0).any()):
        raise CheckpointError(
            f"{name}: weight_zero_point has values other than 0; accepted: symmetric int8 weights: quantize the model again with them"
        )
    if "input_scale" in tensors:
        raise CheckpointError(
            f"{name}: input_scale is {_describe(tensors['input_scale'])}: its activations have a scale of the checkpoint; accepted: "
            "activations that are quantized at each call, dynamic per token: quantize the model again so"
        )
    codes = (weight.to(torch.int16) + 128).to(torch.uint8)
    return QuantizedTensor(codes, scales.reshape(-1, 1).expand(n, 1).contiguous(), None, W8A8)


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
