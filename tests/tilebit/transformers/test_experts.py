"""What loading says of experts that a model stacks: once, whether they were quantized around or saved so."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from tiny_models import gpt_oss, llama, made, saved
from transformers import AutoModelForCausalLM

import tilebit
from tilebit.transformers import TilebitConfig

FORMAT = "w4a16_g64"


def heard(call: Any) -> tuple[Any, list[str]]:
    """What a call gives, and its warnings of experts."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = call()
    return result, [str(warning.message) for warning in said if "experts" in str(warning.message)]


def test_loading_names_the_stacks_that_stay(tmp_path: Path):
    folder = saved(tmp_path / "floats", gpt_oss())
    model, said = heard(lambda: AutoModelForCausalLM.from_pretrained(folder, quantization_config=TilebitConfig(FORMAT)))
    stacks = [value for name, value in model.named_parameters() if value.ndim == 3]
    share = sum(value.nbytes for value in stacks) / model.get_memory_footprint()
    expected = f"the experts of 2 modules stay as they are, {share:.1%} of the bytes that the model now takes: model.layers.*.mlp.experts. "
    (only,) = said
    assert len(stacks) == 4 and 0.5 < share < 1 and expected in only
    model.save_pretrained(tmp_path / "packed")
    again, said = heard(lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "packed"))
    assert said == [only] and again.get_memory_footprint() == model.get_memory_footprint()
    _, said = heard(lambda: tilebit.quantize_model(made(gpt_oss()), FORMAT))
    assert said == [only]


@pytest.mark.parametrize("quantization", [None, TilebitConfig(FORMAT)], ids=["16 bits", FORMAT])
def test_nothing_is_said_of_a_dense_model(tmp_path: Path, quantization: TilebitConfig | None):
    options = {} if quantization is None else {"quantization_config": quantization}
    _, said = heard(lambda: AutoModelForCausalLM.from_pretrained(saved(tmp_path, llama()), **options))
    assert said == []
