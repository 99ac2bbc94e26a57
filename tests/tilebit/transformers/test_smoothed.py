"""Whole models of smoothed inputs: calibrated, saved and loaded; what their packs hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from comparison import prompts
from safetensors.torch import load_file, save_file
from tiny_models import llama, made
from torch import nn
from transformers import AutoModelForCausalLM

import tilebit
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.target import detect_target
from tilebit.transformers.anatomy import anatomy
from tilebit.transformers.fused import SideBySide, factors, fused_blocks, x_group
from tilebit.transformers.needed import kernels_of
from tilebit.transformers.outline import outline
from tilebit.weights.modules import QuantLinear
from tilebit.weights.smooth import Smoothing

CONFIG = llama(num_attention_heads=2, intermediate_size=128)  # all its linear layers are of one shape, so that few kernels compile
FORMAT = "w8a8_channel"
SHARING = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


def smoothed(others: Mapping[str, Smoothing] = MappingProxyType({})) -> Any:
    """A model whose norms make columns of very different sizes, as trained ones do; ``others`` are the factors of some layers."""
    model: Any = made(CONFIG, torch.float16)
    generator = torch.Generator().manual_seed(2)
    for name, value in model.named_parameters():
        if "norm" in name:
            value.data.copy_(torch.exp(torch.randn(value.shape, generator=generator)))
    batches = [torch.randint(2, 256, (2, 24), generator=generator) for _ in range(2)]
    smoothing = tilebit.calibrate_smoothing(model, batches, FORMAT, strengths=(0.2, 0.5))
    tilebit.quantize_model(model, FORMAT, smoothing={**smoothing, **others})
    return model


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: layer.smooth for name, layer in model.named_modules() if isinstance(layer, QuantLinear) and layer.smooth is not None}


@torch.no_grad()
def test_directories_hold_factors_and_what_lacks_them_is_refused(tmp_path: Path):
    model = smoothed()
    own, expected = held(model), model(**prompts(2, 5)).logits
    for block in range(2):
        for names in SHARING:
            first, *others = (own[f"model.layers.{block}.{name}"] for name in names)
            assert all(torch.equal(first, other) for other in others)
    model.save_pretrained(tmp_path)
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    read, info = opened
    assert not any(info.values()) and torch.equal(read(**prompts(2, 5)).logits, expected)
    assert held(read).keys() == own.keys() and all(torch.equal(smooth, own[name]) for name, smooth in held(read).items())
    (file,) = tmp_path.glob("*.safetensors")
    entries, entry = load_file(file), "model.layers.0.mlp.up_proj.smooth"
    cases: tuple[tuple[torch.Tensor | None, str], ...] = (
        (None, r"up_proj cannot be loaded: .* differ in whether its x is smoothed"),
        (entries[entry][1:].clone(), r"up_proj cannot be loaded: smooth is float32 \[127\]"),
        (entries[entry].half(), r"up_proj cannot be loaded: smooth is float16"),
    )
    for value, words in cases:
        left = {name: tensor for name, tensor in entries.items() if name != entry}
        save_file(left if value is None else left | {entry: value}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=words):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_packs_hold_the_kernels_that_smooth(tmp_path: Path):
    """Norms, gates and x of o, of a directory, whose factors are compared: layers of one input stay one product."""
    smoothed().save_pretrained(tmp_path)
    described = outline(tmp_path, None, None, "cpu")
    own = held(described)
    assert own and all(smooth.is_meta for smooth in own.values())
    assert own["model.layers.0.mlp.up_proj"] is own["model.layers.0.mlp.gate_proj"] is not own["model.layers.1.mlp.up_proj"]
    every = kernels_of(described, [KVFormat.from_name("kv16")], [1], 8, detect_target("cpu"))
    found = [w for w in every if isinstance(w, QuantizeWorkload)]
    assert {(w.norm, bool(w.gate)) for w in found if w.smooth} == {(True, False), (False, True), (False, False)}
    unsmoothed = [w for w in found if not w.smooth]
    assert not unsmoothed or any(layer.smooth is None for layer in described.modules() if isinstance(layer, QuantLinear))


@torch.no_grad()
def test_layers_of_one_input_with_other_factors_stay_apart():
    """Each then quantizes x itself: what the model computes is what it was."""
    other = Smoothing(torch.exp(torch.linspace(-1, 1, 128)), 0.5, 0.0, 0.0)
    model = smoothed({f"model.layers.{block}.mlp.up_proj": other for block in range(2)})
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).half()
    for block, layer in zip(fused_blocks(anatomy(model)), model.model.layers, strict=True):
        assert isinstance(block.gate_up, SideBySide) and x_group(block.gate_up) is None and factors(block.gate_up) is None
        assert torch.equal(block.gate_up(x), torch.cat([layer.mlp.gate_proj(x), layer.mlp.up_proj(x)], -1))
        assert isinstance(block.qkv, QuantLinear) and x_group(block.qkv) == -1 and block.qkv.smooth is not None
