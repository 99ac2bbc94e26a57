"""Steps that ``generate`` launches before it asks for them: the same tokens, caches and errors as without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import own_cache, prompts
from compiled_models import model_of
from replays import Watched
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import tilebit.transformers.ahead as ahead
from tilebit.cache.sequences import CacheFull
from tilebit.transformers import TilebitCache, compile, release
from tilebit.transformers.ahead import StepAhead

NEW = 12
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 300}  # which no row reaches
SAMPLED: dict[str, Any] = {**GREEDY, "do_sample": True, "top_k": 20}
ON = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many steps were launched ahead, and how many of them were taken back."""
    found = {"launched": 0, "back": 0}
    real_launch, real_back = StepAhead.launch, TilebitCache.take_back

    def launch(self: StepAhead, tokens: Tensor) -> None:
        before = self.held
        real_launch(self, tokens)
        found["launched"] += self.held is not before

    def back(self: TilebitCache) -> None:
        found["back"] += 1
        real_back(self)

    monkeypatch.setattr(StepAhead, "launch", launch)
    monkeypatch.setattr(TilebitCache, "take_back", back)
    return found


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on nothing is launched ahead."""
    return lambda: monkeypatch.setattr(StepAhead, "launch", lambda self, tokens: None)


def compiled(kind: str = "llama", device: str = "cpu", **options: Any) -> Any:
    return compile(model_of(kind).to(device), (1, 3), **options)


def generated(model: Any, cache: TilebitCache, inputs: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(7)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    return model.generate(**inputs, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options)


def held(cache: TilebitCache) -> list[Tensor]:
    """All that a cache holds of its sequences, and how much."""
    kv = cache.pool.cache
    rows = [row for layer in range(len(cache.own)) for row in kv.gather(cache.pool.handles, layer)]
    assert cache.get_seq_length() == cache.seen
    return [torch.tensor(cache.pool.lengths()), *(part for row in rows for part in row)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("padding", [(), (0, 4, 7)], ids=["whole", "padded"])
@torch.no_grad()
def test_tokens_logits_and_cache_are_those_of_steps_that_are_asked_for(
    device: str, options: dict[str, Any], padding: tuple[int, ...], replays: list[Watched], counts: dict[str, int],
    without: Callable[[], None],
) -> None:  # fmt: skip
    """Of 11 steps the first two load kernels and capture; all others were launched before they were asked for, but none behind the
    last token."""
    model, inputs = compiled(device=device), prompts(3, 120, padding)  # a window fills on the way
    cache, other = own_cache(model), own_cache(model)
    found = generated(model, cache, inputs, **options)
    assert counts == {"launched": NEW - 3, "back": 0} and len(replays) == NEW - 2
    without()
    expected = generated(model, other, inputs, **options)
    assert torch.equal(found.sequences, expected.sequences) and same(list(found.logits), list(expected.logits))
    assert same(held(cache), held(other))


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("format", ["kv16", "kv4_channel", "kv2_token"])
@pytest.mark.parametrize("columns", range(117, 122))
@torch.no_grad()
def test_a_step_behind_the_last_token_is_taken_back(
    device: str, format: str, columns: int, replays: list[Watched], counts: dict[str, int], without: Callable[[], None]
) -> None:
    """``generate`` ends at a token that only the device knew, a window that just filled among them; what the cache holds, and a text
    that is continued, are as if nothing had been launched."""
    model, inputs = compiled(device=device), prompts(1, columns)
    texts, caches = [], []
    ending = generated(model, own_cache(model), inputs, **GREEDY).sequences[0, columns + 7]
    counts.update(launched=0, back=0)
    for launches in (True, False):
        cache = TilebitCache(model.config, format=format)
        if not launches:
            without()
        for _ in range(2):  # captured at the first
            cache.reset()
            text = generated(model, cache, inputs, **{**GREEDY, "eos_token_id": int(ending)}).sequences
        stopped = held(cache)
        more = {"input_ids": torch.cat((text, text[:, -1:]), 1), "attention_mask": torch.ones(1, text.shape[1] + 1, dtype=torch.int64)}
        texts.append(generated(model, cache, more, **GREEDY).sequences)
        caches.append([*stopped, *held(cache)])
        if launches:
            assert counts["back"] == 2 and counts["launched"] > 8
    assert torch.equal(*texts) and texts[0].shape[1] > columns + NEW
    assert same(*caches)


class Calls(BaseStreamer):
    """At the token ``at`` it does ``what``."""

    def __init__(self, at: int, what: Callable[[], object]) -> None:
        self.at, self.what, self.seen = at, what, 0

    def put(self, value: Tensor) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.what()

    def end(self) -> None:
        """Nothing is kept."""


@torch.no_grad()
def test_another_call_takes_the_step_back(replays: list[Watched], counts: dict[str, int], without: Callable[[], None]) -> None:
    """Over another cache, in the middle: the text is as it was, and nothing is launched ahead any more."""
    model, inputs = compiled(), prompts(1, 20)
    cache, other = own_cache(model), own_cache(model)
    asked = Calls(6, lambda: model(**prompts(1, 30), past_key_values=other))
    found = generated(model, cache, inputs, streamer=asked, **GREEDY)
    assert counts == {"launched": 3, "back": 1}
    generated(model, own_cache(model), inputs, **GREEDY)
    assert counts["launched"] > 3  # the next generate begins anew
    without()
    expected = own_cache(model)
    assert torch.equal(found.sequences, generated(model, expected, inputs, **GREEDY).sequences) and same(held(cache), held(expected))


@torch.no_grad()
def test_an_error_takes_the_step_back(replays: list[Watched], counts: dict[str, int]) -> None:
    def fail() -> None:
        assert cache.get_seq_length() == 20 + 5  # the step that was launched does not count yet
        raise OSError("no more paper")

    model, cache = compiled(), own_cache(compiled())
    with pytest.raises(OSError, match="no more paper"):
        generated(model, cache, prompts(1, 20), streamer=Calls(7, fail), **GREEDY)
    assert counts == {"launched": 4, "back": 1} and cache.seen == cache.get_seq_length() == 25 and cache.pool.lengths() == [25]


@torch.no_grad()
@pytest.mark.parametrize("change", ["crop", "reset", "reorder_cache", "activate_past_recording"])
def test_who_changes_the_cache_finds_it_without_the_step(change: str, replays: list[Watched], counts: dict[str, int]) -> None:
    found: list[tuple[int, list[int]]] = []

    def changed() -> None:
        given: dict[str, tuple[Any, ...]] = {"crop": (-2,), "reorder_cache": (torch.tensor([0]),)}
        getattr(cache, change)(*given.get(change, ()))
        found.append((cache.seen, cache.pool.lengths()))
        raise OSError

    model, cache = compiled(), own_cache(compiled())
    with pytest.raises(OSError):
        generated(model, cache, prompts(1, 20), streamer=Calls(7, changed), **GREEDY)
    left = {"crop": 23, "reset": 0}.get(change, 25)
    assert found == [(left, [left] if left else [])] and counts["back"] == 1 and cache.pending is None


class Ends(StoppingCriteria):
    """At ``columns`` columns, which nobody knows before."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.columns)


@torch.no_grad()
def test_a_full_cache_is_no_reason_to_fail(replays: list[Watched], counts: dict[str, int]) -> None:
    """The last token that has room is the last one that is launched, and the first that has none fails when it is asked for."""
    model, inputs = compiled(), prompts(1, 247)
    cache = TilebitCache(model.config, format="kv16", max_tokens=255, sequences=1)
    options = {**GREEDY, "max_new_tokens": 50, "stopping_criteria": StoppingCriteriaList([Ends(256)])}
    assert generated(model, cache, inputs, **options).sequences.shape[1] == 256
    assert counts == {"launched": 6, "back": 0}
    cache.reset()
    with pytest.raises(CacheFull, match="holds up to 255"):
        generated(model, cache, inputs, **GREEDY)
    assert counts["back"] == 0 and cache.seen == 255


@torch.no_grad()
def test_beams_and_assistants_launch_nothing(replays: list[Watched], counts: dict[str, int]) -> None:
    model = compiled()
    generated(model, own_cache(model), prompts(1, 20), **GREEDY, num_beams=3)
    generated(model, own_cache(model), prompts(1, 20), **GREEDY, prompt_lookup_num_tokens=3)
    with torch.inference_mode():  # whose tensors do not say whether they were written to
        generated(model, own_cache(model), prompts(1, 20), **GREEDY)
    assert counts == {"launched": 0, "back": 0}


@torch.no_grad()
def test_a_copy_launches_its_own_and_release_ends_it(replays: list[Watched], counts: dict[str, int]) -> None:
    model = compiled()
    copied = copy.deepcopy(model)
    for of in (model, copied):
        assert of.generate.__self__ is of.tilebit_steps.ahead and of.tilebit_steps.ahead.steps.model is of
        counts.update(launched=0, back=0)
        generated(of, own_cache(of), prompts(1, 20), **GREEDY)
        assert counts == {"launched": NEW - 3, "back": 0}
    release(copied)
    assert not {ahead.GENERATE, ahead.CRITERIA} & set(copied.__dict__)
    generated(copied, own_cache(copied), prompts(1, 20), **GREEDY)
    assert counts["launched"] == NEW - 3


@torch.no_grad()
def test_tokens_that_are_written_to_are_read_again(replays: list[Watched], counts: dict[str, int]) -> None:
    """A call behind other tokens than those that the step was launched with takes it back."""
    model, cache, taken = compiled(), own_cache(compiled()), []

    def write(_: Any, __: Any, named: dict[str, Any]) -> None:
        taken.append(named["input_ids"])
        if len(taken) == 8:
            named["input_ids"][:] = 5

    model.register_forward_pre_hook(write, with_kwargs=True)
    found = generated(model, cache, prompts(1, 20), **GREEDY).sequences
    assert counts == {"launched": 5, "back": 1}
    other = own_cache(model)
    changed = torch.cat((found[:, :26], torch.tensor([[5]])), 1)
    expected = model(input_ids=changed, past_key_values=other, attention_mask=torch.ones_like(changed)).logits[0, -1]
    assert int(expected.argmax()) == int(found[0, 27])


def test_another_threads_call_may_end_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    found: list[Any] = [None, (own_cache(model), 1)]
    monkeypatch.setattr(StepAhead, "_latest", property(lambda _: found.pop()), raising=False)
    launches = object.__new__(StepAhead)
    launches.steps, launches.held, launches._vain = model.tilebit_steps, None, False
    launches.launch(torch.zeros(1, 5, dtype=torch.int64))
    assert launches.held is None
