"""``generate`` over a 16-bit tilebit cache, in every mode: the tokens and logits of transformers' own attention and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import GREEDY, agree, compared, own_cache, prompts, run
from tiny_models import CONFIGS, made
from transformers import DynamicCache

SAMPLED: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "top_k": 20}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": SAMPLED,
    "several returned": {**SAMPLED, "num_return_sequences": 3},
    "beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "output_scores": True},
    "prompt look-up": {**GREEDY, "max_new_tokens": 24, "prompt_lookup_num_tokens": 6},
    "chunked prefill": {**GREEDY, "prefill_chunk_size": 50},
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    own = "eager" if request.param == "gemma2" else "sdpa"  # sdpa leaves soft caps out
    found: Any = made(CONFIGS[request.param](), torch.float16, attn_implementation=own)
    found.reference, found.kind = own, request.param
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
    assistant: Any = made(CONFIGS["llama"](), torch.float16, seed=3)
    compared(model, prompts(1, 120), {**GREEDY, "assistant_model": assistant, "num_assistant_tokens": 5})


@pytest.mark.slow
def test_prompts_are_continued(model: Any):
    """The second call is given all tokens so far and a few more, padded rows among them."""
    inputs = prompts(2, 40, (0, 7))
    caches = {model.reference: DynamicCache(config=model.config), "tilebit": own_cache(model)}
    for _ in range(2):
        results = {name: run(model, name, cache, inputs, GREEDY) for name, cache in caches.items()}
        expected, got = results.values()
        agree(got, expected)
        assert torch.equal(got.sequences, expected.sequences)
        ids = torch.cat((got.sequences, prompts(2, 5)["input_ids"]), 1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - inputs["attention_mask"].shape[1]), value=1)
        inputs = {"input_ids": ids, "attention_mask": mask}
