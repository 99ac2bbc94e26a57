"""A model's directory made on the spot: random weights, and a token for every character of ASCII."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

CHARACTERS = 128


def write_model(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """Write a Llama of bfloat16 weights and its tokenizer to ``folder``, and return that. ``sizes`` are
    of ``LlamaConfig``; by default two layers whose linear layers all have one shape, [128, 128], so that
    few kernels compile."""
    config = LlamaConfig(**{
        "vocab_size": CHARACTERS, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 192, "initializer_range": 0.2, "tie_word_embeddings": True,
        "eos_token_id": None, "bos_token_id": None, **sizes,
    })  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    plain: Any = Tokenizer(models.WordLevel({chr(i): i for i in range(CHARACTERS)}, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder)
    return folder
