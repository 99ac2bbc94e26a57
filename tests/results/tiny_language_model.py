"""The language model of the studies of quality, tiny and random, and the ids of a text for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

VOCABULARY = 61


def tiny(layers: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=layers, num_attention_heads=3, num_key_value_heads=1,
        head_dim=16, tie_word_embeddings=True, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def text_of() -> Tensor:
    """int64 [600]"""
    return torch.randint(0, VOCABULARY, (600,), generator=torch.Generator().manual_seed(1))
