"""A cache that was touched in inference mode serves outside of it, and the other way round; and what fails on the way changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cache_rows import cache_of, rows

from tilebit.cache.batch import Batch
from tilebit.cache.kvcache import KVCache


def made(cache: KVCache) -> KVCache:
    return cache_of("kvfp8", page_size=256)


def with_handles(cache: KVCache) -> KVCache:
    cache.append(cache.sequences, *rows(5))
    return cache


def loaded(cache: KVCache) -> KVCache:
    other = made(cache)
    other.load_state(cache.state())
    return other


@pytest.mark.parametrize("touch", [made, with_handles, loaded, copy.deepcopy], ids=lambda touch: touch.__name__)
def test_what_inference_mode_has_made_is_written_outside_of_it(kernels, touch: Callable[[KVCache], KVCache]):
    cache = made(cache_of())
    cache.append(cache.advance(cache.batch(cache.allocate()), 130), *rows(130))
    with torch.inference_mode():
        cache = touch(cache)
    (a,) = cache.sequences or cache.allocate()
    length = cache.length(a)
    cache.append([a], *rows(1))
    cache.append(cache.advance(cache.batch([a])), *rows(1))
    b = cache.fork(a)
    assert cache.length(a) == cache.length(b) == length + 2
    cache.load_state(cache.state())
    with torch.inference_mode():
        cache.append([a, b], *rows(2))
    assert len(cache.gather([a, b])[0][0]) == length + 3


def test_a_batch_of_inference_mode_advances_outside_of_it(kernels):
    cache = cache_of()
    with torch.inference_mode():
        batch = cache.batch(cache.allocate())
    cache.append(cache.advance(batch), *rows(1))
    assert batch.lengths.tolist() == [1]


def fails(*_: object) -> None:
    raise RuntimeError("no copy")


def test_an_advance_that_fails_takes_its_lengths_back(kernels, monkeypatch):
    cache = cache_of()
    (a,) = cache.allocate(1, 256)
    cache.append([a], *rows(127))
    batch, before = cache.batch([a]), cache.memory.clone()
    calls = [lambda: cache.advance(batch), lambda: cache.append([a], *rows(1)), lambda: cache.prefill([a], rows(1, 4)[0], *rows(1))]
    with monkeypatch.context() as patched:
        patched.setattr(Batch, "_send", fails)
        for call in calls:
            with pytest.raises(RuntimeError, match="no copy"):
                call()
            assert cache.length(a) == 127 and torch.equal(cache.memory, before)
    with pytest.raises(ValueError, match="was not advanced"):
        cache.append(batch, *rows(1))
    cache.append(cache.advance(batch), *rows(1))
    assert cache.length(a) == 128


@pytest.mark.parametrize("copied", ["copy_pages", "copy_window"])
def test_a_fork_that_fails_leaves_no_sequence(kernels, monkeypatch, copied):
    cache = cache_of(page_size=256)
    (a,) = cache.allocate()
    cache.append([a], *rows(130))
    free = cache.free_pages, cache.free_slots
    monkeypatch.setattr(KVCache, copied, fails)
    with pytest.raises(RuntimeError, match="no copy"):
        cache.fork(a)
    assert cache.sequences == [a] and (cache.free_pages, cache.free_slots) == free
