"""Copies of caches and batches, before and after they were used: independent, and right."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_rows import DIM, cache_of, rows

from tilebit.cache.kvcache import KVCache


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "save": saved,
    "twice": lambda value: copy.deepcopy(pickle.loads(pickle.dumps(value))),
}
copies = pytest.mark.parametrize("copied", COPIES)


@copies
@pytest.mark.parametrize("format", ["kv4_channel", "kvfp8"])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_is_independent_and_attends_the_same(kernels, copied, format, used):
    cache = cache_of(format, page_size=256, num_layers=1, max_tokens=2000)
    cache.note = "an attribute of the caller's"  # type: ignore[attr-defined]
    a, b = cache.allocate(2, 512)
    batch = cache.batch([b, a], size=3)
    q = torch.randn(2, 1, 4, DIM).half()
    if used:
        cache.append([a, b], *rows(390), cu_seqlens=[0, 140, 390])
        c = cache.fork(a)
        cache.free(cache.fork(b))
        cache.append(cache.advance(batch, [1, 2]), *rows(3))
        cache.attend([a, b], q)
        cache.append([c], *rows(120))
    sequences = cache.sequences
    before = cache.gather(sequences)
    other, others = COPIES[copied]((cache, batch))
    assert other.note == cache.note and repr(other) == repr(cache) and other.max_tokens == 2000  # type: ignore[attr-defined]
    assert all(torch.equal(x, y) for one, two in zip(before, other.gather(sequences), strict=True) for x, y in zip(one, two, strict=True))
    assert others.copied, "so an append that comes next is a plain launch"
    padded = torch.cat((q, q[:1]))
    for name in ("lengths", "past", "slots", "cu_seqlens", "cu_kv", "block_tables"):
        assert torch.equal(getattr(batch, name), getattr(others, name)), name
        assert getattr(batch, name).data_ptr() != getattr(others, name).data_ptr()
        assert getattr(others, name).data_ptr() % 64 == 0, "as kernels ask for"
    for _ in range(2):
        assert torch.equal(cache.attend([a, b], q)[0], other.attend([a, b], q)[0])
        assert torch.equal(cache.attend(batch, padded)[0], other.attend(others, padded)[0])
    for name in ("pages", "windows"):  # views of one memory, as they were
        assert getattr(other, name)[0].untyped_storage().data_ptr() == other.memory.untyped_storage().data_ptr()
    assert other.memory.shape == cache.memory.shape and other.memory.untyped_storage().nbytes() == other.memory_bytes
    k, v = rows(200)
    for each, its in ((other, others), (cache, batch)):  # what one does the other does not see
        each.append([a, b], k, v)
        each.append(each.advance(its, 1), k[:2], v[:2])
        each.allocate()
        if each is other:
            after = cache.gather(sequences)
            assert all(torch.equal(x, y) for one, two in zip(before, after, strict=True) for x, y in zip(one, two, strict=True))
    assert torch.equal(cache.attend(batch, padded)[0], other.attend(others, padded)[0]) and cache.allocate() == other.allocate()
    assert cache.free_pages == other.free_pages and cache.free_slots == other.free_slots


@copies
def test_a_copied_batch_belongs_to_the_cache_that_was_copied_with_it(kernels, copied):
    cache = cache_of()
    sequences = cache.allocate(2)
    batch = cache.batch(sequences)
    alone = COPIES[copied](batch)
    q = torch.randn(2, 1, 4, DIM).half()
    with pytest.raises(ValueError, match=r"belongs to another cache; accepted: one that this cache's batch\(\) returned"):
        cache.attend(alone, q)
    other, others = COPIES[copied]((cache, batch))
    for wrong, its in ((cache, others), (other, batch)):
        with pytest.raises(ValueError, match="belongs to another cache"):
            wrong.advance(its, 1)
    other.append(other.advance(others, 1), *rows(2))
    with pytest.raises(ValueError, match="would be overwritten"):
        other.append(copy.copy(others), *rows(2))  # what was written is part of it


def test_a_shallow_copy_of_a_batch_has_tensors_of_its_own(kernels):
    cache = cache_of()
    a, b = cache.allocate(2)
    cache.append([a, b], *rows(400), cu_seqlens=[0, 150, 400])
    batch = cache.batch([a, b])
    other = copy.copy(batch)
    q = torch.randn(2, 1, 4, DIM).half()
    expected = cache.attend(batch, q)[0]
    other.assign([b, a])
    cache.append(cache.advance(other, 1), *rows(2))
    cache.truncate(a, 150)
    cache.truncate(b, 250)
    assert torch.equal(cache.attend(batch, q)[0], expected) and torch.equal(cache.attend(other, q.flip(0))[0].flip(0), expected)


def test_a_shallow_copy_of_a_cache_is_refused_with_the_way_to_do_it(kernels):
    with pytest.raises(TypeError, match=r"accepted: copy.deepcopy, .* or state\(\) and load_state\(\)"):
        copy.copy(cache_of())


def test_torch_load_says_how_a_cache_is_loaded(kernels):
    file = io.BytesIO()
    torch.save(cache_of(), file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(file)


def test_a_pickle_holds_what_is_in_use(kernels):
    cache = cache_of(tokens=1 << 16)
    cache.append(cache.allocate(), *rows(300))
    assert cache.memory_bytes > 4 << 20 > 4 * len(pickle.dumps(cache))


def test_a_subclass_stays_one(kernels):
    class Own(KVCache):
        pass

    cache = Own(4, 2, 2, DIM)
    assert type(copy.deepcopy(cache)) is Own
