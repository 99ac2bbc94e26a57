"""One cache, eight threads, each with sequences of its own: every result is its own, first calls that compile included."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cache_rows import DIM, HEADS

from tilebit.cache.kvcache import KVCache
from tilebit.ops import plans
from tilebit.tiles.attention import reference

THREADS = 8


@pytest.fixture(autouse=True)
def _restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def work(cache: KVCache, number: int, steps: int, start: threading.Barrier, tolerance: float = 1e-2) -> int:
    """Histories of this thread's own sequences, checked at each step; how many steps were right."""
    numbers = torch.Generator().manual_seed(number)
    start.wait()
    held = []  # (handle, k, v)
    for step in range(steps):
        if len(held) == 2:
            cache.free(held.pop(0)[0])
        (handle,) = cache.allocate()
        count = 1 + (37 * step + 11 * number) % 140
        k, v = torch.randn(2, count, HEADS, DIM, generator=numbers).half()
        cache.append([handle], k[:-1], v[:-1])
        fork = cache.fork(handle)
        cache.append(cache.advance(cache.batch([handle]), 1), k[-1:], v[-1:])
        cache.append([fork], k[:1], v[:1])
        cache.free(fork)
        held.append((handle, k, v))
        q = torch.randn(len(held), 1, 2 * HEADS, DIM, generator=numbers).half()
        out, _ = cache.attend([h for h, _, _ in held], q)
        for got, query, (h, keys, values) in zip(out, q, held, strict=True):
            assert cache.length(h) == len(keys)
            torch.testing.assert_close(got.double(), reference.attend(query, keys, values)[0], rtol=tolerance, atol=tolerance)
        for (got_k, got_v), (_, keys, values) in zip(cache.gather([h for h, _, _ in held]), held, strict=True):
            assert torch.equal(got_k, keys) and torch.equal(got_v, values)
    for handle, _, _ in held:
        cache.free(handle)
    return steps


def run(cache: KVCache, steps: int) -> None:
    start = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        done = [pool.submit(work, cache, number, steps, start) for number in range(THREADS)]
    assert [future.result() for future in done] == [steps] * THREADS
    assert cache.free_pages == cache.table.num_pages and cache.free_slots == 3 * THREADS and not cache.sequences


def test_threads_with_sequences_of_their_own(kernels):
    run(KVCache(256, 3 * THREADS, HEADS, DIM, "kv16", page_size=16), 12)


@pytest.mark.slow
def test_threads_whose_first_calls_compile(monkeypatch):
    """A format that no other test uses with these options: every kernel is built while eight threads wait for it."""
    monkeypatch.setattr(plans, "held", {})
    run(KVCache(96, 3 * THREADS, HEADS, DIM, "kv16", page_size=64, max_tokens=320), 12)


def test_threads_of_one_table_never_share_a_page_or_a_slot():
    """Without rows: nothing but the books."""
    cache, start = KVCache(512, 64, 1, 64, page_size=16), threading.Barrier(THREADS)

    def own(number: int) -> None:
        start.wait()
        for step in range(100):
            handles = cache.allocate(2, 128)
            cache.advance(handles, (128, 130 + step % 7))
            fork = cache.fork(handles[1])
            pages = [cache.table.sequence(handle).pages for handle in handles]
            assert len({*pages[0], *pages[1]}) == len(pages[0]) + len(pages[1])
            cache.truncate(handles[0], 0)
            for handle in (fork, *handles):
                cache.free(handle)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(own, number) for number in range(THREADS)]:
            future.result()
    assert cache.free_pages == 512 and cache.free_slots == 64 and cache.table.references == [0] * 512
    assert sorted(cache.table._free_pages) == list(range(512))
