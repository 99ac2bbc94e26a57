"""Output layers whose weight is the input embedding's, too: packed where they are asked for, and else tied as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from any_layers import uniform, uniform_steps
from safetensors.torch import load_file, save_file
from stepping import prompt_and_steps
from tiny_models import SIZES, gemma2, llama, made, saved
from torch import nn
from transformers import AutoModelForCausalLM, OpenAIGPTConfig, PreTrainedConfig

import tilebit
from tilebit import AnyPrecisionLinear, QuantEmbedding
from tilebit.layouts.formats import QuantFormat
from tilebit.transformers import TilebitCache, TilebitConfig, compile
from tilebit.transformers.fused import x_group
from tilebit.weights.any_packed import pack_any
from tilebit.weights.modules import QuantLinear
from tilebit.weights.packed import pack
from tilebit.weights.quantize import quantize

TIED = llama(tie_word_embeddings=True)
IDS = torch.tensor([[5, 7, 200, 31]])


def read(folder: Path, config: TilebitConfig | None = None) -> Any:
    """A model of which nothing is missing."""
    options: dict[str, Any] = {} if config is None else {"quantization_config": config}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model, found = loaded
    assert not any(found.values()), found
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


def packed_of(weight: torch.Tensor, format: str) -> QuantLinear:
    return QuantLinear(pack(quantize(weight.detach(), QuantFormat.parse(format)), weight.dtype))


def holds(layer: nn.Module, expected: QuantLinear) -> None:
    a, b = layer.state_dict(), expected.state_dict()
    assert isinstance(layer, QuantLinear) and list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def gpt(**options: Any) -> PreTrainedConfig:
    """It ties the other way round: the embedding to the output layer."""
    return OpenAIGPTConfig(vocab_size=256, n_positions=64, n_embd=128, n_layer=1, n_head=2, **options)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("config", [TIED, gemma2(), gpt()], ids=["llama", "gemma2", "gpt"])
@pytest.mark.parametrize("asked", ["per_layer", "skip"])
def test_it_is_packed_where_it_is_asked_for(tmp_path: Path, config: PreTrainedConfig, asked: str):
    """The embedding keeps its 16 bits; what is saved comes back as it is, and nothing ties it again."""
    options: dict[str, Any] = {"per_layer": {"lm_head": "w8a16_channel"}} if asked == "per_layer" else {"skip": []}
    floats: Any = made(config)
    weight = floats.get_input_embeddings().weight
    assert floats.get_output_embeddings().weight is weight
    model = read(saved(tmp_path / "floats", config), TilebitConfig("w4a16_g64", **options))
    holds(model.lm_head, packed_of(weight, "w8a16_channel" if asked == "per_layer" else "w4a16_g64"))
    held = model.get_input_embeddings().weight
    assert held.dtype == torch.bfloat16 and torch.equal(held, weight) and model.config.tie_word_embeddings is False
    assert config.tie_word_embeddings is True, "another model's"

    expected = logits(model)
    model.tie_weights()
    assert torch.equal(logits(model), expected) and isinstance(model.lm_head, QuantLinear)
    model.save_pretrained(tmp_path / "packed")
    assert config_of(tmp_path / "packed")["tie_word_embeddings"] is False
    again = read(tmp_path / "packed")
    holds(again.lm_head, model.lm_head)
    assert torch.equal(logits(again), expected)


def test_by_default_it_is_kept_and_stays_tied(tmp_path: Path):
    model = read(saved(tmp_path / "floats", TIED), TilebitConfig("w4a16_g64"))
    model.save_pretrained(tmp_path / "packed")
    for found in (model, read(tmp_path / "packed")):
        assert found.lm_head.weight is found.model.embed_tokens.weight and found.config.tie_word_embeddings is True
    assert "skip" not in config_of(tmp_path / "packed")["quantization_config"]


@pytest.mark.parametrize("stored", ["both", "output", "different", "neither"])
def test_a_directory_may_hold_either_name(tmp_path: Path, stored: str):
    """Where it holds two weights, these are used; where none, it is refused."""
    file = saved(tmp_path / "floats", TIED) / "model.safetensors"
    tensors = load_file(file)
    weight = tensors.pop("model.embed_tokens.weight")
    if stored in ("both", "different"):
        tensors["model.embed_tokens.weight"] = weight
    output = 2 * weight if stored == "different" else weight.clone()
    if stored != "neither":
        tensors["lm_head.weight"] = output
    save_file(tensors, file, {"format": "pt"})
    config = TilebitConfig("w4a16_g64", skip=[])
    if stored == "neither":
        with pytest.raises(ValueError, match="no weight for 1 layers that are quantized, lm_head first"):
            read(tmp_path / "floats", config)
        return
    model = read(tmp_path / "floats", config)
    holds(model.lm_head, packed_of(output, "w4a16_g64"))
    assert torch.equal(model.model.embed_tokens.weight, weight)
    model.save_pretrained(tmp_path / "packed")
    again = read(tmp_path / "packed")
    assert torch.equal(logits(again), logits(model)) and again.config.tie_word_embeddings is False


def test_a_model_that_was_quantized_in_memory_comes_back(tmp_path: Path):
    model: Any = made(TIED)
    weight = model.lm_head.weight
    tilebit.quantize_model(model, "w8a16_channel", skip=())
    holds(model.lm_head, packed_of(weight, "w8a16_channel"))
    assert model.config.tie_word_embeddings is False and TIED.tie_word_embeddings is True
    model.save_pretrained(tmp_path)
    again = read(tmp_path)
    holds(again.lm_head, model.lm_head)
    assert torch.equal(again.model.embed_tokens.weight, weight) and torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("embeddings", [None, "w8a16_channel"])
def test_it_may_be_of_any_precision(tmp_path: Path, embeddings: str | None):
    """Packed while the model loads, once its weight is tied; in the width that is set."""
    weight, folder = made(TIED).lm_head.weight.detach(), saved(tmp_path / "floats", TIED)
    with uniform_steps():
        model = read(folder, TilebitConfig("w4a16_g64", per_layer={"lm_head": "w3-4a16_any@3"}, embeddings=embeddings))
        expected = AnyPrecisionLinear(pack_any(uniform(weight, 3, 4), weight.dtype))
    model.save_pretrained(tmp_path / "packed")
    for found in (model, read(tmp_path / "packed")):
        head, embedding = found.lm_head, found.model.embed_tokens
        a, b = head.state_dict(), expected.state_dict()
        assert isinstance(head, AnyPrecisionLinear) and head.bits == 3 and all(torch.equal(a[name], b[name]) for name in b)
        assert found.config.tie_word_embeddings is False and torch.equal(logits(found), logits(model))
        if embeddings is None:
            assert torch.equal(embedding.weight, weight)
        else:
            assert isinstance(embedding, QuantEmbedding)
            holds(embedding.rows, packed_of(weight, embeddings))
    said = config_of(tmp_path / "packed")["quantization_config"]
    assert said["per_layer"] == {"lm_head": "w3-4a16_any@3"} and said.get("embeddings") == embeddings


def test_of_any_precision_in_memory_it_comes_back(tmp_path: Path):
    model: Any = made(TIED, torch.float16)
    weight = model.lm_head.weight
    with uniform_steps():
        tilebit.quantize_model_any(model, 3, 4, skip=lambda name, _: name != "lm_head")
    assert model.config.tie_word_embeddings is False and TIED.tie_word_embeddings is True
    model.save_pretrained(tmp_path)
    again = read(tmp_path)
    assert isinstance(again.lm_head, AnyPrecisionLinear) and torch.equal(again.model.embed_tokens.weight, weight)
    assert torch.equal(logits(again), logits(model))


def test_what_else_is_tied_stays_so():
    """And the config says it."""
    model: Any = made(TIED)
    model.second = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
    ties = {"lm_head.weight": "model.embed_tokens.weight", "second.weight": "model.embed_tokens.weight"}
    model._tied_weights_keys, model.all_tied_weights_keys = ties, dict(ties)
    model.tie_weights()
    assert model.second.weight is model.model.embed_tokens.weight
    tilebit.quantize_model(model, "w8a16_channel", skip=("second",))
    assert model.config.tie_word_embeddings is True and list(model.all_tied_weights_keys) == ["second.weight"]
    model.tie_weights()
    assert isinstance(model.lm_head, QuantLinear) and model.second.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("format", ["w8a16_channel", pytest.param("w8a8_channel", marks=pytest.mark.slow)])
def test_a_fused_step_computes_it(format: str):
    """Of int8 x the last norm writes the codes."""
    model: Any = made(TIED, torch.float16)
    tilebit.quantize_model(model, format, skip=lambda name, _: name != "lm_head")
    cache = TilebitCache(model.config, format="kv16", max_tokens=16, sequences=1)
    expected = prompt_and_steps(model, cache, IDS)
    compile(model, (1,), SIZES["max_position_embeddings"])
    assert x_group(model.tilebit_steps.step._of.head) == (-1 if format == "w8a8_channel" else None)
    for a, b in zip(prompt_and_steps(model, cache, IDS), expected, strict=True):
        assert float((a - b).abs().max()) < 0.1 and torch.equal(a.argmax(-1), b.argmax(-1))
