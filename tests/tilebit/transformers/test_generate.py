"""``generate`` over a 16-bit tilebit cache, in every mode: the tokens and logits of transformers' own attention and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_kernels import build_attention
from comparison import GREEDY, MODES, compared, continued, own_cache, prompts
from tiny_models import CONFIGS, made
from transformers import DynamicCache


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, device: torch.device) -> Any:
    own = "eager" if request.param == "gemma2" else "sdpa"  # sdpa leaves soft caps out
    found: Any = made(CONFIGS[request.param](), torch.float16, attn_implementation=own)
    found.reference = own
    found.to(device)
    build_attention(found, ["kv16"], [1, 3, 4], 120)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_what_transformers_gives(model: Any, mode: str):
    """The residual window fills on the way, between drafts too."""
    rows = 4 if mode in ("greedy", "chunked prefill") else 1  # of several, one whose next tokens are as likely leaves others to compare
    cache = compared(model, prompts(rows, 120), MODES[mode])
    assert set(cache.pool.lengths()) == {cache.get_seq_length()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "chunked prefill"])
def test_padding_never_enters_the_cache(model: Any, mode: str):
    padding = (0, 60, 9)  # with chunks of 50: a chunk of padding alone
    cache = compared(model, prompts(3, 120, padding), MODES[mode])
    if mode != "beams":
        assert cache.pool.lengths() == [cache.get_seq_length() - count for count in padding]


@pytest.mark.slow
def test_a_draft_model_proposes(model: Any):
    assistant: Any = made(CONFIGS["llama"](), torch.float16, seed=3).to(model.device)
    compared(model, prompts(1, 120), {**GREEDY, "assistant_model": assistant, "num_assistant_tokens": 5})


@pytest.mark.slow
def test_prompts_are_continued(model: Any):
    """The second call is given all tokens so far and a few more, padded rows among them."""
    continued([(model, model.reference, DynamicCache(config=model.config)), (model, "tilebit", own_cache(model))], prompts(2, 40, (0, 7)))
