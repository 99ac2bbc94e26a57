"""Fused prompts give the logits of the model as it was, fill the cache alike, and are taken where they may be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparison import GREEDY, own_cache, prompts
from compiled_models import KINDS, PADDING, ROWS, model_of

from tilebit.transformers import TilebitCache, compile
from tilebit.transformers.fused import FusedStep

COLUMNS = 140  # more than a window
ROUNDING = 0.01  # of float16 logits, relative


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each fused prompt, once for each call of a model."""
    found: list[int] = []
    real = FusedStep._logits

    def logits(self: FusedStep, residual: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        found.append(len(residual))
        return real(self, residual, added)

    monkeypatch.setattr(FusedStep, "_logits", logits)
    return found


@torch.no_grad()
def told(model: Any, format: str, chunks: tuple[int, ...], kept: int) -> list[torch.Tensor]:
    """Logits of a prompt with padding that comes in chunks, and of a token behind it."""
    model.set_attn_implementation("tilebit")
    cache, inputs = TilebitCache(model.config, format=format), prompts(ROWS, sum(chunks) + 1, PADDING)
    places, found, first = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0), [], 0
    for columns in (*chunks, 1):
        now = slice(first, first + columns)
        given = {"attention_mask": inputs["attention_mask"][:, : now.stop], "position_ids": places[:, now], "logits_to_keep": kept}
        found.append(model(input_ids=inputs["input_ids"][:, now], past_key_values=cache, **given).logits.clone())
        first += columns
    return found


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "llama")])
def test_a_fused_prompt_gives_the_logits_of_the_model(kind: str, taken: list[int]):
    """Whole, and a chunk behind another."""
    model = model_of(kind)
    cases = [("kv16", (COLUMNS,), 1), ("kv16", (COLUMNS, 40), 3)]
    expected = [told(model, *case) for case in cases]
    compile(model, (1,))
    for case, before in zip(cases, expected, strict=True):
        for a, b in zip(told(model, *case), before, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and float((a - b).float().norm() / b.float().norm()) < ROUNDING
    assert set(taken) == {ROWS, 3 * ROWS}


@torch.no_grad()
def test_generate_takes_it_and_other_calls_run_as_before(taken: list[int]):
    model: Any = compile(model_of("llama"), (1,))
    model.generate(**prompts(1, 20), past_key_values=own_cache(model), **GREEDY)
    assert taken[0] == 1 and len(taken) >= 16
    taken.clear()
    whole = prompts(ROWS, 30)
    cache = own_cache(model)
    assert model(**whole, past_key_values=cache).logits.shape[:2] == (ROWS, 30) and 60 in taken
    taken.clear()
    padded = prompts(ROWS, 30, PADDING)
    places = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model(**padded, position_ids=places, past_key_values=own_cache(model))  # logits of padding, too
    model(**padded, past_key_values=own_cache(model), logits_to_keep=1)  # places that count padding
    model(**whole, position_ids=torch.arange(30)[None] + 5, past_key_values=own_cache(model))
    model(**prompts(1, 16), past_key_values=own_cache(model))  # few tokens
    model(**whole, past_key_values=own_cache(model), logits_to_keep=torch.tensor([29]))
    assert taken == []
    other = copy.deepcopy(model)
    other(**whole, past_key_values=own_cache(other), logits_to_keep=1)
    assert ROWS in taken


@torch.no_grad()
def test_behind_padding_places_must_be_given(taken: list[int]):
    """A model counts columns where it is not told of places; a fused step counts tokens."""
    model: Any = compile(model_of("llama"), (ROWS,))
    cache, inputs = own_cache(model), prompts(ROWS, 30, PADDING)
    places = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model(**inputs, position_ids=places, past_key_values=cache, logits_to_keep=1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    given = {"input_ids": torch.full((ROWS, 1), 5), "past_key_values": cache}
    taken.clear()
    model(**given, attention_mask=mask)
    assert taken == []
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    model(**given, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1)
    assert taken and set(taken) == {ROWS}


@torch.no_grad()
def test_a_mask_of_other_columns_is_refused():
    model: Any = compile(model_of("llama"), (1,))
    cache, inputs = own_cache(model), prompts(1, 30)
    model(**inputs, past_key_values=cache)
    with pytest.raises(ValueError, match="attention_mask is"):
        model(input_ids=inputs["input_ids"], attention_mask=torch.ones(1, 25, dtype=torch.int64), past_key_values=cache)
    assert cache.pool.lengths() == [30]


@torch.no_grad()
def test_a_prompt_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch):
    model: Any = compile(model_of("llama"), (1,))
    cache, inputs = own_cache(model), prompts(1, 30)

    def failing(*_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(FusedStep, "prompt", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            model(**inputs, past_key_values=cache)
    assert cache.get_seq_length() == 0 and cache.pool.lengths() == [0]
    assert model(**inputs, past_key_values=cache).logits.shape[1] == 30 and cache.pool.lengths() == [30]
