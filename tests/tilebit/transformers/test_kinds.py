"""``generate`` over tilebit caches: models with sinks and mixed layers, fp8, large pages, a config of several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import GREEDY, agree, compared, own_cache, prompts, run
from tiny_models import gemma3, gpt_oss, llama, made
from transformers import DynamicCache

from tilebit.transformers import TilebitCache

BEAMS: dict[str, Any] = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "output_scores": True}


def built(config: Any, reference: str, device: str | torch.device = "cpu", **options: Any) -> Any:
    model: Any = made(config, torch.float16, attn_implementation=reference, **options)
    model.reference = reference
    return model.to(device)


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
@pytest.mark.parametrize("kind", ["gpt-oss", "gemma3"])
def test_sinks_and_mixed_layers_give_what_transformers_gives(kind: str, options: dict[str, Any], device: torch.device):
    """Padded rows; windows of 24 columns beside layers that see all; the residual window fills on the way."""
    model = built(gpt_oss(), "eager", device) if kind == "gpt-oss" else built(gemma3(), "sdpa", device)
    if kind == "gpt-oss":  # sinks that take a good part of what there is
        for name, value in model.named_parameters():
            if name.endswith("sinks"):
                value.data.normal_(2.0, 1.0)
    cache = compared(model, prompts(2, 120, (0, 9)), options)
    assert len(cache.own) == 2


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 256])
def test_beams_over_pages_of_other_sizes(page_size: int):
    """256 tokens: pages that beams share are filled in part, and copied when one goes on."""
    cache = compared(built(llama(), "sdpa"), prompts(2, 300, (0, 33)), BEAMS, page_size=page_size)
    assert cache.pool.cache.page_size == page_size and cache.rows == 6


@torch.no_grad()
def test_fp8_rounds_what_is_packed_and_nothing_else():
    model = built(llama(), "sdpa")
    ids = prompts(1, 300)["input_ids"]
    logits, rows = {}, {}
    for format in ("kv16", "kvfp8"):
        model.set_attn_implementation("tilebit")
        cache = TilebitCache(model.config, format=format)
        first = model(ids[:, :270], past_key_values=cache).logits
        logits[format] = torch.cat((first, model(ids[:, 270:], past_key_values=cache).logits), 1).float()
        rows[format] = [x.float() for x in cache.pool.cache.gather(cache.pool.handles, 0)[0]]
    for exact, rounded in zip(rows["kv16"], rows["kvfp8"], strict=True):
        packed = len(exact) // 128 * 128
        assert torch.equal(exact[packed:], rounded[packed:]) and not torch.equal(exact[:packed], rounded[:packed])
        error = (exact - rounded)[:packed].abs()
        assert bool((error <= exact[:packed].abs() / 16 * 1.01 + 2.0**-9).all())  # e4m3 has three bits behind the point
    error = (logits["kv16"] - logits["kvfp8"]).norm() / logits["kv16"].norm()
    assert 0 < float(error) < 0.1


@pytest.mark.slow
def test_fp8_serves_every_row_of_a_padded_batch():
    model = built(llama(), "sdpa")
    inputs = prompts(3, 140, (0, 60, 9))
    expected = run(model, "sdpa", DynamicCache(config=model.config), inputs, GREEDY)
    model.set_attn_implementation("tilebit")
    cache = TilebitCache(model.config, format="kvfp8")
    got = run(model, "tilebit", cache, inputs, GREEDY)
    assert cache.pool.lengths() == [cache.get_seq_length() - count for count in (0, 60, 9)]
    first = (got.logits[0] - expected.logits[0]).norm() / expected.logits[0].norm()
    assert float(first) < 0.1


@pytest.mark.slow
@torch.no_grad()
def test_models_of_one_config_keep_their_caches_apart():
    """What transformers sets for one is the other's attention too: both run as tilebit's, or neither."""
    config = llama()
    model, other = (built(config, "sdpa", seed=seed) for seed in (0, 1))
    other.config = other.model.config = model.config
    for layer in other.model.layers:
        layer.self_attn.config = model.config
    inputs = prompts(1, 60)
    expected = [run(each, "sdpa", DynamicCache(config=config), inputs, GREEDY) for each in (model, other)]
    caches = [own_cache(model), own_cache(other)]
    for each, cache, wanted in zip((model, other), caches, expected, strict=True):
        agree(run(each, "tilebit", cache, inputs, GREEDY), wanted)
    drafted = run(model, "tilebit", own_cache(model), inputs, {**GREEDY, "assistant_model": other, "num_assistant_tokens": 4})
    agree(drafted, expected[0])
    cache = own_cache(model)
    other.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="whose attention is 'sdpa'"):
        model.generate(**inputs, past_key_values=cache, **GREEDY)
