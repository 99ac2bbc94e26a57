"""The sequences of a step as tensors on the device, at addresses that do not change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .sequences import CachedSequence, SequenceTable

SECTION = 16  # int32 numbers: each tensor begins at a multiple of 64 bytes, which CPU kernels ask for


class Batch:
    """What the ops read about up to ``size`` sequences, int32 on ``device``; rows without a
    sequence have length 0.

    ``block_tables`` [size, max_pages], ``slots`` [size], ``lengths`` [size] with the tokens of the
    last ``KVCache.advance``, ``past`` [size] without them, ``cu_seqlens`` [size + 1]: their rows,
    ``cu_kv`` [size + 1]: rows of all tokens end to end. All are changed in place, so that a
    captured CUDA graph sees it. ``handles`` are the sequences, ``counts`` and ``past_lengths`` the
    numbers on the host, ``most_new`` the largest of ``counts``.
    """

    def __init__(self, table: SequenceTable, handles: Sequence[int], size: int, device: torch.device) -> None:
        self.table, self.size = table, size
        sizes = {"slots": size, "lengths": size, "past": size, "cu_seqlens": size + 1, "cu_kv": size + 1}
        starts = np.cumsum([0, *(-(-n // SECTION) * SECTION for n in sizes.values())]).tolist()
        self._host = np.zeros(starts[-1], dtype=np.int32)
        self._numbers = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        place = {name: slice(start, start + n) for (name, n), start in zip(sizes.items(), starts, strict=False)}
        self._of = {name: self._host[where] for name, where in place.items()}
        self.slots, self.lengths, self.past, self.cu_seqlens, self.cu_kv = (self._numbers[where] for where in place.values())
        self._host_tables = np.zeros((size, table.max_pages), dtype=np.int32)
        self.block_tables = torch.zeros((size, table.max_pages), dtype=torch.int32, device=device)
        self._rows = [(-1, -1)] * size  # what each row of block_tables holds: a handle, and when its pages last changed
        self.handles: tuple[int, ...] = ()
        self.counts: list[int] = []
        self.past_lengths: list[int] = []
        self.most_new = 0
        self._version = -1
        self.assign(handles)

    def assign(self, handles: Sequence[int]) -> None:
        """Describe other sequences from now on, in the same tensors: up to ``size`` of them, each
        once."""
        if len(handles) > self.size or len(set(handles)) != len(handles):
            raise ValueError(f"got the sequences {list(handles)[:10]}; accepted: up to {self.size}, each once")
        for handle in handles:
            self.table.sequence(handle)
        self.handles, self.counts, self.most_new = tuple(handles), [0] * len(handles), 0
        self._version = -1

    def update(self, counts: Sequence[int]) -> None:
        """The sequences' last ``counts`` tokens are the new ones."""
        self.counts, self.most_new = list(counts), max(counts, default=0)
        self._version = -1
        self.refresh()

    def refresh(self) -> bool:
        """Bring the device's numbers up to date, where a sequence has changed since; whether one
        had. Raises ``ValueError`` for a freed one."""
        if self._version == self.table.version:
            return False
        if self._numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("sequences have changed since the batch was last used, and a CUDA graph is being captured; accepted: call "
                               "advance(batch) or batch.refresh() before the capture, and again before each replay")  # fmt: skip
        sequences = [self.table.sequence(handle) for handle in self.handles]
        live, of = len(sequences), self._of
        lengths = [s.length for s in sequences]
        # Tokens may have been dropped since they were added.
        self.past_lengths = [max(0, n - count) for n, count in zip(lengths, self.counts, strict=True)]
        self._host[:] = 0
        of["slots"][:live] = [s.slot for s in sequences]
        of["lengths"][:live] = lengths
        of["past"][:live] = self.past_lengths
        of["cu_seqlens"][1 : live + 1] = np.cumsum(self.counts)
        of["cu_kv"][1 : live + 1] = np.cumsum(lengths)
        for name in ("cu_seqlens", "cu_kv"):
            of[name][live + 1 :] = of[name][live]
        # From pageable memory, so that the driver has read it when the call returns: the next step
        # may write here.
        self._numbers.copy_(torch.from_numpy(self._host), non_blocking=True)
        self._refresh_tables(sequences)
        self._version = self.table.version
        return True

    def _refresh_tables(self, sequences: list[CachedSequence]) -> None:
        held = [(handle, s.repaged) for handle, s in zip(self.handles, sequences, strict=True)]
        changed = [row for row, now in enumerate(held) if self._rows[row] != now]
        for row in changed:
            self._rows[row] = held[row]
            self._host_tables[row, : len(sequences[row].pages)] = sequences[row].pages
        if changed:
            rows = slice(changed[0], changed[-1] + 1)
            self.block_tables[rows].copy_(torch.from_numpy(self._host_tables[rows]), non_blocking=True)

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
