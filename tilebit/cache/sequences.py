"""Who owns which page of a KV cache: host bookkeeping in Python integers, without a device.

The first ``floor(length / 128) * 128`` tokens of a sequence are packed and lie in pages, the rest
in the 16-bit residual window of its slot. A packed page never changes, so that forks share it; the
one exception, a page of 256 tokens that is half filled, is copied instead.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..layouts.kv import RESIDUAL
from .counts import as_int, whole
from .state import TableState


class CacheFull(RuntimeError):
    """No free page or slot is left for what was asked; nothing has changed. Free sequences, or make
    the cache with more."""


@dataclass(slots=True)
class CachedSequence:
    """One sequence: its slot (row of the windows), its tokens, the pages of its packed tokens in
    order (some may be reserved and not filled yet), the table's version when these and when its
    length last changed, and how many pages were reserved for it."""

    slot: int
    length: int = 0
    pages: list[int] = field(default_factory=list)
    repaged: int = 0
    resized: int = 0
    reserved: int = 0


class SequenceTable:
    """Pages, slots and lengths of every sequence of a cache of ``num_pages`` pages of ``page_size``
    tokens and ``slots`` windows; no sequence takes more than ``max_pages`` pages.

    Handles are integers that are never used twice; ``unpacked`` are those whose windows wait for
    ``KVCache.pack``. Every method does all that it says or raises and changes nothing. ``version``
    grows with every change. Threads that share a table hold ``lock`` around its methods, and around
    what must go with them (copies of pages).
    """

    def __init__(self, num_pages: int, slots: int, page_size: int, max_pages: int) -> None:
        self.num_pages, self.slots, self.page_size, self.max_pages = num_pages, slots, page_size, max_pages
        self.sequences: dict[int, CachedSequence] = {}
        self.references = [0] * num_pages
        self._free_pages = list(range(num_pages))[::-1]  # taken from the end: a fresh cache hands out 0, 1, 2, ...
        self._free_slots = list(range(slots))[::-1]
        self._next = 0
        self.version = 0
        self.unpacked: set[int] = set()
        self.lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold all but the lock."""
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def sequence(self, handle: int) -> CachedSequence:
        """The live sequence ``handle``. Raises ``ValueError``."""
        number = handle if type(handle) is int else as_int(handle)
        found = None if number is None else self.sequences.get(number)
        if found is None:
            what = "was freed" if number is not None and 0 <= number < self._next else "is no handle of this cache"
            raise ValueError(f"sequence {handle!r} {what}; accepted: handles that allocate or fork returned and free has not taken back")
        return found

    def pages_for(self, length: int) -> int:
        """Pages that ``length`` tokens of one sequence need."""
        return -(-(length // RESIDUAL * RESIDUAL) // self.page_size)

    def allocate(self, count: int, tokens: int = 0) -> list[int]:
        """``count`` empty sequences, each with pages reserved for ``tokens`` tokens."""
        count, tokens = whole("the number of sequences", count, 0), whole("the number of their tokens", tokens, 0)
        if count > self.free_slots:
            raise CacheFull(f"{count} sequences need as many slots and {self.free_slots} of {self.slots} are free; free sequences first")
        pages = self.pages_for(tokens)
        self._check_table(pages, tokens)
        self._check_free(count * pages, f"{count} sequences of {tokens} tokens")
        handles = list(range(self._next, self._next + count))
        for handle in handles:
            self.sequences[handle] = CachedSequence(self._free_slots.pop(), 0, self._take(pages), self.version + 1, reserved=pages)
        self._next += count
        self.version += 1
        return handles

    def extend(self, handles: Sequence[int], counts: Sequence[int]) -> None:
        """Make each sequence longer by as many tokens as ``counts`` says, with pages for what will
        be packed."""
        if len(handles) != len(counts) or not {type(count) for count in counts} <= {int} or min(counts, default=0) < 0:
            raise ValueError(
                f"got {len(counts)} numbers of new tokens ({list(counts)[:8]}) for {len(handles)} sequences; accepted: for each a whole "
                f"number from 0"
            )
        if len(set(handles)) != len(handles):
            raise ValueError(f"a sequence is named twice in {list(handles)}; accepted: every sequence once")
        try:
            sequences = [self.sequences[handle] for handle in handles]
        except (KeyError, TypeError):
            sequences = [self.sequence(handle) for handle in handles]  # says which
        wanted = []  # (sequence, more pages), where a window fills
        for sequence, count in zip(sequences, counts, strict=True):
            length = sequence.length + count
            if sequence.length % RESIDUAL + count >= RESIDUAL:
                pages = self.pages_for(length)
                self._check_table(pages, length)
                wanted.append((sequence, max(0, pages - len(sequence.pages))))
        self._check_free(sum(pages for _, pages in wanted), f"{sum(counts)} tokens")
        self.version = now = self.version + 1
        for sequence, count in zip(sequences, counts, strict=True):
            if count:
                sequence.length += count
                sequence.resized = now
        for sequence, pages in wanted:
            if pages:
                sequence.pages += self._take(pages)
                sequence.repaged = now

    def retract(self, handles: Sequence[int], counts: Sequence[int]) -> None:
        """Take back an ``extend`` of whose tokens none was written; pages stay with their
        sequences."""
        self.version += 1
        for handle, count in zip(handles, counts, strict=True):
            sequence = self.sequence(handle)
            sequence.length -= count
            sequence.resized = self.version

    def fork(self, handle: int) -> tuple[int, list[tuple[int, int]]]:
        """(handle of a sequence with the same tokens, pages to copy as (from, to)). It shares the
        pages that are filled."""
        source = self.sequence(handle)
        if not self._free_slots:
            raise CacheFull(f"a fork needs a slot and all {self.slots} are taken; free sequences first")
        filled = source.length // RESIDUAL * RESIDUAL // self.page_size
        copied = source.pages[filled : self.pages_for(source.length)]  # the half-filled page, where there is one
        self._check_free(len(copied), "the fork's half-filled page")
        fresh = self._take(len(copied))
        for page in source.pages[:filled]:
            self.references[page] += 1
        new, self._next = self._next, self._next + 1
        self.sequences[new] = CachedSequence(self._free_slots.pop(), source.length, source.pages[:filled] + fresh, self.version + 1)
        self.version += 1
        return new, list(zip(copied, fresh, strict=True))

    def truncate(self, handle: int, length: int) -> list[tuple[int, int]]:
        """Drop every token from ``length`` on; returns pages to copy as (from, to). Packed tokens
        cannot be taken apart: accepted are the lengths from the packed length on, and multiples of
        128. Pages become free but those that were reserved, if no fork shares them."""
        sequence, length = self.sequence(handle), whole("length", length)
        packed = sequence.length // RESIDUAL * RESIDUAL
        if not 0 <= length <= sequence.length or (length < packed and length % RESIDUAL):
            raise ValueError(
                f"sequence {handle} has {sequence.length} tokens of which {packed} are packed, and cannot be cut to {length}; accepted: "
                f"{packed} to {sequence.length}, or a smaller multiple of {RESIDUAL}. Tokens that may be dropped again must not fill the "
                f"residual window: append at most revocable_tokens(handle) of them"
            )
        if length == sequence.length:
            return []
        if length >= packed:
            self.version += 1
            sequence.length, sequence.resized = length, self.version
            return []
        keep = self.pages_for(length)
        shared = length % self.page_size and self.references[sequence.pages[keep - 1]] > 1  # its second half will be written again
        self._check_free(int(bool(shared)), "a copy of the page that forks share")
        kept = [page for page in sequence.pages[keep : sequence.reserved] if self.references[page] == 1]
        stay = set(kept)
        self._give_back([page for page in sequence.pages[keep:] if page not in stay])
        sequence.pages[keep:] = kept
        self.version += 1
        sequence.length, sequence.repaged, sequence.resized = length, self.version, self.version
        if not shared:
            return []
        old = sequence.pages[keep - 1]
        (sequence.pages[keep - 1],) = self._take(1)
        self.references[old] -= 1
        return [(old, sequence.pages[keep - 1])]

    def free(self, handle: int) -> None:
        """Forget a sequence; pages that no fork shares become free."""
        sequence = self.sequence(handle)
        del self.sequences[handle]
        self.unpacked.discard(handle)
        self._give_back(sequence.pages)
        self._free_slots.append(sequence.slot)
        self.version += 1

    def state(self) -> dict[str, Any]:
        """Everything, in numbers and lists."""
        rows = [[handle, s.slot, s.length, list(s.pages)] for handle, s in self.sequences.items()]
        return {"sequences": rows, "next": self._next}

    def become(self, state: TableState) -> None:
        """Be the table that ``state.table_state`` has read and found right. Handles that were given out here are not given
        out again."""
        self.version += 1
        now = self.version
        self.sequences = {handle: CachedSequence(slot, length, pages, now, now) for handle, slot, length, pages in state.rows}
        self.unpacked.clear()
        self.references = [state.holders.get(page, 0) for page in range(self.num_pages)]
        taken = {slot for _, slot, _, _ in state.rows}
        self._free_pages = [page for page in reversed(range(self.num_pages)) if not self.references[page]]
        self._free_slots = [slot for slot in reversed(range(self.slots)) if slot not in taken]
        self._next = max(self._next, state.next)

    def _check_table(self, pages: int, tokens: int) -> None:
        if pages > self.max_pages:
            most = self.max_pages * self.page_size // RESIDUAL * RESIDUAL + RESIDUAL - 1
            raise CacheFull(f"a sequence of {tokens} tokens does not fit; this cache holds up to {most}: make it with a larger max_tokens")

    def _check_free(self, pages: int, what: str) -> None:
        if pages > self.free_pages:
            raise CacheFull(
                f"{what} need {pages} more pages of {self.page_size} tokens and {self.free_pages} of {self.num_pages} are free; free "
                f"sequences or make the cache with a larger num_pages. Nothing has changed"
            )

    def _take(self, count: int) -> list[int]:
        taken = [self._free_pages.pop() for _ in range(count)]
        for page in taken:
            self.references[page] = 1
        return taken

    def _give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):  # the first page is the next to be handed out again
            self.references[page] -= 1
            if not self.references[page]:
                self._free_pages.append(page)
