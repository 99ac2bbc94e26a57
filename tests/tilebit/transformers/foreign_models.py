"""Directories of tiny models as AutoAWQ, GPTQModel and llm-compressor write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import made
from torch import nn
from transformers import PreTrainedConfig

from tilebit.weights.synthetic import write_checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "awq": {"family": "awq", "symmetric": False},
    "awq symmetric": {"family": "awq", "group_size": 64},
    "gptq v1": {"family": "gptq", "symmetric": False},
    "gptq v2": {"family": "gptq_v2", "symmetric": False},
    "gptq act order": {"family": "gptq", "group_size": 64, "desc_act": True},
    "gptq 8 bits": {"family": "gptq", "bits": 8, "group_size": -1},
    "pack-quantized w4a16": {"family": "compressed-tensors", "symmetric": False},
    "pack-quantized w8a16": {"family": "compressed-tensors", "bits": 8, "group_size": -1},
    "pack-quantized act order": {"family": "compressed-tensors", "group_size": 64, "desc_act": True},
    "int-quantized w8a8": {"family": "int-quantized"},
    "float-quantized w8a8": {"family": "float-quantized"},
    "fp8 blocks": {"family": "fp8"},
}


def written(folder: Path, kind: str, config: PreTrainedConfig, shards: int = 1, keep: tuple[str, ...] = ("lm_head",)) -> Any:
    """Write the directory; returns the float16 model whose linear layers have the weights that the tool's codes stand for."""
    options = dict(KINDS[kind])
    model = made(config, torch.float16)
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and not name.endswith(keep)}
    if options["family"] in EIGHT_BITS:
        stored, weights, said = EIGHT_BITS[options["family"]]({name: tuple(layer.weight.shape) for name, layer in layers.items()})
    else:
        weights = write_checkpoint(folder, layers={name: tuple(layer.weight.shape) for name, layer in layers.items()}, **options)
        stored, said = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())["quantization_config"]
        (folder / "model.safetensors").unlink()
    tied = set(model.all_tied_weights_keys)
    others = {name: value for name, value in model.state_dict().items() if name not in tied and name.removesuffix(".weight") not in layers}
    parts = tuple(f"{name}." for name in layers)
    save({name: value for name, value in stored.items() if name.startswith(parts)} | others, folder, shards)
    config.dtype, config.architectures = torch.float16, [type(model).__name__]
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": said}, default=str))
    for name, layer in layers.items():
        layer.weight.data.copy_(weights[name])
    return model


def save(tensors: dict[str, torch.Tensor], folder: Path, shards: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name, held in names.items() if held == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))


def int_quantized(layers: dict[str, tuple[int, int]]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """llm-compressor's scheme W8A8: int8 weights with a scale a channel."""
    generator, stored, weights = torch.Generator().manual_seed(0), {}, {}
    for name, shape in layers.items():
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        scale = (torch.rand(shape[0], 1, generator=generator) + 0.5).half() / 1024
        stored |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
        weights[name] = codes.float() * scale.float()
    return stored, weights, w8a8("int")


def w8a8(type: str) -> dict[str, Any]:
    """llm-compressor's config of W8A8 of "int" or "float" numbers, x row by row."""
    numbers = {"num_bits": 8, "type": type, "symmetric": True, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{type}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def float_quantized(layers: dict[str, tuple[int, int]]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """llm-compressor's scheme FP8_DYNAMIC: e4m3 weights with a scale a channel."""
    stored, weights = {}, {}
    for name, (codes, generator) in e4m3_weights(layers).items():
        scale = (torch.rand(len(codes), 1, generator=generator) + 0.5).half() / 1024
        stored |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
        weights[name] = codes.float() * scale.float()
    return stored, weights, w8a8("float")


def fp8_blocks(layers: dict[str, tuple[int, int]]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """transformers' FineGrainedFP8Config, as DeepSeek's checkpoints have it: a scale for each 128 x 128 weights."""
    stored, weights = {}, {}
    for name, (codes, generator) in e4m3_weights(layers).items():
        (n, k), blocks = codes.shape, [-(-size // 128) for size in codes.shape]
        scale = (torch.rand(*blocks, generator=generator) + 0.5) / 1024
        stored |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}
        weights[name] = codes.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return stored, weights, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def e4m3_weights(layers: dict[str, tuple[int, int]]) -> dict[str, tuple[torch.Tensor, torch.Generator]]:
    """Random weights of each layer in e4m3, and what drew them."""
    generator = torch.Generator().manual_seed(0)
    return {name: ((torch.randn(shape, generator=generator) * 70).to(torch.float8_e4m3fn), generator) for name, shape in layers.items()}


EIGHT_BITS = {"int-quantized": int_quantized, "float-quantized": float_quantized, "fp8": fp8_blocks}
