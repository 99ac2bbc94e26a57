"""The two loop bodies of the CPU's decode: a part of a sequence's tokens attended to, and the parts
joined. See ``decode.py``.

Importing this imports tvm. ``arg`` holds flat views of the operands by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....layouts.kv import GRANULE, RESIDUAL, window_words
from ....schedules.attention.workload import AttentionWorkload
from .. import vectors as v
from ..gemm.lane_sums import sum_everywhere
from ..numbers import splat
from ..vectors import T, tirx
from .attend import RowBlock, Visible
from .cache_pages import cache_pages, window_pages
from .granules import LANES
from .softmax_rows import Partial, load_row, softmax_factors, write_row
from .token_sources import PackedTokens

GRANULES = RESIDUAL // GRANULE


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """``rows`` of queries a task, ``parts`` of a sequence, ``step`` tokens at a time, ``table``:
    permutes look codes up; symbolic sizes."""

    workload: AttentionWorkload
    rows: int
    parts: int
    step: int
    table: bool
    q_len: Any
    max_pages: Any
    row_blocks: Any


def partial_floats(head_dim: int) -> int:
    """fp32 numbers of a row's partial result: the weighted sum, the largest score, the sum of
    weights, and what aligns the next."""
    return head_dim + LANES


def attend_part(plan: Plan, arg: dict[str, Any], task: Any) -> None:
    """Part ``task % parts`` of the tokens of a (sequence, kv head, block of rows): an even share of
    its blocks of 128 packed tokens; the last part sees the window too."""
    w = plan.workload
    segment, part = T.bind(task // plan.parts), T.bind(task % plan.parts)
    first_row, pair = T.bind(segment % plan.row_blocks * plan.rows), T.bind(segment // plan.row_blocks)
    b, head = T.bind(pair // w.heads_kv), T.bind(pair % w.heads_kv)
    length = T.bind(arg["lengths"][b])
    factor, cap = softmax_factors(w)
    state = RowBlock.new(plan.rows, w.head_dim, Visible(w.window, w.sink_tokens), cap)
    with T.serial(plan.rows) as r:
        row = T.bind(T.min(first_row + r, plan.q_len * w.group - 1))
        query = T.bind(b * plan.q_len + row // w.group)
        T.buffer_store(state.position, length - plan.q_len + row // w.group, [r])
        start = T.bind((query.astype("int64") * w.heads_q + (head * w.group + row % w.group)) * w.head_dim)
        load_row(arg["q"], start, state, r, factor)

    scales = [arg["head_scales"][head], arg["head_scales"][w.heads_kv + head]] if w.format.has_head_scales else [None, None]
    packed = PackedTokens(cache_pages(w, arg, b, head, plan.max_pages, plan.table), state, key_scale=scales[0])
    blocks = T.bind((T.max(length - 1, 0) if w.full_windows else length) // RESIDUAL)
    recent_tokens = T.bind(length - blocks * RESIDUAL)  # in the window
    near, sinks = state.visible.blocks(state.position[0], blocks)
    count = T.bind(sinks + blocks - near)
    share = T.bind((count + (plan.parts - 1)) // plan.parts)
    begin = T.bind(T.min(part * share, count))
    with T.serial(T.min(begin + share, count) - begin) as i:
        block = T.bind(T.if_then_else(begin + i < sinks, begin + i, begin + i - sinks + near))
        packed.open(T.bind(block * RESIDUAL), GRANULES)
        with T.serial(RESIDUAL // plan.step) as step:
            state.attend(packed, T.bind(step * (plan.step // GRANULE)), plan.step // GRANULE)
    state.collect(packed, 1.0 if w.format.value != "fp8" else scales[1], decay=False)
    with T.If(tirx.And(part == plan.parts - 1, recent_tokens > 0)), T.Then():
        slot = arg["slots"][b].astype("int64")
        words = window_pages(w.head_dim, w.dtype, arg["windows"], T.bind((slot * w.heads_kv + head) * window_words(w.head_dim)))
        recent = PackedTokens(words, state, valid=length)
        granules = T.bind((recent_tokens + (GRANULE - 1)) // GRANULE)
        recent.open(T.bind(blocks * RESIDUAL), granules)
        state.attend(recent, 0, granules, first_time=True)
        state.collect(recent, 1.0, decay=True)
    with T.serial(plan.rows) as r:
        start = T.bind((task * plan.rows + r) * partial_floats(w.head_dim))
        with T.serial(w.head_dim // LANES) as i:
            v.store(arg["partials"], start + i * LANES, v.load(state.out, r * w.head_dim + i * LANES, LANES), LANES)
        total = sum_everywhere(v.load(state.total, r * LANES, LANES))
        T.buffer_store(arg["partials"], state.top[r * LANES], [start + w.head_dim])
        T.buffer_store(arg["partials"], tirx.Shuffle([total], [0]), [start + w.head_dim + 1])


def join_parts(plan: Plan, arg: dict[str, Any], segment: Any) -> None:
    """The output, and log-sum-exp, of the rows of ``segment`` from their parts, in order."""
    w, size = plan.workload, partial_floats(plan.workload.head_dim)
    first_row, pair = T.bind(segment % plan.row_blocks * plan.rows), T.bind(segment // plan.row_blocks)
    b, head = T.bind(pair // w.heads_kv), T.bind(pair % w.heads_kv)
    with T.serial(T.min(plan.rows, plan.q_len * w.group - first_row)) as r:
        row = T.bind(first_row + r)
        q_head = T.bind(head * w.group + row % w.group)
        target = T.bind((b * plan.q_len + row // w.group).astype("int64") * w.heads_q + q_head)
        starts = [T.bind(((segment * plan.parts + part) * plan.rows + r) * size) for part in range(plan.parts)]
        partial = [
            Partial(splat(arg["partials"][start + w.head_dim]), splat(arg["partials"][start + w.head_dim + 1]), arg["partials"], start)
            for start in starts
        ]
        write_row(w, arg, partial, q_head, target)
