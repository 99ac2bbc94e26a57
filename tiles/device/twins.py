"""Numpy twins of the CUDA device functions in this folder: the same values in the same order, for
whole blocks of threads.

16-bit floats travel as their bits (uint16), bf16 included, and are rounded by hand: to nearest,
ties to even, once per device instruction.
"""

from __future__ import annotations

import numpy as np

from ...layouts.formats import Numbers

SLAB_ROWS = 64
GROUP_THREADS = 128  # threads that share a slab: a warpgroup, or four warps

# dtype -> (stored significand bits, exponent of the smallest normal, bits of infinity)
_KINDS = {"float16": (10, -14, 0x7C00), "bfloat16": (7, -126, 0x7F80)}
# The bit tricks of integer codes: (dtype, bits) -> what the exponent bits that are or-ed over a
# code stand for.
_MAGIC = {("float16", 4): 1024.0, ("float16", 8): 1024.0, ("bfloat16", 4): 128.0, ("bfloat16", 8): 8388608.0}
# Raw codes: (dtype, bits) -> (what is added to a code, factors of rows r and r + 8).
_RAW = {
    ("float16", 4): (0.0, 2.0**-24, 2.0**-20),
    ("float16", 8): (0.0, 2.0**-24, 2.0**-24),
    ("bfloat16", 4): (128.0, 1.0, 1.0),
    ("bfloat16", 8): (0.0, 1.0, 1.0),
}
# How many times too small the number is whose bits are those of a 4-bit float in their places.
_E2M1_SHIFT = {"float16": 2.0**14, "bfloat16": 2.0**126}
_HIGH_ROWS = np.arange(8) >> 1 & 1  # of the eight A elements of a k16 step: 0 in row r, 1 in row r + 8


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values, any shape, rounded once to "float16" or "bfloat16": uint16 bits."""
    mantissa, lowest, infinity = _KINDS[dtype]
    values = np.asarray(values, dtype=np.float64)
    size = np.abs(values)
    exponent = np.maximum(np.where(np.isfinite(size) & (size > 0), np.frexp(size)[1] - 1, lowest), lowest)
    with np.errstate(invalid="ignore"):
        units = np.rint(np.ldexp(size, mantissa - exponent))  # a carry runs on into the exponent
        bits = units + (exponent - lowest) * 2.0**mantissa
    bits = np.where(bits < infinity, bits, infinity)  # overflow, and NaN for now
    bits = bits.astype(np.uint16) | (np.signbit(values).astype(np.uint16) << 15)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits).astype(np.uint16)


def widen(bits: np.ndarray, dtype: str) -> np.ndarray:
    """uint16 bits of ``dtype`` as float64."""
    bits = np.asarray(bits, dtype=np.uint16)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    """The eight A elements of a k16 step, as codes [..., 8], from its packed words [..., bits / 4]."""
    words = np.asarray(words).astype(np.uint32)
    if bits == 4:  # register pair i is slots i and i + 4
        shifts = np.array([4 * (i // 2) + 16 * (i % 2) for i in range(8)], dtype=np.uint32)
        return words >> shifts & np.uint32(15)
    return (words[..., None] >> np.arange(0, 32, 8, dtype=np.uint32) & np.uint32(255)).reshape(*words.shape[:-1], 8)


def dequantize(
    words: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, *, dtype: str, numbers: Numbers, slabs: int, group_steps: int,
    scaled: bool,
) -> np.ndarray:  # fmt: skip
    """``tilebit::dequantize`` (dequant.cuh) on every thread: uint16 [threads, k16 steps * slabs *
    8], each thread's A registers in order.

    ``words`` uint32 [slabs of the block, records, 512]; ``scales`` and ``zeros`` uint16 bits
    [groups of the stage, rows of the block], ``zeros`` None for a symmetric format; ``numbers`` the
    codes' kind; ``slabs`` those of one warpgroup; ``group_steps`` k16 steps a scale group. Without
    ``scaled`` the result is q - z.
    """
    bits = numbers.bits
    per_step = bits // 4  # words of a k16 step
    steps = 4 // per_step * words.shape[1]
    codes = _codes(words.reshape(words.shape[0], words.shape[1], GROUP_THREADS, 4 // per_step, per_step), bits)
    codes = codes.transpose(0, 2, 1, 3, 4).reshape(words.shape[0], GROUP_THREADS, steps, 8)  # [slab, thread, k16 step, element]

    thread = np.arange(GROUP_THREADS)
    row = (thread >> 5) * 16 + ((thread & 31) >> 2)
    row = np.arange(words.shape[0])[:, None, None, None] * SLAB_ROWS + row[:, None, None] + 8 * _HIGH_ROWS
    group = (np.arange(steps) // group_steps)[:, None]
    if numbers.kind == "e2m1":
        shift = _E2M1_SHIFT[dtype]
        value = round_to(np.array(numbers.values)[codes] / shift, dtype)
        factors = round_to((widen(scales, dtype) if scaled else np.ones(scales.shape)) * shift, dtype)[group, row]
    else:
        zero = np.float64(1 << (bits - 1)) if zeros is None else widen(zeros, dtype)[group, row]
        value = _subtract(codes, np.broadcast_to(zero, codes.shape), dtype, bits)
        factors = scales[group, row] if scaled else None
    if factors is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            value = round_to(widen(value, dtype) * widen(factors, dtype), dtype)
    value = value.reshape(-1, slabs, GROUP_THREADS, steps, 8)  # [warpgroup, slab, thread, step, element]
    return np.ascontiguousarray(value.transpose(0, 2, 3, 1, 4)).reshape(-1, steps * slabs * 8)


def _subtract(codes: np.ndarray, zero: np.ndarray, dtype: str, bits: int) -> np.ndarray:
    """q - z by the format's bit trick: bits of ``dtype``, every intermediate rounded as the device
    rounds it."""
    magic = _MAGIC[dtype, bits]
    if (dtype, bits) == ("bfloat16", 8):  # through fp32
        difference = (magic + codes).astype(np.float32) - (np.float32(magic) + zero.astype(np.float32))
        return round_to(difference.astype(np.float64), dtype)
    low = widen(round_to(magic + zero, dtype), dtype)
    plain = round_to(magic + codes - low, dtype)
    if (dtype, bits) != ("float16", 4):
        return plain
    high = widen(round_to(64.0 + zero, dtype), dtype)  # the upper nibble: (1024 + 16 q) / 16 - (64 + z), one rounding
    folded = round_to((1024.0 + 16.0 * codes) / 16.0 - high, dtype)
    return np.where(_HIGH_ROWS, folded, plain)


def raw_codes(words: np.ndarray, *, dtype: str, numbers: Numbers) -> np.ndarray:
    """``tilebit::Raw<T, CODE>::unpack`` (raw.cuh): uint32 [..., bits / 4], the words of a k16 step
    -> uint16 bits [..., 8], A elements in register order, each factor * (number + offset), of
    integers in fp16 at 4 bits plus that of row r + 8 in row r."""
    bits = numbers.bits
    if numbers.kind == "e2m1":
        return round_to(np.array(numbers.values)[_codes(words, bits)] / (_E2M1_SHIFT[dtype] if dtype == "float16" else 1.0), dtype)
    offset, low, high = _RAW[dtype, bits]
    values = (_codes(words, bits) + offset) * np.where(_HIGH_ROWS, high, low)
    if (dtype, bits) == ("float16", 4):
        values += np.where(_HIGH_ROWS, 0.0, np.roll(values, -2, axis=-1))
    return round_to(values, dtype)


def partial_index(tile: int, split: int, splits: int, registers: int, threads: int) -> np.ndarray:
    """Where ``tilebit::reduce_split_k`` (split_k.cuh) keeps each accumulator: int64 [threads,
    registers], indices into the fp32 sums that follow the workspace's tickets."""
    register, thread = np.arange(registers), np.arange(threads)[:, None]
    return (tile * splits + split) * registers * threads + (register // 4 * threads + thread) * 4 + register % 4


def reduce_split_k(partials: np.ndarray) -> np.ndarray:
    """``tilebit::reduce_split_k``'s sum of fp32 ``partials`` [splits, ...]: from zero, in split
    order, whoever arrives last."""
    total = np.zeros(partials.shape[1:], dtype=np.float32)
    for partial in partials:
        total = total + partial.astype(np.float32)
    return total


def stage_transposed(accumulators: np.ndarray, *, dtype: str, slabs: int, block_m: int) -> np.ndarray:
    """``tilebit::stage_transposed`` (epilogue.cuh): fp32 accumulators [threads, slabs * block_m /
    2] -> uint16 [block_m, block's rows].

    Each thread's accumulators are ordered [slab][column / 8][row half][column parity].
    """
    threads = accumulators.shape[0]
    # axes: warpgroup, warp, lane / 4, lane % 4, slab, column / 8, row half, column parity
    a = accumulators.reshape(threads // GROUP_THREADS, 4, 8, 4, slabs, block_m // 8, 2, 2)
    columns_first = a.transpose(5, 3, 7, 0, 4, 1, 6, 2)
    return round_to(columns_first.reshape(block_m, -1).astype(np.float64), dtype)
