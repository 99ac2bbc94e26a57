"""The two loop bodies of the CPU GEMM with bit planes: one row of x rearranged, and one task
multiplied. Importing this imports tvm. ``arg`` holds flat views of the operands by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....layouts.planes import CHUNK
from ....schedules.gemm.cpu import TILE
from .. import vectors as v
from ..vectors import T, tirx
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
    whole_table,
)
from .loops import write

if TYPE_CHECKING:
    from .any_program import AnyPlan


def rearrange(plan: AnyPlan, arg: dict[str, Any], row: Any, m: Any) -> None:
    """Row ``row`` of x [m, k] into xs fp32 [m blocks, chunks, block_m, 256], in the order of
    ``columns``. Rows from m and columns from k on are zeros."""
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
        values = [v.held(v.to_float(v.load(stage, first, LANES), LANES)) for first in range(0, BYTES, LANES)]
        offset = T.bind(((block * plan.chunks + piece // STEPS) * mb + i) * CHUNK + piece % STEPS * BYTES)
        for part, order in enumerate(columns(plan.workload.dtype, plan.bits)):
            v.store(arg["xs"], offset + part * LANES, tirx.Shuffle(values, order), LANES)


def multiply(plan: AnyPlan, arg: dict[str, Any], task: Any, m: Any) -> None:
    """Task ``task``: ``block_n`` output channels of ``block_m`` rows, row of the weight after row."""
    mb, n, per_task = plan.block_m, plan.workload.n, plan.schedule.block_n // TILE
    blocks = T.bind((m + (mb - 1)) // mb)
    with T.serial(per_task) as inner:
        nt, block = T.bind(task // blocks * per_task + inner), T.bind(task % blocks)
        with T.If(nt < plan.n_tiles), T.Then():
            stage = v.local(mb * TILE, "float32")
            for vector in range(mb * plan.vectors):
                v.store(stage, vector * LANES, v.splat(0.0, "float32", LANES), LANES)
            with T.serial(T.min(n - nt * TILE, TILE)) as row:
                for i, total in enumerate(_row(plan, arg, T.bind(nt * TILE + row), block)):
                    T.buffer_store(stage, total, [i * TILE + row])
            total = v.local(mb * plan.vectors, f"float32x{LANES}")
            for vector in range(mb * plan.vectors):
                T.buffer_store(total, v.load(stage, vector * LANES, LANES), [vector])
            write(plan, arg, nt, block, m, total)


def _row(plan: AnyPlan, arg: dict[str, Any], row: Any, block: Any) -> list[Any]:
    """The sums of row ``row`` of the weight times each of ``block_m`` rows of x."""
    bits, mb, splits, words = plan.bits, plan.block_m, plan.schedule.split_k, plan.row_tile_words
    upper = max(0, bits - INDEX_BITS)
    first, dtype, scalar = T.bind(row * (1 << bits)), plan.workload.dtype, bits >= SCALAR_BITS
    table = whole_table(arg["scales"], first, bits, dtype) if scalar else tables(arg["scales"], first, bits)
    sums = v.sums(splits * mb, LANES)
    plane_words = plan.workload.n * plan.chunks * words
    with T.serial(plan.chunks) as chunk:
        start = T.bind((row * plan.chunks + chunk) * words)
        planes = [v.held(v.load(arg["weight"], tirx.Cast("int64", start) + plane * plane_words, LANES)) for plane in range(bits)]
        codes = bytes_of(planes) if scalar else nibbles(planes[upper:])
        x = T.bind((block * plan.chunks + chunk) * (mb * CHUNK))
        if scalar:
            with T.serial(STEPS) as step:
                _accumulate(plan, arg, looked_up(table, codes, step), T.bind(x + step * BYTES), sums)
        else:
            for step in range(STEPS):
                _accumulate(plan, arg, numbers(table, codes, planes[:upper], step, dtype), x + step * BYTES, sums)
    totals = []
    for i in range(mb):
        joined = sums[i]
        for split in range(1, splits):
            joined = joined + sums[split * mb + i]
        totals.append(v.lane_sum(joined, LANES))
    return totals


def _accumulate(plan: AnyPlan, arg: dict[str, Any], weights: list[Any], x: Any, sums: Any) -> None:
    """Add four vectors of weights, each times its x from ``x`` on, to the sums of all rows of x."""
    for part, number in enumerate(weights):
        weight = v.held(number)
        for i in range(plan.block_m):
            slot = part % plan.schedule.split_k * plan.block_m + i
            T.buffer_store(sums, v.fma(weight, v.load(arg["xs"], x + i * CHUNK + part * LANES, LANES), sums[slot]), [slot])
