"""A paged KV cache of low-bit keys and values, with a 16-bit residual window for every sequence:
memory, sequences, and the ops on them.

    cache = KVCache(num_pages=4096, slots=64, heads_kv=8, head_dim=128, format="kv4_channel", device="cuda")
    sequences = cache.allocate(4)
    out = cache.prefill(sequences, q, k, v, cu_seqlens)         # prompts: attention over 16-bit rows, then they join the cache
    cache.append(sequences, k, v)                               # a new token each
    out, _ = cache.attend(sequences, q)

With several layers, or in a CUDA graph, the two halves of an append are called on their own.
``advance`` finds pages and sets lengths, once a step, on the host; ``append(batch, ...)`` writes
rows of one layer and only launches. A ``Batch`` keeps its tensors where they are, so that a graph
which was captured with it replays with whatever lengths, tables and sequences it has been given
since:

    batch = cache.batch(sequences)
    for token in ...:
        cache.advance(batch)                                    # in the graph: append(batch, k, v, layer=i), attend(batch, q, layer=i)
        graph.replay()
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, NoReturn, overload

import torch
from torch import Tensor

from ..accepted import expect, expect_tensors
from ..layouts.kv import RESIDUAL
from ..layouts.kv_formats import KVFormat
from ..ops import attention as ops
from .batch import Batch
from .calls import (
    Turning,
    check_layer,
    check_one_each,
    check_packed,
    check_query,
    check_query_rows,
    check_rows,
    check_scores,
    counts_of,
    flat_rows,
    reject_windows,
    turning_of,
)
from .counts import score_options, whole
from .memory import CacheMemory
from .rotary import rotated
from .sequences import SequenceTable
from .state import table_state

# By name: their contents are, or they are a thread's.
UNCOPIED = ("memory", "all_pages", "all_windows", "pages", "windows", "head_scales", "_latest")


class _Latest(threading.local):
    """The batch of the handles that a thread named last: a step names them more than once."""

    batch: Batch | None = None


class KVCache(CacheMemory):
    """Keys and values of up to ``slots`` sequences in ``num_pages`` pages of ``page_size`` tokens
    (16, 32, 64, 128 or 256), for each of ``num_layers`` layers with ``heads_kv`` heads of
    ``head_dim`` channels.

    ``format`` is a ``KVFormat`` or its name, ``dtype`` that of q, k and v (torch.float16 or
    torch.bfloat16, of which formats of integers keep numbers within fp16's range only).
    ``max_tokens`` bounds one sequence (default: all pages): the width of block tables, and what
    schedules are chosen for. So many tokens fit; more are not refused while its last page and its
    window hold them. ``head_scales`` fp32 [2, heads_kv] or [num_layers, 2, heads_kv] are fp8's, of keys and
    values (default 1). All memory is one allocation of ``memory_bytes``, zero at first.

    The first ``floor(length / 128) * 128`` tokens of a sequence are packed, at ``memory_per_token``
    bytes each; the rest wait in 16 bits in its window. A handle names a sequence and is never used
    twice. Methods take handles or a ``Batch`` of them. Inference only. Raises ``ValueError`` for
    calls that do not fit and ``CacheFull`` when pages or slots run out, both before anything has
    changed.

    **Threads**: any number may call any methods at once, each for sequences of its own. One
    sequence (a fork is another one) and one ``Batch`` are one thread's at a time, and on a GPU the
    stream's of that thread: free a sequence, or hand it to another thread, when kernels that were
    launched for it have ended. ``state``, ``load_state`` and copies are for when no other thread
    calls.

    **Copies**: ``copy.deepcopy``, ``pickle`` and ``torch.save`` (``torch.load`` with
    weights_only=False) give an independent cache with the same sequences and handles, and memory of
    the same size; batches copied along with it belong to it. ``state`` goes into another cache.
    ``copy.copy`` raises ``TypeError``.
    """

    def __init__(
        self,
        num_pages: int,
        slots: int,
        heads_kv: int,
        head_dim: int,
        format: KVFormat | str = "kv4_channel",
        dtype: torch.dtype = torch.float16,
        page_size: int = 128,
        device: torch.device | str = "cpu",
        num_layers: int = 1,
        max_tokens: int | None = None,
        head_scales: Tensor | None = None,
    ) -> None:
        super().__init__(num_pages, slots, heads_kv, head_dim, format, dtype, page_size, device, num_layers, head_scales)
        num_pages, slots, page_size = len(self.pages[0]), len(self.windows[0]), self.page_size
        self.max_tokens = num_pages * page_size + RESIDUAL - 1 if max_tokens is None else whole("max_tokens", max_tokens, 1)
        max_pages = max(1, -(-(self.max_tokens // RESIDUAL * RESIDUAL) // page_size))
        self.table = SequenceTable(num_pages, slots, page_size, max_pages)
        self._latest = _Latest()

    @classmethod
    def contiguous(cls, batch: int, max_tokens: int, heads_kv: int, head_dim: int, **options: Any) -> tuple[KVCache, list[int]]:
        """(a cache for ``batch`` sequences of up to ``max_tokens`` tokens, their handles), each in
        consecutive pages of its own.

        ``options`` are the constructor's others.
        """
        page_size = whole("page_size", options.get("page_size", RESIDUAL), 1)
        batch, max_tokens = whole("batch", batch, 1), whole("max_tokens", max_tokens, 1)
        per_sequence = max(1, -(-(max_tokens // RESIDUAL * RESIDUAL) // page_size))
        cache = cls(batch * per_sequence, batch, heads_kv, head_dim, max_tokens=max_tokens, **options)
        return cache, cache.allocate(batch, max_tokens)

    # ---- sequences ----

    def allocate(self, count: int = 1, tokens: int = 0) -> list[int]:
        """Handles of ``count`` new, empty sequences; pages for ``tokens`` of each are reserved
        (consecutive ones, in a new cache) until it is freed, or a fork shares them. ``load_state``
        knows of no reservation."""
        with self.table.lock:
            return self.table.allocate(count, tokens)

    def free(self, handle: int) -> None:
        """Forget a sequence: its slot is free again, and its pages are unless a fork shares them."""
        with self.table.lock:
            self.table.free(handle)

    def fork(self, handle: int) -> int:
        """A new sequence with the same tokens. Packed pages are shared; the window is copied, and a
        half-filled page of 256 tokens."""
        check_packed(self.table, (handle,))
        with self.table.lock:
            new, copies = self.table.fork(handle)
            try:
                self.copy_pages(copies)
                self.copy_window(self.table.sequence(handle).slot, self.table.sequence(new).slot)
            except Exception:
                self.table.free(new)
                raise
        return new

    def truncate(self, handle: int, length: int) -> None:
        """Drop a sequence's tokens from ``length`` on (rejected drafts). Packed tokens cannot be
        taken apart: ``length`` must be at least the packed length, or a multiple of 128. Pages that
        it no longer needs become free, but those that were reserved. ``revocable_tokens`` says how
        many can be appended and dropped again."""
        check_packed(self.table, (handle,))
        with self.table.lock:  # until the page is copied: who shares it may free it
            self.copy_pages(self.table.truncate(handle, length))

    def length(self, handle: int) -> int:
        """Tokens of a sequence."""
        return self.table.sequence(handle).length

    def revocable_tokens(self, handle: int) -> int:
        """How many tokens can be appended so that ``truncate`` can drop any number of them again:
        those that do not fill the window."""
        return RESIDUAL - 1 - self.length(handle) % RESIDUAL

    @property
    def sequences(self) -> list[int]:
        """Handles of all live sequences, the oldest first."""
        return list(self.table.sequences)

    @property
    def free_pages(self) -> int:
        """Pages that belong to no sequence."""
        return self.table.free_pages

    @property
    def free_slots(self) -> int:
        """How many more sequences there may be."""
        return self.table.free_slots

    # ---- steps ----

    def batch(self, sequences: Sequence[int], size: int | None = None) -> Batch:
        """Tensors on the device that describe ``sequences`` to the ops; ``size`` rows (default: as
        many), the last ones empty."""
        expect("sequences", sequences, Sequence, "a list of handles")
        made = Batch(self.table, (), len(sequences) if size is None else whole("size", size, 0), self.device)
        made.assign(sequences)
        return made

    def advance(self, sequences: Sequence[int] | Batch, counts: int | Sequence[int] = 1, deferred: bool = False) -> Batch:
        """Make room for ``counts`` new tokens of each sequence and set lengths, tables and rows of
        the batch: once a step, before ``append`` writes them in every layer. Host work and at most
        two small copies to the device; not to be captured. ``deferred``: the batch's tensors may lag
        until a method of the cache, or a compiled step, is given the batch, which then often needs no
        copy; not for a graph of your own that reads them."""
        batch = self._as_batch(sequences)
        if type(counts) is int:
            return self._advance(batch, [counts] * len(batch.handles), deferred)
        try:
            given = list(counts)  # type: ignore[arg-type]
        except TypeError:  # one for all
            given = [counts] * len(batch.handles)
        return self._advance(batch, [whole("a number of new tokens", count, 0) for count in given], deferred)

    @overload
    def append(
        self,
        sequences: Sequence[int] | Batch,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Sequence[int] | Tensor | None = ...,
        cos_sin: Tensor | None = ...,
        rotary: str = ...,
        layer: int = ...,
        dependent: bool = ...,
        full_windows: bool = ...,
        *,
        q: None = ...,
    ) -> None: ...

    @overload
    def append(
        self,
        sequences: Sequence[int] | Batch,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Sequence[int] | Tensor | None = ...,
        cos_sin: Tensor | None = ...,
        rotary: str = ...,
        layer: int = ...,
        dependent: bool = ...,
        full_windows: bool = ...,
        *,
        q: Tensor,
        q_norm: Tensor | None = ...,
        k_norm: Tensor | None = ...,
        norm_eps: float = ...,
        norm_offset: float = ...,
        out: Tensor | None = ...,
    ) -> Tensor: ...

    def append(
        self,
        sequences: Sequence[int] | Batch,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cos_sin: Tensor | None = None,
        rotary: str = "half",
        layer: int = 0,
        dependent: bool = False,
        full_windows: bool = False,
        *,
        q: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor | None:
        """Put new rows at the end of each sequence, and turn their queries ``q`` too, if given.

        ``k``, ``v`` [tokens, heads_kv, head_dim], sequences one after another, as many rows each,
        or as ``cu_seqlens`` says ([batch + 1] numbers on the host); or [batch, rows, heads_kv,
        head_dim]. ``cos_sin`` fp32 [max_position, head_dim] turns k (``rotary`` "half" or
        "interleaved"). Given handles it advances them first (one layer only); a ``Batch`` has been
        advanced by the rows to write, once for each layer, and rows beyond these are padding. With
        ``dependent`` the preceding kernel may write q, k, v and the cache. The launch is a plain
        one all the same where numbers of the batch have been copied to the device since the last
        append, as ``advance`` does: of a step's layers the first one's, unless a graph is captured.

        ``q`` [tokens, heads_q, head_dim] or [batch, rows, heads_q, head_dim], rows as k's: the
        result is q turned at the same positions, in the same launch: a new tensor of q's shape, or
        ``out`` (contiguous, other memory than that of q, k and v). Its rows of padding stay
        undefined. Without q there is no result. ``q_norm`` and ``k_norm`` [head_dim], both or
        neither: each head of q and k is first divided by sqrt(mean of squares + ``norm_eps``) and
        multiplied by the weights plus ``norm_offset`` (1 for Gemma's), with or without ``cos_sin``;
        all in fp32, rounded once. ``cos_sin`` of fewer than head_dim columns, a multiple of 32,
        turns as many channels, the first ones. Rows of q, k and v may lie any multiple of 16 bytes
        apart, as slices of a fused projection's output do: nothing is copied.

        ``full_windows``, of a ``Batch`` that was advanced by one token each: windows that fill are
        not packed here but by ``pack``, behind all layers.
        """
        given, k, v = (k, v), flat_rows(self, "k", k), flat_rows(self, "v", v)
        batch, counts = self._begin(sequences, k.shape[0], cu_seqlens)
        check_rows(self, batch, k, v, given, counts, cos_sin, rotary, layer)
        if full_windows:
            check_one_each(batch, counts)
        else:
            check_packed(self.table, batch.handles)
        turning = None
        if q is not None or out is not None or q_norm is not None or k_norm is not None:
            turning = turning_of(self, q, out, *given, cos_sin, q_norm, k_norm, norm_eps, norm_offset)
        if counts is not None:
            self._advance(batch, counts)
        try:
            turned = self._write(batch, k, v, cos_sin, rotary if cos_sin is not None else "", layer, dependent, turning, full_windows)
        except Exception:
            self._take_back(batch, counts)
            raise
        return turned.view(q.shape) if turned is not None and q is not None else None

    def attend(
        self,
        sequences: Sequence[int] | Batch,
        q: Tensor,
        sinks: Tensor | None = None,
        scale: float | None = None,
        window: int = 0,
        sink_tokens: int = 0,
        soft_cap: float = 0.0,
        return_lse: bool = False,
        layer: int = 0,
        dependent: bool = False,
        full_windows: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(out like q, log-sum-exp): ``q`` [batch, q_len, heads_q, head_dim] of each sequence's
        newest tokens, in the cache's dtype, attends to it.

        Arguments and results as ``tilebit.attention.decode``. Empty rows of a ``Batch`` give 0.
        With ``dependent`` the preceding kernel may be ``append``, since ``advance`` settles lengths
        and tables before it, or whatever computes q after that. The launch is a plain one all the
        same when sequences have changed since the batch was last used, and after an advance by more
        than q_len tokens: a graph that was captured with ``dependent`` replays with up to q_len new
        tokens of each sequence. ``full_windows``: behind an ``append`` of the layer with it.
        """
        batch = self._as_batch(sequences)
        check_layer(self, layer)
        if full_windows != (layer in batch.unpacked):
            reject_windows(batch, layer, full_windows)
        if not full_windows:
            check_packed(self.table, batch.handles)
        q_len = check_query(self, batch, q)
        scale, window, sink_tokens, soft_cap = score_options(scale, window, sink_tokens, soft_cap)
        if sinks is not None and not isinstance(sinks, Tensor):
            expect_tensors(("sinks",), sinks=sinks)
        changed = batch.refresh()  # then lengths and tables, or the pages of a fork, may have been copied just now
        early = dependent and not changed and batch.most_new <= q_len
        return ops.DECODE(
            q, self.pages[layer], self.windows[layer], batch.block_tables, batch.slots, batch.lengths, self.scales(layer), sinks,
            self.format.name, self.page_size, scale, window, sink_tokens, soft_cap, return_lse, early, full_windows,
        )  # fmt: skip

    def pack(self, batch: Batch, dependent: bool = False) -> None:
        """Pack the windows that this step filled, in all layers at once, where each layer's append
        had ``full_windows``: what is packed is what plain appends pack, and a step of many layers
        waits for it once. Sequences are read again, advanced or dropped behind it. ``dependent`` as in
        ``append``.
        """
        expect("batch", batch, Batch, "the batch that was appended to")
        batch = self._as_batch(batch)
        if batch.unpacked != set(range(self.num_layers)):
            left = sorted(set(range(self.num_layers)) - batch.unpacked)
            raise ValueError(
                f"layers {left[:8]} were not appended to with full_windows in this step; accepted: pack behind all layers' appends"
            )
        batch.refresh()
        if not batch.advanced or not self.table.unpacked.issuperset(batch.handles):
            raise ValueError(
                "the batch's sequences are not what it appended to with full_windows (load_state has put others in their place); accepted: "
                "advance(batch), appends to all layers with full_windows, then pack"
            )
        ops.PACK(
            self.all_pages, self.all_windows, batch.block_tables, batch.slots, batch.lengths, self.head_scales, self.format.name,
            self.page_size, self.head_dim, self.dtype, dependent and self._settled(batch),
        )  # fmt: skip
        batch.unpacked.clear()
        self.table.unpacked.difference_update(batch.handles)

    def check_attend(
        self,
        sequences: Sequence[int] | Batch,
        q: Tensor,
        sinks: Tensor | None,
        scale: float | None,
        window: int,
        sink_tokens: int,
        soft_cap: float,
        layer: int,
    ) -> None:
        """Raise ``ValueError`` for arguments that ``attend`` refuses, for who changes something
        before."""
        check_layer(self, layer)
        check_query(self, self._as_batch(sequences), q)
        check_scores(self, q.shape[2], sinks, scale, window, sink_tokens, soft_cap)

    def prefill(
        self,
        sequences: Sequence[int] | Batch,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        cos_sin: Tensor | None = None,
        rotary: str = "half",
        sinks: Tensor | None = None,
        scale: float | None = None,
        window: int = 0,
        sink_tokens: int = 0,
        soft_cap: float = 0.0,
        return_lse: bool = False,
        layer: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """(out like q [tokens, heads_q, head_dim], log-sum-exp [tokens, heads_q]) of new rows,
        which then join the cache.

        Each new row attends to what its sequence holds in the cache (dequantized) and to the new
        rows up to its own in 16 bits. ``k``, ``v``, ``cu_seqlens``, ``cos_sin``, ``rotary`` as in
        ``append`` (q comes turned already, and some elements of k may differ in their last bit from
        what ``append`` turns), the others as in ``tilebit.attention.prefill``. Results of rows
        beyond those that a ``Batch`` was advanced by, padding, stay undefined. Sequences that hold
        tokens need memory for these in 16 bits meanwhile. Not to be captured: lengths decide its
        shapes.
        """
        given, k, v = (k, v), flat_rows(self, "k", k), flat_rows(self, "v", v)
        batch, counts = self._begin(sequences, k.shape[0], cu_seqlens)
        check_rows(self, batch, k, v, given, counts, cos_sin, rotary, layer)
        check_query_rows(self, q, k.shape[0])
        options = check_scores(self, q.shape[1], sinks, scale, window, sink_tokens, soft_cap)
        if counts is not None:
            self._advance(batch, counts)
        try:
            batch.refresh()
            if cos_sin is not None:
                k = rotated(k, batch.positions(), cos_sin, rotary)
            all_k, all_v = self._behind_history(batch, self._history(batch, layer), k, v)
            result = ops.PREFILL(q, all_k, all_v, batch.cu_seqlens, batch.cu_kv, sinks, *options, return_lse)
            self._write(batch, k, v, None, "", layer)
        except Exception:
            self._take_back(batch, counts)
            raise
        return result

    def prefill_turning(
        self,
        batch: Batch,
        qk: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        scale: float | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
        layer: int = 0,
    ) -> Tensor:
        """``prefill`` of queries and keys that lie side by side and have not been turned, as a fused
        projection gives them: one launch turns both ("half") and writes the cache.

        ``qk`` [tokens, heads_q + heads_kv, head_dim], keys behind queries; its rows and those of ``v``
        [tokens, heads_kv, head_dim] may lie any multiple of 16 bytes apart. ``batch`` has been advanced
        by these rows. The result is [tokens, heads_q, head_dim]; other arguments are ``prefill``'s.
        """
        expect_tensors(qk=qk, v=v, cos_sin=cos_sin)
        check_query_rows(self, qk, v.shape[0], "qk", "heads_q + heads_kv")
        heads_q = qk.shape[1] - self.heads_kv
        k = qk[:, heads_q:]
        check_rows(self, batch, k, v, (k, v), None, cos_sin, "half", layer)
        options = check_scores(self, heads_q, None, scale, window, 0, soft_cap)
        turning = turning_of(self, qk, None, k, v, cos_sin, None, None, 0.0, 0.0)
        past = self._history(batch, layer)  # before the rows are written: a window that fills is packed
        turned = self._write(batch, k, v, cos_sin, "half", layer, turning=turning)
        assert turned is not None
        all_k, all_v = self._behind_history(batch, past, turned[:, heads_q:], v)
        return ops.PREFILL(turned[:, :heads_q], all_k, all_v, batch.cu_seqlens, batch.cu_kv, None, *options, False)[0]

    def gather(self, sequences: Sequence[int] | Batch, layer: int = 0) -> list[tuple[Tensor, Tensor]]:
        """(k, v) of each sequence, [length, heads_kv, head_dim] in ``dtype``: what the cache holds,
        dequantized."""
        batch = self._as_batch(sequences)
        check_layer(self, layer)
        check_packed(self.table, batch.handles)
        batch.refresh()
        lengths = [self.length(handle) for handle in batch.handles]
        padded = [0, *lengths, *[0] * (batch.size - len(lengths))]
        bounds = torch.tensor(padded, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        k, v = ops.GATHER(
            *self._operands(batch, layer, batch.lengths), bounds.to(self.device), self.scales(layer), self.format.name, self.page_size,
            sum(lengths), self.head_dim, self.dtype,
        )  # fmt: skip
        return list(zip(k.split(lengths), v.split(lengths), strict=True))

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Everything that ``load_state`` of such a cache needs, with copies of the pages and
        windows in use: fit for ``torch.save``."""
        check_packed(self.table, self.sequences)
        with self.table.lock:
            return {"config": self.config(), "table": self.table.state(), **self._kept()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Hold what the cache held when ``state`` was taken; handles are the ones of then. This
        cache must have the same format, page size, dtype, heads and layers, and at least the pages
        and slots in use; its own sequences are gone. Raises ``ValueError`` for anything else, and
        for a state that does not fit together, before anything has changed."""
        config = state.get("config") if isinstance(state, dict) else None
        if config != self.config():
            raise ValueError(f"the state is of a cache {config}; accepted here: {self.config()}")
        table = table_state(state.get("table"), self.table)
        kept = self.checked(state, table.holders, [slot for _, slot, _, _ in table.rows])
        with self.table.lock:
            self.restore(kept)
            self.table.become(table)

    def _kept(self) -> dict[str, Any]:
        live = self.table.sequences.values()
        return self.kept(sorted({page for s in live for page in s.pages}), [s.slot for s in live])

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the pages and windows in use. Views of one memory would come
        apart in a copy, so they are made anew."""
        held = {name: value for name, value in self.__dict__.items() if name not in UNCOPIED}
        return {**held, "kept": self._kept()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state["kept"]
        self.__dict__.update({name: value for name, value in state.items() if name != "kept"})
        device = kept["windows"][1].device  # ``torch.load`` may have moved it
        self._allocate(self.table.num_pages, self.table.slots, device)
        self.head_scales = self._checked_scales(kept["head_scales"])
        self.restore(kept)
        self._latest = _Latest()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        made = memo[id(self)] = type(self).__new__(type(self))
        with self.table.lock:
            state = self.__getstate__()
            kept = state.pop("kept")  # copies already
            made.__setstate__({**copy.deepcopy(state, memo), "kept": kept})
        return made

    def __copy__(self) -> NoReturn:
        raise TypeError("copy.copy of a KVCache would share its sequences or its memory; accepted: copy.deepcopy, which shares nothing, or "
                        "state() and load_state()")  # fmt: skip

    def __repr__(self) -> str:
        used = self.table.num_pages - self.free_pages
        return (
            f"KVCache({self.format.name}, {self.num_layers} x {self.heads_kv} heads of {self.head_dim}, {len(self.sequences)} sequences, "
            f"{used} of {self.table.num_pages} pages of {self.page_size} tokens, {self.memory_bytes} bytes on {self.device})"
        )

    # ---- inside ----

    def _operands(self, batch: Batch, layer: int, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.pages[layer], self.windows[layer], batch.block_tables, batch.slots, lengths

    def _as_batch(self, sequences: Sequence[int] | Batch) -> Batch:
        """A list of handles as a batch; each thread's latest one is kept, since a step uses it more
        than once."""
        if isinstance(sequences, Batch):
            if sequences.table is not self.table:
                raise ValueError("the batch belongs to another cache; accepted: one that this cache's batch() returned")
            return sequences
        latest = self._latest.batch
        if type(sequences) is not list:
            expect("sequences", sequences, Sequence, "a list of handles, or a Batch")
        if latest is None or latest.handles != tuple(sequences):
            latest = self._latest.batch = Batch(self.table, sequences, len(sequences), self.device)
        return latest

    def _begin(
        self, sequences: Sequence[int] | Batch, rows: int, cu_seqlens: Sequence[int] | Tensor | None
    ) -> tuple[Batch, list[int] | None]:
        """(batch, how many rows each sequence gets; None: what the batch was advanced by)."""
        batch = self._as_batch(sequences)
        if isinstance(sequences, Batch):
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens is given with a Batch; accepted: None, since advance(batch, counts) has said it")
            return batch, None
        if self.num_layers > 1:
            raise ValueError(
                f"this cache has {self.num_layers} layers; accepted: batch = advance(handles, counts) once, then each layer with it"
            )
        return batch, counts_of(batch, rows, cu_seqlens)

    def _advance(self, batch: Batch, counts: list[int], deferred: bool = False) -> Batch:
        check_packed(self.table, batch.handles)
        with self.table.lock:
            self.table.extend(batch.handles, counts)
            try:
                batch.update(counts, deferred)
            except Exception:
                self.table.retract(batch.handles, counts)
                batch.name(batch.handles)
                raise
        return batch

    def _take_back(self, batch: Batch, counts: list[int] | None) -> None:
        """Undo what this call advanced a batch by, so that a failed call changes no length."""
        if counts is not None:
            with self.table.lock:
                self.table.retract(batch.handles, counts)
                batch.update([0] * len(counts))

    def _write(
        self,
        batch: Batch,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor | None,
        rotary: str,
        layer: int,
        dependent: bool = False,
        turning: Turning | None = None,
        full_windows: bool = False,
    ) -> Tensor | None:
        """One layer's rows, to their places; the turned queries, if there are any."""
        batch.refresh()
        dependent = dependent and self._settled(batch)
        batch.copied = False
        operands = (
            k, v, batch.cu_seqlens, batch.lengths, batch.block_tables, batch.slots, self.pages[layer], self.windows[layer],
            self.scales(layer), cos_sin,
        )  # fmt: skip
        format, size, out = self.format.name, self.page_size, None
        if turning is None:
            ops.APPEND(*operands, format, size, rotary, dependent, full_windows)
        elif turning.out is None:
            out = ops.APPEND_AND_ROTATE(*operands, *turning.operands, format, size, rotary, *turning.norm, dependent, full_windows)
        else:
            out = turning.out
            ops.APPEND_AND_ROTATE_OUT(*operands, *turning.operands, format, size, rotary, *turning.norm, dependent, full_windows, out=out)
        if batch.most_new:
            batch.written.add(layer)
        if full_windows:
            batch.unpacked.add(layer)
            self.table.unpacked.update(batch.handles)
        return out

    def _settled(self, batch: Batch) -> bool:
        """Whether lengths and tables are older than the preceding kernel, for a launch that reads them before
        that has ended: no copies to them came since the last append, or they are a graph's, which have
        ended when it is launched."""
        return not batch.copied or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def _history(self, batch: Batch, layer: int) -> tuple[Tensor, Tensor] | None:
        """Room for the rows that new tokens attend to, sequence after sequence (``batch.cu_kv``), with what
        the cache holds in its place; None where it holds nothing. ``batch`` has been refreshed."""
        total = sum(batch.past_lengths) + sum(batch.counts)
        if total == sum(batch.counts):
            return None
        room = (total, self.heads_kv, self.head_dim)
        all_k, all_v = (torch.empty(room, dtype=self.dtype, device=self.device) for _ in range(2))
        ops.GATHER_OUT(
            *self._operands(batch, layer, batch.past), batch.cu_kv, self.scales(layer), self.format.name, self.page_size,
            out_k=all_k, out_v=all_v,
        )  # fmt: skip
        return all_k, all_v

    def _behind_history(self, batch: Batch, past: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``past`` (of ``_history``) with the new rows in their places."""
        if past is None:
            return k, v
        rows = batch.new_rows()
        for held, new in zip(past, (k, v), strict=True):
            held.index_copy_(0, rows, new[: rows.numel()])
        return past
