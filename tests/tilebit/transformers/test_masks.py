"""Masks that attention is told of, over transformers' own static caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_models import mistral
from tiny_models import gemma2, gpt_oss, llama, made
from transformers import StaticCache

import tilebit.transformers  # noqa: F401  registers the attention

IDS = torch.randint(2, 256, (2, 40), generator=torch.Generator().manual_seed(0))


def chunks(model: Any, attention: str) -> torch.Tensor:
    """Logits of a prompt in three calls."""
    model.set_attn_implementation(attention)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        return torch.cat([model(IDS[:, a:b], past_key_values=cache).logits for a, b in ((0, 30), (30, 31), (31, 40))], 1)


@pytest.mark.parametrize("config", [llama(), gemma2(), gpt_oss()], ids=["llama", "gemma2", "gpt-oss"])
def test_chunks_behind_a_static_cache_see_no_future(config: Any):
    """Whose layers count their tokens in a tensor before attention asks for the mask."""
    model = made(config, torch.float32)
    torch.testing.assert_close(chunks(model, "tilebit"), chunks(model, "eager"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [llama(), mistral()], ids=["llama", "a window that the prompt fills"])
def test_generate_makes_masks_ahead_for_a_static_cache(config: Any):
    model: Any = made(config, torch.float32)
    mask = torch.ones_like(IDS)
    mask[1, :7] = 0
    found = []
    for attention in ("tilebit", "eager"):
        model.set_attn_implementation(attention)
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
        found.append(model.generate(IDS, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options))
    torch.testing.assert_close(torch.stack(found[0].logits), torch.stack(found[1].logits), atol=1e-4, rtol=1e-4)
