"""Integer products of the CPU GEMM: codes of weights times int8 x, sums in int32. Importing this
imports tvm.

Of 4 bits the codes are multiplied as they are, as unsigned bytes, four neighbouring k a 32-bit lane;
scale and offset of a group (LiquidGEMM section 4), or a channel's zero point, are applied to its
int32 sum:

    sum x (q s + o - 128) = s * sum(q x) + (o - 128) * sum(x)
    sum x (q - z) = sum(q x) - z * sum(x)

Where rows of x have scales of groups, a group's sum (of 128 products, less than 2^24) becomes fp32,
exactly, and is multiplied by both scales and added to those of the groups before it, rounded once
each.

vpdpbusd adds such a product to int32 sums. Without it vpmaddubsw leaves pairs in 16 bits, where the
32 k of a tile fit: 32 x 15 x 128 / 2 < 2^15; vpmaddwd by ones joins them. Bytes less 128 are
multiplied as 16-bit pairs of neighbouring k by vpmaddwd: vpmaddubsw would saturate.
"""

from __future__ import annotations

from typing import Any

from ....layouts.formats import OFFSET_ZERO, GemmFormat
from ....schedules.gemm.cpu import TILE
from .. import vectors as v
from ..vectors import T
from .lane_sums import permute
from .plan import Plan

# k of the bytes of a lane of packed codes: nibble 4 e + 2 p of a word is that of k = 2 p + e.
QUAD = (0, 2, 1, 3)


def store_x(plan: Plan, xs: Any, offset: Any, stage: Any) -> None:
    """A tile's 32 int8 of a row, as ``accumulate`` multiplies them: bytes in the order of codes in a
    word, or 16-bit numbers."""
    codes = v.load(stage, 0, TILE)
    if plan.dot == "bytes":
        order = [quad * 4 + k for quad in range(TILE // 4) for k in QUAD]
        v.store(xs, offset, T.reinterpret(f"int32x{TILE // 4}", permute(codes, order)), TILE // 4)
    else:
        v.store(xs, offset, T.reinterpret(f"int32x{TILE // 2}", codes.astype(f"int16x{TILE}")), TILE // 2)


def accumulate(plan: Plan, arg: dict[str, Any], words: Any, x: Any, depth: int, rows: tuple[int, ...], sums: Any) -> None:
    """As ``inner.accumulate_step``, into int32 sums."""
    (_accumulate_bytes if plan.dot == "bytes" else _accumulate_shorts)(plan, arg, words, x, depth, rows, sums)


def _accumulate_bytes(plan: Plan, arg: dict[str, Any], words: Any, x: Any, depth: int, rows: tuple[int, ...], sums: Any) -> None:
    lanes, mb, splits = plan.isa.lanes, plan.block_m, plan.schedule.split_k
    parts = 16 // lanes  # vectors of words, whose upper nibbles are those of 16 rows further
    pairs = None if plan.isa.byte_dot else v.sums(splits * mb * len(rows), 2 * lanes, "int16")
    for quad in range(depth // 4):
        loaded = {row % parts: words + quad * 16 + row % parts * lanes for row in rows}
        loaded = {part: T.bind(v.load(arg["weight"], offset, lanes)) for part, offset in loaded.items()}
        codes = [T.bind(_nibbles(plan, loaded[row % parts], row // parts)) for row in rows]
        for i in range(mb):
            factor = T.bind(v.splat(arg["xs"][x + i * plan.row_words + quad], "int32", lanes))
            for position, code in enumerate(codes):
                slot = (quad % splits * mb + i) * len(rows) + position
                if pairs is None:
                    T.buffer_store(sums, v.dot_bytes(code, factor, sums[slot], lanes), [slot])
                else:
                    T.buffer_store(pairs, pairs[slot] + v.multiply_bytes(code, factor, lanes), [slot])
    if pairs is not None:
        ones = v.splat(1, "int16", 2 * lanes)
        for slot in range(splits * mb * len(rows)):
            T.buffer_store(sums, sums[slot] + v.multiply_shorts(pairs[slot], ones, lanes), [slot])


def _nibbles(plan: Plan, word: Any, h: int) -> Any:
    """The codes of four k of each row, ``h`` its half of the tile, as bytes."""
    lanes = plan.isa.lanes
    if h:
        word = (word.astype(f"uint32x{lanes}") >> v.splat(4, "uint32", lanes)).astype(f"int32x{lanes}")
    return word & v.splat(0x0F0F0F0F, "int32", lanes)


def _accumulate_shorts(plan: Plan, arg: dict[str, Any], words: Any, x: Any, depth: int, rows: tuple[int, ...], sums: Any) -> None:
    lanes, mb, splits = plan.isa.lanes, plan.block_m, plan.schedule.split_k

    def codes(k: int, row: int) -> Any:
        return v.load(arg["weight"], words * 4 + k * TILE + row * lanes, lanes).astype(f"int32x{lanes}")

    middle = v.splat(OFFSET_ZERO, "int16", 2 * lanes)
    for pair in range(depth // 2):
        weights = []
        for row in rows:
            both = codes(2 * pair, row) | codes(2 * pair + 1, row) << v.splat(16, "int32", lanes)
            weights.append(T.bind(T.reinterpret(f"int16x{2 * lanes}", both) - middle))
        for i in range(mb):
            factor = T.bind(T.reinterpret(f"int16x{2 * lanes}", v.splat(arg["xs"][x + i * plan.row_words + pair], "int32", lanes)))
            for position, weight in enumerate(weights):
                slot = (pair % splits * mb + i) * len(rows) + position
                T.buffer_store(sums, sums[slot] + v.multiply_shorts(weight, factor, lanes), [slot])


def apply_group(
    plan: Plan, arg: dict[str, Any], group: Any, nt: Any, block: Any, rows: tuple[int, ...], sums: Any, total: Any, m: Any
) -> None:
    """total += s * sums + (offset - 128) * sum of x, or sums - zero * sum of x, the split ones
    joined; of x whose groups have scales, times s and x's scale of the group."""
    lanes, mb, weight_format = plan.isa.lanes, plan.block_m, plan.workload.format
    for position, vector in enumerate(rows):
        column = T.bind((group * plan.n_tiles + nt) * TILE + vector * lanes)
        scale, shift = (_of_rows(arg, name, column, lanes) if there else None for name, there in _parameters(weight_format))
        if weight_format.x_grouped:
            of_weight = T.bind(v.to_float(v.load(arg["scales"], column, lanes), lanes))
        if weight_format.offset:
            shift = T.bind(v.splat(OFFSET_ZERO, "int32", lanes) - shift)
        for i in range(mb):
            joined = sums[i * len(rows) + position]
            for split in range(1, plan.schedule.split_k):
                joined = joined + sums[(split * mb + i) * len(rows) + position]
            joined = joined if scale is None else joined * scale
            if shift is not None:
                joined = joined - shift * v.splat(arg["sums"][(block * plan.groups + group) * mb + i], "int32", lanes)
            slot = i * plan.vectors + vector
            if weight_format.x_grouped:
                of_x = scale_of_x(arg, group, block * mb + i, m, lanes)
                T.buffer_store(total, v.fma(joined.astype(f"float32x{lanes}"), of_weight * of_x, total[slot]), [slot])
            else:
                T.buffer_store(total, total[slot] + joined, [slot])


def scale_of_x(arg: dict[str, Any], group: Any, row: Any, m: Any, lanes: int) -> Any:
    """The scale of a group of row ``row`` of x; rows behind the last are not written: any will do."""
    return v.splat(arg["token_scales"][group * m + T.min(row, m - 1)], "float32", lanes)


def _parameters(weight_format: GemmFormat) -> tuple[tuple[str, bool], ...]:
    """Operands by groups, and whether they are applied to integer sums."""
    return ("scales", weight_format.offset), ("zeros", not weight_format.symmetric)


def _of_rows(arg: dict[str, Any], name: str, column: Any, lanes: int) -> Any:
    return T.bind(v.load(arg[name], column, lanes).astype(f"int32x{lanes}"))
