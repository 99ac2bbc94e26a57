"""Small checkpoints of random weights, laid out as AutoAWQ, GPTQModel and llm-compressor write
theirs; nothing is downloaded.

For the demo and the tests. The writers shift and or plain integers the way those tools do and share
nothing with ``layouts.checkpoints``, so that reading one back proves something.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from .synthetic_float import FLOAT_FAMILIES, float_config, float_group, float_layer

FAMILIES = ("awq", "gptq", "gptq_v2", "compressed-tensors", *FLOAT_FAMILIES)
_Tensors = dict[str, torch.Tensor]
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def write_checkpoint(
    path: str | Path,
    family: str,
    layers: Mapping[str, tuple[int, int]],
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    desc_act: bool = False,
    shards: int = 1,
    seed: int = 0,
    bias: bool = False,
    dtype: torch.dtype = torch.float16,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint directory (config.json, model.safetensors or an index and ``shards``
    files) and return each layer's dequantized weight, fp32 [n, k].

    ``layers`` maps names to (n, k); ``family`` is one of ``FAMILIES`` ("gptq" is the v1 zero point
    convention); ``group_size`` is -1 for one group a channel; ``desc_act`` (not AWQ) scatters the
    columns of a group as act-order quantization does; ``dtype`` is that of scales and biases.
    ``FLOAT_FAMILIES`` hold 4-bit floats, of which ``bits``, ``group_size`` and what follows them
    say nothing: leave these out. An unquantized "lm_head.weight" and "model.norm.weight" go with
    them. Raises ``ValueError`` for what the real tools would not write.
    """
    path = Path(path)
    _check(family, layers, bits, group_size, desc_act, shards)
    rng = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    reference: dict[str, torch.Tensor] = {}
    for name, (n, k) in layers.items():
        if family in FLOAT_FAMILIES:
            stored, reference[name] = float_layer(family, n, k, rng)
            tensors.update({f"{name}{suffix}": value for suffix, value in stored.items()})
            if bias:
                tensors[f"{name}{'_' if family == 'gpt-oss' else '.'}bias"] = torch.from_numpy(rng.standard_normal(n, dtype=np.float32)).to(
                    dtype
                )
            continue
        group = k if group_size == -1 else group_size
        weight = rng.standard_normal((n, k), dtype=np.float32) * rng.uniform(0.01, 0.05, (n, 1)).astype(np.float32)
        if not symmetric:  # off-centre, with one-sided channels, whose zero points are the first and the last code
            weight += np.float32(0.01)
            weight[0], weight[-1] = np.abs(weight[0]), -np.abs(weight[-1])
        order = rng.permutation(k) if desc_act else np.arange(k)
        group_of = np.empty(k, dtype=np.int32)
        group_of[order] = np.arange(k) // group
        codes, scales, zeros = _round(weight, order, group, bits, symmetric, dtype)
        write = {"awq": _awq, "gptq": _gptq, "gptq_v2": _gptq_v2, "compressed-tensors": _compressed}[family]
        for suffix, value in write(codes, scales, zeros, group_of, bits, symmetric, desc_act).items():
            tensors[f"{name}.{suffix}"] = value.contiguous()
        if bias:
            tensors[f"{name}.bias"] = torch.from_numpy(rng.standard_normal(n, dtype=np.float32)).to(dtype)
        shifted = torch.from_numpy(codes.astype(np.float32) - zeros[:, group_of])
        reference[name] = shifted * scales.float()[:, torch.from_numpy(group_of)]
    hidden = next(iter(layers.values()))[1]
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    tensors["lm_head.weight"] = torch.from_numpy(rng.standard_normal((8, hidden), dtype=np.float32)).to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    _save(path, tensors, shards)
    quantization = float_config(family) if family in FLOAT_FAMILIES else _config(family, bits, group_size, symmetric, desc_act)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "quantization_config": quantization,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if family.startswith("gptq"):
        (path / "quantize_config.json").write_text(json.dumps(quantization, indent=2))
    return reference


def _check(family: str, layers: Mapping[str, tuple[int, int]], bits: int, group_size: int, desc_act: bool, shards: int) -> None:
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; accepted: {', '.join(FAMILIES)}")
    if family in FLOAT_FAMILIES:
        group_size = float_group(family)
    if bits not in ((4,) if family in ("awq", *FLOAT_FAMILIES) else (4, 8)) or (desc_act and family in ("awq", *FLOAT_FAMILIES)):
        raise ValueError(f"{family} has no {bits}-bit{' act-order' if desc_act else ''} checkpoints")
    if not layers or not 1 <= shards <= len(layers):
        raise ValueError(f"{len(layers)} layers in {shards} shards; accepted: at least one layer and one layer a shard")
    per_word = 32 // bits
    for name, (n, k) in layers.items():
        if group_size != -1 and k % group_size:
            raise ValueError(f"{name}: k is {k}; the tools need a multiple of the group size {group_size}")
        if family not in ("compressed-tensors", *FLOAT_FAMILIES) and (n % per_word or k % per_word):
            raise ValueError(f"{name}: [{n}, {k}] is not a multiple of {per_word} both ways, which {family} needs")


def _round(
    weight: np.ndarray, order: np.ndarray, group: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
    """Codes uint8 [n, k], scales [n, groups], zero points uint8 [n, groups], unsigned; ``group``
    columns along ``order`` make a group."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    parts = weight[:, order].reshape(len(weight), -1, group)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    step = np.maximum(-low, high) * 2 / top if symmetric else (high - low) / top
    scales = torch.from_numpy(np.maximum(step, 1e-5)).to(dtype)
    stored = scales.float().numpy()
    zeros = np.full_like(stored, middle) if symmetric else np.clip(np.round(-low / stored), 0, top)
    codes = np.empty(weight.shape, dtype=np.uint8)
    codes[:, order] = np.clip(np.round(parts / stored[..., None]) + zeros[..., None], 0, top).reshape(weight.shape)
    return codes, scales, zeros.astype(np.uint8)


def _awq(
    codes: np.ndarray, scales: torch.Tensor, zeros: np.ndarray, group_of: np.ndarray, bits: int, symmetric: bool, desc_act: bool
) -> _Tensors:
    def interleaved(values: np.ndarray) -> torch.Tensor:  # [rows, n] -> [rows, n / 8]
        packed = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
        for i in range(8):
            packed |= values[:, _AWQ_ORDER[i] :: 8].astype(np.uint32) << np.uint32(4 * i)
        return torch.from_numpy(packed.view(np.int32))

    return {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.t()}


def _gptq(
    codes: np.ndarray,
    scales: torch.Tensor,
    zeros: np.ndarray,
    group_of: np.ndarray,
    bits: int,
    symmetric: bool,
    desc_act: bool,
    zero_offset: int = 1,
) -> _Tensors:
    per_word = 32 // bits
    qweight = np.zeros((codes.shape[1] // per_word, codes.shape[0]), dtype=np.uint32)
    stored = (zeros.T.astype(np.int32) - zero_offset) & (2**bits - 1)
    qzeros = np.zeros((stored.shape[0], stored.shape[1] // per_word), dtype=np.uint32)
    for i in range(per_word):
        qweight |= codes.T[i::per_word].astype(np.uint32) << np.uint32(bits * i)
        qzeros |= stored[:, i::per_word].astype(np.uint32) << np.uint32(bits * i)
    return {
        "qweight": torch.from_numpy(qweight.view(np.int32)),
        "qzeros": torch.from_numpy(qzeros.view(np.int32)),
        "scales": scales.t(),
        "g_idx": torch.from_numpy(group_of),
    }


def _gptq_v2(
    codes: np.ndarray, scales: torch.Tensor, zeros: np.ndarray, group_of: np.ndarray, bits: int, symmetric: bool, desc_act: bool
) -> _Tensors:
    return _gptq(codes, scales, zeros, group_of, bits, symmetric, desc_act, zero_offset=0)


def _compressed(
    codes: np.ndarray, scales: torch.Tensor, zeros: np.ndarray, group_of: np.ndarray, bits: int, symmetric: bool, desc_act: bool
) -> _Tensors:
    middle, per_word = 2 ** (bits - 1), 32 // bits

    def rows_packed(signed: np.ndarray) -> np.ndarray:  # [rows, columns] -> [rows, ceil(columns / per_word)]
        packed = np.zeros((signed.shape[0], -(-signed.shape[1] // per_word)), dtype=np.uint32)
        for i in range(per_word):
            values = (signed[:, i::per_word] + middle).astype(np.uint32)
            packed[:, : values.shape[1]] |= values << np.uint32(bits * i)
        return packed.view(np.int32)

    tensors = {
        "weight_packed": torch.from_numpy(rows_packed(codes.astype(np.int16) - middle)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(rows_packed(zeros.T.astype(np.int16) - middle).T))
    if desc_act:
        tensors["weight_g_idx"] = torch.from_numpy(group_of)
    return tensors


def _config(family: str, bits: int, group_size: int, symmetric: bool, desc_act: bool) -> dict[str, Any]:
    if family == "awq":
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group_size,
            "zero_point": not symmetric,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    if family != "compressed-tensors":
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group_size,
            "desc_act": desc_act,
            "sym": symmetric,
            "lm_head": False,
            "checkpoint_format": family,
            "pack_dtype": "int32",
            "true_sequential": True,
            "damp_percent": 0.05,
            "meta": {"quantizer": ["gptqmodel:4.0.0"]},
        }
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "group_size": None if group_size == -1 else group_size,
        "strategy": "channel" if group_size == -1 else "group",
        "block_structure": None,
        "dynamic": False,
        "actorder": "group" if desc_act else None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": scheme},
    }


def _save(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {name: f"model-{index % shards + 1:05d}-of-{shards:05d}.safetensors" for index, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, path / file, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
