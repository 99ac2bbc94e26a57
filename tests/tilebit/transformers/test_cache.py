"""``TilebitCache``: what it holds, gives back and refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import SIZES, gemma2, llama, made
from transformers import DynamicCache, Gemma4TextConfig, Llama4TextConfig

from tilebit.cache.sequences import CacheFull
from tilebit.transformers import TilebitCache

IDS = torch.randint(2, 256, (1, 300), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Any:
    return made(llama(), torch.float16, attn_implementation="tilebit")


def step(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, **options).logits


def rows_of(cache: TilebitCache) -> list[torch.Tensor]:
    return [x for layer in range(len(cache.own)) for pair in cache.pool.cache.gather(cache.pool.handles, layer) for x in pair]


@pytest.mark.parametrize("new", [9, 140])
@pytest.mark.parametrize("rejected", [0, 1, 4, 8])
@pytest.mark.parametrize("held", [120, 127])
def test_rejected_tokens_leave_no_trace(model: Any, held: int, new: int, rejected: int):
    """A step that fills windows is taken back in part: groups that stay packed keep their bits, and the rows since are in 16 bits, as
    a cache that never packs holds them (of the first layer, whose keys depend on no attention)."""
    cache, exact = (TilebitCache(model.config, format=format) for format in ("kv4_channel", "kv16"))
    for own in (cache, exact):
        own.activate_past_recording()
        step(model, own, IDS[:, :held])
        step(model, own, IDS[:, held : held + new])
    before = rows_of(cache)
    cache.crop(-rejected)
    after, left = rows_of(cache), held + new - rejected
    assert cache.get_seq_length() == left == cache.pool.lengths()[0]
    packed = left // 128 * 128
    assert all(torch.equal(a[:packed], b[:packed]) and len(a) == left for a, b in zip(after, before, strict=True))
    assert all(torch.equal(a[packed:], b[packed:left]) for a, b in zip(after[:2], rows_of(exact)[:2], strict=True))
    step(model, cache, IDS[:, left : left + 3])
    assert cache.pool.lengths() == [left + 3]


def test_a_cut_restores_the_bits_of_the_window(model: Any):
    cache = TilebitCache(model.config, format="kv4_channel")
    cache.activate_past_recording()
    step(model, cache, IDS[:, :120])
    held = rows_of(cache)
    step(model, cache, IDS[:, 120:132])
    assert not all(torch.equal(a[:120], b) for a, b in zip(rows_of(cache), held, strict=True))  # they were packed
    cache.crop(-10)
    assert all(torch.equal(a[:120], b) and len(a) == 122 for a, b in zip(rows_of(cache), held, strict=True))


def test_packed_tokens_are_not_taken_apart(model: Any):
    cache = TilebitCache(model.config, format="kv4_channel")
    step(model, cache, IDS[:, :140])
    with pytest.raises(ValueError, match="cannot be cut to 100"):
        cache.crop(-40)
    assert cache.get_seq_length() == 140 == cache.pool.lengths()[0]
    cache.crop(-12)
    assert cache.get_seq_length() == 128


def test_it_grows_and_holds_what_it_held(model: Any):
    cache = TilebitCache(model.config, format="kv4_channel")
    step(model, cache, IDS[:, :130])
    held, memory = rows_of(cache), cache.memory_bytes
    step(model, cache, IDS[:, 130:300])
    assert cache.memory_bytes > memory
    assert all(torch.equal(a[:128], b[:128]) for a, b in zip(rows_of(cache), held, strict=True))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.rows == 1 and cache.pool.lengths() == [300]


def test_a_cache_of_fixed_size_says_what_does_not_fit(model: Any):
    cache = TilebitCache(model.config, format="kv4_channel", max_tokens=128, sequences=2)
    with pytest.raises(ValueError, match="the batch has 3 rows"):
        step(model, cache, IDS[:, :9].expand(3, -1))
    assert cache.memory_bytes == 0
    step(model, cache, IDS[:, :100])
    with pytest.raises(CacheFull, match="max_tokens"):
        step(model, cache, IDS[:, 100:300])
    assert cache.get_seq_length() == 100 == cache.pool.lengths()[0]  # nothing has changed
    step(model, cache, IDS[:, 100:110])
    with pytest.raises(ValueError, match="the batch has 2 rows"):
        step(model, cache, IDS[:, :2].expand(2, -1))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.pool.cache.free_slots == 2


def held_by(cache: TilebitCache) -> tuple[list[int], list[int], int, int]:
    own = cache.pool.cache
    return list(cache.pool.handles), own.sequences, own.free_slots, own.free_pages


@pytest.mark.parametrize("rows", [[0, 5], [-1, -2], [2, 0], [0.0, 1.0]])
def test_rows_that_are_none_are_refused_before_one_is_dropped(model: Any, rows: list[int]):
    cache = TilebitCache(model.config, format="kv4_channel")
    step(model, cache, IDS[:, :9].expand(2, -1))
    before = held_by(cache)
    with pytest.raises(ValueError, match=r"a row of the cache is .*; accepted: whole numbers from 0 to 1"):
        cache.reorder_cache(torch.tensor(rows))
    assert held_by(cache) == before
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.pool.lengths() == [9, 9]


def test_more_rows_than_there_is_room_for_change_nothing(model: Any):
    """Slots first; then pages, where a half-filled one is copied and those of dropped rows become free."""
    cache = TilebitCache(model.config, format="kv4_channel", max_tokens=100, sequences=3, page_size=256)
    step(model, cache, IDS[:, :9].expand(2, -1))
    before = held_by(cache)
    with pytest.raises(CacheFull, match="2 more rows need as many slots and 1 of 3 are free; make the cache with more sequences"):
        cache.batch_repeat_interleave(2)
    assert held_by(cache) == before
    cache.reset()
    step(model, cache, IDS[:, :130])
    before = held_by(cache)
    with pytest.raises(CacheFull, match="1 more rows need 1 pages and 0 of 1 are free; make the cache with more sequences, or a larger"):
        cache.batch_repeat_interleave(2)
    assert held_by(cache) == before
    full = TilebitCache(model.config, format="kv4_channel", max_tokens=256, sequences=2, page_size=256)
    step(model, full, IDS[:, :130].expand(2, -1))
    assert full.pool.cache.free_pages == 0
    full.reorder_cache(torch.tensor([1, 1]))
    assert full.pool.lengths() == [130, 130]


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_bound_is_a_whole_number(model: Any, number: Any):
    with pytest.raises(ValueError, match=f"max_tokens is {number}; accepted: whole numbers from 1"):
        TilebitCache(model.config, max_tokens=number)
    assert TilebitCache(model.config).max_tokens == model.config.max_position_embeddings


def test_masks_are_held_to_what_the_cache_has_seen(model: Any):
    cache = TilebitCache(model.config, format="kv4_channel")
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :5] = 0
    ids = IDS[:, :20].expand(2, -1)
    step(model, cache, ids, attention_mask=mask)
    assert cache.pool.lengths() == [20, 15]
    for wrong, message in ((None, "attention_mask is None"), (torch.ones(2, 21), "holds"), (torch.ones(2, 3), "accepted")):
        with pytest.raises(ValueError, match=message):
            step(model, cache, ids[:, :1], attention_mask=wrong)
    step(model, cache, ids[:, :1], attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1))
    assert cache.pool.lengths() == [21, 16]


def test_what_has_no_attention_here_is_refused(model: Any):
    cache = TilebitCache(model.config, format="kv4_channel")
    with pytest.raises(ValueError, match="no causal one"):
        step(model, cache, IDS[:, :4], attention_mask=torch.zeros(1, 1, 4, 4))
    assert cache.memory_bytes == 0
    with pytest.raises(ValueError, match="float16"):
        step(made(llama(), torch.float32, attn_implementation="tilebit"), TilebitCache(model.config), IDS[:, :4])
    windows = made(gemma2(), torch.float16, attn_implementation="tilebit")
    with pytest.raises(ValueError, match="padding between tokens"):
        step(windows, TilebitCache(windows.config), IDS[:, :4], attention_mask=torch.tensor([[1, 0, 1, 1]]))


def test_another_attention_is_refused():
    model: Any = made(llama(), torch.float16, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="whose attention is 'sdpa'"):
        step(model, TilebitCache(model.config), IDS[:, :4])
    cache = TilebitCache(copied(model.config, "tilebit"))  # whose config says another attention than the model has
    with pytest.raises(ValueError, match="never came to tilebit's attention"):
        for _ in range(2):
            step(model, cache, IDS[:, :4])


def copied(config: Any, attention: str) -> Any:
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    return config


def test_layers_without_an_attention_are_named():
    with pytest.raises(ValueError, match="heads have 32 channels"):
        TilebitCache(llama(head_dim=32))
    config = gemma2(layer_types=["full_attention", "chunked_attention"], attention_chunk_size=8)
    with pytest.warns(UserWarning, match="1 of 2 layers .* layer 1 first: its kind is chunked_attention"):
        cache = TilebitCache(config)
    assert len(cache.own) == 1 and len(cache.layers) == 2
    with pytest.raises(ValueError, match="values have 128 channels and its keys 64"):
        TilebitCache(llama(v_head_dim=128))


def test_what_no_cache_is_made_of_is_refused():
    with pytest.raises(ValueError, match=r"layers of this model differ in their heads.*accepted"):
        TilebitCache(Gemma4TextConfig())
    for other in (None, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"accepted: the config of a model, model.config"):
            TilebitCache(other)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*layers keep a cache in 16 bits")
def test_nothing_is_left_in_any_layer_behind_a_reset():
    """Layers in 16 bits are transformers' own."""
    own = {"head_dim": 64, "intermediate_size_mlp": 256, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 64}
    config = Llama4TextConfig(**{**SIZES, **own, "layer_types": ["chunked_attention", "full_attention"]})
    model = made(config, torch.float16, attn_implementation="tilebit")
    cache = TilebitCache(model.config, "kv16")
    step(model, cache, IDS[:, :30])
    cache.reset()
    assert torch.equal(step(model, cache, IDS[:, 100:130]), step(model, TilebitCache(model.config, "kv16"), IDS[:, 100:130]))


def test_a_reset_ends_recording(model: Any):
    """So that steps are fused again behind an assisted ``generate``."""
    cache = TilebitCache(model.config)
    cache.activate_past_recording()
    step(model, cache, IDS[:, :20])
    assert not cache.fusible
    cache.reset()
    assert cache.fusible


@pytest.mark.parametrize("config", [llama(), gemma2()], ids=["llama", "gemma2"])
def test_without_its_cache_the_attention_is_the_models_own(config: Any):
    own = made(config, torch.float16, attn_implementation="eager")
    expected = step(own, DynamicCache(config=own.config), IDS[:, :60])
    own.set_attn_implementation("tilebit")
    got = step(own, DynamicCache(config=own.config), IDS[:, :60])
    assert float((got - expected).abs().max()) < 0.1
