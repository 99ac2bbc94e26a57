"""Numbers of a batch that follow late: whoever uses it finds them, and replayed steps that let them grow need no copy."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor

from tilebit.cache.batch import Batch
from tilebit.cache.kvcache import KVCache

TENSORS = ("slots", "lengths", "past", "cu_seqlens", "cu_kv", "block_tables")


@pytest.fixture
def cache() -> KVCache:
    return KVCache(16, 4, 2, 64, "kv4_channel", max_tokens=512)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often numbers went to the device."""
    found: list[int] = []
    real = Batch._send

    def send(self: Batch, *given: object) -> None:
        found.append(1)
        real(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Batch, "_send", send)
    return found


def numbers(batch: Batch) -> list[Tensor]:
    return [getattr(batch, name) for name in TENSORS]


def expect_current(batch: Batch, cache: KVCache) -> None:
    """The batch says what one that is made anew says, and which tokens are new."""
    fresh = Batch(cache.table, batch.handles, batch.size, batch.lengths.device)
    fresh.update(batch.counts)
    for name, a, b in zip(TENSORS, numbers(batch), numbers(fresh), strict=True):
        if name == "block_tables":  # rows hold as many pages as a sequence has
            pages = [len(cache.table.sequence(handle).pages) for handle in batch.handles]
            assert all(torch.equal(a[row, :n], b[row, :n]) for row, n in enumerate(pages)), name
        else:
            assert torch.equal(a, b), name


class Replayed:
    """What a captured step does to the numbers of its batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.growth = batch, batch.growth()

    def __call__(self) -> None:
        self.batch.lag(self.growth)
        self.batch.grow(torch.from_numpy(self.growth))


def test_a_deferred_advance_follows_where_the_batch_is_used(cache: KVCache, sent: list[int]):
    batch = cache.advance(cache.batch(cache.allocate(2)), [130, 5])
    before = [t.clone() for t in numbers(batch)]
    sent.clear()
    assert cache.advance(batch, [1, 2], deferred=True) is batch
    assert not sent and all(torch.equal(a, b) for a, b in zip(before[:5], numbers(batch)[:5], strict=True))
    assert batch.counts == [1, 2] and batch.past_lengths == [130, 5] and cache.length(batch.handles[1]) == 7
    assert batch.refresh() and len(sent) == 1
    expect_current(batch, cache)
    sent.clear()
    assert not batch.refresh() and not sent


def test_steps_that_are_replayed_copy_nothing(cache: KVCache, sent: list[int]):
    batch = cache.advance(cache.batch(cache.allocate(3), size=4), [120, 3, 0])
    step = Replayed(batch)
    for count in range(20):  # the first window fills on the way
        sent.clear()
        cache.advance(batch, deferred=True)
        step()
        assert len(sent) == (count == 0), f"step {count}"  # the first comes behind a prompt
        expect_current(batch, cache)
    sent.clear()
    assert not batch.refresh() and not sent  # a call that is none of the graph's finds them there


def test_a_replay_of_the_same_step_says_the_same(cache: KVCache):
    batch = cache.advance(cache.batch(cache.allocate(2)), [7, 9])
    step = Replayed(batch)
    cache.advance(batch, deferred=True)
    for _ in range(3):
        step()
        expect_current(batch, cache)


@pytest.mark.parametrize("seed", range(8))
def test_any_history_between_replays(cache: KVCache, seed: int):
    """Copies of numbers, or none: a step always finds the present ones."""
    draw = random.Random(seed)
    handles = cache.allocate(4)
    batch = cache.batch(handles[:3], size=4)
    step = Replayed(batch)
    for _ in range(60):
        what = draw.choice(("step", "step", "step", "step", "advance", "truncate", "assign", "refresh", "other", "capture", "again"))
        if what == "step":
            cache.advance(batch, deferred=draw.random() < 0.8)
            step()
        elif what == "again":
            step()
        elif what == "advance":
            cache.advance(batch, [draw.randrange(3) for _ in batch.handles], deferred=draw.random() < 0.5)
            batch.refresh()
        elif what == "truncate":
            handle = draw.choice(handles)
            cache.truncate(handle, cache.length(handle) - min(cache.length(handle) % 128, draw.randrange(3)))
            batch.refresh()
        elif what == "assign":
            batch.assign(draw.sample(handles, draw.randint(1, 4)))
        elif what == "other":
            cache.advance([draw.choice(handles)])
            batch.refresh()
        elif what == "capture":
            batch.refresh()
            step = Replayed(batch)
        if max(cache.length(handle) for handle in handles) > 300:
            for handle in handles:
                cache.truncate(handle, 0)
            batch.refresh()
        expect_current(batch, cache)


def test_a_copy_of_a_deferred_batch_is_current(cache: KVCache):
    batch = cache.advance(cache.batch(cache.allocate(2)), [4, 5])
    cache.advance(batch, deferred=True)
    twin_cache, twin = copy.deepcopy((cache, batch))
    expect_current(twin, twin_cache)
    twin_cache.advance(twin, deferred=True)
    twin.refresh()
    expect_current(twin, twin_cache)
    batch.refresh()
    expect_current(batch, cache)
