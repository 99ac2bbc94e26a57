"""Random histories of a cache against a list of tensors for each sequence: whatever the caller does, in whatever order, on whichever of
two threads, with batches that are kept and reused.

    TILEBIT_HISTORIES_MINUTES=10 python -m pytest tests/tilebit/cache/test_histories.py

runs new ones for as long.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cache_rows import DIM, HEADS
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from tilebit.cache.batch import Batch
from tilebit.cache.kvcache import KVCache
from tilebit.cache.sequences import CacheFull
from tilebit.tiles.attention import reference

MINUTES = float(os.environ.get("TILEBIT_HISTORIES_MINUTES", "0"))
THREADS = 2
UNHURRIED = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
Rows = tuple[Tensor, Tensor]
counts = st.sampled_from((0, 1, 3, 100, 127, 128, 129, 256))
threads = st.integers(0, THREADS - 1)


class Histories(RuleBasedStateMachine):
    """``model``: what each live sequence must hold, (k, v), in kv16, so that it must be the very same numbers."""

    handles, batches = Bundle("handles"), Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.pools = [ThreadPoolExecutor(1) for _ in range(THREADS)]
        self.seed = 0

    def teardown(self) -> None:
        for pool in self.pools:
            pool.shutdown()

    @initialize(page_size=st.sampled_from((16, 64, 128, 256, 256)))
    def begin(self, page_size: int) -> None:
        self.cache = KVCache(2048 // page_size, 4, HEADS, DIM, "kv16", page_size=page_size, max_tokens=1024)
        self.model: dict[int, Rows] = {}
        self.made: dict[int, tuple[Batch, list[int]]] = {}
        self.others: list[tuple[KVCache, dict[int, Rows], int]] = []

    def on(self, thread: int, call: Callable[[], Any]) -> Any:
        """What ``call`` gives on that thread; None where the cache is full, which changes nothing."""
        before = self.cache.table.state()
        try:
            return self.pools[thread].submit(call).result()
        except CacheFull:
            assert self.cache.table.state() == before
            return None

    def rows(self, count: int) -> Rows:
        self.seed += 1
        numbers = torch.randn(2, count, HEADS, DIM, generator=torch.Generator().manual_seed(self.seed)).half()
        return numbers[0], numbers[1]

    def grow(self, handles: list[int], added: list[int], k: Tensor, v: Tensor) -> None:
        for handle, a, b in zip(handles, k.split(added), v.split(added), strict=True):
            old_k, old_v = self.model[handle]
            self.model[handle] = torch.cat((old_k, a)), torch.cat((old_v, b))

    @rule(target=handles, thread=threads, reserved=st.sampled_from((0, 0, 300)))
    def allocate(self, thread: int, reserved: int) -> int:
        made = self.on(thread, lambda: self.cache.allocate(1, reserved))
        if made is None:
            return -1
        assert made[0] not in self.model, "a handle is never used twice"
        self.model[made[0]] = self.rows(0)
        return made[0]

    @rule(chosen=st.lists(handles, max_size=3, unique=True), added=st.lists(counts, min_size=3, max_size=3), thread=threads)
    def append(self, chosen: list[int], added: list[int], thread: int) -> None:
        live, added = [h for h in chosen if h in self.model], added[: sum(h in self.model for h in chosen)]
        k, v = self.rows(sum(added))
        bounds = [sum(added[:i]) for i in range(len(added) + 1)]
        before = self.cache.table.state()
        if self.on(thread, lambda: (self.cache.append(live, k, v, cu_seqlens=bounds), 1)) is not None:
            self.grow(live, added, k, v)
        else:
            assert self.cache.table.state() == before

    @rule(a=handles, b=handles, count=counts)
    def append_at_once(self, a: int, b: int, count: int) -> None:
        """Two threads, each its own sequence."""
        if a == b or not {a, b} <= self.model.keys():
            return
        new = [self.rows(count) for _ in range(2)]
        done = [pool.submit(self.cache.append, [handle], *rows) for pool, handle, rows in zip(self.pools, (a, b), new, strict=True)]
        for handle, rows, future in zip((a, b), new, done, strict=True):
            if not isinstance(future.exception(), CacheFull):
                future.result()
                self.grow([handle], [count], *rows)

    @rule(target=batches, chosen=st.lists(handles, max_size=2, unique=True), more=st.integers(0, 1))
    def batch(self, chosen: list[int], more: int) -> int:
        live = [h for h in chosen if h in self.model]
        self.made[len(self.made)] = self.cache.batch(live, len(live) + more), live
        return len(self.made) - 1

    @rule(number=batches, added=st.lists(counts, min_size=2, max_size=2), thread=threads)
    def append_to_a_kept_batch(self, number: int, added: list[int], thread: int) -> None:
        batch, live = self.made[number]
        if not set(live) <= self.model.keys():
            with pytest.raises(ValueError, match="was freed"):
                self.cache.advance(batch, added[: len(live)])
            return
        added = added[: len(live)]
        k, v = self.rows(sum(added))
        if self.on(thread, lambda: self.cache.append(self.cache.advance(batch, added), k, v) or 1):
            self.grow(live, added, k, v)

    @rule(number=batches, chosen=st.lists(handles, max_size=2, unique=True))
    def assign(self, number: int, chosen: list[int]) -> None:
        batch, _ = self.made[number]
        live = [h for h in chosen if h in self.model][: batch.size]
        batch.assign(live)
        self.made[number] = batch, live

    @rule(number=batches, q_len=st.integers(1, 2), thread=threads)
    def attend_with_a_kept_batch(self, number: int, q_len: int, thread: int) -> None:
        batch, live = self.made[number]
        if not batch.size or not set(live) <= self.model.keys():
            return
        q = torch.randn(batch.size, q_len, HEADS, DIM, generator=torch.Generator().manual_seed(number)).half()
        out = self.on(thread, lambda: self.cache.attend(batch, q)[0])
        assert batch.lengths.tolist()[: len(live)] == [len(self.model[h][0]) for h in live]
        for i, handle in enumerate(live):
            expected, _ = reference.attend(q[i], *self.model[handle])
            torch.testing.assert_close(out[i].double(), expected, rtol=1e-2, atol=1e-3)

    @rule(target=handles, source=handles, thread=threads)
    def fork(self, source: int, thread: int) -> int:
        if source not in self.model:
            return -1
        made = self.on(thread, lambda: self.cache.fork(source))
        if made is None:
            return -1
        assert made not in self.model
        self.model[made] = self.model[source]
        return made

    @rule(handle=handles, part=st.floats(0, 1), whole=st.booleans(), thread=threads)
    def truncate(self, handle: int, part: float, whole: bool, thread: int) -> None:
        if handle not in self.model:
            return
        k, v = self.model[handle]
        packed = len(k) // 128 * 128
        length = int(part * packed) // 128 * 128 if whole else packed + int(part * (len(k) - packed))
        if self.on(thread, lambda: (self.cache.truncate(handle, length), 1)) is not None:
            self.model[handle] = k[:length], v[:length]

    @rule(handle=consumes(handles), thread=threads)
    def free(self, handle: int, thread: int) -> None:
        if handle in self.model:
            self.on(thread, lambda: self.cache.free(handle))
            del self.model[handle]
        with pytest.raises(ValueError, match="accepted: handles"):
            self.cache.length(handle)

    @rule(how=st.sampled_from(("deepcopy", "pickle", "state")), stay=st.booleans())
    def copy(self, how: str, stay: bool) -> None:
        """Go on with a copy, with its batches; the one that is left keeps what it held."""
        old, batches = self.cache, {number: batch for number, (batch, _) in self.made.items()}
        if how == "state":
            new = KVCache(2048 // old.page_size, 4, HEADS, DIM, "kv16", page_size=old.page_size, max_tokens=1024)
            new.allocate(3, 256)
            new.load_state(old.state())
            stay = True  # no batch goes along
            self.others = [*self.others[-1:], (new, dict(self.model), len(self.model))]
            return
        new, made = copy.deepcopy((old, batches)) if how == "deepcopy" else pickle.loads(pickle.dumps((old, batches)))
        left = old
        if stay:
            new, left = old, new
        else:
            self.made = {number: (made[number], live) for number, (_, live) in self.made.items()}
        self.cache = new
        self.others = [*self.others[-1:], (left, dict(self.model), len(self.model))]

    @rule(thread=threads)
    def gather(self, thread: int) -> None:
        for cache, model in [(self.cache, self.model), *((cache, model) for cache, model, _ in self.others)]:
            self.check(cache, model, thread)

    def check(self, cache: KVCache, model: dict[int, Rows], thread: int) -> None:
        order = sorted(model, key=lambda handle: (handle * 7) % 5)
        for handle, got in zip(order, self.pools[thread].submit(cache.gather, order).result() if order else [], strict=True):
            assert torch.equal(got[0], model[handle][0]) and torch.equal(got[1], model[handle][1]), handle

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "cache"):
            return
        table = self.cache.table
        assert self.cache.sequences == sorted(self.model) and all(self.cache.length(h) == len(k) for h, (k, _) in self.model.items())
        held = [page for s in table.sequences.values() for page in s.pages]
        assert table.references == [held.count(page) for page in range(table.num_pages)]
        assert sorted(table._free_pages) == [page for page in range(table.num_pages) if page not in held]
        assert self.cache.free_slots == 4 - len(self.model)
        self.check(self.cache, self.model, len(held) % THREADS)
        for batch, live in list(self.made.values())[-2:]:
            if live and set(live) <= self.model.keys():
                assert all(torch.equal(got[0], self.model[h][0]) for h, got in zip(live, self.cache.gather(batch), strict=True))


@pytest.mark.slow
def test_any_history_leaves_every_sequence_as_it_was_put(kernels):
    base = settings(max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=UNHURRIED)
    if not MINUTES:
        run_state_machine_as_test(Histories, settings=base)
        return
    until, runs = time.monotonic() + 60 * MINUTES, 0
    fresh = settings(base, derandomize=False, database=None, max_examples=20, stateful_step_count=50, phases=(Phase.generate, Phase.shrink))
    while time.monotonic() < until:
        random.seed(time.time_ns())
        run_state_machine_as_test(Histories, settings=fresh)
        runs += 1
    print(f"{runs} runs of 20 histories of up to 50 steps")


@pytest.mark.parametrize("use", ["gather", "batch"])
def test_a_truncate_after_a_copy_on_write_is_seen(kernels, use):
    """A page of 256 tokens that a fork shares is copied when it is cut in half: batches that were kept must be told."""
    cache = KVCache(8, 4, HEADS, DIM, "kv16", page_size=256)
    (a,) = cache.allocate()
    k, v = torch.randn(2, 384, HEADS, DIM).half()
    cache.append([a], k[:256], v[:256])
    fork = cache.fork(a)
    batch = cache.batch([a])
    assert torch.equal(cache.gather([a])[0][0], k[:256]) and torch.equal(cache.gather(batch)[0][0], k[:256])
    assert torch.equal(cache.gather([fork])[0][0], k[:256])
    cache.gather([a])
    cache.truncate(a, 128)
    if use == "gather":
        cache.append([a], k[256:], v[256:])
    else:
        cache.append(cache.advance(batch, 128), k[256:], v[256:])
    assert torch.equal(cache.gather([fork])[0][0], k[:256]), "the fork's page is as it was"
    assert torch.equal(cache.gather(batch)[0][0], torch.cat((k[:128], k[256:])))
