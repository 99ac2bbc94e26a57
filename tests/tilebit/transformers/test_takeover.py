"""Layers that another quantizer loaded become tilebit's; models save as directories of tilebit, whoever quantized them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import KINDS, written
from safetensors.torch import load_file
from tiny_models import gemma2, llama, made
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear

from tilebit.transformers import load, takeover
from tilebit.weights.modules import QuantLinear, quantize_model

IDS = torch.arange(2, 42)[None]


class Other(nn.Module):
    """A layer as the tools' torch modules hold it."""

    def __init__(self, linear: nn.Linear, tensors: dict[str, torch.Tensor], zeros: int | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        if zeros is not None:
            self.qzero_format = lambda: zeros


def loaded_by_the_tool(folder: Path, kind: str, zeros: int | None = None) -> Any:
    model, stored = written(folder, kind, llama()), load_file(folder / "model.safetensors")
    for name, layer in list(model.named_modules()):
        tensors = {part.removeprefix(f"{name}."): value for part, value in stored.items() if part.startswith(f"{name}.")}
        if type(layer) is nn.Linear and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Other(layer, tensors, zeros))
    return model


def equal(model: Any, other: Any) -> None:
    a, b = model.state_dict(), other.state_dict()
    assert list(a) == list(b) and all(torch.equal(value, b[name]) and value.dtype == b[name].dtype for name, value in a.items())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, other(IDS).logits)


@pytest.mark.parametrize(
    ("kind", "zeros"), [("awq", None), ("awq symmetric", None), ("gptq v1", 1), ("gptq v2", 2), ("gptq act order", 1), ("gptq 8 bits", 1)]
)
def test_layers_of_the_tools_are_taken_over(tmp_path: Path, kind: str, zeros: int | None):
    model = loaded_by_the_tool(tmp_path / "theirs", kind, zeros)
    names = takeover(model)
    assert len(names) == 14 and all(isinstance(model.get_submodule(name), QuantLinear) for name in names)
    for name, layer in load(tmp_path / "theirs").named_modules():
        if isinstance(layer, QuantLinear):
            own: Any = model.get_submodule(name)
            assert torch.equal(own.unpack().dequantize(), layer.unpack().dequantize()), name
    model.save_pretrained(tmp_path / "own")
    equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "own"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "quantized" in kind and "act order" not in kind])
def test_layers_of_compressed_tensors_are_taken_over(tmp_path: Path, kind: str):
    """As transformers loads them with that library, compressed."""
    pytest.importorskip("compressed_tensors")
    written(tmp_path / "theirs", kind, llama())
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert len(takeover(model)) == 14
    expected: Any = load(tmp_path / "theirs")
    equal(model, expected)
    model.save_pretrained(tmp_path / "own")
    equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "own"))


def with_fp8_layers(folder: Path, **said: Any) -> Any:
    """As transformers holds blocks of fp8 on a GPU that has them; elsewhere it loads floats."""
    model, stored = written(folder, "fp8 blocks", llama()), load_file(folder / "model.safetensors")
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            theirs = FP8Linear(layer.in_features, layer.out_features, **{"block_size": (128, 128), **said})
            theirs.weight.data, theirs.weight_scale_inv.data = (stored[f"{name}.{part}"] for part in ("weight", "weight_scale_inv"))
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, theirs)
    return model


def test_layers_of_fp8_blocks_are_taken_over(tmp_path: Path):
    model = with_fp8_layers(tmp_path / "theirs")
    assert len(takeover(model)) == 14
    expected: Any = load(tmp_path / "theirs")
    equal(model, expected)
    model.save_pretrained(tmp_path / "own")
    equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "own"))


@pytest.mark.parametrize(
    ("said", "reason"), [({"activation_scheme": "static"}, "fp8 activation_scheme"), ({"block_size": (64, 64)}, "fp8 weight_block_size")]
)
def test_other_fp8_layers_are_refused(tmp_path: Path, said: dict[str, Any], reason: str):
    with pytest.raises(ValueError, match=f"can be taken over: .*{reason}"):
        takeover(with_fp8_layers(tmp_path, **said))


def test_what_cannot_be_taken_is_named_and_stays(tmp_path: Path):
    model = loaded_by_the_tool(tmp_path, "awq")
    first, second, third = (model.model.layers[0].mlp.get_submodule(f"{part}_proj") for part in ("gate", "up", "down"))
    first.q_handle, second.in_features = 1, 64
    model.model.layers[0].mlp.down_proj = bytes_alone = Other(nn.Linear(256, 128), {"weight": torch.zeros(16384, 1, dtype=torch.uint8)})
    with pytest.warns(UserWarning) as said:
        names = takeover(model)
    text = str(said[0].message)
    assert len(said) == 1 and text.startswith("3 quantized layers stay as they are") and "64" in text
    assert all(f"layers.0.mlp.{part}_proj" in text for part in ("gate", "up")) and len(names) == 11
    assert model.model.layers[0].mlp.gate_proj is first and model.model.layers[0].mlp.down_proj is bytes_alone
    assert type(third) is Other
    with pytest.raises(ValueError, match=r"3 layers are of another quantizer, .*gate_proj first"):
        model.save_pretrained(tmp_path / "own")
    assert not (tmp_path / "own" / "config.json").exists()


def test_gptq_layers_that_do_not_say_their_zero_points_are_asked_for(tmp_path: Path):
    model = loaded_by_the_tool(tmp_path, "gptq v2")
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=r"no linear layer that can be taken over.*checkpoint_format='gptq'"):
        takeover(model)
    assert list(model.state_dict()) == before
    assert len(takeover(model, gptq_format="gptq_v2")) == 14
    with pytest.raises(ValueError, match=r"accepted: a model with layers of AutoAWQ.*fp8"):
        takeover(model)
    with pytest.raises(ValueError, match="gptq_v3"):
        takeover(model, gptq_format="gptq_v3")
    with pytest.raises(ValueError, match=r"would compute in torch\.float32"):
        takeover(made(llama(), torch.float32))


@pytest.mark.parametrize("config", [llama(attention_bias=True), gemma2()], ids=["llama", "gemma2"])
def test_a_model_of_quantize_model_is_saved(tmp_path: Path, config: Any):
    """Formats of several calls, which one config then names by layer; the parts of a model too."""
    model: Any = made(config)
    quantize_model(model, "w8a16_g32", skip=lambda name, _: "down_proj" not in name)
    quantize_model(model, "w4a16_g64_asym", skip=lambda name, _: name == "lm_head" or name.endswith("0.self_attn.v_proj"))
    for saved in (model, copy.deepcopy(model)):
        saved.save_pretrained(tmp_path / "own")
        again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
        equal(model, again)
    formats = {layer.format.name for layer in again.modules() if isinstance(layer, QuantLinear)}
    assert formats == {"w8a16_g32", "w4a16_g64_asym"} and type(again.model.layers[0].self_attn.v_proj) is nn.Linear
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice" / "config.json").read_text() == (tmp_path / "own" / "config.json").read_text()
    again.model.save_pretrained(tmp_path / "part")
    part: Any = type(again.model).from_pretrained(tmp_path / "part")
    with torch.no_grad():
        assert torch.equal(part(IDS).last_hidden_state, again.model(IDS).last_hidden_state)


def test_a_model_that_shares_the_config_stays_one_of_floats(tmp_path: Path):
    config = llama()
    model, other = made(config), made(config, seed=1)
    quantize_model(model, "w4a16_g64")
    model.save_pretrained(tmp_path / "own")
    other.save_pretrained(tmp_path / "floats")
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    equal(read, other)
    assert not any(isinstance(layer, QuantLinear) for layer in read.modules())
