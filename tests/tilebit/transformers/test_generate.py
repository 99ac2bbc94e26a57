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
    "beams": {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "output_scores": True},
    "prompt look-up": {**GREEDY, "max_new_tokens": 24, "prompt_lookup_num_tokens": 6},
    "chunked prefill": {**GREEDY, "prefill_chunk_size": 50},
}
LIMIT = 0.1  # of float16 logits with a deviation of 2, and of a beam's mean logarithm of probability


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


def agree(got: Any, expected: Any) -> None:
    """The same logits at every step, hence the same tokens, but where two tokens' logits lie so near in float16 that either may
    follow: behind it a row's text is another one, and is not compared. That may happen to few."""
    assert len(got.logits) == len(expected.logits)
    first = expected.sequences.shape[1] - len(expected.logits)
    same = torch.ones(len(expected.sequences), dtype=torch.bool)
    compared = 0
    for step, (a, b) in enumerate(zip(got.logits, expected.logits, strict=True)):
        assert float((a - b)[same].abs().max()) < LIMIT
        compared += int(same.sum())
        same &= got.sequences[:, first + step] == expected.sequences[:, first + step]
        if not same.any():
            break
    assert compared >= 0.75 * same.numel() * len(expected.logits)


def agree_on_beams(model: Any, got: Any, expected: Any, inputs: dict[str, torch.Tensor]) -> None:
    """The beams' scores are the reference's, and what the reference gives such texts; beams of nearly the same score may change
    places."""
    assert float((got.sequences_scores - expected.sequences_scores).abs().max()) < LIMIT
    model.set_attn_implementation(model.reference)
    text, prompt = got.sequences, inputs["input_ids"].shape[1]
    mask = inputs["attention_mask"].repeat_interleave(len(text) // len(inputs["input_ids"]), 0)
    mask = torch.nn.functional.pad(mask, (0, text.shape[1] - prompt), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=text, attention_mask=mask, position_ids=positions).logits[:, prompt - 1 : -1].float()
    scores = logits.log_softmax(-1).gather(2, text[:, prompt:, None]).mean((1, 2))
    assert float((got.sequences_scores - scores).abs().max()) < LIMIT


@torch.no_grad()
def compared(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> TilebitCache:
    cache = own_cache(model)
    expected = run(model, model.reference, DynamicCache(config=model.config), inputs, options)
    got = run(model, "tilebit", cache, inputs, options)
    if "num_beams" in options:
        agree_on_beams(model, got, expected, inputs)
        return cache
    agree(got, expected)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_what_transformers_gives(model: Any, mode: str):
    """The residual window fills on the way, between drafts too."""
    cache = compared(model, prompts(1, 120), MODES[mode])
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
