"""Checkpoints of 4-bit floats, read back exactly; and what a broken one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilebit.weights.checkpoint import CheckpointError, load_checkpoint
from tilebit.weights.packed import pack
from tilebit.weights.synthetic import write_checkpoint
from tilebit.weights.synthetic_float import FLOAT_FAMILIES

LAYERS = {"model.layers.0.mlp.up_proj": (24, 256), "model.layers.10.mlp.down_proj": (13, 96)}
LAYER = "model.layers.0.mlp.up_proj"
PACKED = FLOAT_FAMILIES[:2]
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def _rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors whose names end so; None removes them."""
    tensors = load_file(path / "model.safetensors")
    for suffix, value in changes.items():
        name = next(name for name in tensors if name.startswith(LAYER) and name.endswith(suffix))
        tensors.pop(name)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path / "model.safetensors")


def _configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("family", FLOAT_FAMILIES)
def test_weights_are_exact(family: str, configured: bool, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, family, LAYERS, bias=True, shards=2)
    if not configured:
        (tmp_path / "config.json").unlink()
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.family == ("mxfp4" if family == "gpt-oss" else "compressed-tensors") and checkpoint.layers() == list(LAYERS)
    for name, (n, k) in LAYERS.items():
        q = checkpoint.quantized(name)
        assert q.format.name == ("w4a16_nvfp4" if family.startswith("nvfp4") else "w4a16_mxfp4") and (q.n, q.k) == (n, k)
        assert torch.equal(q.dequantize(), reference[name])
        bias = checkpoint.bias(name)
        assert bias is not None and bias.shape == (n,)
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(pack(q, dtype).unpack().dequantize(), reference[name])


@pytest.mark.parametrize("family", PACKED)
def test_compressed_tensors_decompresses_to_the_same(family: str, tmp_path: Path) -> None:
    base = pytest.importorskip("compressed_tensors.compressors.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    write_checkpoint(tmp_path, family, LAYERS, seed=2)
    config = quantization.QuantizationConfig.model_validate(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    (scheme,) = config.config_groups.values()
    raw = load_file(tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path)
    for name in LAYERS:
        state = {key.removeprefix(f"{name}."): value for key, value in raw.items() if key.startswith(f"{name}.")}
        weight = base.BaseCompressor.get_value_from_registry(family).decompress(state, scheme)["weight"]
        assert torch.equal(checkpoint.quantized(name).dequantize(weight.dtype), weight)


def test_every_scale_of_eight_bits(tmp_path: Path) -> None:
    for family, count in (("gpt-oss", 255), ("mxfp4-pack-quantized", 255), ("nvfp4-pack-quantized", 127)):
        write_checkpoint(tmp_path, family, {LAYER: (count, 32)})
        scales = torch.arange(count, dtype=torch.uint8)[:, None]
        packed = torch.tensor([2 * i | (2 * i + 1) << 4 for i in range(8)] * 2, dtype=torch.uint8).repeat(count, 1)
        expected = torch.tensor(VALUES * 2, dtype=torch.float64).repeat(count, 1)
        if family.startswith("nvfp4"):
            scales = scales.repeat(1, 2).view(torch.float8_e4m3fn)
            _rewrite(tmp_path, weight_packed=packed, weight_scale=scales, weight_global_scale=torch.tensor([3.0]))
            expected = expected * scales.double().repeat_interleave(16, 1) * torch.tensor(256 / 3.0, dtype=torch.float32).double() / 256
        elif family == "gpt-oss":
            _rewrite(tmp_path, blocks=packed[:, None], scales=scales)
        else:
            _rewrite(tmp_path, weight_packed=packed, weight_scale=scales)
        if not family.startswith("nvfp4"):
            expected = expected * torch.exp2(torch.arange(count, dtype=torch.float64) - 127)[:, None]
        got = load_checkpoint(tmp_path).quantized(LAYER).dequantize()
        assert torch.equal(got, expected.float())


@pytest.mark.parametrize("family", PACKED)
def test_quantized_activations_are_left_out(family: str, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, family, LAYERS)
    group = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    dynamic = "local" if family.startswith("nvfp4") else True
    _configure(tmp_path, config_groups={"group_0": group | {"input_activations": group["weights"] | {"dynamic": dynamic}}})
    assert torch.equal(load_checkpoint(tmp_path).quantized(LAYER).dequantize(), reference[LAYER])


def test_expert_stacks_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt-oss", LAYERS, bias=True)
    _rewrite(tmp_path, blocks=torch.zeros(4, 24, 8, 16, dtype=torch.uint8), scales=torch.zeros(4, 24, 8, dtype=torch.uint8))
    checkpoint = load_checkpoint(tmp_path)
    for read in (checkpoint.quantized, checkpoint.bias):
        with pytest.raises(CheckpointError, match=rf"{LAYER} is a stack of 4 experts.*not supported yet"):
            read(LAYER)


@pytest.mark.parametrize(
    "family,changes,message",
    [
        ("gpt-oss", {"_scales": None}, r"has .*up_proj_blocks but not .*up_proj_scales"),
        ("mxfp4-pack-quantized", {"weight_scale": None}, "but not .*weight_scale"),
        ("nvfp4-pack-quantized", {"weight_global_scale": None}, r"weight_global_scale is absent; accepted: float32 \[1\]"),
        ("nvfp4-pack-quantized", {"weight_global_scale": torch.tensor([0.0])}, "weight_global_scale is 0; accepted: a positive"),
        ("nvfp4-pack-quantized", {"weight_global_scale": torch.ones(2)}, r"weight_global_scale is float32 \[2\]"),
        ("nvfp4-pack-quantized", {"weight_scale": torch.ones(24, 16)}, r"scales is float32 \[24, 16\]; accepted: float8_e4m3fn \[24, 16\]"),
        ("nvfp4-pack-quantized", {"weight_scale": torch.full((24, 16), float("nan")).to(torch.float8_e4m3fn)}, "384 scales are NaN"),
        ("mxfp4-pack-quantized", {"weight_scale": torch.full((24, 8), 255, dtype=torch.uint8)}, "192 scales are NaN"),
        ("gpt-oss", {"_scales": torch.full((24, 8), 255, dtype=torch.uint8)}, "192 scales are NaN"),
        ("gpt-oss", {"_scales": torch.zeros(24, 7, dtype=torch.uint8)}, r"scales is uint8 \[24, 7\]; accepted: uint8 \[24, 8\]"),
        ("gpt-oss", {"_blocks": torch.zeros(24, 8, 16)}, "the packed weight is float32"),
        ("mxfp4-pack-quantized", {"weight_packed": torch.zeros(24, 100, dtype=torch.uint8)}, "k whole groups"),
    ],
)
def test_broken_tensors(family: str, changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, LAYERS)
    _rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path).quantized(LAYER)


def test_damaged_configs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gpt-oss", LAYERS)
    _configure(tmp_path, modules_to_not_convert=["model.layers.*.mlp"])
    with pytest.raises(CheckpointError, match=r"up_proj.*: the layer holds blocks of mxfp4 but the config keeps 'model\.layers\.\*\.mlp'"):
        load_checkpoint(tmp_path).quantized(LAYER)
    _configure(tmp_path, modules_to_not_convert="lm_head")
    with pytest.raises(CheckpointError, match="modules_to_not_convert is 'lm_head'; accepted: 'a list of names'"):
        load_checkpoint(tmp_path)
    write_checkpoint(tmp_path, "mxfp4-pack-quantized", LAYERS)
    group = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    _configure(tmp_path, config_groups={"group_0": group | {"weights": group["weights"] | {"group_size": 64}}})
    with pytest.raises(CheckpointError, match="group_size is 64; accepted: 32"):
        load_checkpoint(tmp_path).quantized(LAYER)
    _configure(tmp_path, format="nvfp5-pack-quantized")
    with pytest.raises(CheckpointError, match="nvfp5-pack-quantized"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("family", FLOAT_FAMILIES)
def test_the_writer_refuses_what_the_tools_would_not_write(family: str, tmp_path: Path) -> None:
    refused: tuple[dict[str, Any], ...] = ({"bits": 8}, {"desc_act": True})
    for options in refused:
        with pytest.raises(ValueError, match=f"{family} has no"):
            write_checkpoint(tmp_path, family, LAYERS, **options)
    with pytest.raises(ValueError, match="multiple of the group size"):
        write_checkpoint(tmp_path, family, {"a": (8, 40)})


@pytest.mark.parametrize("shape", [(), (24,), (0, 128), (24, 0)])
@pytest.mark.parametrize("family", FLOAT_FAMILIES)
def test_a_weight_that_is_no_matrix_is_named(family: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family, LAYERS)
    part = "blocks" if family == "gpt-oss" else "weight_packed"
    _rewrite(tmp_path, **{part: torch.zeros(shape, dtype=torch.uint8)})
    checkpoint = load_checkpoint(tmp_path)
    for read in (checkpoint.declared, checkpoint.quantized):
        with pytest.raises(CheckpointError, match=rf"{LAYER}: the .*weight is .*; accepted"):
            read(LAYER)
