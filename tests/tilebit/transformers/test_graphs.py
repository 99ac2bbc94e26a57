"""Captured steps of compiled models: replays write the tokens and logits of steps that are launched. On a GPU they are CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_kernels import build_attention
from comparison import GREEDY, MODES, NEAR, agree, agree_on_beams, apart, own_cache, prompts, run
from compiled_models import model_of
from replays import Watched
from stepping import COLUMNS, steps_of

import tilebit
from tilebit.transformers import TilebitCache, compile
from tilebit.transformers.compiled import DecodeSteps
from tilebit.weights.any_modules import AnyPrecisionLinear
from tilebit.weights.any_packed import pack_any
from tilebit.weights.quantize_any import AnyPrecisionTensor

STEPS = 10


def llama_on(device: torch.device) -> Any:
    return model_of("llama").to(device)


@torch.no_grad()
def test_replayed_steps_give_the_tokens_of_others(device: torch.device, replays: list[Watched]):
    """Between replays: none of the graph's (a prompt, several rows at once, a shorter cache), and two graphs on one cache."""
    model, own = compile(llama_on(device), (1, 3)), llama_on(device)
    own.reference, inputs = "sdpa", prompts(1, 120)
    for options in (GREEDY, MODES["beams"]):
        cache = own_cache(model)
        for _ in range(2):
            got, expected = run(model, "tilebit", cache, inputs, options), run(own, "tilebit", own_cache(own), inputs, options)
            if "num_beams" in options:
                agree_on_beams(own, got, expected, inputs)
            else:
                agree(got, expected)
            cache.reset()
    assert len(replays) >= 4 * 13 and {len(replay.ids) for replay in replays} == {1, 3}
    ids, last = prompts(1, 40)["input_ids"].to(device), []
    for of in (model, own):
        cache = own_cache(of)
        of(input_ids=ids[:, :30], past_key_values=cache)
        for start in (30, 31, 32):
            of(input_ids=ids[:, start : start + 1], past_key_values=cache)
        cache.crop(31)
        of(input_ids=ids[:, 31:34], past_key_values=cache)  # no step
        last.append(torch.cat([of(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(34, 40)]))
    assert float(apart(*last).max()) < NEAR


@torch.no_grad()
def test_a_server_samples_into_the_captured_step(device: torch.device, replays: list[Watched]):
    model: Any = compile(llama_on(device), (1,))
    steps, cache = model.tilebit_steps, own_cache(model)
    prompt = {name: value.to(device) for name, value in prompts(1, 20).items()}
    tokens = model.generate(**prompt, past_key_values=cache, **GREEDY)[0, 20:]
    cache.reset()
    first = model(**prompt, past_key_values=cache).logits[:, -1].argmax(-1)
    kv, batch = cache.pool.cache, cache.pool.cache.batch(cache.pool.handles)
    assert steps.tokens(batch) is None
    replays.clear()
    ids, found = first, []
    for _ in range(len(tokens) - 1):
        found.append(ids.clone())
        kv.advance(batch, deferred=True)
        sampled = steps.launch(kv, batch, ids).argmax(-1)
        held = steps.tokens(batch)
        ids = sampled if held is None else held.copy_(sampled)
    assert torch.equal(torch.cat([*found, ids]), tokens) and len(replays) == len(tokens) - 2
    assert ids is replays[-1].ids


@pytest.mark.slow
def test_replays_of_any_number_of_rows_give_the_logits_of_launches(
    device: torch.device, replays: list[Watched], monkeypatch: pytest.MonkeyPatch
):
    """Rows of their own lengths, whose windows fill on the way; each with a cache that is used again. Bit by bit: caches of
    one bound split attention alike."""
    sizes, formats = (1, 3, 16), ("kv16", "kv4_channel")
    build_attention(model_of("llama", quantized=False).to(device), formats, sizes, COLUMNS)
    model: Any = compile(llama_on(device), sizes)
    for rows in sizes:
        padding = tuple(range(rows))
        for format in formats:
            cache, other = (TilebitCache(model.config, format=format, max_tokens=256, sequences=rows) for _ in range(2))
            with monkeypatch.context() as launching:
                launching.setattr(DecodeSteps, "_captures", lambda steps, ids: False)
                launched = steps_of(model, STEPS, format, rows, padding=padding, cache=other)
            assert not replays
            for steps in (STEPS - 1, STEPS):  # of a cache that is new, and of one whose graph is there
                found = steps_of(model, STEPS, format, rows, padding=padding, cache=cache)
                assert [len(replay.ids) for replay in replays] == [rows] * steps and len(set(replays)) == 1
                assert all(map(torch.equal, found, launched))
                cache.reset()
                replays.clear()


def in_any_precision(model: Any) -> Any:
    """Its layers in 3 and 4 bits, by random codes and codebooks."""
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and name != "lm_head":
            codes = torch.randint(0, 16, layer.weight.shape, dtype=torch.uint8)
            books = {bits: (torch.randn(len(codes), 1 << bits) / 5).half() for bits in (3, 4)}
            model.set_submodule(name, AnyPrecisionLinear(pack_any(AnyPrecisionTensor(codes, books), torch.float16)))
    return model


@pytest.mark.slow
def test_every_width_of_any_precision_layers_has_a_graph(device: torch.device, replays: list[Watched]):
    """Of one cache: a graph is replayed in its width, whatever the layers were set to in between."""
    own, model = models = [in_any_precision(model_of("llama", quantized=False)).to(device) for _ in range(2)]
    for bits in (3, 4):
        tilebit.set_precision(own, bits)
        tilebit.prepare(own, m=[1, COLUMNS])
    compile(model, (1,))
    cache = TilebitCache(model.config, format="kv16", max_tokens=256, sequences=1)
    expected, graphs = {}, {}
    for bits in (4, 3, 4, 3):
        for each in models:
            tilebit.set_precision(each, bits)
        expected.setdefault(bits, torch.cat(steps_of(own, 6, rows=1, padding=())))
        found = torch.cat(steps_of(model, 6, rows=1, padding=(), cache=cache))
        assert float(apart(found, expected[bits]).max()) < NEAR
        assert len(set(replays)) == 1 and len(replays) == (6 if bits in graphs else 5)
        assert graphs.setdefault(bits, replays[0]) is replays[0]
        cache.reset()
        replays.clear()
    assert graphs[3] is not graphs[4] and float(apart(expected[3], expected[4]).max()) > 2 * NEAR
