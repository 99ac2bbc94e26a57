"""Steps whose appends leave full windows to a pack behind all layers: the same cache, and refusals of what must not come between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilebit.cache.batch import Batch
from tilebit.cache.kvcache import KVCache
from tilebit.layouts.kv import RESIDUAL

HEADS, DIM, LAYERS = 2, 64, 2
STARTS = (120, 0, 250)


def cache_of(format: str = "kv4_channel") -> tuple[KVCache, Batch]:
    """A cache with a prompt of each sequence."""
    cache = KVCache(16, 4, HEADS, DIM, format, num_layers=LAYERS)
    batch = cache.batch(cache.allocate(3), 4)  # and a row without a sequence
    generator = torch.Generator().manual_seed(0)
    cache.advance(batch, STARTS)
    for layer in range(LAYERS):
        cache.append(batch, *rows(generator, sum(STARTS)), layer=layer)
    return cache, batch


def rows(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    k, v = torch.randn(2, count, HEADS, DIM, generator=generator).half()
    return k, v


@pytest.mark.parametrize("format", ["kv4_channel", "kvfp8", "kv16"])
def test_steps_fill_the_cache_that_plain_appends_fill(kernels, format: str):
    """Two windows fill on the way; the tokens of the steps that fill them see 16-bit rows, as a cache in 16 bits has them."""
    (plain, plain_batch), (late, batch), (exact, exact_batch) = cache_of(format), cache_of(format), cache_of("kv16")
    generator = torch.Generator().manual_seed(1)
    filled = 0
    for _ in range(10):
        new, q = [rows(generator, 3) for _ in range(LAYERS)], torch.randn(4, 1, 4, DIM, generator=generator).half()
        for cache, its in ((plain, plain_batch), (late, batch), (exact, exact_batch)):
            cache.advance(its)
        for layer, (k, v) in enumerate(new):
            plain.append(plain_batch, k, v, layer=layer)
            exact.append(exact_batch, k, v, layer=layer)
            late.append(batch, k, v, layer=layer, full_windows=True)
            got, _ = late.attend(batch, q, layer=layer, full_windows=True)
            expected, _ = plain.attend(plain_batch, q, layer=layer)
            of_16_bits, _ = exact.attend(exact_batch, q, layer=layer)
            for b, handle in enumerate(batch.handles):
                full = late.length(handle) % RESIDUAL == 0
                wanted = of_16_bits if full and late.length(handle) == RESIDUAL else expected
                if not full or wanted is of_16_bits:
                    assert torch.equal(got[b], wanted[b])
                filled += full
        late.pack(batch)
        assert torch.equal(late.all_pages, plain.all_pages)
        assert all(
            torch.equal(a, b)
            for pair in zip(late.gather(batch), plain.gather(plain_batch), strict=True)
            for a, b in zip(*pair, strict=True)
        )
    assert filled == 2 * LAYERS


def test_nothing_comes_between_an_append_and_its_pack(kernels):
    cache, batch = cache_of()
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(4, 1, 4, DIM, generator=generator).half()
    cache.advance(batch)
    cache.append(batch, *rows(generator, 3), layer=0, full_windows=True)
    lengths = [cache.length(handle) for handle in batch.handles]
    first, other = batch.handles[0], cache.batch(batch.handles[1:])
    waits = r"sequences \[\d.*\] were appended to with full_windows; accepted: pack of that batch before anything else, or free them"
    refused: list[tuple[str, Callable[[], object]]] = [
        ("full_windows is False and layer 0 was appended to with it", lambda: cache.attend(batch, q, layer=0)),
        ("full_windows is True and layer 1 was appended to without it", lambda: cache.attend(batch, q, layer=1, full_windows=True)),
        (r"layers \[1\] were not appended to with full_windows", lambda: cache.pack(batch)),
        (waits, lambda: cache.advance(batch)),
        (waits, lambda: cache.gather(batch)),
        (waits, lambda: cache.attend(batch, q, layer=1)),
        (waits, lambda: cache.append(batch, *rows(generator, 3), layer=1)),
        (waits, lambda: cache.attend(other, q[1:3], layer=1)),  # another batch of some of them
        (waits, lambda: cache.fork(first)),
        (waits, lambda: cache.truncate(first, 0)),
        (waits, cache.state),
    ]
    for words, call in refused:
        with pytest.raises(ValueError, match=words):
            call()
    assert [cache.length(handle) for handle in batch.handles] == lengths
    cache.append(batch, *rows(generator, 3), layer=1, full_windows=True)
    cache.pack(batch)
    cache.advance(batch)


def test_sequences_that_are_freed_wait_for_nothing(kernels):
    cache, batch = cache_of()
    cache.advance(batch)
    cache.append(batch, *rows(torch.Generator().manual_seed(2), 3), layer=0, full_windows=True)
    for handle in batch.handles:
        cache.free(handle)
    batch.assign(cache.allocate(2))
    cache.advance(batch, [3, 0])
    for layer in range(LAYERS):
        cache.append(batch, *rows(torch.Generator().manual_seed(2), 3), layer=layer)
    assert len(cache.gather(batch)) == 2 and not cache.table.unpacked


def test_full_windows_are_for_one_token_each(kernels):
    cache, batch = cache_of()
    generator = torch.Generator().manual_seed(3)
    cache.advance(batch, [1, 2, 1])
    with pytest.raises(ValueError, match=r"a batch that was advanced by \[1, 2, 1\] tokens is given with full_windows; accepted: a Batch"):
        cache.append(batch, *rows(generator, 4), full_windows=True)
    one = KVCache(4, 1, HEADS, DIM)
    handles = one.allocate(1)
    with pytest.raises(ValueError, match="handles are given with full_windows"):
        one.append(handles, *rows(generator, 1), full_windows=True)
    assert one.length(handles[0]) == 0


def test_all_layers_of_a_step_or_none(kernels):
    """Else no pack would take the batch, and nothing else would take its sequences."""
    cache, batch = cache_of()
    generator = torch.Generator().manual_seed(4)
    cache.advance(batch)
    cache.append(batch, *rows(generator, 3), layer=0)
    with pytest.raises(ValueError, match=r"layers \[0\] were appended to without full_windows in this step; accepted: all layers with it"):
        cache.append(batch, *rows(generator, 3), layer=1, full_windows=True)
    cache.append(batch, *rows(generator, 3), layer=1)
    assert len(cache.gather(batch, layer=1)) == 3


def test_a_batch_keeps_the_sequences_that_wait_for_it(kernels):
    cache, batch = cache_of()
    generator = torch.Generator().manual_seed(5)
    (other,) = cache.allocate()
    cache.advance(batch)
    for layer in range(LAYERS):
        cache.append(batch, *rows(generator, 3), layer=layer, full_windows=True)
    handles = batch.handles
    with pytest.raises(ValueError, match=r"sequences \[0, 1, 2\] of the batch were appended to with full_windows; accepted: other"):
        batch.assign([other])
    assert batch.handles == handles
    cache.pack(batch)
    batch.assign([other])


def test_a_pack_of_what_a_state_has_replaced_is_refused(kernels):
    cache = KVCache(16, 4, HEADS, DIM, "kv16")
    generator = torch.Generator().manual_seed(6)
    (a,) = cache.allocate()
    k, v = rows(generator, 128)
    cache.append([a], k, v)
    state = cache.state()
    cache.truncate(a, 0)
    cache.append([a], *rows(generator, 127))
    batch = cache.advance(cache.batch([a]))
    cache.append(batch, *rows(generator, 1), full_windows=True)
    cache.load_state(state)
    refused = "are not what it appended to with full_windows"
    with pytest.raises(ValueError, match=refused):
        cache.pack(batch)
    cache.truncate(a, 0)
    cache.append([a], *rows(generator, 127))
    other = cache.advance(cache.batch([a]))
    cache.append(other, *rows(generator, 1), full_windows=True)  # the sequence waits again, for another batch
    with pytest.raises(ValueError, match=refused):
        cache.pack(batch)
    cache.pack(other)
    cache.load_state(state)
    assert all(torch.equal(held, given) for held, given in zip(cache.gather([a])[0], (k, v), strict=True))
    cache.append(cache.advance(batch), *rows(generator, 1))  # and a plain step of that batch is one
    assert cache.attend(batch, torch.zeros(1, 1, 4, DIM).half())[0].shape[0] == 1
