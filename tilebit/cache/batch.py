"""The sequences of a step as tensors on the device, at addresses that do not change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .sequences import CachedSequence, SequenceTable

DERIVED = ("_host", "_sent", "_numbers", "_place", "_of", "slots", "lengths", "past", "cu_seqlens", "cu_kv", "_host_tables", "block_tables")
SECTION = 16  # int32 numbers: each tensor begins at a multiple of 64 bytes, which CPU kernels ask for


class Batch:
    """What the ops read about up to ``size`` sequences, int32 on ``device``; rows without a
    sequence have length 0.

    ``block_tables`` [size, max_pages], ``slots`` [size], ``lengths`` [size] with the tokens of the
    last ``KVCache.advance``, ``past`` [size] without them, ``cu_seqlens`` [size + 1]: their rows,
    ``cu_kv`` [size + 1]: rows of all tokens end to end. All are changed in place, so that a
    captured CUDA graph sees it. ``handles`` are the sequences, ``counts`` and ``past_lengths`` the
    numbers on the host, ``most_new`` the largest of ``counts``; ``written`` are the layers whose
    new rows have been written, ``unpacked`` those of them whose windows wait for ``KVCache.pack``,
    ``copied`` says that numbers were copied to the device since the last append.

    The tensors say what was so when the batch was made, or when ``KVCache.advance`` (not ``deferred``),
    ``assign``, ``refresh`` or a method of the cache was last given it. One thread at a time uses a batch. A
    copy (``copy``, ``pickle``, ``torch.save``) has tensors of its own, and belongs to the cache
    that was copied with it (``copy.copy``: to the same cache).
    """

    def __init__(self, table: SequenceTable, handles: Sequence[int], size: int, device: torch.device) -> None:
        self.table, self.size = table, size
        self._lay_out(device)
        self.copied, self._deferred = True, False
        self._rows = [(-1, -1)] * size  # what each row of block_tables holds: a handle, and when its pages last changed
        self.past_lengths: list[int] = []
        self.unpacked: set[int] = set()
        self.name(handles)

    @torch.inference_mode(False)  # tensors that inference mode has made cannot be written outside of it
    def _lay_out(self, device: torch.device) -> None:
        size, max_pages = self.size, self.table.max_pages
        sizes = {"slots": size, "lengths": size, "past": size, "cu_seqlens": size + 1, "cu_kv": size + 1}
        starts = np.cumsum([0, *(-(-n // SECTION) * SECTION for n in sizes.values())]).tolist()
        self._host = np.zeros(starts[-1], dtype=np.int32)
        self._sent = self._host.copy()  # what the device has when all that was launched has run
        self._numbers = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self._place = {name: slice(start, start + n) for (name, n), start in zip(sizes.items(), starts, strict=False)}
        self._of = {name: self._host[where] for name, where in self._place.items()}
        self.slots, self.lengths, self.past, self.cu_seqlens, self.cu_kv = (self._numbers[where] for where in self._place.values())
        self._host_tables = np.zeros((size, max_pages), dtype=np.int32)
        self.block_tables = torch.zeros((size, max_pages), dtype=torch.int32, device=device)

    def __getstate__(self) -> dict[str, Any]:
        """The numbers, and an empty tensor that says where the device's are: ``torch.load`` may move
        it. Views of one memory would come apart in a copy, so they are made anew."""
        held = {name: value for name, value in self.__dict__.items() if name not in DERIVED}
        where = torch.empty(0, device=self._numbers.device)
        return {**held, "numbers": self._host.copy(), "tables": self._host_tables.copy(), "where": where}

    def __setstate__(self, state: dict[str, Any]) -> None:
        numbers, tables, where = (state[name] for name in ("numbers", "tables", "where"))
        self.__dict__.update({name: value for name, value in state.items() if name not in ("numbers", "tables", "where")})
        self.written, self.unpacked, self._rows = set(self.written), set(self.unpacked), list(self._rows)
        self._lay_out(where.device)
        self._host[:], self._host_tables[:] = numbers, tables
        self._send(self._host)
        self.block_tables.copy_(torch.from_numpy(self._host_tables))

    def assign(self, handles: Sequence[int]) -> None:
        """Describe other sequences from now on, in the same tensors: up to ``size`` of them, each
        once."""
        self.name(handles)
        self.refresh()
        self._version = -1  # a dependent launch that comes next is still a plain one

    def name(self, handles: Sequence[int]) -> None:
        """``assign``, with tensors that are brought up to date where the batch is used."""
        for handle in handles:
            self.table.sequence(handle)
        named = tuple(index(handle) for handle in handles)
        if len(named) > self.size or len(set(named)) != len(named):
            raise ValueError(f"got the sequences {list(named)[:10]}; accepted: up to {self.size}, each once")
        self._reject_waiting()
        self.handles: tuple[int, ...] = named
        self.counts, self.most_new = [0] * len(handles), 0
        self.written: set[int] = set()
        self.unpacked.clear()
        self._resized: list[int] = []  # when each sequence's length last changed
        self._advanced: list[int] | None = None  # and when it did by the advance of these counts; None: by no such
        self._version = -1

    def _reject_waiting(self) -> None:
        """Raise ``ValueError`` where sequences would no longer be found by the pack that they wait
        for."""
        waiting = sorted(self.table.unpacked.intersection(self.handles)) if self.unpacked else []
        if waiting:
            raise ValueError(
                f"sequences {waiting[:8]} of the batch were appended to with full_windows; accepted: other sequences behind pack of the "
                f"batch, or when these are freed"
            )

    def update(self, counts: Sequence[int], deferred: bool = False) -> None:
        """The sequences' last ``counts`` tokens are the new ones; ``deferred``: the device's numbers
        follow when the batch is next used."""
        self.counts, self.most_new = list(counts), max(counts, default=0)
        self.written.clear()
        self.unpacked.clear()  # of sequences that others have replaced: those that wait are not advanced
        self._version, self._advanced = -1, None
        if deferred:
            self._follow()
            self._deferred = True
        else:
            self.refresh()
        self._advanced = self._resized

    @property
    def advanced(self) -> bool:
        """Whether the sequences have the lengths that the last ``KVCache.advance`` of this batch
        gave them, as of the last ``refresh``."""
        return self._advanced is not None

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, and calls write nothing yet."""
        return self._numbers.is_cuda and torch.cuda.is_current_stream_capturing()

    def reject_rows(self, layer: int) -> None:
        """Raise ``ValueError`` when new rows of ``layer`` have no place: nobody has made room for
        them since, or it has been filled."""
        if not self.advanced:
            raise ValueError(
                "the batch was not advanced since it was made, or its sequences have changed their lengths since; accepted: "
                "advance(batch, counts), then the rows of each layer once"
            )
        # A graph that is being captured writes nothing yet, and its calls were made once before.
        if layer in self.written and not self.capturing:
            raise ValueError(
                f"the rows of layer {layer} were written since the batch was advanced, and would be overwritten; accepted: "
                f"advance(batch, counts) before the next rows"
            )

    def refresh(self) -> bool:
        """Bring the device's numbers up to date, where a sequence has changed since; whether one
        had. Raises ``ValueError`` for a freed one."""
        stale = self._version != self.table.version
        if not stale and not self._deferred:
            return False
        if self.capturing:
            raise RuntimeError("sequences have changed since the batch was last used, and a CUDA graph is being captured; accepted: call "
                               "advance(batch) or batch.refresh() before the capture, and again before each replay")  # fmt: skip
        if stale:
            self._follow()
        self._send(self._host)
        return True

    def growth(self) -> np.ndarray:
        """int32: what the device's numbers grow by from one step of a token each to the next. A captured step
        begins with ``grow``, so that between two replays nothing is copied."""
        live, rows = len(self.handles), np.arange(self.size + 1)
        grown = np.zeros_like(self._host)
        grown[self._place["lengths"]] = grown[self._place["past"]] = rows[:-1] < live
        grown[self._place["cu_kv"]] = np.minimum(rows, live)
        return grown

    def grow(self, growth: Tensor) -> None:
        """Add ``growth``, on the device, to the device's numbers."""
        self._numbers.add_(growth)

    def lag(self, growth: np.ndarray) -> None:
        """Have the device's numbers lie ``growth`` behind, for a replay, which comes next and adds it. They do so
        already where the step before was such a replay, and room for a token each was made since, ``deferred``."""
        if self._version != self.table.version:
            self._follow()
        behind = self._host - growth
        if not np.array_equal(self._sent, behind):
            self._send(behind)
        self._sent[:] = self._host
        self._deferred = False

    def _follow(self) -> None:
        """Bring the host's numbers, and the tables, up to date."""
        table = self.table
        with table.lock:
            try:
                sequences = [table.sequences[handle] for handle in self.handles]
            except KeyError:
                sequences = [table.sequence(handle) for handle in self.handles]  # says which
            self._fill(sequences)
            self._version = table.version

    def _send(self, numbers: np.ndarray) -> None:
        # From pageable memory, so that the driver has read it when the call returns: the next step
        # may write here.
        self._numbers.copy_(torch.from_numpy(numbers), non_blocking=True)
        self._sent[:] = numbers
        self.copied, self._deferred = True, False

    def _fill(self, sequences: list[CachedSequence]) -> None:
        live, of = len(sequences), self._of
        lengths = [s.length for s in sequences]
        self._resized = [s.resized for s in sequences]
        if self._advanced != self._resized:
            self._advanced = None
        # Tokens may have been dropped since they were added.
        self.past_lengths = [n - count if n > count else 0 for n, count in zip(lengths, self.counts, strict=True)]
        self._host[:] = 0
        of["slots"][:live] = [s.slot for s in sequences]
        of["lengths"][:live] = lengths
        of["past"][:live] = self.past_lengths
        for name, counts in (("cu_seqlens", self.counts), ("cu_kv", lengths)):
            of[name][1 : live + 1] = list(accumulate(counts))
            of[name][live + 1 :] = of[name][live]
        self._refresh_tables(sequences)

    def _refresh_tables(self, sequences: list[CachedSequence]) -> None:
        held = [(handle, s.repaged) for handle, s in zip(self.handles, sequences, strict=True)]
        if held == self._rows[: len(held)]:
            return
        changed = [row for row, now in enumerate(held) if self._rows[row] != now]
        for row in changed:
            self._rows[row] = held[row]
            self._host_tables[row, : len(sequences[row].pages)] = sequences[row].pages
        rows = slice(changed[0], changed[-1] + 1)
        self.block_tables[rows].copy_(torch.from_numpy(self._host_tables[rows]), non_blocking=True)
        self.copied = True

    def positions(self) -> Tensor:
        """int64 [new tokens] on the device: each new row's position in its sequence."""
        return self._spread(self.past_lengths)

    def new_rows(self) -> Tensor:
        """int64 [new tokens] on the device: each new row's place when all tokens lie end to end
        (``cu_kv``)."""
        ends = np.cumsum([0, *(past + count for past, count in zip(self.past_lengths, self.counts, strict=True))])
        return self._spread([int(start) + past for start, past in zip(ends, self.past_lengths, strict=False)])

    def _spread(self, firsts: Sequence[int]) -> Tensor:
        runs = [np.arange(first, first + count) for first, count in zip(firsts, self.counts, strict=True)]
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *runs])).to(self._numbers.device)
