"""Small checkpoints of random weights, laid out as AutoAWQ, GPTQModel and llm-compressor write theirs; nothing is downloaded.

For the demo and the tests. The writers shift and or plain integers the way those tools do and share nothing with ``layouts.checkpoints``,
so that reading one back proves something.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

FAMILIES = ("awq", "gptq", "gptq_v2", "compressed-tensors")
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
    """Write a checkpoint directory (config.json, model.safetensors or an index and ``shards`` files) and return each layer's dequantized
    weight, fp32 [n, k].

    ``layers`` maps names to (n, k); ``family`` is one of ``FAMILIES`` ("gptq" is the v1 zero point convention); ``group_size`` is -1 for
    one group a channel; ``desc_act`` (not AWQ) scatters the columns of a group as act-order quantization does; ``dtype`` is that of scales
    and biases. An unquantized "lm_head.weight" and "model.norm.weight" go with them. Raises ``ValueError`` for what the real tools would
    not write.
    """
    path = Path(path)
    _check(family, layers, bits, group_size, desc_act, shards)
    rng = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    reference: dict[str, torch.Tensor] = {}
    for name, (n, k) in layers.items():
        group = k if group_size == -1 else group_size
        weight = (rng.standard_normal((n, k), dtype=np.float32) * rng.uniform(0.01, 0.05, (n, 1)) + (0.0 if symmetric else 0.01)).astype(
            np.float32
        )
        if not symmetric:  # one-sided channels, whose zero points are the first and the last code
            weight[0], weight[-1] = np.abs(weight[0]), -np.abs(weight[-1])
        order = rng.permutation(k) if desc_act else np.arange(k)
        group_of = np.empty(k, dtype=np.int64)
        group_of[order] = np.arange(k) // group
        codes, scales, zeros = _round(weight, group_of, bits, symmetric, dtype)
        write = {"awq": _awq, "gptq": _gptq, "gptq_v2": _gptq_v2, "compressed-tensors": _compressed}[family]
        for suffix, value in write(codes, scales, zeros, group_of, bits, symmetric, desc_act).items():
            tensors[f"{name}.{suffix}"] = value.contiguous()
        if bias:
            tensors[f"{name}.bias"] = torch.from_numpy(rng.standard_normal(n, dtype=np.float32)).to(dtype)
        shifted = torch.from_numpy((codes - zeros[:, group_of]).astype(np.float32))
        reference[name] = shifted * scales.float()[:, torch.from_numpy(group_of)]
    hidden = next(iter(layers.values()))[1]
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    tensors["lm_head.weight"] = torch.from_numpy(rng.standard_normal((8, hidden), dtype=np.float32)).to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    _save(path, tensors, shards)
    quantization = _config(family, bits, group_size, symmetric, desc_act)
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
    if bits not in ((4,) if family == "awq" else (4, 8)) or (desc_act and family == "awq"):
        raise ValueError(f"{family} has no {bits}-bit{' act-order' if desc_act else ''} checkpoints")
    if not layers or not 1 <= shards <= len(layers):
        raise ValueError(f"{len(layers)} layers in {shards} shards; accepted: at least one layer and one layer a shard")
    per_word = 32 // bits
    for name, (n, k) in layers.items():
        if group_size != -1 and k % group_size:
            raise ValueError(f"{name}: k is {k}; the tools need a multiple of the group size {group_size}")
        if family != "compressed-tensors" and (n % per_word or k % per_word):
            raise ValueError(f"{name}: [{n}, {k}] is not a multiple of {per_word} both ways, which {family} needs")


def _round(
    weight: np.ndarray, group_of: np.ndarray, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
    """Unsigned codes int64 [n, k], scales [n, groups], unsigned zero points int64 [n, groups], one group after the other."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    groups = int(group_of.max()) + 1
    codes = np.zeros(weight.shape, dtype=np.int64)
    scales = torch.zeros(weight.shape[0], groups, dtype=dtype)
    zeros = np.zeros((weight.shape[0], groups), dtype=np.int64)
    for g in range(groups):
        columns = group_of == g
        part = weight[:, columns]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        step = np.maximum(-low, high) * 2 / top if symmetric else (high - low) / top
        scales[:, g] = torch.from_numpy(np.maximum(step, 1e-5)).to(dtype)
        stored = scales[:, g].float().numpy()
        zeros[:, g] = middle if symmetric else np.clip(np.round(-low / stored), 0, top)
        codes[:, columns] = np.clip(np.round(part / stored[:, None]) + zeros[:, g][:, None], 0, top)
    return codes, scales, zeros


def _awq(codes, scales, zeros, group_of, bits, symmetric, desc_act) -> dict[str, torch.Tensor]:
    def interleaved(values: np.ndarray) -> torch.Tensor:  # [rows, n] -> [rows, n / 8]
        packed = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
        for column in range(packed.shape[1]):
            for i in range(8):
                packed[:, column] |= values[:, column * 8 + _AWQ_ORDER[i]].astype(np.uint32) << np.uint32(4 * i)
        return torch.from_numpy(packed.view(np.int32))

    return {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.t()}


def _gptq(codes, scales, zeros, group_of, bits, symmetric, desc_act, zero_offset: int = 1) -> dict[str, torch.Tensor]:
    per_word, top = 32 // bits, 2**bits - 1
    qweight = np.zeros((codes.shape[1] // per_word, codes.shape[0]), dtype=np.uint32)
    for row in range(qweight.shape[0]):
        for i in range(per_word):
            qweight[row] |= codes[:, row * per_word + i].astype(np.uint32) << np.uint32(bits * i)
    stored = (zeros.T - zero_offset) & top
    qzeros = np.zeros((stored.shape[0], stored.shape[1] // per_word), dtype=np.uint32)
    for column in range(qzeros.shape[1]):
        for i in range(per_word):
            qzeros[:, column] |= stored[:, column * per_word + i].astype(np.uint32) << np.uint32(bits * i)
    return {
        "qweight": torch.from_numpy(qweight.view(np.int32)),
        "qzeros": torch.from_numpy(qzeros.view(np.int32)),
        "scales": scales.t(),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }


def _gptq_v2(codes, scales, zeros, group_of, bits, symmetric, desc_act) -> dict[str, torch.Tensor]:
    return _gptq(codes, scales, zeros, group_of, bits, symmetric, desc_act, zero_offset=0)


def _compressed(codes, scales, zeros, group_of, bits, symmetric, desc_act) -> dict[str, torch.Tensor]:
    def rows_packed(signed: np.ndarray) -> np.ndarray:  # [rows, columns] -> [rows, ceil(columns * bits / 32)]
        packed = np.zeros((signed.shape[0], -(-signed.shape[1] * bits // 32)), dtype=np.uint32)
        for column in range(signed.shape[1]):
            value = (signed[:, column] + 2 ** (bits - 1)).astype(np.uint32)
            packed[:, column * bits // 32] |= value << np.uint32(column * bits % 32)
        return packed.view(np.int32)

    middle = 2 ** (bits - 1)
    tensors = {
        "weight_packed": torch.from_numpy(rows_packed(codes - middle)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(rows_packed((zeros - middle).T).T))
    if desc_act:
        tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
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
