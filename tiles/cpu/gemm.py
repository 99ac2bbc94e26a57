"""GEMM with packed weights on x86-64 CPUs: vector code from TensorIR, one task per block of output channels and rows.

    y[m, n] = sum_k x[m, k] * w[n, k] (+ bias[n]),   w = (q - z) * s

Inside a group of k the sums stay unscaled, acc = sum x (q - c); scale and zero point are applied once per group, y += s * (acc - (z - c) * sum x), with
c = 8 where a look-up table decodes and 0 elsewhere. All sums are fp32. Three ways to multiply, by what the processor has:

- vdpbf16ps (AVX512-BF16): a permute looks four bits up as bf16, and every lane multiplies two neighbouring k. bf16 x is exact in it; fp16 x is split
  into the two bf16 numbers whose sum it is, which is exact too.
- AVX-512: a permute looks four bits up as fp32 (it ignores all other bits of its index, so nothing is masked); fused multiply-add.
- AVX2: mask, convert, fused multiply-add. A nibble is masked where it stands and x is scaled by the power of two that it is too large by, once per call.

That is 3 (fp16: 4), 6 and 13 vector instructions per 32 weights. Eight bits are extended, converted and multiplied in fp32 everywhere.

A first parallel loop rearranges x once per call into blocks of ``block_m`` rows x 32 k, padded with zeros; a second one multiplies. Each becomes a plain C
function over a range of its iterations (``outline.py``), shared out among threads by ``device/cpu_launch.c``: no TVM runtime is needed.
"""

from __future__ import annotations

from ...schedules.rules.gemm_cpu import PROGRAM as NAME
from ...schedules.rules.gemm_cpu import TILE, cpu_legal
from ...schedules.schedule import Schedule
from ...schedules.target import Target
from ...schedules.workload import Workload
from ..program import TileProgram
from .outline import TOGETHER
from .plan import Plan


def build(workload: Workload, schedule: Schedule, target: Target):
    """The PrimFunc over x [m, k], weight int32 [n tiles, k tiles, words], scales (and zeros) [groups, n_pad], bias [n] if any, y [m, n]: two parallel loops, over rows
    padded to whole blocks of ``block_m`` and over tasks (block of n) x (block of m), m inner. Raises ``ValueError`` on a target without AVX2."""
    from tvm.script.ir_builder import IRBuilder

    from . import vectors as v

    T, plan = v.T, Plan.of(workload, schedule, target)
    dtype, mb = workload.dtype, schedule.block_m
    columns = (plan.groups, plan.n_tiles * TILE)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({"tilebit.threads": schedule.num_warps})
        m = T.int32(is_size_var=True)
        shapes = {"x": (m, workload.k), "scales": columns, "zeros": columns, "bias": (workload.n,), "y": (m, workload.n)}
        weight_shape = (plan.n_tiles, plan.k_tiles, plan.tile_words)
        arg = {}
        for name in params(workload, schedule):
            shape, kind = (weight_shape, "int32") if name == "weight" else (shapes[name], dtype)
            arg[name] = T.match_buffer(T.arg(name, T.handle()), shape, kind)
        blocks = (m + (mb - 1)) // mb
        xs = T.alloc_buffer((blocks * plan.row_block_words,), "int32" if plan.dot == "pairs" else "float32")
        sums = T.alloc_buffer((blocks * (mb * plan.groups),), "float32") if plan.needs_sums else None

        def views() -> dict:
            """Flat views of the operands as the loops read them: bf16 travels as its bits, 8-bit codes as bytes."""
            kinds = {name: "uint8" if name == "weight" and plan.bits == 8 else "uint16" if buffer.dtype == "bfloat16" else None for name, buffer in arg.items()}
            return {"xs": v.flat(xs), **({"sums": v.flat(sums)} if sums is not None else {}), **{name: v.flat(arg[name], kind) for name, kind in kinds.items()}}

        with T.parallel(blocks * mb, annotations={TOGETHER: mb}) as row:
            _prepare(plan, v, row, m, views())
        with T.parallel(blocks * plan.n_tasks, annotations={TOGETHER: blocks}) as task, v.instructions(plan.isa.bf16_dot):
            _tile(plan, v, task, m, views())
    return builder.get()


def _prepare(plan: Plan, v, row, m, arg) -> None:
    """x [m, k] -> xs [m blocks, k tiles, planes, block_m, 32 k] (bf16 pairs or fp32) and sums [m blocks, groups, block_m], the sum of x over each group."""
    T, k, lanes, mb = v.T, plan.workload.k, plan.isa.lanes, plan.block_m
    block, i = T.bind(row // mb), T.bind(row % mb)
    for count, first, tiles in plan.group_runs:
        with T.serial(count) as index:
            group = T.bind(index + first)
            total = v.local(1, f"float32x{lanes}")
            v.clear(total, lanes)
            with T.serial(tiles) as step_k:
                kt = T.bind(group * plan.group_tiles + step_k)
                stage = v.local(TILE, str(arg["x"].dtype))
                start = T.bind(row.astype("int64") * k + kt * TILE)
                with T.If((row < m) & (kt * TILE + TILE <= k)):
                    with T.Then():
                        v.store(stage, 0, v.load(arg["x"], start, TILE), TILE)
                    with T.Else(), T.serial(TILE) as j:
                        inside = (row < m) & (kt * TILE + j < k)
                        T.buffer_store(stage, T.if_then_else(inside, arg["x"][start + j], v.const(0, str(stage.dtype))), [j])
                values = [T.bind(v.to_float(v.load(stage, part * lanes, lanes), lanes)) for part in range(plan.vectors)]
                for value in values:
                    T.buffer_store(total, total[0] + value, [0])
                _store_x(plan, v, arg["xs"], ((block * plan.k_tiles + kt) * plan.planes * mb + i) * (plan.row_words), values, stage)
            if plan.needs_sums:
                T.buffer_store(arg["sums"], v.lane_sum(total[0], lanes), [(block * plan.groups + group) * mb + i])


def _store_x(plan: Plan, v, xs, offset, values, stage) -> None:
    """One row's 32 k into ``xs``, in the form that the dot product wants."""
    T, lanes = v.T, plan.isa.lanes
    if plan.dot == "float":
        for part, value in enumerate(values):
            if plan.masks_in_place:  # k = 4 j + 2 p + e is masked 16 e + 8 p bits too high
                value = value * v.constant_vector([2.0 ** -(16 * (k & 1) + 8 * (k >> 1 & 1)) for k in range(lanes)], "float32")
            v.store(xs, offset + part * lanes, value, lanes)
    elif plan.planes == 1:
        v.store(xs, offset, T.reinterpret(f"int32x{TILE // 2}", v.load(stage, 0, TILE)), TILE // 2)
    else:
        high, low = (v.local(TILE, "uint16") for _ in range(2))
        for part, value in enumerate(values):
            bits = T.bind(T.reinterpret(f"uint32x{lanes}", value))
            upper = T.bind(bits & v.splat(v.const(0xFFFF0000, "uint32"), lanes))
            rest = T.reinterpret(f"uint32x{lanes}", value - T.reinterpret(f"float32x{lanes}", upper))
            exponent = v.splat(v.const(0x7F800000, "uint32"), lanes)
            rest = v.tirx.Select((bits & exponent) == exponent, v.splat(v.const(0, "uint32"), lanes), rest)  # inf - inf would be NaN
            for target, word in ((high, upper), (low, rest)):
                v.store(target, part * lanes, (word >> v.splat(v.const(16, "uint32"), lanes)).astype(f"uint16x{lanes}"), lanes)
        for plane, source in enumerate((high, low)):
            v.store(xs, offset + plane * plan.block_m * plan.row_words, T.reinterpret(f"int32x{TILE // 2}", v.load(source, 0, TILE)), TILE // 2)


def _tile(plan: Plan, v, task, m, arg) -> None:
    T, lanes, mb, vectors = v.T, plan.isa.lanes, plan.block_m, plan.vectors
    tiles_per_task = plan.schedule.block_n // TILE
    m_blocks = T.bind((m + (mb - 1)) // mb)
    with T.serial(tiles_per_task) as inner:
        nt, block = T.bind(task // m_blocks * tiles_per_task + inner), T.bind(task % m_blocks)
        with T.If(nt < plan.n_tiles), T.Then():
            total = v.local(mb * vectors, f"float32x{lanes}")
            v.clear(total, lanes)
            for count, first, tiles in plan.group_runs:
                with T.serial(count) as index:
                    group = T.bind(index + first)
                    sums = v.local(plan.schedule.split_k * mb * vectors, f"float32x{lanes}")
                    v.clear(sums, lanes)
                    unroll = plan.schedule.block_k // TILE if tiles % (plan.schedule.block_k // TILE) == 0 else 1
                    with T.serial(tiles // unroll) as step_k:
                        for extra in range(unroll):
                            kt = T.bind(group * plan.group_tiles + step_k * unroll + extra)
                            _multiply(plan, v, arg, T.bind((nt * plan.k_tiles + kt) * plan.tile_words), T.bind((block * plan.k_tiles + kt) * plan.planes * mb * plan.row_words), sums)
                    _apply_scales(plan, v, arg, group, nt, block, sums, total)
            _write(plan, v, arg, nt, block, m, total)


def _multiply(plan: Plan, v, arg, words, x, sums) -> None:
    """One tile, 32 rows x 32 k, times ``block_m`` rows of x: ``sums[(split, i, vector)]``."""
    T, lanes, mb, vectors, splits = v.T, plan.isa.lanes, plan.block_m, plan.vectors, plan.schedule.split_k

    def accumulate(step: int, vector: int, dot, weight) -> None:
        """Add ``weight`` times the x of ``step`` (a k, or a pair of them) to every row's sum."""
        weight = T.bind(weight)
        for i in range(mb):
            slot = (step % splits * mb + i) * vectors + vector
            for plane in range(plan.planes):
                factor = v.splat(arg["xs"][x + (plane * mb + i) * plan.row_words + step], lanes)
                T.buffer_store(sums, dot(weight, factor, sums[slot]), [slot])

    if plan.bits == 8:
        for k in range(TILE):
            for vector in range(vectors):
                codes = v.load(arg["weight"], words * 4 + k * TILE + vector * lanes, lanes)
                accumulate(k, vector, v.fma, codes.astype(f"float32x{lanes}"))
        return
    # A word holds eight codes: nibble 4 e + 2 p + h is row 16 h + lane, k = 4 quad + 2 p + e.
    for quad in range(TILE // 4):
        for part in range(16 // lanes):
            word = T.bind(v.load(arg["weight"], words + quad * 16 + part * lanes, lanes))
            for p in range(2):
                for h in range(2):
                    vector = h * (16 // lanes) + part
                    if plan.dot == "pairs":
                        index = T.reinterpret("int16x32", word) >> v.splat(v.const(8 * p + 4 * h, "int16"), 32)
                        weight = T.reinterpret("int32x16", v.permute16(v.constant_vector([_bf16(q - 8) for q in range(16)] * 2, "int16"), index))
                        accumulate(2 * quad + p, vector, lambda w, f, s: v.dot_bf16(s, w, f), weight)
                        continue
                    for e in range(2):
                        if plan.table:
                            index = word >> v.splat(v.const(16 * e + 8 * p + 4 * h, "int32"), lanes)
                            weight = v.permute32(v.constant_vector([float(q - 8) for q in range(16)], "float32"), index)
                        else:
                            aligned = word if h == 0 else (word.astype(f"uint32x{lanes}") >> v.splat(v.const(4, "uint32"), lanes)).astype(f"int32x{lanes}")
                            weight = (aligned & v.splat(v.const(15 << 16 * e + 8 * p, "int32"), lanes)).astype(f"float32x{lanes}")
                        accumulate(4 * quad + 2 * p + e, vector, v.fma, weight)


def _bf16(value: int) -> int:
    """The bits of a small integer in bf16, as a signed 16-bit number."""
    import struct

    return struct.unpack("<hh", struct.pack("<f", float(value)))[1]


def _apply_scales(plan: Plan, v, arg, group, nt, block, sums, total) -> None:
    """total += s * (sums - (z - center) * sum of x), and the split sums are joined in a fixed order."""
    T, lanes, mb, vectors, splits = v.T, plan.isa.lanes, plan.block_m, plan.vectors, plan.schedule.split_k
    for vector in range(vectors):
        column = group * (plan.n_tiles * TILE) + nt * TILE + vector * lanes
        scale = T.bind(v.to_float(v.load(arg["scales"], column, lanes), lanes))
        if plan.needs_sums:
            if plan.workload.format.symmetric:
                zero = v.splat(v.const(float(plan.center - plan.workload.format.symmetric_zero_point), "float32"), lanes)
            else:
                zero = T.bind(v.splat(v.const(float(plan.center), "float32"), lanes) - v.to_float(v.load(arg["zeros"], column, lanes), lanes))
        for i in range(mb):
            slots = [(split * mb + i) * vectors + vector for split in range(splits)]
            joined = sums[slots[0]]
            for slot in slots[1:]:
                joined = joined + sums[slot]
            if plan.needs_sums:
                joined = v.fma(zero, v.splat(arg["sums"][(block * plan.groups + group) * mb + i], lanes), joined)
            T.buffer_store(total, v.fma(joined, scale, total[i * vectors + vector]), [i * vectors + vector])


def _write(plan: Plan, v, arg, nt, block, m, total) -> None:
    """Add the bias, round and write the real rows and columns."""
    T, lanes, n, dtype = v.T, plan.isa.lanes, plan.workload.n, plan.workload.dtype
    ragged = n % TILE
    for vector in range(plan.vectors):
        column = T.bind(nt * TILE + vector * lanes)
        if plan.workload.bias:
            bias = v.local(lanes, str(arg["bias"].dtype))
            if ragged:
                with T.serial(lanes) as j:
                    T.buffer_store(bias, T.if_then_else(column + j < n, arg["bias"][column + j], v.const(0, str(bias.dtype))), [j])
            else:
                v.store(bias, 0, v.load(arg["bias"], column, lanes), lanes)
        for i in range(plan.block_m):
            row = T.bind(block * plan.block_m + i)
            with T.If(row < m), T.Then():
                value = total[i * plan.vectors + vector]
                if plan.workload.bias:
                    value = value + v.to_float(v.load(bias, 0, lanes), lanes)
                value = T.bind(v.from_float(value, dtype, lanes))
                start = T.bind(row.astype("int64") * n + column)
                if not ragged:
                    v.store(arg["y"], start, value, lanes)
                    continue
                with T.If(column + lanes <= n):
                    with T.Then():
                        v.store(arg["y"], start, value, lanes)
                    with T.Else():
                        stage = v.local(lanes, str(arg["y"].dtype))
                        v.store(stage, 0, value, lanes)
                        with T.serial(T.max(n - column, 0)) as j:
                            T.buffer_store(arg["y"], stage[j], [start + j])


def params(workload: Workload, schedule: Schedule) -> tuple[str, ...]:
    """The kernel's tensors in call order."""
    del schedule
    zeros, bias = () if workload.format.symmetric else ("zeros",), ("bias",) if workload.bias else ()
    return ("x", "weight", "scales", *zeros, *bias, "y")


def reference(x, w, bias=None):
    """y in fp64: x [m, k] and the dequantized weight w [n, k] (any float dtype, exact in fp64), bias [n] or None."""
    y = x.double() @ w.double().T
    return y if bias is None else y + bias.double()


PROGRAM = TileProgram(
    name=NAME, compiler="tvm", arches=("cpu",), legal=cpu_legal, build=build, params=params, headers=("cpu_launch.c",), reference=reference
)
