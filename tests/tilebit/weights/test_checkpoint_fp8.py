"""Checkpoints of e4m3 weights whose activations are quantized at each call: compressed-tensors' float-quantized, written by that library,
and Hugging Face's blocks of fp8; read back exactly, and what of them is not supported is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tilebit
from tilebit.weights.checkpoint import CheckpointError, load_checkpoint

N, K = 200, 300  # neither is a whole number of blocks
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
HUGGING_FACE = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def every_code(seed: int) -> Tensor:
    """float8_e4m3fn [N, K]: all finite codes, in any order."""
    codes = torch.randint(0, 256, (N, K), generator=torch.Generator().manual_seed(seed), dtype=torch.int32).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x7E
    return codes.view(torch.float8_e4m3fn)


def write(path: Path, config: dict[str, Any] | None, scale: str, scales: Tensor, **changes: Tensor | None) -> dict[str, Tensor]:
    """Two layers and what is not quantized; returns the layers' weights, in fp64. ``changes`` of each layer's tensors: None drops one."""
    tensors, weights = {}, {}
    for seed, name in enumerate(LAYERS):
        stored = {"weight": every_code(seed), scale: scales, **changes}
        tensors |= {f"{name}.{part}": t.clone() for part, t in stored.items() if t is not None}
        columns = scales.double().repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K] if scales.numel() not in (1, N) else scales
        weights[name] = every_code(seed).double() * columns
    tensors |= {
        "model.norm.weight": torch.ones(K).bfloat16(),
        "lm_head.weight": torch.ones(8, K),
        f"{LAYERS[0]}.bias": torch.ones(N).half(),
    }
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    said = {} if config is None else {"quantization_config": config}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **said}))
    return weights


def positive(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(7)) + 0.5) / 64


def test_blocks_of_hugging_face_are_exact(tmp_path: Path) -> None:
    scales = positive(2, 3)
    weights = write(tmp_path, HUGGING_FACE, "weight_scale_inv", scales)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.family == "fp8" and checkpoint.layers() == sorted(LAYERS)
    for name, weight in weights.items():
        q = checkpoint.quantized(name)
        assert q.format.name == "w8a8_fp8_g128" and q.scales.dtype is torch.float32 and q.scales.shape == (N, 3)
        assert torch.equal(q.dequantize(), weight.float())
        for arch in ("cpu", "sm_89", "sm_90a"):
            assert torch.equal(tilebit.pack(q, torch.bfloat16, arch=arch).unpack().dequantize(), weight.float())
    bias = checkpoint.bias(LAYERS[0])
    assert bias is not None and torch.equal(bias, torch.ones(N).half())
    scheme, n, k = checkpoint.declared(LAYERS[1])
    assert (scheme.format.name, n, k) == ("w8a8_fp8_g128", N, K)


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_written_by_its_library(strategy: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors.naive_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    blocks = strategy == "block"
    shape = {"block_structure": [128, 128]} if blocks else {}
    args = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **shape)
    grouped = {"strategy": "group", "group_size": 128} if blocks else {"strategy": "token"}
    activations = quantization.QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=True, **grouped)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    n, k = (256, 384) if blocks else (N, K)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02
    largest = {
        "channel": lambda: weight.abs().amax(1, keepdim=True),
        "tensor": lambda: weight.abs().max().view(1),
        "block": lambda: weight.abs().view(2, 128, 3, 128).amax((1, 3)),
    }[strategy]()
    tensors = compressors.FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": largest / 448}, scheme)
    assert tensors["weight"].dtype is torch.float8_e4m3fn
    save_file({f"proj.{part}": t for part, t in tensors.items()}, tmp_path / "model.safetensors")
    said = quantization.QuantizationConfig(config_groups={"group_0": scheme}, format="float-quantized", quantization_status="compressed")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said.model_dump(mode="json")}))
    q = load_checkpoint(tmp_path).quantized("proj")
    assert q.format.name == ("w8a8_fp8_g128" if blocks else "w8a8_fp8")
    assert torch.equal(q.codes, tensors["weight"].view(torch.uint8))
    assert torch.equal(q.dequantize(), compressors.FloatQuantizationCompressor.decompress(tensors, scheme)["weight"])
    assert float((q.dequantize() - weight).norm() / weight.norm()) < 0.04


@pytest.mark.parametrize("blocks", [False, True])
def test_a_layer_multiplies(blocks: bool, tmp_path: Path) -> None:
    scales = positive(2, 3) if blocks else positive(1)
    config = HUGGING_FACE if blocks else of_library()
    weights = write(tmp_path, config, "weight_scale_inv" if blocks else "weight_scale", scales)
    layer = tilebit.QuantLinear.from_checkpoint(load_checkpoint(tmp_path), LAYERS[0], torch.bfloat16)
    x = torch.randn(5, K).bfloat16()
    expected = x.double() @ weights[LAYERS[0]].T + 1
    assert float((layer(x).double() - expected).norm() / expected.norm()) < 0.04  # x is rounded to three bits


def of_library(weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """llm-compressor's, for its scheme FP8_DYNAMIC."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "dynamic": False} | (weights or {}),
        "input_activations": common | {"strategy": "token", "dynamic": True} | (activations or {}),
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
NAN = torch.full((N, K), float("nan")).to(torch.float8_e4m3fn)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "static activations": (of_library(activations={"strategy": "tensor"}), {}, "strategy of input_activations is 'tensor'"),
    "blocks of other sizes": (of_library(BLOCKS | {"block_structure": [64, 128]}), {}, r"block_structure of weights is \[64, 128\]"),
    "blocks with tokens": (of_library(BLOCKS), {}, "strategy of input_activations is 'token'; accepted: 'group'"),
    "weights of groups": (of_library({"strategy": "group", "group_size": 128}), {}, "strategy of weights is 'group'; accepted: 'channel'"),
    "int8 weights": (of_library(), {"weight": torch.zeros(N, K, dtype=torch.int8)}, "format is 'float-quantized' in the config"),
    "NaN": (of_library(), {"weight": NAN}, "the weight holds NaN"),
    "a scale of activations": (of_library(), {"input_scale": torch.ones(1)}, r"input_scale is float32 \[1\].*dynamic per token"),
    "no scales": (of_library(), {"weight_scale": None}, r"has model\.layers\.0\.\w+\.\w+\.weight but not .*weight_scale"),
    "Hugging Face: other blocks": (HUGGING_FACE | {"weight_block_size": [64, 64]}, {}, r"weight_block_size is \[64, 64\]; accepted"),
    "Hugging Face: static": (HUGGING_FACE | {"activation_scheme": "static"}, {}, "activation_scheme is 'static'; accepted: 'dynamic'"),
    "Hugging Face: other numbers": (HUGGING_FACE | {"fmt": "e5m2"}, {}, "fmt is 'e5m2'; accepted: 'e4m3'"),
    "Hugging Face: kept": (
        HUGGING_FACE | {"modules_to_not_convert": ["*q_proj", "*up_proj"]}, {"weight_scale_inv": torch.ones(2, 3)}, "from conversion"
    ),
    "Hugging Face: no scales": (HUGGING_FACE, {}, "but not .*weight_scale_inv"),
    "Hugging Face: too few scales": (HUGGING_FACE, {"weight_scale_inv": torch.ones(1, 3)}, r"accepted: .*\[2, 3\]"),
    "Hugging Face: int8 weights": (
        HUGGING_FACE, {"weight": torch.zeros(N, K, dtype=torch.int8), "weight_scale_inv": torch.ones(2, 3)}, "accepted: float8_e4m3fn"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case: str, tmp_path: Path) -> None:
    config, changes, words = REFUSED[case]
    write(tmp_path, config, "weight_scale", positive(N, 1), **changes)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path).quantized(LAYERS[0])


@pytest.mark.parametrize("shape", [(), (0, K), (N, 0)])
def test_a_weight_that_is_no_matrix_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, HUGGING_FACE, "weight_scale_inv", positive(2, 3), weight=torch.zeros(shape).to(torch.float8_e4m3fn))
    checkpoint = load_checkpoint(tmp_path)
    for read in (checkpoint.declared, checkpoint.quantized, *([checkpoint.bias] if shape == () else [])):
        with pytest.raises(CheckpointError, match=r"q_proj.*accepted"):
            read(LAYERS[0])
