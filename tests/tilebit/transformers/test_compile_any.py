"""Compiled models with layers of any precision: steps are fused and follow the width that is set, captured ones too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from any_layers import uniform_steps
from comparison import own_cache, prompts
from compiled_models import LIMIT
from replays import Watched
from tiny_models import llama, made
from torch import Tensor

import tilebit
from tilebit.transformers import compile

STEPS = 4


@pytest.fixture(scope="module")
def expected() -> Any:
    """2 and 3 bits beside packed layers and floats."""
    model: Any = made(llama(), torch.float16)
    with uniform_steps():
        tilebit.quantize_model_any(model, 2, 3, skip=lambda name, _: "_proj" not in name or "down_proj" in name)
    tilebit.quantize_model(model, "w4a16_g64")
    model.set_attn_implementation("tilebit")
    return model


def view_of(model: Any, bits: int) -> Any:
    return tilebit.precision_view(model, bits)


@torch.no_grad()
def steps_of(model: Any, cache: Any, count: int = STEPS) -> list[Tensor]:
    """Logits of a prompt's last token and of ``count`` tokens behind it, always the same ones; the cache is ready for the next."""
    found = [model(**prompts(1, 20), past_key_values=cache, logits_to_keep=1).logits]
    found += [model(input_ids=torch.tensor([[5 + step]]), past_key_values=cache).logits for step in range(count)]
    cache.reset()
    return found


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_steps_follow_the_width(expected: Any, replays: list[Watched]):
    """Of the model, between calls and in the middle of a text; a step is replayed in the width that it was captured in."""
    by_width = {}
    for bits in (2, 3):
        tilebit.set_precision(expected, bits)
        by_width[bits] = steps_of(expected, own_cache(expected))
    assert apart(by_width[2], by_width[3]) > 4 * LIMIT  # they can be told apart
    model: Any = compile(view_of(expected, 3), (1,))
    cache, graphs = own_cache(model), {}
    for bits in (3, 2, 3):
        tilebit.set_precision(model, bits)
        replays.clear()
        assert apart(steps_of(model, cache), by_width[bits]) < LIMIT
        assert len(replays) == STEPS - (bits not in graphs) and set(replays) == {graphs.setdefault(bits, replays[0])}  # at the second step
    with torch.no_grad():
        model(**prompts(1, 20), past_key_values=cache)
        for bits in (3, 2, 2):
            tilebit.set_precision(model, bits)
            model(input_ids=torch.tensor([[5]]), past_key_values=cache)
            assert captured_in(replays[-1]) == {bits}
    steps = model.tilebit_steps
    cache.reset()
    with torch.no_grad():
        model(**prompts(1, 20), past_key_values=cache)
    kv, batch = cache.pool.cache, cache.pool.cache.batch(cache.pool.handles)
    for bits in (2, 2, 3, 3):  # a server's, which calls no model
        tilebit.set_precision(model, bits)
        kv.advance(batch, deferred=True)
        steps.launch(kv, batch, torch.tensor([5]))
        assert steps.tokens(batch) is None or captured_in(replays[-1]) == {bits}


def captured_in(replay: Any) -> set[int]:
    return {bits for _, bits in replay.graph.widths}


def test_kernels_of_the_width_that_is_set_are_there_before_a_step(expected: Any, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr("tilebit.transformers.parted.prepare", lambda layers, rows: asked.append((widths(layers), list(rows))))
    model: Any = compile(view_of(expected, 3), (1, 4))
    assert asked == [({3}, [1, 4])]
    tilebit.set_precision(model, 2)
    steps_of(model, own_cache(model))
    tilebit.set_precision(model, 3)
    steps_of(model, own_cache(model))
    assert [wanted for wanted in asked if wanted[1] == [1, 4]] == [({3}, [1, 4]), ({2}, [1, 4])]
    assert [wanted for wanted in asked if wanted[1] == [20]] == [({2}, [20]), ({3}, [20])]  # prompts


def widths(layers: Any) -> set[int]:
    return {layer.bits for layer in layers.modules() if isinstance(layer, tilebit.AnyPrecisionLinear)}


def test_a_view_of_a_compiled_model_has_steps_of_its_own(expected: Any):
    tilebit.set_precision(expected, 2)
    own = steps_of(expected, own_cache(expected), 1)
    model: Any = compile(view_of(expected, 3), (1,))
    view = view_of(model, 2)
    assert apart(steps_of(view, own_cache(view), 1), own) < LIMIT
    assert widths(model) == {3} and view.get_parameter("lm_head.weight") is model.get_parameter("lm_head.weight")
