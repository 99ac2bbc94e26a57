"""Random models of two layers, and directories with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip


def llama(**options: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**SIZES, "head_dim": 64, "tie_word_embeddings": False, **options})


def qwen3(**options: Any) -> PreTrainedConfig:
    """Norms of q and k."""
    return Qwen3Config(**{**SIZES, "head_dim": 128, "tie_word_embeddings": True, **options})


def gemma2(**options: Any) -> PreTrainedConfig:
    """A layer with a sliding window and one without, soft caps, heads of 256 channels, a scale of its own."""
    own = {"head_dim": 256, "sliding_window": 24, "query_pre_attn_scalar": 144, "attn_logit_softcapping": 20.0}
    return Gemma2Config(**{**SIZES, **own, **options})


def phi3(**options: Any) -> PreTrainedConfig:
    """One layer for q, k and v, one for gate and up."""
    return Phi3Config(**{**SIZES, "tie_word_embeddings": False, **options})


def gemma3(**options: Any) -> PreTrainedConfig:
    """A layer with a sliding window and one without, norms of q and k, no soft cap."""
    own = {"head_dim": 256, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 256}
    return Gemma3TextConfig(**{**SIZES, **own, **options})


def gpt_oss(**options: Any) -> PreTrainedConfig:
    """A sink for each head, sliding windows in turn, experts."""
    own = {"head_dim": 64, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(**{**SIZES, **own, **options})


CONFIGS = {"llama": llama, "qwen3": qwen3, "gemma2": gemma2}


def made(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **options: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
    for name, parameter in model.named_parameters():  # transformers starts biases at nothing
        if name.endswith("bias"):
            parameter.data.normal_()
    return model


def saved(folder: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    made(config, dtype).save_pretrained(folder, **options)
    return folder
