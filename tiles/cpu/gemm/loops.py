"""The two loop bodies of the CPU GEMM: one row of x rearranged, and one task multiplied. See
``gemm.py`` for the arithmetic.

Importing this imports tvm. ``arg`` holds flat views of the operands by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ....schedules.gemm.cpu import TILE
from ....schedules.gemm.parts import ADDED, GATE_ROWS, Part, parts
from .. import vectors as v
from ..numbers import activated
from ..vectors import T
from . import integers
from .inner import accumulate_step
from .plan import Plan

INFINITY = 0x7F800000  # its bits in fp32: those of every finite magnitude are fewer, those of NaNs more


def rearrange(plan: Plan, arg: dict[str, Any], row: Any, m: Any) -> None:
    """Row ``row`` of x [m, k] into xs [m blocks, k tiles, planes, block_m, 32] (fp32, bf16 pairs,
    bytes or 16-bit integers) and its sums over each group into sums [m blocks, groups, block_m]. Rows from m and columns from
    k on are zeros. Of a norm x times its weight, rounded, takes the place of x, and the row's factor
    goes into factors [m blocks * block_m]."""
    k, lanes, mb, norm = plan.workload.k, plan.isa.lanes, plan.block_m, plan.workload.norm
    block, i = T.bind(row // mb), T.bind(row % mb)
    squares = v.sums(1, lanes) if norm else None
    for count, first, depth in plan.sum_runs:
        with T.serial(count) as index:
            group = T.bind(index + first)
            total = v.sums(1, lanes, plan.sums_dtype) if plan.needs_sums else None
            with T.serial(depth // TILE) as step:
                kt = T.bind(group * (plan.group_k // TILE) + step)
                start = T.bind(row.astype("int64") * k + kt * TILE)
                stage = _tile(arg["x"], start, kt, k, row < m)
                if squares is not None:
                    _norm(plan, stage, _tile(arg["norm_weight"], T.bind(kt * TILE), kt, k, row < m), squares)
                stage = _bf16_of_e4m3(plan, stage) if plan.x_is_e4m3 else stage
                numbers = [v.load(stage, part * lanes, lanes) for part in range(plan.vectors)]
                values = [T.bind(x.astype(f"int32x{lanes}") if plan.integers else v.to_float(x, lanes)) for x in numbers]
                if total is not None:
                    for value in values:
                        T.buffer_store(total, total[0] + value, [0])
                offset = T.bind(((block * plan.k_tiles + kt) * plan.planes * mb + i) * plan.row_words)
                if plan.integers:
                    integers.store_x(plan, arg["xs"], offset, stage)
                else:
                    _STORE_X[plan.dot, plan.planes](plan, arg["xs"], offset, values, stage)
            if total is not None:
                T.buffer_store(arg["sums"], v.lane_sum(total[0], lanes, plan.sums_dtype), [(block * plan.groups + group) * mb + i])
    if squares is not None:
        T.buffer_store(arg["factors"], _factor(plan, squares), [row])


def _tile(source: Any, start: Any, kt: Any, k: int, there: Any) -> Any:
    """The 32 numbers of ``source`` from ``start`` on, of tile ``kt`` of k; zeros behind k, and where they
    are not ``there``."""
    stage = v.local(TILE, str(source.dtype))
    with T.If(there & (kt * TILE + TILE <= k)):
        with T.Then():
            v.store(stage, 0, v.load(source, start, TILE), TILE)
        with T.Else(), T.serial(TILE) as j:
            inside = there & (kt * TILE + j < k)
            T.buffer_store(stage, T.if_then_else(inside, source[start + j], v.tirx.const(0, str(stage.dtype))), [j])
    return stage


def _norm(plan: Plan, x: Any, weight: Any, squares: Any) -> None:
    """Multiply a tile of x by the norm's weight, in x's dtype, and add its squares up."""
    lanes = plan.isa.lanes
    for part in range(plan.vectors):
        numbers = v.held(v.to_float(v.load(x, part * lanes, lanes), lanes))
        T.buffer_store(squares, v.fma(numbers, numbers, squares[0]), [0])
        product = v.held(numbers * v.to_float(v.load(weight, part * lanes, lanes), lanes))
        v.store(x, part * lanes, v.from_float(product, plan.workload.dtype, lanes), lanes)


def _factor(plan: Plan, squares: Any) -> Any:
    """1 / sqrt(mean square + eps), fp32; NaN where the sum of squares is not finite."""
    lanes, w = plan.isa.lanes, plan.workload
    total = v.held(v.splat(v.lane_sum(squares[0], lanes), "float32", lanes))
    mean = v.held(total / v.splat(float(w.k), "float32", lanes) + v.splat(w.eps, "float32", lanes))
    root = v.tirx.call_llvm_pure_intrin(f"float32x{lanes}", "llvm.sqrt", mean)
    finite = T.reinterpret(f"int32x{lanes}", total) < v.splat(INFINITY, "int32", lanes)
    found = v.held(v.tirx.Select(finite, v.splat(1.0, "float32", lanes) / root, v.splat(math.nan, "float32", lanes)))
    return v.tirx.Shuffle([found], [0])


def _bf16_of_e4m3(plan: Plan, codes: Any) -> Any:
    """A tile's 32 e4m3 codes as bf16."""
    lanes, stage = plan.isa.lanes, v.local(TILE, "uint16")
    for part in range(plan.vectors):
        number = v.from_e4m3(v.load(codes, part * lanes, lanes).astype(f"int32x{lanes}"), lanes)
        bits = T.reinterpret(f"uint32x{lanes}", number) >> v.splat(16, "uint32", lanes)
        v.store(stage, part * lanes, bits.astype(f"uint16x{lanes}"), lanes)
    return stage


def _store_float(plan: Plan, xs: Any, offset: Any, values: list[Any], stage: Any) -> None:
    lanes = plan.isa.lanes
    for part, value in enumerate(values):
        if plan.masks_in_place:  # a code of k = 4 j + 2 p + e is masked 16 e + 8 p bits up in its word
            value = value * v.constant([2.0 ** -(16 * (k & 1) + 8 * (k >> 1 & 1)) for k in range(lanes)], "float32")
        v.store(xs, offset + part * lanes, value, lanes)


def _store_bf16(plan: Plan, xs: Any, offset: Any, values: list[Any], stage: Any) -> None:
    v.store(xs, offset, _pairs(stage), plan.row_words)


def _store_split(plan: Plan, xs: Any, offset: Any, values: list[Any], stage: Any) -> None:
    """fp16 as two planes of bf16: the first 8 significant bits, and the other 3."""
    lanes = plan.isa.lanes
    high, low = (v.local(TILE, "uint16") for _ in range(2))
    for part, value in enumerate(values):
        bits = T.bind(T.reinterpret(f"uint32x{lanes}", value))
        upper = T.bind(bits & v.splat(0xFFFF0000, "uint32", lanes))
        rest = T.reinterpret(f"uint32x{lanes}", value - T.reinterpret(f"float32x{lanes}", upper))
        exponent = v.splat(0x7F800000, "uint32", lanes)
        rest = v.tirx.Select((bits & exponent) == exponent, v.splat(0, "uint32", lanes), rest)  # infinity is all in the first
        for target, word in ((high, upper), (low, rest)):
            v.store(target, part * lanes, (word >> v.splat(16, "uint32", lanes)).astype(f"uint16x{lanes}"), lanes)
    for plane, source in enumerate((high, low)):
        v.store(xs, offset + plane * plan.block_m * plan.row_words, _pairs(source), plan.row_words)


_STORE_X = {("float", 1): _store_float, ("pairs", 1): _store_bf16, ("pairs", 2): _store_split}


def _pairs(stage: Any) -> Any:
    """A tile's 32 16-bit values as 16 words."""
    return T.reinterpret(f"int32x{TILE // 2}", v.load(stage, 0, TILE))


def multiply(plan: Plan, arg: dict[str, Any], task: Any, m: Any) -> None:
    """Task ``task``: ``block_n`` output channels of ``block_m`` rows, tile of 32 channels after
    tile; where gates are the first half of the weight, each with the tile that it gates."""
    per_task = plan.schedule.block_n // TILE
    blocks = T.bind((m + (plan.block_m - 1)) // plan.block_m)
    with T.serial(per_task) as inner:
        nt, block = T.bind(task // blocks * per_task + inner), T.bind(task % blocks)
        with T.If(nt < plan.written_tiles), T.Then():
            total = _total(plan, arg, nt, block, m)
            if plan.workload.gate_halves:
                write_halves(plan, arg, nt, block, m, total)
            else:
                write(plan, arg, nt, block, m, total)


def _total(plan: Plan, arg: dict[str, Any], nt: Any, block: Any, m: Any) -> Any:
    """Of tile ``nt`` and ``block_m`` rows of x the sums over all of k [block_m, vectors], in registers."""
    mb, lanes = plan.block_m, plan.isa.lanes
    total = v.sums(mb * plan.vectors, lanes, plan.total_dtype)
    accumulate = integers.accumulate if plan.integers else accumulate_step
    apply = partial(integers.apply_group if plan.integers else _apply_scales, m=m)
    for count, first, run in plan.group_runs:
        with T.serial(count) as index:
            group = T.bind(index + first)
            for rows in plan.row_passes:
                sums = v.sums(plan.schedule.split_k * mb * len(rows), lanes, plan.sums_dtype)
                for kt, k, depth in _steps(plan, group, run):
                    words = T.bind((nt * plan.k_tiles + kt) * plan.tile_words + k * (plan.tile_words // TILE))
                    x = T.bind((block * plan.k_tiles + kt) * (plan.planes * mb * plan.row_words) + k * plan.row_words // TILE)
                    accumulate(plan, arg, words, x, depth, rows, sums)
                apply(plan, arg, group, nt, block, rows, sums, total)
    return total


def _steps(plan: Plan, group: Any, run: int) -> Iterator[tuple[Any, Any, int]]:
    """Loops over the ``run`` k of a group; yields (tile, first k in it, how many k) of each
    unrolled step, inside the loops."""
    depth = plan.schedule.block_k
    if run < TILE:
        together = TILE // run
        with T.serial(run // depth) as part:
            yield T.bind(group // together), T.bind(group % together * run + part * depth), depth
        return
    tiles = run // TILE
    whole = depth // TILE if depth > TILE and tiles % (depth // TILE) == 0 else 1
    with T.serial(tiles // whole) as step:
        for extra in range(whole):
            kt = T.bind(group * (plan.group_k // TILE) + step * whole + extra)
            if depth >= TILE:
                yield kt, 0, TILE
            else:
                with T.serial(TILE // depth) as part:
                    yield kt, part * depth, depth


def _apply_scales(
    plan: Plan, arg: dict[str, Any], group: Any, nt: Any, block: Any, rows: tuple[int, ...], sums: Any, total: Any, m: Any
) -> None:
    """total += s * (sums + (c - z) * sum of x), the split sums joined in a fixed order; of x whose
    groups have scales, times x's scale of the group."""
    lanes, mb, weight_format = plan.isa.lanes, plan.block_m, plan.workload.format
    for position, vector in enumerate(rows):
        column = T.bind((group * plan.n_tiles + nt) * TILE + vector * lanes)
        scale = T.bind(v.to_float(v.load(arg["scales"], column, lanes), lanes))
        zero = v.splat(float(plan.center - weight_format.symmetric_zero_point), "float32", lanes)
        if not weight_format.symmetric:
            zero = T.bind(v.splat(float(plan.center), "float32", lanes) - v.to_float(v.load(arg["zeros"], column, lanes), lanes))
        for i in range(mb):
            joined = sums[i * len(rows) + position]
            for split in range(1, plan.schedule.split_k):
                joined = joined + sums[(split * mb + i) * len(rows) + position]
            slot = i * plan.vectors + vector
            of_x = v.splat(arg["sums"][(block * plan.groups + group) * mb + i], "float32", lanes) if plan.needs_sums else None
            if plan.needs_sums:
                joined = v.fma(zero, of_x, joined)
            factor = scale * integers.scale_of_x(arg, group, block * mb + i, m, lanes) if weight_format.x_grouped else scale
            T.buffer_store(total, v.fma(joined, factor, total[slot]), [slot])


def _of_channels(plan: Plan, operand: Any, part: Part, column: Any, row: Any = None) -> Any:
    """The numbers of a part for the channels from ``column`` on, of a part of both axes in ``row``, in
    registers; zeros behind the last of an operand that is not padded."""
    lanes, n = plan.isa.lanes, plan.workload.n
    numbers = v.local(lanes, str(operand.dtype))
    start = column if row is None else T.bind(row.astype("int64") * n + column)
    if part.packed or n % TILE == 0:
        v.store(numbers, 0, v.load(operand, start, lanes), lanes)
    else:
        with T.serial(lanes) as j:
            T.buffer_store(numbers, T.if_then_else(column + j < n, operand[start + j], v.tirx.const(0, str(operand.dtype))), [j])
    return numbers


def write_gated(plan: Plan, arg: dict[str, Any], nt: Any, row: Any, values: Any) -> None:
    """Write the 16 columns of y that a tile's 32 sums ``values`` of ``row`` make: of 16 the first 8 are
    gates, the others what these gate."""
    columns = TILE // 2
    gates, ups = v.local(columns, "float32"), v.local(columns, "float32")
    for half in range(TILE // (2 * GATE_ROWS)):
        for target, first in ((gates, 0), (ups, GATE_ROWS)):
            v.store(target, half * GATE_ROWS, v.load(values, half * 2 * GATE_ROWS + first, GATE_ROWS), GATE_ROWS)
    gated = activated(v.load(gates, 0, columns), plan.workload.gate) * v.load(ups, 0, columns)
    found = v.held(v.from_float(v.held(gated), plan.workload.dtype, columns))
    start = T.bind(row.astype("int64") * plan.workload.columns + nt * columns)
    if plan.workload.n % TILE == 0:
        v.store(arg["y"], start, found, columns)
        return
    stage = v.local(columns, str(arg["y"].dtype))
    v.store(stage, 0, found, columns)
    with T.serial(T.min(plan.workload.columns - nt * columns, columns)) as j:
        T.buffer_store(arg["y"], stage[j], [start + j])


def write_placed(plan: Plan, arg: dict[str, Any], nt: Any, row: Any, values: Any) -> None:
    """Write a tile's 32 sums ``values`` of ``row`` to the columns of y that the index says: of 16 one of
    the last 8 may be added to the one 8 before it."""
    first, base, rows = T.bind(row.astype("int64") * plan.workload.width), T.bind(nt * TILE), plan.workload.n
    channels, stage = arg["channels"], v.local(TILE, str(arg["y"].dtype))
    for half in range(TILE // (2 * GATE_ROWS)):
        with T.serial(GATE_ROWS) as j:
            at = T.bind(half * 2 * GATE_ROWS + j)
            with T.If(base + at + GATE_ROWS < rows), T.Then(), T.If(channels[base + at + GATE_ROWS] == ADDED), T.Then():
                T.buffer_store(values, values[at] + values[at + GATE_ROWS], [at])
    v.store(stage, 0, T.bind(v.from_float(v.load(values, 0, TILE), plan.workload.dtype, TILE)), TILE)
    with T.serial(T.max(T.min(rows - base, TILE), 0)) as j:
        to = T.bind(channels[base + j])
        with T.If((to >= 0) & (to < plan.workload.width)), T.Then():  # a wrong index costs no other memory
            T.buffer_store(arg["y"], stage[j], [first + to])


def write(plan: Plan, arg: dict[str, Any], nt: Any, block: Any, m: Any, total: Any) -> None:
    """Apply the parts that follow, round and write the real rows and columns."""
    lanes, n, dtype = plan.isa.lanes, plan.workload.n, plan.workload.dtype
    if plan.workload.gate or plan.workload.width:
        of_tile = _finished_tile(plan, arg, nt, block, m, total)
        for i, values in enumerate(of_tile):
            row = T.bind(block * plan.block_m + i)
            with T.If(row < m), T.Then():
                (write_placed if plan.workload.width else write_gated)(plan, arg, nt, row, values)
        return

    def store(i: int, row: Any, vector: int, value: Any) -> None:
        value, column = T.bind(v.from_float(value, dtype, lanes)), T.bind(nt * TILE + vector * lanes)
        start = T.bind(row.astype("int64") * n + column)
        if n % TILE == 0:
            v.store(arg["y"], start, value, lanes)
            return
        with T.If(column + lanes <= n):
            with T.Then():
                v.store(arg["y"], start, value, lanes)
            with T.Else():
                stage = v.local(lanes, str(arg["y"].dtype))
                v.store(stage, 0, value, lanes)
                with T.serial(T.max(n - column, 0)) as j:
                    T.buffer_store(arg["y"], stage[j], [start + j])

    _finish(plan, arg, nt, block, m, total, store)


def write_halves(plan: Plan, arg: dict[str, Any], nt: Any, block: Any, m: Any, total: Any) -> None:
    """Write the 32 columns of y that the gates of tile ``nt``, whose sums are ``total``, and the tile that they
    gate make."""
    gates = _finished_tile(plan, arg, nt, block, m, total)
    there = T.bind(nt + plan.n_tiles // 2)
    ups = _finished_tile(plan, arg, there, block, m, _total(plan, arg, there, block, m))
    columns, w = TILE // 2, plan.workload
    for i, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        row = T.bind(block * plan.block_m + i)
        with T.If(row < m), T.Then():
            start = T.bind(row.astype("int64") * w.columns + nt * TILE)
            for at in range(0, TILE, columns):
                gated = activated(v.load(gate, at, columns), w.gate) * v.load(up, at, columns)
                v.store(arg["y"], start + at, v.held(v.from_float(v.held(gated), w.dtype, columns)), columns)


def _finished_tile(plan: Plan, arg: dict[str, Any], nt: Any, block: Any, m: Any, total: Any) -> list[Any]:
    """What is stored for each row's 32 sums, fp32, in registers."""
    of_tile, lanes = [v.local(TILE, "float32") for _ in range(plan.block_m)], plan.isa.lanes
    _finish(plan, arg, nt, block, m, total, lambda i, row, vector, value: v.store(of_tile[i], vector * lanes, value, lanes))
    return of_tile


def _finish(plan: Plan, arg: dict[str, Any], nt: Any, block: Any, m: Any, total: Any, store: Callable[[int, Any, int, Any], None]) -> None:
    """Call ``store`` with (i, row, vector, what is stored for its sums, fp32) for each vector of each real row."""
    lanes = plan.isa.lanes
    for vector in range(plan.vectors):
        column = T.bind(nt * TILE + vector * lanes)
        after = parts(plan.workload, applied=() if plan.integers else ("scales",))
        after = tuple(part for part in after if part.does != "place")
        of_channels = {part: _of_channels(plan, arg[part.operand], part, column) for part in after if part.axis == "n"}
        for i in range(plan.block_m):
            row = T.bind(block * plan.block_m + i)
            with T.If(row < m), T.Then():
                value = total[i * plan.vectors + vector]
                if plan.total_dtype == "int32":
                    value = value.astype(f"float32x{lanes}")
                if plan.workload.norm:
                    value = value * v.splat(arg["factors"][row], "float32", lanes)
                for part in after:
                    if part.axis == "mn":
                        number = v.to_float(v.load(_of_channels(plan, arg[part.operand], part, column, row), 0, lanes), lanes)
                    elif part.axis == "m":
                        number = v.splat(arg[part.operand][row], "float32", lanes)
                    else:
                        number = v.to_float(v.load(of_channels[part], 0, lanes), lanes)
                    value = value * number if part.does == "multiply" else value + number
                store(i, row, vector, value)
