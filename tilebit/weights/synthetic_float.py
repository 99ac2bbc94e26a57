"""Layers of random 4-bit floats as compressed-tensors and gpt-oss store them, with plain shifts;
for ``synthetic``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

FLOAT_FAMILIES = ("mxfp4-pack-quantized", "nvfp4-pack-quantized", "gpt-oss")
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def float_group(family: str) -> int:
    return 16 if family.startswith("nvfp4") else 32


def float_layer(family: str, n: int, k: int, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(tensors by what follows the layer's name, the weight fp32 [n, k]) of random codes, exponents
    and e4m3 numbers."""
    group = float_group(family)
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    packed = torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)
    values = torch.from_numpy(_VALUES[codes])
    if family == "nvfp4-pack-quantized":
        scales = torch.from_numpy(rng.integers(8, 127, (n, k // group), dtype=np.uint8)).view(torch.float8_e4m3fn)
        divisor = torch.tensor([8192.0])
        weight = values * scales.float().repeat_interleave(group, 1) / divisor
        return {".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": divisor}, weight
    exponents = rng.integers(112, 124, (n, k // group), dtype=np.uint8)
    scales = torch.from_numpy(exponents)
    weight = values * torch.from_numpy(np.exp2(exponents.astype(np.float32) - 127)).repeat_interleave(group, 1)
    if family == "gpt-oss":
        return {"_blocks": packed.view(n, k // group, 16), "_scales": scales}, weight
    return {".weight_packed": packed, ".weight_scale": scales}, weight


def float_config(family: str) -> dict[str, Any]:
    if family == "gpt-oss":
        return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"]}
    two_levels = family.startswith("nvfp4")
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": float_group(family),
        "strategy": "tensor_group" if two_levels else "group",
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if two_levels else "torch.uint8",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": family,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": family}},
    }
