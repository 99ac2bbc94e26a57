"""The ``KVCache`` behind a model's cache: it grows when it is full, and its sequences are the rows of
the model's batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ..cache.batch import Batch
from ..cache.counts import whole
from ..cache.kvcache import KVCache
from ..cache.sequences import CacheFull
from ..layouts.kv import RESIDUAL


class Pool:
    """Sequences of up to ``max_tokens`` tokens. With ``sequences`` the memory for as many is taken at
    once and never more (``CacheFull`` and ``ValueError`` say what does not fit); without, it
    doubles when it is full. ``options`` are the cache's others. Nothing is allocated before
    ``begin``."""

    def __init__(self, max_tokens: int, sequences: int | None, page_size: int, **options: Any) -> None:
        self.max_tokens, self.sequences, self.page_size, self._options = max_tokens, sequences, page_size, options
        self._cache: KVCache | None = None
        self.handles: list[int] = []
        self._batch: Batch | None = None
        self._batches: dict[int, Batch] = {}  # of each number of rows: a CUDA graph has their addresses

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None
        return self._cache

    @property
    def memory_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.memory_bytes

    def begin(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Have ``rows`` sequences. Raises ``ValueError`` for another batch than the one that is held."""
        if self.handles:
            if rows != len(self.handles):
                raise ValueError(
                    f"the batch has {rows} rows and the cache holds {len(self.handles)}; accepted: the same sequences, or reset() before "
                    "others"
                )
            if (dtype, device) != (self.cache.dtype, self.cache.device):
                raise ValueError(f"keys are {dtype} on {device}; the cache is {self.cache.dtype} on {self.cache.device}: make another")
            return
        if self.sequences is not None and rows > self.sequences:
            raise ValueError(
                f"the batch has {rows} rows (beams and returned sequences are rows, too) and the cache is for {self.sequences}; accepted: "
                "at most as many: make it with more sequences"
            )
        if self._cache is None or (self._cache.dtype, self._cache.device) != (dtype, device):
            self._cache, self._batches = None, {}
            if self.sequences is None:
                self._cache = self._made(rows, rows, dtype, device)
            else:
                self._cache = self._made(self.sequences * self._pages(self.max_tokens), self.sequences, dtype, device)
        self._room(rows, 0)
        self.handles = self.cache.allocate(rows)

    def advance(self, counts: Sequence[int], deferred: bool = False) -> Batch:
        """Room for ``counts`` new tokens of each sequence, as a batch to write and read with (``deferred``
        as ``KVCache.advance`` has it)."""
        table = self.cache.table
        held = [table.sequence(handle) for handle in self.handles]
        needed = sum(max(0, self._pages(s.length + count) - len(s.pages)) for s, count in zip(held, counts, strict=True))
        self._room(0, needed)
        if self._batch is None:
            self._batch = self._batches.get(len(self.handles))
            if self._batch is None:
                self._batch = self._batches[len(self.handles)] = self.cache.batch(self.handles)
            else:
                self._batch.assign(self.handles)
        return self.cache.advance(self._batch, counts, deferred)

    def has_room(self, tokens: int) -> bool:
        """Whether each sequence can be so many tokens longer in the memory that is there."""
        held = [self.cache.table.sequence(handle) for handle in self.handles]
        needed = sum(max(0, self._pages(s.length + tokens) - len(s.pages)) for s in held)
        return needed <= self.cache.free_pages and all(s.length + tokens <= self.max_tokens for s in held)

    def lengths(self) -> list[int]:
        return [self.cache.length(handle) for handle in self.handles]

    def select(self, rows: Sequence[int]) -> None:
        """Have the sequences that were ``rows``, one of them several times perhaps: those share
        pages. Raises before anything has changed."""
        rows = [whole("a row of the cache", row, 0, len(self.handles) - 1) for row in rows]
        if rows == list(range(len(self.handles))):
            return
        kept = set(rows)
        more = len(rows) - len(kept)
        self._room(max(0, more - (len(self.handles) - len(kept))), more)  # a fork may copy a page that is half filled
        dropped = [handle for row, handle in enumerate(self.handles) if row not in kept]
        self._check_forks([self.handles[row] for row in (Counter(rows) - Counter(kept)).elements()], dropped)
        for handle in dropped:
            self.cache.free(handle)
        taken: set[int] = set()
        handles = []
        for row in rows:
            handles.append(self.cache.fork(self.handles[row]) if row in taken else self.handles[row])
            taken.add(row)
        self.handles, self._batch = handles, None

    def _check_forks(self, sources: list[int], dropped: list[int]) -> None:
        """Raise ``CacheFull`` unless each of ``sources`` can be forked, one several times perhaps,
        when ``dropped`` are freed."""
        table = self.cache.table
        slots = table.free_slots + len(dropped)
        if len(sources) > slots:
            raise CacheFull(f"{len(sources)} more rows need as many slots and {slots} of {table.slots} are free; make the cache with more "
                            "sequences (beams and returned sequences are rows, too). Nothing has changed")  # fmt: skip
        copies = sum(table.sequence(handle).length // RESIDUAL * RESIDUAL % self.page_size > 0 for handle in sources)
        if copies > table.free_pages:
            held = Counter(page for handle in dropped for page in table.sequence(handle).pages)
            pages = table.free_pages + sum(table.references[page] == count for page, count in held.items())
            if copies > pages:
                raise CacheFull(f"{len(sources)} more rows need {copies} pages and {pages} of {table.num_pages} are free; make the cache "
                                "with more sequences, or a larger max_tokens. Nothing has changed")  # fmt: skip

    def reset(self) -> None:
        """Forget all sequences; memory stays."""
        for handle in self.handles:
            self.cache.free(handle)
        self.handles, self._batch = [], None

    def _pages(self, tokens: int) -> int:
        return -(-(tokens // RESIDUAL * RESIDUAL) // self.page_size)

    def _made(self, pages: int, slots: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        return KVCache(
            max(1, pages), max(1, slots), dtype=dtype, device=device, page_size=self.page_size, max_tokens=self.max_tokens, **self._options
        )

    def _room(self, slots: int, pages: int) -> None:
        """Grow until so many are free; a cache of fixed size says itself what is lacking."""
        old = self.cache
        if self.sequences is not None or (slots <= old.free_slots and pages <= old.free_pages):
            return
        total, rows = old.table.num_pages, old.table.slots
        if pages > old.free_pages:
            total = max(2 * total, total + pages - old.free_pages)
        if slots > old.free_slots:
            rows = max(2 * rows, rows + slots - old.free_slots)
        grown = self._made(total, rows, old.dtype, old.device)
        grown.load_state(old.state())
        self._cache, self._batch, self._batches = grown, None, {}
