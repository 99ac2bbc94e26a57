"""What an opened checkpoint says of layers that it cannot read: one report, before any is read."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilebit import load_checkpoint
from tilebit.weights import checkpoint as checkpoints
from tilebit.weights.checkpoint import CheckpointError
from tilebit.weights.synthetic import write_checkpoint

LAYERS = {f"model.layers.{i}.mlp.{name}": (24, 192) for i in range(3) for name in ("down_proj", "up_proj")}


def edit(path: Path, change: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, "compressed-tensors", LAYERS, group_size=64)
    return tmp_path


def test_a_checkpoint_that_can_be_read_reports_nothing(written):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_checkpoint(written).layers() == sorted(LAYERS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_bits": 3}, "bits is 3; accepted: 4, 8; requantize"),
        ({"group_size": 16}, "group_size is 16; accepted: 32, 64, 128, -1; requantize"),
        ({"group_size": 96}, "group_size is 96; accepted: 32, 64, 128, -1; requantize"),
        ({"strategy": "tensor", "group_size": None}, "strategy is 'tensor'; accepted: 'group', 'channel'; use one of these"),
    ],
    ids=["3 bits", "groups of 16", "groups of 96", "per tensor"],
)
def test_every_layer_is_of_a_kind_that_cannot_be_read(written, change, says, monkeypatch):
    edit(written, lambda config: config["config_groups"]["group_0"]["weights"].update(change))
    monkeypatch.setattr(checkpoints.Checkpoint, "tensor", lambda *_: pytest.fail("a layer was read"))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(written)
    assert str(caught.value).startswith(
        f"6 of the 6 quantized layers of {written} cannot be read: model.layers.0.mlp.down_proj and 5 more: "
    )
    assert says in str(caught.value) and "copy the checkpoint again" not in str(caught.value)


def test_some_layers_cannot_be_read(written):
    """A warning names them once, those of each reason together; the others are read."""

    def mixed(config: dict[str, Any]) -> None:
        group = config["config_groups"]["group_0"]
        for key, target, change in (("group_1", "re:.*down_proj", {"group_size": 16}), ("group_2", "re:.*2.mlp.up_proj", {"num_bits": 3})):
            config["config_groups"][key] = {**group, "targets": [target], "weights": group["weights"] | change}

    edit(written, mixed)
    with pytest.warns(UserWarning) as caught:
        checkpoint = load_checkpoint(written)
    (text,) = [str(warning.message) for warning in caught]
    assert text.startswith(f"4 of the 6 quantized layers of {written} cannot be read: model.layers.0.mlp.down_proj and 2 more: ")
    assert "; model.layers.2.mlp.up_proj: the layer: bits is 3; accepted: 4, 8" in text
    assert caught[0].filename == __file__, "the caller's line is named"
    assert checkpoint.quantized("model.layers.0.mlp.up_proj").n == 24
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj: group_size is 16"):
        checkpoint.quantized("model.layers.1.mlp.down_proj")


@pytest.mark.parametrize("shape", [[1], []])
def test_one_scale_for_a_weight_is_no_damaged_file(written, shape):
    file = written / "model.safetensors"
    tensors = load_file(file)
    save_file({name: torch.ones(shape).half() if name.endswith("weight_scale") else value for name, value in tensors.items()}, file)
    with pytest.raises(
        CheckpointError, match=r"and 5 more: it has one scale for the whole weight, \[1?\]; accepted: .*quantize again"
    ) as caught:
        load_checkpoint(written)
    assert "copy the checkpoint again" not in str(caught.value)


@pytest.mark.parametrize("format", ["naive-quantized", "pack-quantized"])
def test_activations_of_8_bits_are_named_whatever_the_format(written, format):
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

    def change(config: dict[str, Any]) -> None:
        config["format"] = format
        config["config_groups"]["group_0"]["input_activations"] = activations

    edit(written, change)
    with pytest.raises(CheckpointError, match=r"quantizes its activations too; accepted: weight-only schemes such as W4A16") as caught:
        load_checkpoint(written)
    assert "save the model again" not in str(caught.value)
