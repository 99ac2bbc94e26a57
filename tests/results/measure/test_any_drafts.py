"""A narrow view of a model drafts for a wide one of the same store, here of a tiny random model on a CPU."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tilebit
from results.measure import any_drafts
from results.measure.any_drafts import drafted
from results.report.any_drafts import any_drafts_section
from tilebit import AnyPrecisionLinear


def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=128,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(config)
    model = made.to(torch.bfloat16).eval()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data.mul_(8.0)  # so that the most likely token is clearly so
    return model


def test_a_view_shares_every_tensor_and_has_a_width_of_its_own() -> None:
    model = tiny()
    tilebit.quantize_model_any(model)
    view: Any = tilebit.precision_view(model, 3)
    for (name, one), (_, other) in zip(model.state_dict().items(), view.state_dict().items(), strict=True):
        assert one.data_ptr() == other.data_ptr() or name.endswith("_extra_state"), name
    widths = [{m.bits for m in one.modules() if isinstance(m, AnyPrecisionLinear)} for one in (model, view)]
    assert widths == [{8}, {3}]
    tilebit.set_precision(model, 5)
    assert {m.bits for m in view.modules() if isinstance(m, AnyPrecisionLinear)} == {3}
    with pytest.raises(ValueError, match="bits is 9"):
        tilebit.precision_view(model, 9)
    with pytest.raises(ValueError, match="has no AnyPrecisionLinear"):
        tilebit.precision_view(nn.Linear(2, 2), 3)


@pytest.mark.slow
def test_drafts_of_3_bits_leave_the_tokens_of_8() -> None:
    model = tiny()
    tilebit.quantize_model_any(model)
    ids = torch.randint(3, 97, (1, 5), generator=torch.Generator().manual_seed(1))
    found = drafted(model, tilebit.precision_view(model, 3), ids, 24, 4)
    assert found.same and found.tokens.shape == (1, 24) and found.drafted > 0 and 0 <= found.accepted <= found.drafted
    itself = drafted(model, copy.deepcopy(model), ids, 24, 4)
    assert itself.same and itself.accepted > found.accepted / 2 and itself.accepted >= 0.6 * itself.drafted


@pytest.mark.slow
def test_a_row_for_each_store_width_and_number_of_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(folder: Path, sensitivity: str) -> tuple[Any, Any]:
        model = tiny()
        tilebit.quantize_model_any(model)
        return model, lambda prompt: {"input_ids": [3 + len(prompt) % 7, 5, 8]}

    monkeypatch.setattr(any_drafts, "stored", stored)
    out = tmp_path / "any_drafts" / "cpu.jsonl"
    asked = ["--model", "none", "--tokens", "6", "--ahead", "2", "--bits", "3", "4", "--out", str(out)]
    assert any_drafts.main(asked) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["sensitivity"], row["bits"]) for row in rows] == [("none", 3), ("none", 4), ("fisher", 3), ("fisher", 4)]
    assert all(row["same"] == row["prompts"] == 4 and row["new"] == 24 and row["drafted"] > 0 for row in rows)
    page = any_drafts_section(tmp_path / "any_drafts")
    assert "| by squared gradients | 4 | 2 |" in page and "24 new tokens of 4 prompts" in page


def test_a_page_says_what_a_step_gives(tmp_path: Path) -> None:
    assert any_drafts_section(tmp_path) == ""
    row = {
        "op": "any_drafts", "model": "M", "sensitivity": "none", "bits": 3, "ahead": 4, "drafted": 40, "accepted": 20, "same": 1,
        "prompts": 1, "new": 30, "seconds": 2.0, "seconds_alone": 3.0, "gpu": "a CPU", "commit": None, "date": "",
    }  # fmt: skip
    (tmp_path / "cpu.jsonl").write_text(json.dumps(row) + "\n")
    assert "| all values alike | 3 | 4 | 50% | 3.00 | 1 of 1 | 2.0 | 3.0 |" in any_drafts_section(tmp_path)
