"""Fields of quantization configs that are of another kind than they should be: said as what they are, whatever they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tilebit.weights.checkpoint import load_checkpoint
from tilebit.weights.checkpoint_config import CheckpointError, parse_quantization
from tilebit.weights.synthetic import write_checkpoint

NAME = "model.layers.0.mlp.up_proj"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}
QSERVE: dict[str, Any] = {"quant_method": "qserve", "wbits": 4, "group_size": 128}
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def packed(**changes: Any) -> dict[str, Any]:
    """A compressed-tensors config with one group, with ``changes`` of it."""
    group = {"targets": ["Linear"], "weights": WEIGHTS} | changes
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "GPTQ bits": (GPTQ | {"bits": 4.0}, r"GPTQ config: bits is 4\.0; accepted: 4, 8"),
    "GPTQ group_size": (GPTQ | {"group_size": 32.0}, r"GPTQ config: group_size is 32\.0; accepted: 32, 64"),
    "GPTQ dynamic as a list": (GPTQ | {"dynamic": ["l"]}, r"GPTQ dynamic is \['l'\]; accepted: 'an object of patterns'"),
    "GPTQ dynamic of False": (GPTQ | {"dynamic": {"l": False}}, "GPTQ dynamic 'l' is False; accepted: 'an object of fields'"),
    "GPTQ dynamic of no pattern": (GPTQ | {"dynamic": {"+:(": {}}}, r"GPTQ dynamic '\+:\(' is no regular expression: .*repair the config"),
    "GPTQ dynamic too much": (GPTQ | {"dynamic": {"a{9999999999}": {}}}, "is no regular expression: the repetition number is too large"),
    "GPTQ dynamic bits": (GPTQ | {"dynamic": {".*": {"bits": 8.0}}}, rf"GPTQ config for {NAME}: bits is 8\.0"),
    "GPTQ dynamic desc_act": (GPTQ | {"dynamic": {".*": {"desc_act": "no"}}}, "desc_act is 'no'; accepted: True, False"),
    "AWQ bits": (AWQ | {"bits": 4.0}, r"bits is 4\.0"),
    "AWQ group_size": (AWQ | {"group_size": [32]}, r"group_size is \[32\]"),
    "QServe group_size": (QSERVE | {"group_size": [128]}, r"QServe group_size is \[128\]; accepted: -1, 128"),
    "QServe bits": (QSERVE | {"wbits": [4]}, r"QServe wbits is \[4\]; accepted: 4"),
    "fp8 blocks": (FP8 | {"weight_block_size": 5}, r"fp8 weight_block_size is 5; accepted: \[128, 128\]"),
    "sparsity": (packed() | {"sparsity_config": "dense"}, "sparsity_config is 'dense'; accepted: 'an object'"),
    "weights": (packed(weights=[1]), r"weights of config_groups group_0 is \[1\]; accepted: 'an object'"),
    "activations": (packed(input_activations="int8"), "input_activations of config_groups group_0 is 'int8'"),
    "targets": (packed(targets="Linear"), "targets of config_groups group_0 is 'Linear'; accepted: 'a list of names'"),
    "target": (packed(targets=["Linear", 5]), r"targets of config_groups group_0 is \['Linear', 5\]"),
    "target of no pattern": (packed(targets=["re:("]), r"target 're:\(' of config_groups group_0 is no regular expression"),
    "preset": (packed() | {"config_groups": {"W4A16": ["re:("]}}, r"target 're:\(' of config_groups W4A16 is no regular expression"),
    "group": (packed() | {"config_groups": {"group_0": 4}}, "config_groups group_0 is 4; accepted: 'an object', 'a list of targets'"),
}  # fmt: skip


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_a_field_of_another_kind_is_named(case: str, library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "compressed_tensors" else find(name, *more))
    config, words = REFUSED[case]
    with pytest.raises(CheckpointError, match=words):
        parse_quantization(config)[1](NAME)


def test_what_a_dynamic_config_leaves_out_says_nothing() -> None:
    """Such layers hold nothing to be read, whatever is said of them; of two patterns the first counts."""
    dynamic = {"-:.*lm_head": False, "-:(": {}, "+:.*up_proj": {"bits": 8}, ".*up_proj": {"bits": 4}}
    assert parse_quantization(GPTQ | {"dynamic": dynamic})[1](NAME).format.bits == 8


@pytest.mark.parametrize("config", ["gptq", [GPTQ]])
def test_a_config_is_a_mapping(config: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gptq", {NAME: (24, 256)})
    with pytest.raises(TypeError, match=r"config is .*; accepted: the quantization config as a mapping"):
        load_checkpoint(tmp_path, config=config)
