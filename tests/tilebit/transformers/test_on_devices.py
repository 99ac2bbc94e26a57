"""Directories and commands on each device: weights are quantized there, come back, and write text in captured steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import GREEDY, agree, own_cache, prompts, run
from replays import Watched
from tiny_models import llama, saved
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tilebit.command.cli import app
from tilebit.transformers import TilebitConfig, compile
from tilebit.transformers.synthetic import write_model
from tilebit.weights.modules import QuantLinear
from tilebit.weights.packed import arch_of

TOKENS = 24


def layers_of(model: Any) -> dict[str, QuantLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


@pytest.mark.slow
def test_a_directory_is_quantized_on_a_device_and_comes_back(device: torch.device, tmp_path: Path, replays: list[Watched]):
    """By ``device_map``, packed for the device; the CPU packs again what was saved there, and computes with the same codes."""
    pytest.importorskip("accelerate")
    folder, wanted = saved(tmp_path / "float", llama(), torch.float16), TilebitConfig("w4a16_g64")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=wanted, device_map=str(device))
    model.save_pretrained(tmp_path / "packed")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", device_map=str(device))
    assert {value.device.type for value in again.state_dict().values() if value.dtype != torch.uint8} == {device.type}
    assert {layer.arch for each in (model, again) for layer in layers_of(each).values()} == {arch_of(device)}
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    on_cpu = layers_of(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))
    assert len(on_cpu) == 14
    for name, layer in layers_of(again).items():
        assert on_cpu[name].arch == "cpu" and torch.equal(layer.unpack().codes.cpu(), on_cpu[name].unpack().codes)
    expected = run(model, "tilebit", own_cache(model), prompts(3, 40), GREEDY)
    compile(again, (3,))
    agree(run(again, "tilebit", own_cache(again), prompts(3, 40), GREEDY), expected)
    assert [len(replay.ids) for replay in replays] == [3] * 14


def said(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, (*arguments, "--json"))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
def test_commands_write_text_in_captured_steps(device: torch.device, tmp_path: Path, replays: list[Watched]):
    """Quantized while it loads, or before: the same weights, and the same text."""
    folder, packed = write_model(tmp_path / "dense"), tmp_path / "packed"
    here = ("--device", str(device))
    assert said("quantize", str(folder), str(packed), "--format", "w4a16_g64", *here)["peak_bytes"] > 0
    asked = ("--prompt", "a small model", "--max-tokens", str(TOKENS), "--kv-format", "kv4_channel", *here)
    found = said("generate", str(packed), *asked)
    assert found["new_tokens"] == TOKENS == len(found["text"]) and found["decode_tokens_per_s"] > 0
    # Three tokens before the clock starts, whose first step is captured at the second; then every step.
    assert [len(replay.ids) for replay in replays] == [1] * (1 + TOKENS - 1) and len(set(replays)) == 1
    assert said("generate", str(folder), *asked, "--format", "w4a16_g64")["text"] == found["text"]
