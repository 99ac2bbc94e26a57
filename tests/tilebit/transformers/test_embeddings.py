"""Input embeddings that are quantized while a model loads: alone, beside an output layer, or as one weight with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepping import prompt_and_steps
from tiny_models import gemma2, llama, made, saved
from torch import nn
from transformers import AutoModelForCausalLM, BartConfig

from tilebit import QuantEmbedding, QuantLinear
from tilebit.layouts.formats import QuantFormat
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import target_from_name
from tilebit.transformers import TilebitCache, TilebitConfig, compile
from tilebit.transformers.needed import kernels_of
from tilebit.transformers.opening import open_model
from tilebit.transformers.outline import outline
from tilebit.weights.quantize import quantize

IDS = torch.tensor([[5, 7, 200, 31]])
TIED = llama(tie_word_embeddings=True)
HEAD = {"lm_head": "w8a16_channel"}
CASES: dict[str, tuple[Any, dict[str, Any], bool, bool]] = {  # a config, options, whether one weight serves both, whether config.json ties
    "its own": (llama(), {"embeddings": "w8a16_channel"}, False, False),
    "both": (llama(), {"embeddings": "w8a16_channel", "per_layer": HEAD}, False, False),
    "one": (TIED, {"embeddings": "w8a16_channel", "per_layer": HEAD}, True, True),
    "scaled": (gemma2(), {"embeddings": "w4a16_g64", "skip": []}, True, True),
    "two of a tied one": (TIED, {"embeddings": "w8a16_g64_asym", "skip": []}, False, False),
}


def read(folder: Path, **options: Any) -> Any:
    """A model of which nothing is missing."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model, found = loaded
    assert not any(found.values()), found
    return model


def quantized(tmp_path: Path, case: str) -> Any:
    config, options, _, _ = CASES[case]
    return read(saved(tmp_path / "floats", config), quantization_config=TilebitConfig("w4a16_g64", **options))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("case", CASES)
def test_it_is_quantized_and_comes_back(tmp_path: Path, case: str):
    """What is looked up is what the floats' own embedding gives of the weight dequantized."""
    config, options, one, tied = CASES[case]
    model, floats = quantized(tmp_path, case), cast("Any", made(config))
    layer, plain = model.get_input_embeddings(), floats.get_input_embeddings()
    plain.weight.data = quantize(plain.weight.detach(), QuantFormat.parse(options["embeddings"])).dequantize(torch.bfloat16)
    assert isinstance(layer, QuantEmbedding) and torch.equal(layer(IDS), plain(IDS)) and layer(IDS).dtype == torch.bfloat16
    head = model.lm_head
    assert isinstance(head, nn.Linear if case == "its own" else QuantLinear) and (head is layer.rows) == one
    assert model.config.tie_word_embeddings is tied and not layer.training

    expected, size = logits(model), model.get_memory_footprint()
    model.tie_weights()
    assert torch.equal(logits(model), expected) and torch.equal(logits(copy.deepcopy(model)), expected)
    model.save_pretrained(tmp_path / "packed")
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert ("lm_head.weight" in stored) != one and "model.embed_tokens.rows.weight" in stored
    again = read(tmp_path / "packed")
    assert torch.equal(logits(again), expected) and again.get_memory_footprint() == size
    assert (again.lm_head is again.get_input_embeddings().rows) == one and again.config.tie_word_embeddings is tied
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(open_model(tmp_path / "again")), expected)


def test_by_default_it_is_kept(tmp_path: Path):
    model = read(saved(tmp_path, TIED), quantization_config=TilebitConfig("w4a16_g64"))
    assert type(model.model.embed_tokens) is nn.Embedding and "embeddings" not in TilebitConfig().to_dict()


def test_a_fused_step_looks_up_in_it(tmp_path: Path):
    model = quantized(tmp_path, "one").to(torch.float16)
    cache = TilebitCache(model.config, format="kv16", max_tokens=16, sequences=1)
    expected = prompt_and_steps(model, cache, IDS)
    compile(model, (1,), 64)
    for a, b in zip(prompt_and_steps(model, cache, IDS), expected, strict=True):
        assert float((a - b).abs().max()) < 0.1


@pytest.mark.parametrize("case", ["one", "two of a tied one"])
def test_a_pack_of_it_holds_the_output_layers_product(tmp_path: Path, case: str):
    """And none of an embedding."""
    quantized(tmp_path, case).save_pretrained(tmp_path / "packed")
    described = outline(tmp_path / "packed", None, None, "sm_90a")
    listed = kernels_of(described, [KVFormat.from_name("kv4_channel")], [1], 64, target_from_name("sm_90a"))
    formats = {product.format.name for product in listed if isinstance(product, Workload) and product.n == 256 and product.k == 128}
    assert "w8a16_channel" in formats or case != "one"
    assert "w8a16_g64_asym" not in formats


def test_a_directory_without_it_is_refused(tmp_path: Path):
    """And one whose config says another format, or does not tie the layer that it lacks."""
    quantized(tmp_path, "one").save_pretrained(tmp_path / "packed")
    file, config = tmp_path / "packed" / "model.safetensors", tmp_path / "packed" / "config.json"
    said, tensors = config.read_text(), load_file(file)
    for before, after, message in (
        ('"tie_word_embeddings": true', '"tie_word_embeddings": false', "which it does not hold, lm_head first"),
        ('"embeddings": "w8a16_channel"', '"embeddings": "w4a16_g64"', "which it does not hold, lm_head first"),
        ('"embeddings": "w8a16_channel",', "", "does not hold"),
    ):
        assert before in said
        config.write_text(said.replace(before, after))
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "packed")
    config.write_text(said)
    save_file({name: value for name, value in tensors.items() if not name.endswith("rows._extra_state")}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="which it does not hold"):
        read(tmp_path / "packed")


def test_a_missing_weight_is_refused(tmp_path: Path):
    file = saved(tmp_path, llama()) / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "embed" not in name}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="no weight for 1 layers that are quantized, model"):
        read(tmp_path, quantization_config=TilebitConfig("w4a16_g64", embeddings="w8a16_channel"))


def test_a_tied_output_layer_that_is_kept_needs_the_floats(tmp_path: Path):
    """In 16 bits it would hold them beside the embedding's codes."""
    with pytest.raises(ValueError, match=r"lm_head, which has the same weight, in 16 bits.*per_layer=\{'lm_head': 'w8a16_channel'\}"):
        read(saved(tmp_path, TIED), quantization_config=TilebitConfig("w4a16_g64", embeddings="w8a16_channel"))


@pytest.mark.parametrize("format", ["w8a8_channel", "w4a16_nvfp4", "w9"])
def test_formats_that_have_no_rows_to_look_up_are_refused(format: str):
    with pytest.raises(ValueError, match=format):
        TilebitConfig(embeddings=format)


def test_an_embedding_that_does_more_is_refused():
    options: dict[str, Any] = {"vocab_size": 64, "d_model": 64, "decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 64}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(BartConfig(**options, tie_word_embeddings=False))
    with pytest.raises(ValueError, match="the embedding is a BartScaledWordEmbedding, which may do more"):
        TilebitConfig("w8a16_channel", embeddings="w8a16_channel").embedding_of(model)
