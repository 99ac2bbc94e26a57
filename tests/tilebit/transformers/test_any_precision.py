"""Directories of models with layers of any precision: exact with the width that is set, beside other layers, and what lies is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from any_layers import uniform_steps
from safetensors.torch import load_file, save_file
from tiny_models import llama, made, qwen3, saved
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import tilebit
from tilebit import AnyPrecisionLinear, QuantLinear
from tilebit.layouts.formats import GemmFormat
from tilebit.transformers import TilebitConfig, quantizer, sources, takeover
from tilebit.transformers.benching import low_bit_model
from tilebit.weights import any_modules
from tilebit.weights.any_packed import pack_any
from tilebit.weights.extra_state import from_tensor, to_tensor

BIASED = llama(attention_bias=True)
IDS = torch.arange(2, 22)[None]
UP, DOWN, Q = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module", autouse=True)
def without_k_means() -> Iterator[None]:
    with uniform_steps():
        yield


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def of_widths(model: nn.Module) -> dict[str, AnyPrecisionLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, AnyPrecisionLinear)}


def same(model: nn.Module, other: nn.Module) -> None:
    a, b = model.state_dict(), other.state_dict()
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name
    bits = {name: layer.bits for name, layer in of_widths(model).items()}
    assert bits and bits == {name: layer.bits for name, layer in of_widths(other).items()}


def said(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.fixture(scope="module")
def original(without_k_means: None) -> Any:
    """3 to 5 bits."""
    model = made(BIASED)
    assert len(tilebit.quantize_model_any(model, max_bits=5)) == 14
    return model


@pytest.fixture
def model(original: Any) -> Any:
    return copy.deepcopy(original)


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
@pytest.mark.parametrize("bits", [3, 5])
def test_a_saved_model_loads_without_packing(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str, bits: int):
    """The same tensors and the same width; nothing is missing, nothing is left over."""
    tilebit.set_precision(model, bits)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard != "5GB")
    assert said(tmp_path) == {"quant_method": "tilebit", "format": "w3-5a16_any" + "@3" * (bits == 3)}

    def refused(*_: Any, **__: Any):
        raise AssertionError("packed again")

    for module in (quantizer, any_modules):
        monkeypatch.setattr(module, "pack_any", refused)
    again, info = loaded(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    same(model, again)
    assert all(layer.planes.data_ptr() % 64 == 0 and not layer.training for layer in of_widths(again).values())
    if bits == 3 and shard == "5GB":  # of the others no kernels are compiled
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, again(IDS).logits)


def test_layers_keep_their_own_widths_and_the_next_save_says_what_is_set_then(model: Any, tmp_path: Path):
    layers = of_widths(model)
    for place, layer in enumerate(layers.values()):
        layer.bits = 3 + place % 3
    model.save_pretrained(tmp_path / "a")
    again = loaded(tmp_path / "a")
    same(model, again)
    assert {layer.bits for layer in of_widths(again).values()} == {3, 4, 5}
    tilebit.set_precision(again, 4)
    again.save_pretrained(tmp_path / "b")
    assert said(tmp_path / "b") == {"quant_method": "tilebit", "format": "w3-5a16_any@4"}
    same(again, loaded(tmp_path / "b"))


def test_other_layers_stand_beside_them(tmp_path: Path):
    """Two stores of other widths, one of a single width, packed layers, and floats; tied output embeddings."""
    model = made(qwen3())
    tilebit.quantize_model_any(model, max_bits=4, skip=lambda name, _: "q_proj" not in name)
    tilebit.quantize_model_any(model, 2, 2, skip=lambda name, _: "k_proj" not in name)
    tilebit.quantize_model(model, "w4a16_g64", skip=("lm_head", "v_proj"))
    tilebit.set_precision(model.model.layers[1].self_attn.q_proj, 3)
    model.save_pretrained(tmp_path)
    kinds = {name: layer.kind for name, layer in of_widths(model).items()}
    assert sorted(kinds.values()) == ["w2a16_any", "w2a16_any", "w3-4a16_any", "w3-4a16_any@3"]
    assert {said(tmp_path)["format"], *said(tmp_path)["per_layer"].values()} == {"w4a16_g64", *kinds.values()}
    again = loaded(tmp_path)
    same(model, again)
    assert type(again.model.layers[0].self_attn.v_proj) is nn.Linear and type(again.model.layers[0].self_attn.o_proj) is QuantLinear


def test_what_was_packed_for_another_architecture_is_packed_again(model: Any, tmp_path: Path):
    expected = {name: layer.packed.unpack().codes for name, layer in of_widths(model).items()}
    for layer in of_widths(model).values():
        layer._hold(pack_any(layer.packed.unpack(), layer.dtype, arch="sm_90a"))
    model.save_pretrained(tmp_path)
    again = of_widths(loaded(tmp_path))
    assert all(layer.arch == "cpu" and torch.equal(layer.packed.unpack().codes, expected[name]) for name, layer in again.items())


def test_codebooks_are_cast_to_the_dtype_asked_for(model: Any, folder: Path):
    read = loaded(folder, dtype=torch.float16)
    for name, layer in of_widths(read).items():
        own = model.get_submodule(name)
        assert layer.dtype == torch.float16 and torch.equal(layer.planes, own.planes)
        assert torch.equal(layer.get_buffer("codebook_4"), own.codebook_4.half())
    rewritten(folder, f"{UP}.codebook_4", lambda book: torch.full_like(book, 1e6))
    with pytest.raises(ValueError, match=rf"{UP}: a codebook does not fit torch.float16"):
        loaded(folder, dtype=torch.float16)
    loaded(folder)


def test_weights_are_quantized_while_they_load(original: Any, tmp_path: Path):
    """As ``quantize_model_any`` does it without a sensitivity, biases included."""
    read = loaded(saved(tmp_path, BIASED), quantization_config=TilebitConfig("w3-5a16_any@4"))
    assert {layer.bits for layer in of_widths(read).values()} == {4} and not any(layer.training for layer in of_widths(read).values())
    tilebit.set_precision(read, 5)
    same(original, read)


def test_layers_have_widths_of_their_own(tmp_path: Path):
    """Names count as for other formats; a format that is no name, too."""
    stores: dict[str, Any] = {"v_proj": "w2-3a16_any@2", "1.self_attn.v_proj": GemmFormat.parse("w2a16_any"), "q_proj": "w8a16_g32"}
    config = TilebitConfig("w2a16_any", skip=["lm_head", "mlp.gate_proj", "up_proj", "down_proj", "o_proj"], per_layer=stores)
    read = loaded(saved(tmp_path / "float", BIASED), quantization_config=config)
    kinds = {name.removeprefix("model.layers."): layer.kind for name, layer in of_widths(read).items()}
    v, k = "self_attn.v_proj", "self_attn.k_proj"
    assert kinds == {f"0.{v}": "w2-3a16_any@2", f"1.{v}": "w2a16_any", f"0.{k}": "w2a16_any", f"1.{k}": "w2a16_any"}
    assert read.get_submodule(Q).format.name == "w8a16_g32" and type(read.get_submodule(UP)) is nn.Linear
    read.save_pretrained(tmp_path / "packed")
    same(read, loaded(tmp_path / "packed"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "w8a16_any"}, "widths from 2, 3, 4 bits on, .*'w3-8a16_any' computes in 8 bits"),
        ({"format": "w5-6a16_any"}, "'w3-6a16_any' computes in 6 bits"),
        ({"per_layer": {"q_proj": "w6a16_any"}}, r"layers\.0\.self_attn\.q_proj is to be w6a16_any"),
        ({"format": "w3-8a16_any", "clip_search": True}, "clip_search goes with layers of any precision alone"),
        ({"format": "w3-9a16_any"}, "accepted: from 2 up to 8"),
        ({"format": "w3-8a16_any+w8a8_g128"}, "accepted are names such as"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
):
    folder = saved(tmp_path, BIASED)
    monkeypatch.setattr(quantizer, "quantize_any", lambda *_: pytest.fail("a layer is quantized"))
    with pytest.raises(ValueError, match=message):
        loaded(folder, quantization_config=TilebitConfig(**options))


def test_random_models_of_a_config_are_of_any_precision(tmp_path: Path):
    BIASED.save_pretrained(tmp_path)
    model = low_bit_model(tmp_path / "config.json", TilebitConfig("w2-3a16_any@2"), torch.bfloat16, torch.device("cpu"))
    assert {layer.kind for layer in of_widths(model).values()} == {"w2-3a16_any@2"}


def test_they_are_no_other_tools(model: Any):
    with pytest.raises(ValueError, match="has no linear layer that can be taken over"):
        takeover(model)


def rewritten(folder: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    value = change(tensors.pop(name, torch.zeros(1)))
    save_file(tensors if value is None else {**tensors, name: value.contiguous()}, file, {"format": "pt"})


def saying(**values: Any) -> Callable[[Tensor], Tensor]:
    return lambda state: to_tensor({**from_tensor(state), **values})


FILES: dict[str, tuple[str, Callable[[Tensor], Tensor | None], str]] = {
    "no planes": (f"{UP}.planes", lambda t: None, "the state_dict lacks planes"),
    "a plane less": (f"{UP}.planes", lambda t: t[:4], r"of \[3, 4, 5\] bits|of 4 planes"),
    "a plane more": (f"{UP}.planes", lambda t: torch.cat((t, t[:1])), "of 6 planes"),
    "planes of another shape": (f"{UP}.planes", lambda t: t[:, :-1], "weight is torch.int32"),
    "floats as planes": (f"{UP}.planes", lambda t: t.float(), "weight is torch.float32"),
    "no codebook": (f"{DOWN}.codebook_4", lambda t: None, "the state_dict lacks codebook_4"),
    "a codebook more": (f"{DOWN}.codebook_6", lambda t: t, r"codebook_6 is there, and the layer stores 3 to 5 bits"),
    "a shorter codebook": (f"{DOWN}.codebook_4", lambda t: t[:, :8], "scales is torch.bfloat16"),
    "codebooks of two types": (f"{DOWN}.codebook_4", lambda t: t.half(), "accepted: one dtype"),
    "no bias": (f"{Q}.bias", lambda t: None, "its bias is missing"),
    "a shorter bias": (f"{Q}.bias", lambda t: t[:-1], r"its bias is \[255\] and config.json makes it \[256\]"),
    "a bias too many": (f"{UP}.bias", lambda t: t, r"its bias is \[1\] and config.json makes it none"),
    "no description": (f"{UP}._extra_state", lambda t: None, "says that 1 layers are packed which it does not hold"),
    "another description": (f"{UP}._extra_state", lambda t: t[:-1], "cannot be loaded: the extra state is"),
    "other widths": (f"{UP}._extra_state", saying(widths=[3, 4]), "of 5 planes|codebook_5"),
    "widths with a gap": (f"{UP}._extra_state", saying(widths=[3, 5]), r"widths are 256, 128 and \[3, 5\]"),
    "another layout": (f"{UP}._extra_state", saying(layout="planes_old"), "lie as planes_old has them"),
    "another n": (f"{UP}._extra_state", saying(n=128), "weight is torch.int32"),
}


@pytest.mark.parametrize("lie", FILES)
def test_files_that_lie_are_refused_before_tensors_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch, lie: str):
    name, change, message = FILES[lie]
    rewritten(folder, name, change)
    monkeypatch.setattr(sources.PackedSource, "read", lambda *_: pytest.fail("a layer was read"))
    with pytest.raises(ValueError, match=message) as error:
        loaded(folder)
    assert name.rpartition(".")[0] in str(error.value) and "accepted" in str(error.value)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "wider": ({"format": "w3-8a16_any"}, r"is w3-5a16_any \[.*\] and config.json says w3-8a16_any \["),
    "narrower": ({"format": "w3-4a16_any"}, "config.json says w3-4a16_any"),
    "a view": ({"format": "w5a16_any"}, "config.json says w5a16_any"),
    "scales": ({"format": "w4a16_g64"}, "is w3-5a16_any .* config.json says w4a16_g64"),
    "one layer": ({"per_layer": {"o_proj": "w8a16_g64"}}, "o_proj is w3-5a16_any .* config.json says w8a16_g64"),
    "set to what is not stored": ({"format": "w3-5a16_any@6"}, "set to 6; accepted"),
    "skipped": ({"skip": ["q_proj"]}, "lm_head|config.json says none"),
}


@pytest.mark.parametrize("lie", CONFIGS)
def test_a_config_that_lies_is_refused_before_tensors_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch, lie: str):
    values, message = CONFIGS[lie]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sources.PackedSource, "read", lambda *_: pytest.fail("a layer was read"))
    with pytest.raises(ValueError, match=message) as error:
        loaded(folder)
    assert "accepted" in str(error.value)


def test_packed_layers_of_one_kind_in_the_place_of_another(folder: Path):
    """config.json says any precision, the file holds codes and scales."""
    layer = QuantLinear.from_float(nn.Linear(128, 256, bias=False), "w4a16_g64", dtype=torch.bfloat16)
    (file,) = folder.glob("*.safetensors")
    held = {name: tensor for name, tensor in load_file(file).items() if not name.startswith(UP)}
    save_file({**held, **{f"{UP}.{name}": tensor for name, tensor in layer.state_dict().items()}}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{UP} is w4a16_g64 \[256, 128\] and config.json says w3-5a16_any"):
        loaded(folder)


def test_a_model_of_another_library_is_not_saved():
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64).half()

        def save_pretrained(self, folder: Path) -> None:
            raise AssertionError("saved")

    model = Saved()
    tilebit.quantize_model_any(model, max_bits=3)
    with pytest.raises(ValueError, match="would write what from_pretrained cannot read"):
        model.save_pretrained(Path())
