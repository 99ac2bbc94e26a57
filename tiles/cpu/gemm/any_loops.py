"""The two loop bodies of the CPU GEMM with bit planes: one row of x rearranged, and one task
multiplied. Importing this imports tvm. ``arg`` holds flat views of the operands by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....layouts.planes import CHUNK
from ....schedules.gemm.cpu import TILE
from .. import vectors as v
from ..vectors import T, tirx
from . import codebooks_wide as wide
from .codebooks import (
    BYTES,
    INDEX_BITS,
    LANES,
    SCALAR_BITS,
    STEPS,
    bytes_of,
    columns,
    looked_up,
    nibbles,
    numbers,
    tables,
    whole_codes,
    whole_table,
)
from .loops import write

if TYPE_CHECKING:
    from .any_program import AnyPlan


def rearrange(plan: AnyPlan, arg: dict[str, Any], row: Any, m: Any) -> None:
    """Row ``row`` of x [m, k] into xs [m blocks, chunks, block_m, 256], fp32 in the order of
    ``columns``, or bf16 as it is. Rows from m and columns from k on are zeros."""
    k, mb = plan.workload.k, plan.block_m
    block, i = T.bind(row // mb), T.bind(row % mb)
    with T.serial(plan.chunks * STEPS) as piece:
        stage = v.local(BYTES, str(arg["x"].dtype))
        column = T.bind(piece * BYTES)
        start = T.bind(row.astype("int64") * k + column)
        with T.If((row < m) & (column + BYTES <= k)):
            with T.Then():
                v.store(stage, 0, v.load(arg["x"], start, BYTES), BYTES)
            with T.Else(), T.serial(BYTES) as j:
                inside = (row < m) & (column + j < k)
                T.buffer_store(stage, T.if_then_else(inside, arg["x"][start + j], tirx.const(0, str(stage.dtype))), [j])
        offset = T.bind(((block * plan.chunks + piece // STEPS) * mb + i) * CHUNK + piece % STEPS * BYTES)
        if plan.pairs:
            v.store(arg["xs"], offset, v.load(stage, 0, BYTES), BYTES)
            return  # as it is
        values = [v.held(v.to_float(v.load(stage, first, LANES), LANES)) for first in range(0, BYTES, LANES)]
        dtype = plan.workload.dtype
        for part, order in enumerate(wide.columns(dtype) if plan.wide else columns(dtype, plan.bits)):
            v.store(arg["xs"], offset + part * len(order), tirx.Shuffle(values, order), len(order))


def multiply(plan: AnyPlan, arg: dict[str, Any], task: Any, m: Any) -> None:
    """Task ``task``: ``block_n`` output channels of ``block_m`` rows, row of the weight after row."""
    mb, n, per_task, lanes = plan.block_m, plan.workload.n, plan.schedule.block_n // TILE, plan.isa.lanes
    blocks = T.bind((m + (mb - 1)) // mb)
    with T.serial(per_task) as inner:
        nt, block = T.bind(task // blocks * per_task + inner), T.bind(task % blocks)
        with T.If(nt < plan.n_tiles), T.Then():
            stage = v.local(mb * TILE, "float32")
            for vector in range(mb * plan.vectors):
                v.store(stage, vector * lanes, v.splat(0.0, "float32", lanes), lanes)
            with T.serial(T.min(n - nt * TILE, TILE)) as row:
                for i, total in enumerate(_row(plan, arg, T.bind(nt * TILE + row), block)):
                    T.buffer_store(stage, total, [i * TILE + row])
            total = v.local(mb * plan.vectors, f"float32x{lanes}")
            for vector in range(mb * plan.vectors):
                T.buffer_store(total, v.load(stage, vector * lanes, lanes), [vector])
            write(plan, arg, nt, block, m, total)


def _row(plan: AnyPlan, arg: dict[str, Any], row: Any, block: Any) -> list[Any]:
    """The sums of row ``row`` of the weight times each of ``block_m`` rows of x."""
    bits, mb, splits, words = plan.bits, plan.block_m, plan.schedule.split_k, plan.row_tile_words
    table = _table(plan, arg["scales"], T.bind(row * (1 << bits)))
    sums = v.sums(splits * mb, plan.isa.lanes)
    plane_words = plan.workload.n * plan.chunks * words
    with T.serial(plan.chunks) as chunk:
        start = T.bind((row * plan.chunks + chunk) * words)
        planes = [v.held(v.load(arg["weight"], tirx.Cast("int64", start) + plane * plane_words, LANES)) for plane in range(bits)]
        _multiply_chunk(plan, arg, table, planes, T.bind((block * plan.chunks + chunk) * (mb * CHUNK)), sums)
    totals = []
    for i in range(mb):
        joined = sums[i]
        for split in range(1, splits):
            joined = joined + sums[split * mb + i]
        totals.append(v.lane_sum(joined, plan.isa.lanes))
    return totals


def _table(plan: AnyPlan, codebooks: Any, first: Any) -> Any:
    if plan.wide:
        return wide.tables(codebooks, first, plan.bits)
    if plan.bits >= SCALAR_BITS:
        return whole_table(codebooks, first, plan.bits, plan.workload.dtype)
    return tables(codebooks, first, plan.bits)


def _multiply_chunk(plan: AnyPlan, arg: dict[str, Any], table: Any, planes: list[Any], x: Any, sums: Any) -> None:
    """256 weights of a row, whose bits are ``planes``, times their x from ``x`` on."""
    bits, dtype, scalar = plan.bits, plan.workload.dtype, plan.bits >= SCALAR_BITS
    if plan.wide:
        for step, indices in enumerate(whole_codes(planes)):
            found = wide.numbers(table, indices, bits, dtype, plan.pairs)
            _accumulate(plan, arg, found, x + step * BYTES, sums, step * len(found))
        return
    upper = max(0, bits - INDEX_BITS)
    codes = bytes_of(planes) if scalar else nibbles(planes[upper:])
    if scalar:
        with T.serial(STEPS) as step:
            _accumulate(plan, arg, looked_up(table, codes, step), T.bind(x + step * BYTES), sums)
    else:
        for step in range(STEPS):
            _accumulate(plan, arg, numbers(table, codes, planes[:upper], step, dtype), x + step * BYTES, sums)


def _accumulate(plan: AnyPlan, arg: dict[str, Any], weights: list[Any], x: Any, sums: Any, turn: int = 0) -> None:
    """Add vectors of weights, each times its x from ``x`` on, to the sums of all rows of x; ``turn`` is the number of the first
    among those that the sets of sums take turns for."""
    numbers = BYTES // len(weights)
    for part, number in enumerate(weights):
        weight = v.held(number)
        for i in range(plan.block_m):
            slot = (turn + part) % plan.schedule.split_k * plan.block_m + i
            values = v.load(arg["xs"], x + i * CHUNK + part * numbers, numbers)
            both = (weight, T.reinterpret("int32x16", values)) if plan.pairs else (weight, values)
            T.buffer_store(sums, (v.dot_bf16 if plan.pairs else v.fma)(*both, sums[slot]), [slot])
