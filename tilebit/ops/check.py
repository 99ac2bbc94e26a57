"""What lies in the lengths, block tables, slots and bounds of the attention ops, checked before a
launch where ``TILEBIT_CHECK=1`` was set when tilebit was imported.

For whoever manages blocks: the kernels take these numbers as they find them on the device, so wrong
ones read and write memory that is not the cache's. The checks fetch them to the host, which waits
for the device at every call; calls that a CUDA graph captures are not checked, because their
numbers are those of the replay. Only what a kernel would read counts: entries of a table beyond a
sequence's packed tokens, and the slot of one whose window is empty, may be anything.

The same switch has every call of every op compare its tensors with their storages
(``launchers.py``): one that was shrunk, or freed under a view, is an error at any call. Without it
a call notices what was freed whole, and at a weight's first call what was shrunk.
"""

from __future__ import annotations

import os
from typing import NoReturn

import torch
from torch import Tensor

from ..layouts.kv import RESIDUAL

VARIABLE = "TILEBIT_CHECK"
CHECKED = os.environ.get(VARIABLE, "0") not in ("", "0")


def check_decode(
    pages: Tensor, windows: Tensor, block_tables: Tensor, slots: Tensor, lengths: Tensor, page_size: int, full_windows: bool
) -> None:
    """Raises ``ValueError`` for what ``attention_decode`` would read outside of its operands."""
    if _read_later(block_tables, (slots, 0), (lengths, 0)):
        return
    _check_cache("decode", pages, windows, block_tables, slots, lengths.cpu().long(), page_size, full_windows=full_windows)


def check_pack(pages: Tensor, windows: Tensor, block_tables: Tensor, slots: Tensor, lengths: Tensor, page_size: int) -> None:
    """Raises ``ValueError`` for what ``attention_pack`` would read or write outside of its operands."""
    if _read_later(block_tables, (slots, 0), (lengths, 0)):
        return
    counts = lengths.cpu().long()
    packed_now = torch.where((counts > 0) & (counts % RESIDUAL == 0), RESIDUAL, 0)
    _check_cache("pack", pages[0], windows[0], block_tables, slots, counts, page_size, packed_now)


def check_gather(
    pages: Tensor, windows: Tensor, block_tables: Tensor, slots: Tensor, lengths: Tensor, cu_kv: Tensor, page_size: int, total: int
) -> None:
    """Raises ``ValueError`` for what ``attention_gather`` would read or write outside of its
    operands; ``total``: rows of its outputs."""
    if _read_later(block_tables, (slots, 0), (lengths, 0), (cu_kv, 1)):
        return
    counts, bounds = lengths.cpu().long(), _bounds("gather", "cu_kv", cu_kv, "total", total)
    _check_cache("gather", pages, windows, block_tables, slots, counts, page_size)
    for b in _where(counts > bounds.diff()):
        _refuse("gather", f"lengths[{b}]", counts[b], f"at most {int(bounds.diff()[b])}, the rows of cu_kv[{b}] to cu_kv[{b + 1}]")


def check_append(
    tokens: int, cu_seqlens: Tensor, lengths: Tensor, block_tables: Tensor, slots: Tensor, pages: Tensor, windows: Tensor,
    cos_sin: Tensor | None, page_size: int, full_windows: bool,
) -> None:  # fmt: skip
    """Raises ``ValueError`` for what ``attention_append`` of ``tokens`` rows would read or write
    outside of its operands, for two sequences that would write one window, and for more tokens of one
    than ``full_windows`` allows."""
    if _read_later(block_tables, (slots, 0), (lengths, 0), (cu_seqlens, 1)):
        return
    counts, new = lengths.cpu().long(), _bounds("append", "cu_seqlens", cu_seqlens, "tokens", tokens).diff()
    for b in _where(counts < new):
        _refuse("append", f"lengths[{b}]", counts[b], f"at least {int(new[b])}, the new rows: it is the length with them")
    for b in _where(new > 1) if full_windows else ():
        _refuse("append", f"cu_seqlens[{b + 1}]", cu_seqlens[b + 1], "one new token a sequence at most, with full_windows")
    for b in _where((new > 0) & (counts > len(cos_sin))) if cos_sin is not None else ():
        _refuse("append", f"lengths[{b}]", counts[b], f"at most {len(cos_sin)}, the positions of cos_sin")
    _check_cache("append", pages, windows, block_tables, slots, counts, page_size, new)
    written = slots.cpu()[new > 0].tolist()
    for slot in written:
        if written.count(slot) > 1:
            _refuse("append", "slots", slot, "each slot once among sequences with new rows; they would write one window")


def check_prefill(tokens: int, total: int, cu_q: Tensor, cu_kv: Tensor) -> None:
    """Raises ``ValueError`` for what ``attention_prefill`` of ``tokens`` queries over ``total``
    keys would read or write outside of its operands."""
    if _read_later(cu_q, (cu_kv, 0)):
        return
    _bounds("prefill", "cu_q", cu_q, "tokens", tokens)
    _bounds("prefill", "cu_kv", cu_kv, "total", total)


def _read_later(batched: Tensor, *others: tuple[Tensor, int]) -> bool:
    """Whether there is nothing to check: the numbers are those of a replay, or ``others`` are no
    int32 [len(batched) + more] as their kernel takes them, which the launch refuses in its own
    words."""
    capturing = batched.is_cuda and torch.cuda.is_current_stream_capturing()
    fit = all(tensor.dtype == torch.int32 and tensor.shape == (len(batched) + more,) for tensor, more in others)
    return capturing or batched.dtype != torch.int32 or not fit


def _bounds(op: str, name: str, bounds: Tensor, limit_name: str, limit: int) -> Tensor:
    """``bounds`` on the host, which must rise from 0 or more to ``limit`` or less."""
    found = bounds.cpu().long()
    if found[0] < 0:
        _refuse(op, f"{name}[0]", found[0], "0")
    for b in _where(found.diff() < 0):
        _refuse(op, f"{name}[{b + 1}]", found[b + 1], f"at least {int(found[b])}, which {name}[{b}] is")
    if found[-1] > limit:
        _refuse(op, f"{name}[{len(found) - 1}]", found[-1], f"at most {limit}, which {limit_name} is")
    return found


def _check_cache(
    op: str, pages: Tensor, windows: Tensor, block_tables: Tensor, slots: Tensor, counts: Tensor, page_size: int, new: Tensor | None = None,
    full_windows: bool = False,
) -> None:  # fmt: skip
    """The pages and slots of sequences of ``counts`` tokens; ``new``: how many of these an append
    brings, or a pack packs, which touches no older page."""
    columns, num_pages = block_tables.shape[1], pages.shape[0]
    packed = (counts - int(full_windows)).clamp(min=0) // RESIDUAL * RESIDUAL
    for b in _where(counts < 0):
        _refuse(op, f"lengths[{b}]", counts[b], "0 or more")
    for b in _where(packed > columns * page_size):
        most = columns * page_size // RESIDUAL * RESIDUAL + RESIDUAL - 1
        _refuse(op, f"lengths[{b}]", counts[b], f"at most {most}: block_tables has {columns} pages of {page_size} tokens a sequence")
    begin = torch.arange(columns) * page_size
    first = (counts - new) // RESIDUAL * RESIDUAL if new is not None else torch.zeros_like(counts)
    touched = (begin < packed[:, None]) & (begin + page_size > first[:, None])
    tables, places = block_tables.cpu(), slots.cpu()
    for b, i in (touched & ((tables < 0) | (tables >= num_pages))).nonzero().tolist():
        _refuse(
            op, f"block_tables[{b}, {i}]", tables[b, i], f"0 to {num_pages - 1}, a page that sequence {b} of {int(counts[b])} tokens has"
        )
    held = counts > packed if new is None else new > 0
    for b in _where(held & ((places < 0) | (places >= len(windows)))):
        _refuse(op, f"slots[{b}]", places[b], f"0 to {len(windows) - 1}, a row of windows")


def _where(wrong: Tensor) -> list[int]:
    return wrong.nonzero().flatten().tolist()


def _refuse(op: str, what: str, got: Tensor | int, accepted: str) -> NoReturn:
    raise ValueError(f"{op} got {what} = {int(got)}; accepted: {accepted}")
