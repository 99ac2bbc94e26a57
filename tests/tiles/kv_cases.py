"""Formats of a low-bit cache that several test files go through, and caches in which everything that holds no token is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tilebit.autotune.problems.attention import AttentionProblem, attention_problem
from tilebit.layouts.kv import RESIDUAL, KVLayout
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.workload import AttentionWorkload

NAMES = (
    "kv16", "kv8_channel", "kv8_token", "kv4_channel", "kv4_token", "kv2_channel", "kv2_token", "kvfp8", "k8_channel_v4", "k4_channel_v2",
    "kfp8_v4",
)  # fmt: skip
FORMATS = tuple(map(KVFormat.from_name, NAMES))
POISON = {torch.float16: 0x7E5A, torch.bfloat16: 0x7FDA}  # NaNs that no computation makes
POISONED_WORD = 0x7E5A7E5A
BEHIND = 9  # rows of nobody after each sequence of a prefill


def poisoned_problem(
    workload: AttentionWorkload, lengths: Sequence[int], rows: Sequence[int], seed: int, device: str = "cpu"
) -> AttentionProblem:
    """``attention_problem`` with NaN in all of the cache that holds no token before the call."""
    problem = attention_problem(workload, lengths, rows, seed, device)
    o, w = problem.operands, workload
    waits = w.op == "pack" or (w.op == "decode" and w.full_windows)  # a window may be full
    held = [length - new * (w.op == "append") for length, new in zip(lengths, rows, strict=True)]
    packed = [max(tokens - waits, 0) // RESIDUAL * RESIDUAL for tokens in held]
    left = {slot: tokens - own for slot, tokens, own in zip(o["slots"].tolist(), held, packed, strict=True)}
    for pages, windows in zip(o["pages"], o["windows"], strict=True) if w.op == "pack" else [(o["pages"], o["windows"])]:
        _poison_pages(pages, o["block_tables"].tolist(), packed, w.layout)
        for slot in range(len(windows)):
            _poison_rows(windows[slot], left.get(slot, 0), w.head_dim, POISON[getattr(torch, w.dtype)])
    return problem


def _poison_pages(pages: Tensor, tables: list[list[int]], packed: Sequence[int], layout: KVLayout) -> None:
    """``pages`` of no sequence; ``packed``: each one's tokens."""
    used = torch.zeros(len(pages), dtype=torch.bool)
    for table, tokens in zip(tables, packed, strict=True):
        own = table[: -(-tokens // layout.page_size)]
        used[own] = True
        if tokens % layout.page_size:
            _poison_tail(pages[own[-1]], layout)
    pages[~used.to(pages.device)] = POISONED_WORD


def prefill_problem(workload: AttentionWorkload, sequences: Sequence[tuple[int, int]], seed: int) -> AttentionProblem:
    """``attention_problem`` of (keys, queries) of each sequence, with NaN in the keys and values of sequences without queries, and such
    a one after each, so that what a tile takes from behind its sequence shows."""
    between = [pair for sequence in sequences for pair in (sequence, (BEHIND, 0))]
    problem = attention_problem(workload, [keys for keys, _ in between], [rows for _, rows in between], seed, "cpu")
    first = problem.operands["cu_kv"].tolist()
    for (_, rows), begin, end in zip(between, first[:-1], first[1:], strict=True):
        if not rows:
            problem.operands["k"][begin:end], problem.operands["v"][begin:end] = torch.nan, torch.nan
    return problem


def _poison_tail(page: Tensor, layout: KVLayout) -> None:
    """``page`` [heads_kv, words] of 256 tokens, of which the last 128 are none."""
    ends = (0, layout.value_offset, layout.key_parameter_offset, layout.value_parameter_offset, layout.page_bytes)
    for begin, end in pairwise(ends):
        page[:, (begin + end) // 8 : end // 4] = POISONED_WORD


def _poison_rows(window: Tensor, first: int, head_dim: int, poison: int) -> None:
    """``window`` [heads_kv, words]: rows from ``first`` on."""
    window.view(torch.int16)[:, _row_places(head_dim)[first:].flatten().to(window.device)] = poison


@cache
def _row_places(head_dim: int) -> Tensor:
    """int64 [128, 2 * head_dim]: which 16-bit elements of a window are a token's key and value."""
    rows = KVLayout(KVFormat(), head_dim, RESIDUAL)
    tokens, channels = np.arange(RESIDUAL)[:, None], np.arange(head_dim)[None]
    places = [word * 2 + bit // 16 for word, bit in (rows.key_position(tokens, channels), rows.value_position(tokens, channels))]
    return torch.from_numpy(np.concatenate(places, axis=1))
