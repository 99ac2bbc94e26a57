"""The innermost step of the CPU GEMM: decode vectors of weights, multiply each by several rows of
x. Importing this imports tvm."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ....schedules.gemm.cpu import TILE
from .. import vectors as v
from ..vectors import T
from .plan import Plan


def accumulate_step(plan: Plan, arg: dict[str, Any], words: Any, x: Any, depth: int, rows: tuple[int, ...], sums: Any) -> None:
    """``depth`` k of a tile, times ``block_m`` rows of x, into ``sums[split, i, position in
    rows]``.

    ``rows`` are the tile's vectors of rows to multiply; packed words start at ``words`` and x at
    ``x``.
    """
    lanes = plan.isa.lanes
    if plan.bits == 8:

        def codes(k: int, row: int) -> Any:
            loaded = v.load(arg["weight"], words * 4 + k * TILE + row * lanes, lanes)
            if plan.workload.format.integer:
                return loaded.astype(f"float32x{lanes}")
            return v.from_e4m3(loaded.astype(f"int32x{lanes}"), lanes)

        for k in range(0, depth, 2):
            if plan.dot == "pairs":
                _accumulate(plan, arg, x, k // 2, [_joined(codes(k, row), codes(k + 1, row)) for row in rows], v.dot_bf16, sums)
                continue
            for one in (k, k + 1):
                _accumulate(plan, arg, x, one, [codes(one, row) for row in rows], v.fma, sums)
        return
    # A word holds eight codes: nibble 4 e + 2 p + h is that of row 16 h + lane, k = 4 quad + 2 p +
    # e. ``rows`` are both h of each part.
    parts = 16 // lanes
    for quad in range(depth // 4):
        loaded = {row % parts: words + quad * 16 + row % parts * lanes for row in rows}
        loaded = {part: T.bind(v.load(arg["weight"], offset, lanes)) for part, offset in loaded.items()}
        for p in range(2):
            if plan.dot == "pairs":
                weights = [_pair(plan, loaded[row % parts], 2 * p + row // parts) for row in rows]
                _accumulate(plan, arg, x, 2 * quad + p, weights, v.dot_bf16, sums)
                continue
            for e in range(2):
                decode = _looked_up if plan.table else _masked
                weights = [decode(plan, loaded[row % parts], 4 * e + 2 * p, row // parts) for row in rows]
                _accumulate(plan, arg, x, 4 * quad + 2 * p + e, weights, v.fma, sums)


def _accumulate(plan: Plan, arg: dict[str, Any], x: Any, step: int, weights: list[Any], dot: Callable[..., Any], sums: Any) -> None:
    """Add one k's (or pair's) ``weights``, a vector for each of the step's rows, times its x to all
    sums.

    All weights are decoded first, then x comes by x: each is in a register for as short as
    possible, so that more sums fit.
    """
    mb, split = plan.block_m, step % plan.schedule.split_k
    weights = [T.bind(weight) for weight in weights]
    for i in range(mb):
        for plane in range(plan.planes):
            factor = T.bind(v.splat(arg["xs"][x + (plane * mb + i) * plan.row_words + step], "float32", plan.isa.lanes))
            for position, weight in enumerate(weights):
                slot = (split * mb + i) * len(weights) + position
                T.buffer_store(sums, dot(weight, factor, sums[slot]), [slot])


def _joined(even: Any, odd: Any) -> Any:
    """int32x16: two fp32 vectors of numbers of at most 8 significant bits as pairs of bf16."""
    return (T.reinterpret("uint32x16", even) >> v.splat(16, "uint32", 16) | T.reinterpret("uint32x16", odd)).astype("int32x16")


def _pair(plan: Plan, word: Any, nibble: int) -> Any:
    """int32x16: the numbers in ``nibble`` of both halves of each word, as a pair of bf16. The
    permute's index has 5 bits and the table repeats, so that the bit above the nibble does not
    matter."""
    table = v.constant([_bf16_bits(value) for value in plan.values] * 2, "int16")
    index = T.reinterpret("int16x32", word) >> v.splat(4 * nibble, "int16", 32)
    return T.reinterpret("int32x16", v.permute16(table, index))


def _bf16_bits(value: float) -> int:
    """A number that bf16 holds, as a signed 16-bit number."""
    return struct.unpack("<hh", struct.pack("<f", value))[1]


def _looked_up(plan: Plan, word: Any, even: int, h: int) -> Any:
    """fp32: the number in nibble ``even + h`` of each word. A permute's index has 4 bits, or, of 8
    lanes, 3: then the fourth chooses between two tables."""
    lanes, nibble = plan.isa.lanes, even + h
    index = word >> v.splat(4 * nibble, "int32", lanes)
    tables = [v.constant(plan.values[first : first + lanes], "float32") for first in range(0, 16, lanes)]
    if lanes == 16:
        return v.permute32(tables[0], index)
    lower, upper = (v.permute32(table, index) for table in tables)
    return v.tirx.Select(word << v.splat(28 - 4 * nibble, "int32", lanes) < v.splat(0, "int32", lanes), upper, lower)


def _masked(plan: Plan, word: Any, even: int, h: int) -> Any:
    """fp32: the code in nibble ``even + h`` of each word, times 16^even. Odd nibbles are shifted
    down by one first: one shift serves four of them, and none has the sign bit then."""
    lanes = plan.isa.lanes
    if h:
        word = (word.astype(f"uint32x{lanes}") >> v.splat(4, "uint32", lanes)).astype(f"int32x{lanes}")
    return (word & v.splat(15 << 4 * even, "int32", lanes)).astype(f"float32x{lanes}")
