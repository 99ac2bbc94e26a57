"""One stored layer of 8-bit weights that are not packed -> ``QuantizedTensor``: compressed-tensors'
int-quantized and float-quantized W8A8, and Hugging Face's blocks of fp8."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..layouts.formats import STEP_K, GemmFormat
from .checkpoint_config import CheckpointError
from .checkpoint_layers import PARTS
from .quantize import SCALE_DTYPES, QuantizedTensor

W8A8 = GemmFormat.parse("w8a8_channel")


def decode_int8(name: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
    """``weight`` int8 [n, k]; ``weight_scale`` fp16, bf16 or fp32 [n, 1], or [n], or one for the whole
    weight. Codes are the weight plus 128, the zero point that the format has everywhere. Raises
    ``CheckpointError`` for anything else, scales of activations among it: they are quantized at a
    call."""
    weight = _weight(name, tensors, torch.int8)
    scales = _of_channels(name, tensors.get("weight_scale"), len(weight))
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and bool(zeros.ne(0).any()):
        raise CheckpointError(
            f"{name}: weight_zero_point has values other than 0; accepted: symmetric int8 weights: quantize the model again with them"
        )
    return QuantizedTensor((weight.to(torch.int16) + 128).to(torch.uint8), scales, None, W8A8)


def decode_fp8(name: str, kind: str, tensors: Mapping[str, Tensor], format: GemmFormat) -> QuantizedTensor:
    """``weight`` float8_e4m3fn [n, k], whose bytes are the codes; ``weight_scale``, or of ``kind`` "fp8"
    ``weight_scale_inv``, which weights are multiplied by as well: of ``format`` w8a8_fp8 as
    ``decode_int8``'s, of w8a8_fp8_g128 [ceil(n / 128), ceil(k / 128)], which the 128 channels of a block
    repeat. Raises ``CheckpointError`` for anything else."""
    weight, part = _weight(name, tensors, torch.float8_e4m3fn), PARTS[kind][1]
    (n, k), scales = weight.shape, tensors.get(part)
    if not format.x_grouped:
        return QuantizedTensor(_finite_codes(name, weight), _of_channels(name, scales, n), None, format)
    blocks = (-(-n // STEP_K), -(-k // STEP_K))
    if scales is None or scales.dtype not in SCALE_DTYPES or tuple(scales.shape) != blocks:
        raise CheckpointError(
            f"{name}: {part} is {_describe(scales)}; accepted: float16, bfloat16 or float32 {list(blocks)}, one for each {STEP_K} x "
            f"{STEP_K} of the weight [{n}, {k}]: copy the checkpoint again"
        )
    _check_finite(name, part, scales)
    return QuantizedTensor(_finite_codes(name, weight), scales.repeat_interleave(STEP_K, 0)[:n].contiguous(), None, format)


def _weight(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The stored weight [n, k] of a layer whose activations are quantized at each call."""
    weight = tensors.get("weight")
    if weight is None or weight.dtype != dtype or weight.ndim != 2 or 0 in weight.shape:
        wanted = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{name}: the weight is {_describe(weight)}; accepted: {wanted} [n, k]: copy the checkpoint again")
    if "input_scale" in tensors:
        raise CheckpointError(
            f"{name}: input_scale is {_describe(tensors['input_scale'])}: its activations have a scale of the checkpoint; accepted: "
            "activations that are quantized at each call, dynamic per token: quantize the model again so"
        )
    return weight


def _of_channels(name: str, scales: Tensor | None, n: int) -> Tensor:
    """[n, 1] of the scale of each channel, or of that of all."""
    if scales is None or scales.dtype not in SCALE_DTYPES or scales.numel() not in (1, n) or scales.ndim > 2 or n not in (*scales.shape, n):
        raise CheckpointError(
            f"{name}: weight_scale is {_describe(scales)}; accepted: float16, bfloat16 or float32 [{n}, 1] or [1]: copy the checkpoint "
            "again"
        )
    _check_finite(name, "weight_scale", scales)
    return scales.reshape(-1, 1).expand(n, 1).contiguous()


def _check_finite(name: str, part: str, scales: Tensor) -> None:
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{name}: {part} holds NaN or infinite values; accepted: finite ones: copy the checkpoint again")


def _finite_codes(name: str, weight: Tensor) -> Tensor:
    codes = weight.view(torch.uint8)
    if bool((codes & 0x7F == 0x7F).any()):
        raise CheckpointError(f"{name}: the weight holds NaN; accepted: finite numbers: quantize the model again")
    return codes


def _describe(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
