"""A narrow view of a model drafts for a wide one of the same store, here of a tiny random model on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import tilebit
from results.measure.any_drafts import drafted
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
