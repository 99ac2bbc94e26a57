"""Models quantized while they load, and directories of packed ones."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import gemma2, llama, made, qwen3, saved
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from tilebit.layouts.formats import QuantFormat
from tilebit.ops.dispatch import plan_for
from tilebit.schedules.gemm.workload import Workload
from tilebit.transformers import TilebitConfig, quantizer, register, sources
from tilebit.transformers.fused import x_group
from tilebit.transformers.needed import kernels_of
from tilebit.transformers.outline import outline
from tilebit.weights import modules
from tilebit.weights.mixed import MixedLinear
from tilebit.weights.modules import QuantLinear
from tilebit.weights.packed import pack
from tilebit.weights.precision import LayerPrecision, PrecisionPlan
from tilebit.weights.quantize import quantize

BIASED = llama(attention_bias=True)


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def packed_layers(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


def same(model: nn.Module, other: nn.Module) -> None:
    a, b = model.state_dict(), other.state_dict()
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("format", ["w4a16_g64", "w8a16_channel", "w4a16_mxfp4", "w4a8_lqq_g64", "w8a8_channel"])
def test_weights_are_quantized_while_they_load(tmp_path: Path, format: str):
    """As ``quantize`` and ``pack`` do it, layer by layer; everything else is what was saved."""
    model, read = made(BIASED), loaded(saved(tmp_path, BIASED), quantization_config=TilebitConfig(format))
    layers = packed_layers(read)
    assert len(layers) == 14 and type(read.lm_head) is nn.Linear
    for name, layer in layers.items():
        float_layer: Any = model.get_submodule(name)
        expected = QuantLinear(pack(quantize(float_layer.weight.detach(), QuantFormat.parse(format)), torch.bfloat16), float_layer.bias)
        same(layer, expected)
        assert not layer.training
    for name, value in read.named_parameters():
        assert torch.equal(value, model.get_parameter(name)), name


def test_layers_have_formats_of_their_own(tmp_path: Path):
    formats = {"o_proj": "w8a16_g32", "layers.1.self_attn.o_proj": None, "lm_head": "w8a16_channel"}
    config = TilebitConfig("w4a16_g64", skip=["k_proj"], per_layer=formats)
    read = loaded(saved(tmp_path, BIASED), quantization_config=config)
    held = {name: layer.format.name for name, layer in packed_layers(read).items()}
    assert held["model.layers.0.self_attn.o_proj"] == "w8a16_g32" and held["lm_head"] == "w8a16_channel"
    assert held["model.layers.1.mlp.up_proj"] == "w4a16_g64" and len(held) == 15 - 3
    assert type(read.model.layers[1].self_attn.o_proj) is nn.Linear and type(read.model.layers[0].self_attn.k_proj) is nn.Linear
    read.save_pretrained(tmp_path / "packed")
    same(read, loaded(tmp_path / "packed"))


def test_of_several_names_that_fit_the_longest_counts():
    """Those that keep a layer among them; a layer's full name may be the end of another's."""
    with torch.device("meta"):
        model: Any = made(BIASED)
    config = TilebitConfig("w4a16_g64", skip=["mlp.up_proj"], per_layer={"o_proj": None, "1.self_attn.o_proj": "w8a16_g32", "proj": None})
    with pytest.raises(ValueError, match="per_layer names 'proj'"):
        config.formats_of(model)
    model.proj = nn.Linear(128, 128)
    model.inner = nn.ModuleDict({"proj": nn.Linear(128, 128), "lm_head": nn.Linear(128, 128)})
    formats = config.formats_of(model)
    assert "model.layers.0.self_attn.o_proj" not in formats and formats["model.layers.1.self_attn.o_proj"].name == "w8a16_g32"
    assert not {"proj", "inner.proj", "model.layers.0.mlp.up_proj"} & set(formats)
    formats |= {"inner.proj": QuantFormat(4, 64), "inner.lm_head": QuantFormat(8, 64)}
    for kept, other in (("proj", "inner.proj"), ("inner.proj", "proj")):
        formats.pop(kept, None)
        wanted = {**formats, other: QuantFormat(8, 32)}
        assert TilebitConfig.naming(wanted, quantized_in(model, wanted)).formats_of(model) == wanted


def quantized_in(model: nn.Module, formats: dict[str, Any]) -> Any:
    """``model`` as it is when those layers have been replaced."""
    found = copy.deepcopy(model)
    for name in formats:
        found.set_submodule(name, nn.Identity())
    return found


def test_the_floats_of_one_layer_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(tmp_path, BIASED)
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    counts = []

    def counted(weight: torch.Tensor, *options: Any):
        alive.append(weakref.ref(weight.untyped_storage()))
        counts.append(sum(held() is not None for held in alive))
        return quantize(weight, *options)

    monkeypatch.setattr(quantizer, "quantize", counted)
    read = loaded(tmp_path, quantization_config=TilebitConfig("w4a16_g64"))
    assert counts == [1] * 14
    assert not any(held() is not None for held in alive) and len(packed_layers(read)) == 14


@pytest.mark.parametrize("config", [BIASED, qwen3(), gemma2()], ids=["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_a_saved_model_loads_without_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, shard: str):
    read = loaded(saved(tmp_path / "float", config), quantization_config=TilebitConfig("w4a16_g64_asym"))
    read.save_pretrained(tmp_path / "packed", max_shard_size=shard)
    assert (len(list((tmp_path / "packed").glob("*.safetensors"))) > 1) == (shard != "5GB")

    def refused(*_: Any, **__: Any):
        raise AssertionError("packed again")

    for module in (quantizer, sources, modules):
        monkeypatch.setattr(module, "pack", refused)
    again, info = loaded(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values()), info
    same(read, again)
    assert all(layer.weight.data_ptr() % 64 == 0 for layer in packed_layers(again).values())  # as kernels ask for
    assert again.config.quantization_config.to_dict() == {"quant_method": "tilebit", "format": "w4a16_g64_asym"}


def test_what_was_packed_for_another_architecture_is_packed_again(tmp_path: Path):
    read = loaded(saved(tmp_path / "float", BIASED), quantization_config=TilebitConfig("w4a16_g64"))
    expected = {name: layer.unpack().codes for name, layer in packed_layers(read).items()}
    for layer in packed_layers(read).values():
        layer._repack_for("sm_90a")
    read.save_pretrained(tmp_path / "packed")
    again = packed_layers(loaded(tmp_path / "packed"))
    assert all(layer.arch == "cpu" and torch.equal(layer.unpack().codes, expected[name]) for name, layer in again.items())


def test_scales_are_cast_to_the_dtype_asked_for(tmp_path: Path):
    loaded(saved(tmp_path / "float", BIASED), quantization_config=TilebitConfig("w4a16_g64")).save_pretrained(tmp_path / "packed")
    read = loaded(tmp_path / "packed", dtype=torch.float16)
    assert {layer.dtype for layer in packed_layers(read).values()} == {torch.float16} == {value.dtype for value in read.parameters()}
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.scales"][0, 0] = 1e-30  # of bfloat16: nothing in float16
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="do not fit"):
        loaded(tmp_path / "packed", dtype=torch.float16)


def rewritten(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= values.pop("quantization_config", {})
    (folder / "config.json").write_text(json.dumps({**config, **values}))


LIES = {
    "format": ({"quantization_config": {"format": "w4a16_g128"}}, "config.json says w4a16_g128"),
    "bits": ({"quantization_config": {"format": "w8a16_g64"}}, "config.json says w8a16_g64"),
    "no format": ({"quantization_config": {"format": "w5a16"}}, "w5a16"),
    "another layer": ({"quantization_config": {"skip": []}}, "lm_head"),
    "no such layer": ({"quantization_config": {"per_layer": {"q_prj": "w8a16_g64"}}}, "per_layer names 'q_prj'"),
    "newer": ({"quantization_config": {"rotation": 1}}, "rotation"),
    "shape": ({"intermediate_size": 512}, r"config.json says w4a16_g64 \[128, 512\]"),
    "fewer layers": ({"num_hidden_layers": 1}, r"layers\.1\..*is no linear layer"),
    "more layers": ({"num_hidden_layers": 3}, r"layers\.2\."),
    "dtype": ({"dtype": "float32"}, "accepted: float16 and bfloat16"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_config_that_lies_is_refused_before_tensors_are_read(tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch):
    values, message = LIES[lie]
    loaded(saved(tmp_path / "float", BIASED), quantization_config=TilebitConfig("w4a16_g64")).save_pretrained(tmp_path / "packed")
    rewritten(tmp_path / "packed", **values)
    monkeypatch.setattr(sources.PackedSource, "read", lambda *_: pytest.fail("a layer was read"))
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / "packed")


def changed(folder: Path, change: str) -> str:
    """Damages a directory of two shards; returns what the error says."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.down_proj.scales"
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    if change == "no shard":
        file.unlink()
        return file.name
    if change == "torn":
        file.write_bytes(file.read_bytes()[:-100])
        return "not a whole safetensors file|deserializing header"
    if change == "cast":
        tensors[name] = tensors[name].float()
    elif change == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif change == "renamed":
        tensors[name + "s"] = tensors.pop(name)
    save_file(tensors, file, {"format": "pt"})
    return "does not hold it" if change == "renamed" else "down_proj cannot be loaded"


@pytest.mark.parametrize("change", ["no shard", "torn", "cast", "shape", "renamed"])
def test_a_damaged_directory_is_refused(tmp_path: Path, change: str):
    packed = tmp_path / "packed"
    read = loaded(saved(tmp_path / "float", BIASED), quantization_config=TilebitConfig("w4a16_g64"))
    read.save_pretrained(packed, max_shard_size="100KB")
    message = changed(packed, change)
    with pytest.raises((ValueError, OSError), match=message):
        loaded(packed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "w3a16"}, "w3a16"),
        ({"per_layer": {"q_proj": "w4"}}, "w4"),
        ({"per_layer": {"no_such": None}}, "per_layer names 'no_such'"),
        ({"skip": ["lm_head", "mlp.gaet_proj"]}, "skip names 'mlp.gaet_proj'; accepted: a layer's name"),
        ({"skip": ["q_proj"], "per_layer": {"q_proj": "w8a16_g64"}}, "q_proj is to be kept, in skip, and w8a16_g64, in per_layer"),
        ({"skip": ["proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]}, "not skipped"),
        ({"group_size": 64}, "group_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused(tmp_path: Path, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        loaded(saved(tmp_path, BIASED), quantization_config=TilebitConfig(**options))


@pytest.mark.parametrize("skip", [5, [5], ["lm_head", None]])
def test_what_names_no_layer_is_refused(skip: Any):
    with pytest.raises(TypeError, match=r"skip is .*accepted: "):
        TilebitConfig(skip=skip)


def test_float32_is_refused(tmp_path: Path):
    folder = saved(tmp_path, qwen3())
    with pytest.raises(ValueError, match="accepted: float16 and bfloat16"):
        loaded(folder, quantization_config=TilebitConfig(), dtype=torch.float32)


def test_a_missing_weight_is_refused(tmp_path: Path):
    file = saved(tmp_path, BIASED) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"no weight for 1 layers .*layers\.1\.mlp\.down_proj"):
        loaded(tmp_path, quantization_config=TilebitConfig())


def test_a_part_of_the_model_that_was_saved_is_refused(tmp_path: Path):
    packed = tmp_path / "packed"
    loaded(saved(tmp_path / "float", BIASED), quantization_config=TilebitConfig("w4a16_g64")).save_pretrained(packed)
    with pytest.raises(
        ValueError, match=r"holds LlamaForCausalLM, of which LlamaModel is the part 'model'; accepted: .*AutoModelForCausalLM"
    ):
        AutoModel.from_pretrained(packed)


def test_registering_again_changes_nothing():
    register()
    register()


@pytest.mark.slow
def test_transformers_is_imported_with_its_package_alone():
    code = "import sys, tilebit, tilebit.weights.modules, tilebit.cache.kvcache, tilebit.command.cli; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_layers_in_two_formats_come_back(tmp_path: Path):
    """Whichever share of their channels is in which, in one alone as plain layers; what a directory says and does not hold is refused."""
    model = made(BIASED)
    names = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and name != "lm_head"]
    shares = {name: (0, 1, 10, -1)[place % 4] for place, name in enumerate(names[:-1])}
    low, high = map(QuantFormat.parse, ("w4a8_g128_asym", "w8a8_g128"))
    layers = tuple(
        LayerPrecision(name, w.shape[0], w.shape[1], torch.randperm(w.shape[0])[: share if share >= 0 else w.shape[0]])
        for name, share in shares.items()
        if (w := model.get_parameter(f"{name}.weight")) is not None
    )
    modules.quantize_model(model, "w4a16_g64", precision=PrecisionPlan(layers, low, high))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    named = {config["format"], *config["per_layer"].values()}
    assert named == {"w4a8_g128_asym+w8a8_g128", low.name, high.name, "w4a16_g64"}
    read = loaded(tmp_path)
    same(model, read)
    kinds = {name: layer.kind for name, layer in read.named_modules() if isinstance(layer, MixedLinear)}
    assert kinds == {name: "w4a8_g128_asym+w8a8_g128" for name, share in shares.items() if share > 0}
    again = tmp_path / "again"
    read.save_pretrained(again)
    same(model, loaded(again))

    (file,) = tmp_path.glob("*.safetensors")
    entries = load_file(file)
    mixed, plain = next(iter(kinds)), next(name for name, share in shares.items() if share <= 0)
    index = entries[f"{mixed}.channels"]
    described, layer = outline(tmp_path, None, None, "cpu"), read.get_submodule(mixed)
    shape, bias = (len(index), layer.in_features), layer.rows.bias is not None
    plan = plan_for(index.device, *shape, low.name, layer.dtype, bias, False, layer.out_features, nibbles=True)
    wanted = {w.static() for w in kernels_of(described, [], [1], 8, plan.target) if isinstance(w, Workload)}
    assert plan.workload.static() in wanted and x_group(described.get_submodule(mixed)) == layer.x_group
    unpaired = next(row for row, channel in enumerate(index.tolist()) if channel == -2 and row % 16 < 8)
    for entry, value, message in (
        (f"{mixed}.channels", None, "cannot be loaded"),
        (f"{mixed}.channels", index.clamp(max=5), "do not hold each of"),
        (f"{mixed}.channels", index.index_fill(0, torch.tensor([unpaired]), -1), f"channels are -1 at row {unpaired}"),
        (f"{mixed}.channels", index[1:].clone(), "copy the directory again"),
        (f"{mixed}.rows._extra_state", None, "it does not hold|copy it again"),
        (f"{mixed}.rows._extra_state", entries[f"{plain}._extra_state"], "cannot be loaded|config.json says"),
        (f"{mixed}.low_channels", index, "two packed weights, which one now is; 1 layers .* quantize the model again"),
        (f"{plain}.low_channels", index, "two packed weights, which one now is; 1 layers .* quantize the model again"),
    ):
        changed = {name: tensor for name, tensor in entries.items() if name != entry} | ({} if value is None else {entry: value.clone()})
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            loaded(tmp_path)


def test_two_formats_take_a_search(tmp_path: Path):
    for kind, message in (("w4a8_g128_asym+w8a8_g128", "of channels that a search finds"), ("w4a16_g64+w8a8_g128", "the same int8 x")):
        with pytest.raises(ValueError, match=message):
            loaded(saved(tmp_path, BIASED), quantization_config=TilebitConfig(kind))
