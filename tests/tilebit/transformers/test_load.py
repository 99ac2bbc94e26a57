"""Directories that other tools quantized become models with tilebit's layers; what is wrong with one is said before memory is taken."""

from __future__ import annotations

import importlib.util
import json
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import KINDS, save, written
from safetensors.torch import load_file
from tiny_models import llama, made, phi3, qwen3, saved
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tilebit.transformers import TilebitConfig, foreign, load
from tilebit.weights.checkpoint import Checkpoint
from tilebit.weights.modules import QuantLinear
from tilebit.weights.quantize import QuantizedTensor

IDS = torch.arange(2, 42)[None]
BIASED = {"attention_bias": True}


def layers_of(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


@torch.no_grad()
def close(model: Any, reference: Any, limit: float = 0.01) -> None:
    """Logits differ by what rounding to 16 bits does in two layers; other codes would make other logits altogether."""
    got, expected = model(IDS).logits.float(), reference(IDS).logits.float()
    assert float(expected.std()) > 0.1
    assert float((got - expected).norm() / expected.norm()) < limit


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "compressed_tensors" else found(name, *rest))


COMPRESSED = [kind for kind in KINDS if KINDS[kind]["family"] in ("compressed-tensors", "int-quantized", "float-quantized")]


@pytest.mark.parametrize(("kind", "library"), [*((kind, True) for kind in KINDS), *((kind, False) for kind in COMPRESSED)])
def test_every_kind_computes_what_its_codes_stand_for(tmp_path: Path, kind: str, library: bool, monkeypatch: pytest.MonkeyPatch):
    if not library:
        without_library(monkeypatch)
    reference = written(tmp_path, kind, llama())
    model: Any = load(tmp_path)
    layers = layers_of(model)
    assert len(layers) == 14 and type(model.lm_head) is nn.Linear and {layer.dtype for layer in layers.values()} == {torch.float16}
    for name, layer in layers.items():
        assert torch.equal(layer.unpack().dequantize().half(), reference.get_submodule(name).weight), name
        assert not layer.training
    for name, value in model.named_parameters():
        assert torch.equal(value, reference.get_parameter(name)), name
    # x is quantized, too: to int8, or to the three bits of e4m3
    close(model, reference, {"int-quantized": 0.05, "float-quantized": 0.15, "fp8": 0.15}.get(KINDS[kind]["family"], 0.01))


@pytest.mark.parametrize("kind", ["awq", "gptq act order", "pack-quantized w8a16", "int-quantized w8a8", "fp8 blocks"])
def test_what_was_loaded_saves_as_a_directory_of_tilebit(tmp_path: Path, kind: str):
    written(tmp_path / "theirs", kind, llama(), shards=3)
    model: Any = load(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "own", max_shard_size="100KB")
    again: Any = load(tmp_path / "own")
    expected, got = model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "own").state_dict()
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], value) and got[name].dtype == value.dtype for name, value in expected.items())
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    said = json.loads((tmp_path / "own" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "tilebit" and "source" not in said


def test_fused_layers_tied_embeddings_biases_and_layers_kept(tmp_path: Path):
    cases = [(phi3(), ("lm_head",)), (qwen3(), ("lm_head",)), (llama(**BIASED), ("lm_head", "1.mlp.down_proj"))]
    for number, (config, keep) in enumerate(cases):
        folder = tmp_path / str(number)
        reference = written(folder, "awq", config, keep=keep)
        model: Any = load(folder)
        floats = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
        assert all(name.endswith(keep) for name in floats) and len(floats) == len(keep)
        close(model, reference)
        model.save_pretrained(tmp_path / "own")
        with torch.no_grad():
            again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
            assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_library_writes_what_is_loaded(tmp_path: Path):
    """compressed-tensors itself packs the weights and writes its config."""
    compressor: Any = pytest.importorskip("compressed_tensors.compressors.pack_quantized").PackedQuantizationCompressor
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(num_bits=4, symmetric=True, group_size=128, strategy="group")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    config = llama()
    model, tensors = made(config, torch.float16), {}
    for name, value in list(model.state_dict().items()):
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            tensors[name] = value
            continue
        scale = value.view(len(value), -1, 128).abs().amax(-1) / 7
        parts = compressor.compress({"weight": value, "weight_scale": scale}, scheme)
        tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        parts["weight_shape"] = torch.Size(parts["weight_shape"].tolist())
        linear: Any = model.get_submodule(layer)
        linear.weight.data.copy_(compressor.decompress(parts, scheme)["weight"])
    save(tensors, tmp_path, 2)
    said = quantization.QuantizationConfig(config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed")
    config.dtype = torch.float16
    text = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": said.model_dump(mode="json")}
    (tmp_path / "config.json").write_text(json.dumps(text, default=str))
    close(load(tmp_path), model)


def test_the_example_of_the_readme_runs(tmp_path: Path):
    written(tmp_path / "model", "gptq v1", llama())
    text = (Path(__file__).parents[3] / "README.md").read_text()
    code = textwrap.dedent(text[text.index("    import tilebit.transformers") : text.index("`load` checks config")])
    names: dict[str, Any] = {}
    exec(code.replace("path/to", str(tmp_path)), names)
    assert len(layers_of(names["model"])) == len(layers_of(load(tmp_path / "packed"))) == 14


def test_files_are_opened_where_tensors_are_no_meta_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a library makes while it is imported stays; transformers builds models with meta as the default device."""
    written(tmp_path, "pack-quantized w4a16", llama())
    devices: list[str] = []
    opened = foreign.load_checkpoint
    monkeypatch.setattr(foreign, "load_checkpoint", lambda *a, **b: (devices.append(torch.empty(0).device.type), opened(*a, **b))[1])
    load(tmp_path)
    assert devices == ["cpu"]


def test_layers_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The codes of one are in memory, unpacked; scales in another dtype are rounded to it."""
    written(tmp_path, "gptq v1", llama())
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    counts = []
    quantized = Checkpoint.quantized

    def counted(self: Checkpoint, *where: Any) -> QuantizedTensor:
        weight = quantized(self, *where)
        alive.append(weakref.ref(weight.codes.untyped_storage()))
        counts.append(sum(held() is not None for held in alive))
        return weight

    monkeypatch.setattr(Checkpoint, "quantized", counted)
    model = load(tmp_path, dtype=torch.bfloat16)
    assert counts == [1] * 14 and not any(held() is not None for held in alive)
    assert {layer.dtype for layer in layers_of(model).values()} == {torch.bfloat16} == {value.dtype for value in model.parameters()}


LIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "group size": ("awq", {"quantization_config": {"group_size": 64}}, "group_size 64 over k"),
    "group size, gptq": ("gptq v1", {"quantization_config": {"group_size": 32}}, "group_size 32 over k"),
    "group size, compressed": ("pack-quantized w4a16", {"weights": {"group_size": 64}}, "group_size 64 over k"),
    "bits": ("gptq v1", {"quantization_config": {"bits": 8}}, "g_idx is|8 bits"),
    "bits, awq": ("awq", {"quantization_config": {"bits": 8}}, "AWQ bits is 8"),
    "bits, compressed": ("pack-quantized w4a16", {"weights": {"num_bits": 8}}, "8-bit compressed-tensors weight"),
    "no such bits": ("gptq v1", {"quantization_config": {"bits": 3}}, "bits is 3"),
    "method": ("awq", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is 'bitsandbytes'"),
    "another method": ("awq", {"quantization_config": {"quant_method": "gptq", "sym": False}}, "g_idx|gptq"),
    "shape": ("awq", {"intermediate_size": 512}, r"config.json makes it \[128, 512\]"),
    "fewer layers": ("awq", {"num_hidden_layers": 1}, r"layers\.1\..*is no linear layer"),
    "more layers": ("awq", {"num_hidden_layers": 3}, r"neither a packed weight of model\.layers\.2"),
    "dtype": ("awq", {"dtype": "float32"}, "accepted: float16 and bfloat16"),
    "activations": ("int-quantized w8a8", {"input_activations": {"dynamic": False, "strategy": "tensor"}}, "of input_activations is"),
    "no config": ("awq", {"quantization_config": None}, "is not quantized"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_config_that_lies_is_refused_before_weights_are_read(tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch):
    kind, values, message = LIES[lie]
    written(tmp_path, kind, llama())
    config = json.loads((tmp_path / "config.json").read_text())
    for part, changes in values.items():
        if part in ("weights", "input_activations"):
            config["quantization_config"]["config_groups"]["group_0"][part] |= changes
        elif part == "quantization_config" and changes is not None:
            config[part] |= changes
        else:
            config[part] = changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").unlink(missing_ok=True)
    monkeypatch.setattr(foreign.ForeignSource, "read", lambda *_: pytest.fail("a layer was read"))
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["no shard", "a part is gone", "a layer is gone", "scales", "zero points"])
def test_a_damaged_directory_is_refused_before_weights_are_read(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path, "awq", llama())
    file, layer = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj"
    tensors = load_file(file)
    if damage == "no shard":
        file.unlink()
        save(tensors, tmp_path, 3)
        (tmp_path / "model-00002-of-00003.safetensors").unlink()
    else:
        for part in ("qweight", "qzeros", "scales") if damage == "a layer is gone" else ("scales",) if damage == "a part is gone" else ():
            del tensors[f"{layer}.{part}"]
        if damage in ("scales", "zero points"):
            part = f"{layer}.{'scales' if damage == 'scales' else 'qzeros'}"
            tensors[part] = tensors[part][:, :-2].contiguous()
        save(tensors, tmp_path, 1)
    monkeypatch.setattr(foreign.ForeignSource, "read", lambda *_: pytest.fail("a layer was read"))
    said = {"no shard": "00002-of-00003", "a layer is gone": f"neither a packed weight of {layer}"}
    with pytest.raises((ValueError, OSError), match=said.get(damage, layer)):
        load(tmp_path)


def test_what_load_is_not_for_is_refused(tmp_path: Path):
    saved(tmp_path, llama())
    with pytest.raises(ValueError, match=r"is not quantized: config\.json has no quantization_config"):
        load(tmp_path)
    with pytest.raises(ValueError, match="load takes no quantization_config"):
        load(tmp_path, quantization_config=TilebitConfig())
    with pytest.raises(TypeError, match="directory is"):
        load(3)  # type: ignore[arg-type]
