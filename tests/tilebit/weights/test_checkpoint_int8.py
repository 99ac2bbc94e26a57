"""compressed-tensors' int-quantized W8A8: read back exactly; what of it is not supported is named."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tilebit
from tilebit.weights.checkpoint import CheckpointError, load_checkpoint
from tilebit.weights.synthetic import write_checkpoint

N, K = 24, 200
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": None}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def config(weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """llm-compressor's, for its scheme W8A8."""
    group = {"targets": ["Linear"], "weights": WEIGHTS | (weights or {}), "input_activations": ACTIVATIONS | (activations or {})}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group | {"output_activations": None}},
        **changes,
    }


def write(path: Path, quantization: dict[str, Any] | None, scales: tuple[int, ...] = (N, 1), **changes: Any) -> dict[str, torch.Tensor]:
    """A model.safetensors of two int8 layers and what is not quantized; returns the layers' weights. ``changes`` of each layer's tensors:
    None drops one."""
    generator, tensors, weights = torch.Generator().manual_seed(0), {}, {}
    for name in LAYERS:
        codes = torch.randint(-128, 128, (N, K), generator=generator, dtype=torch.int8)
        codes[0, :2] = torch.tensor([-128, 127])
        scale = (torch.rand(scales, generator=generator) + 0.5).bfloat16() / 64
        stored = {"weight": codes, "weight_scale": scale, **changes}
        tensors |= {f"{name}.{part}": t.clone() for part, t in stored.items() if t is not None}
        weights[name] = codes.float() * scale.float()
    tensors |= {"model.norm.weight": torch.ones(K).bfloat16(), "lm_head.weight": torch.ones(8, K)}
    tensors[f"{LAYERS[0]}.bias"] = torch.arange(N).bfloat16()
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    said = {} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **said}))
    return weights


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(("strategy", "scales"), [("channel", (N, 1)), ("tensor", (1,)), ("tensor", ())], ids=str)
def test_weights_are_exact(strategy: str, scales: tuple[int, ...], library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "compressed_tensors" else found(name))
    weights = write(tmp_path, config({"strategy": strategy}), scales)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.family == "compressed-tensors" and checkpoint.layers() == sorted(LAYERS)
    for name, weight in weights.items():
        q = checkpoint.quantized(name)
        assert q.format.name == "w8a8_channel" and q.scales.dtype is torch.bfloat16 and q.scales.shape == (N, 1)
        assert torch.equal(q.dequantize(), weight)
        for arch in ("cpu", "sm_90a"):
            assert torch.equal(tilebit.pack(q, torch.bfloat16, arch=arch).unpack().dequantize(), weight)
    bias = checkpoint.bias(LAYERS[0])
    assert bias is not None and torch.equal(bias, torch.arange(N).bfloat16()) and checkpoint.bias(LAYERS[1]) is None


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_written_by_its_library(strategy: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors.naive_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(num_bits=8, symmetric=True, strategy=strategy)
    activations = quantization.QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.02
    scale = weight.abs().amax(1, keepdim=True) / 127 if strategy == "channel" else weight.abs().max().view(1) / 127
    tensors = compressors.IntQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    save_file({f"proj.{part}": t for part, t in tensors.items()}, tmp_path / "model.safetensors")
    said = quantization.QuantizationConfig(config_groups={"group_0": scheme}, format="int-quantized", quantization_status="compressed")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said.model_dump(mode="json")}))
    q = load_checkpoint(tmp_path).quantized("proj")
    assert torch.equal(q.dequantize(), compressors.IntQuantizationCompressor.decompress(tensors, scheme)["weight"])
    assert float((q.dequantize() - weight).abs().max()) <= float(scale.max()) * 0.51


@pytest.mark.slow
def test_a_layer_multiplies(tmp_path: Path) -> None:
    weights = write(tmp_path, config())
    layer = tilebit.QuantLinear.from_checkpoint(load_checkpoint(tmp_path), LAYERS[0], torch.bfloat16)
    x = torch.randn(5, K).bfloat16()
    expected = x.double() @ weights[LAYERS[0]].double().T + torch.arange(N)
    assert float((layer(x).double() - expected).norm() / expected.norm()) < 0.02


def test_packed_and_plain_layers_in_one_model(tmp_path: Path) -> None:
    """Each layer by its own group of the config; what another group's format is, is said at once."""
    packed = write_checkpoint(tmp_path / "packed", "compressed-tensors", {"model.layers.1.down_proj": (24, 256)}, 4, 128)
    plain = write(tmp_path / "plain", config())
    both = load_file(tmp_path / "packed" / "model.safetensors") | load_file(tmp_path / "plain" / "model.safetensors")
    save_file(both, tmp_path / "plain" / "model.safetensors")
    theirs = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    groups = {
        "group_0": theirs | {"targets": ["re:.*down_proj"], "format": "pack-quantized"},
        "group_1": config()["config_groups"]["group_0"] | {"targets": ["re:.*(q|up)_proj"], "format": "int-quantized"},
    }

    def said(**changes: Any) -> Path:
        data = {"quantization_config": config(format="mixed-precision", config_groups={**groups, **changes})}
        (tmp_path / "plain" / "config.json").write_text(json.dumps(data))
        return tmp_path / "plain"

    checkpoint = load_checkpoint(said())
    assert set(checkpoint.layers()) == {*packed, *plain}
    for name, weight in {**packed, **plain}.items():
        assert torch.equal(checkpoint.quantized(name).dequantize(), weight)
    parts = {part: groups["group_1"][part] | {"num_bits": 8, "type": "float"} for part in ("weights", "input_activations")}
    fp8 = groups["group_1"] | parts | {"format": "float-quantized"}
    with pytest.warns(UserWarning, match=r"2 of the 3 quantized layers .*a plain weight with scales but its format is 'float-quantized'"):
        checkpoint = load_checkpoint(said(group_1=fp8))
    assert torch.equal(checkpoint.quantized(next(iter(packed))).dequantize(), next(iter(packed.values())))
    with pytest.raises(CheckpointError, match="of e4m3 in 'float-quantized'"):
        checkpoint.quantized(LAYERS[0])
    (tmp_path / "plain" / "config.json").unlink()
    with pytest.warns(UserWarning, match=r"2 of the 3 .*there is no config, which says how its activations are quantized"):
        checkpoint = load_checkpoint(tmp_path / "plain")
    assert torch.equal(checkpoint.quantized(next(iter(packed))).dequantize(), next(iter(packed.values())))


REFUSED: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "static activations": (config(activations={"dynamic": False, "strategy": "tensor"}), {}, "of input_activations is .*; accepted: "),
    "asymmetric activations": (config(activations={"symmetric": False}), {}, "symmetric of input_activations is False; accepted: True"),
    "activations of groups": (
        config(activations={"strategy": "group", "group_size": 128}),
        {},
        "strategy of input_activations is 'group'; accepted: 'token'",
    ),
    "activations of 16 bits": (config(config_groups={"g": {"targets": ["Linear"], "weights": WEIGHTS}}), {}, "'pack-quantized'"),
    "asymmetric weights": (config({"symmetric": False}), {}, "symmetric of weights is False; accepted: True"),
    "4 bits": (config({"num_bits": 4}), {}, "num_bits of weights is 4; accepted: 8"),
    "weights of groups": (config({"strategy": "group", "group_size": 128}), {}, "strategy of weights is 'group'; accepted: 'channel'"),
    "a scale of activations": (config(), {"input_scale": torch.ones(1)}, r"input_scale is float32 \[1\].*dynamic per token"),
    "zero points": (config(), {"weight_zero_point": torch.ones(N, 1, dtype=torch.int8)}, "values other than 0"),
    "float weights": (config(), {"weight": torch.zeros(N, K)}, r"the weight is float32 \[24, 200\]; accepted: int8"),
    "fp8 weights": (
        config(),
        {"weight": torch.zeros(N, K).to(torch.float8_e4m3fn)},
        "a plain weight with scales of e4m3 but its format is 'int-quantized'",
    ),
    "a stack": (config(), {"weight": torch.zeros(2, N, K, dtype=torch.int8)}, r"int8 \[2, 24, 200\]; accepted: int8 \[n, k\]"),
    "scales of other channels": (config(), {"weight_scale": torch.ones(N - 1, 1)}, r"weight_scale is float32 \[23, 1\]; accepted"),
    "scales of columns": (config(), {"weight_scale": torch.ones(1, K)}, r"weight_scale is float32 \[1, 200\]"),
    "integer scales": (config(), {"weight_scale": torch.ones(N, 1, dtype=torch.int32)}, "weight_scale is int32"),
    "scales that are none": (config(), {"weight_scale": torch.full((N, 1), float("nan"))}, "NaN or infinite"),
    "no scales": (config(), {"weight_scale": None}, r"has model\.layers\.0\.\w+\.\w+\.weight but not .*weight_scale"),
    "no weight": (config(), {"weight": None}, r"weight_scale but not .*\.weight;"),
    "labelled packed": (
        config(format="pack-quantized", config_groups={"g": {"targets": ["Linear"], "weights": WEIGHTS}}),
        {},
        "plain weight",
    ),
    "no config": (None, {}, "no quantization config"),
    "called fp8": (config(format="float-quantized"), {}, "type of weights is 'int'; accepted: 'float'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case: str, tmp_path: Path) -> None:
    quantization, changes, words = REFUSED[case]
    write(tmp_path, quantization, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path).quantized(LAYERS[0])


def test_outputs_that_are_quantized_are_refused(tmp_path: Path) -> None:
    group = config()["config_groups"]["group_0"] | {"output_activations": {"num_bits": 8, "type": "int"}}
    write(tmp_path, config(config_groups={"group_0": group}))
    with pytest.raises(CheckpointError, match="quantizes its outputs"):
        load_checkpoint(tmp_path)
