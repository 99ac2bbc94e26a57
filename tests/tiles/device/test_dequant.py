"""The CUDA device functions, compiled for the host, against their numpy twins and against arithmetic: bit for bit, every code point."""

from __future__ import annotations

import ctypes
import re
import sys
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tilebit.layouts.formats import Numbers
from tilebit.layouts.packing import gemm_layout
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.tiles.compiler.headers import TYPES, device_source
from tilebit.tiles.device import twins
from tilebit.tiles.gemm.operands import BARRIER

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import CUDA_ARCH, DeviceCode, build, needs_host_compiler

pytestmark = needs_host_compiler
DTYPES = ("float16", "bfloat16")
CODES = {"uint4": Numbers("uint", 4), "uint8": Numbers("uint", 8), "e2m1": Numbers("e2m1", 4)}
TYPE = {"uint4": "tilebit::Uint<4>", "uint8": "tilebit::Uint<8>", "e2m1": "tilebit::E2m1"}
FORMATS = tuple(product(DTYPES, CODES))
PATHS = tuple(product((True, False), (True, False)))  # symmetric, scaled
SOURCE = device_source(("ptx/instructions.cuh", "codecs/dequant.cuh", "codecs/e2m1.cuh", "store/split_k.cuh", "store/epilogue.cuh"))
THREADS = {1: 128, 2: 256, 4: 256}  # of a block whose warpgroups hold that many slabs each
RECORDS = {4: 2, 8: 4}  # 128 k a stage
GROUP_STEPS = 4  # 64 k a scale group
PARTS = {1: 1, 2: 2, 4: 2}  # that a stage is taken in, by slabs

# Ordinary, powers of two, the smallest and largest subnormal, the smallest normal, the largest finite (products overflow), zero, negative.
SCALE_BITS = {
    "float16": (0x3C00, 0x4000, 0x4400, 0x211F, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0x5A3D, 0x0000, 0xA12F, 0x1555),
    "bfloat16": (0x3F80, 0x4000, 0x4080, 0x3C23, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x5A3D, 0x0000, 0xBC2F, 0x3A55),
}


def scale_bits(dtype: str, code: str) -> list[int]:
    """Those that kernels take of a kind of codes: of 4-bit floats none above 2 and, because one product is all, none below 0."""
    two = 0x4000  # in either type
    return [bits if code != "e2m1" or bits & 0x7FFF <= two else two for bits in SCALE_BITS[dtype]]


def call_names(dtype: str, code: str, symmetric: bool, scaled: bool, slabs: int) -> list[str]:
    """Of the parts of a stage, in order."""
    rows, records = THREADS[slabs] // 128 * slabs * 64, RECORDS[CODES[code].bits] // PARTS[slabs]
    flags = [str(flag).lower() for flag in (symmetric, scaled)]
    shape = f"{TYPES[dtype]}, {TYPE[code]}, {flags[0]}, {slabs}"
    return [f"tilebit::dequantize<{shape}, {part}, {records}, {GROUP_STEPS}, {rows}, {flags[1]}>" for part in range(PARTS[slabs])]


def served(code: str, symmetric: bool, scaled: bool) -> bool:
    """4-bit floats have neither zero points nor one scale a channel."""
    return code != "e2m1" or (symmetric and scaled)


@pytest.fixture(scope="module")
def device() -> DeviceCode:
    names = [name for f in FORMATS for p in PATHS if served(f[1], *p) for slabs in THREADS for name in call_names(*f, *p, slabs)]
    return DeviceCode(SOURCE, CUDA_ARCH["gemm_wgmma"], names)


def run_dequantize(
    device: DeviceCode, names: list[str], words: np.ndarray, scales: np.ndarray, zeros: np.ndarray, threads: int
) -> np.ndarray:
    """uint16 [threads, elements], the parts' one after another. ``words``: a stage's records, [slab, record, 512]."""
    bits = 8 if "<8>" in names[0] else 4
    parts = words.reshape(words.shape[0], len(names), -1).swapaxes(0, 1).copy()  # as they lie in a stage
    out = np.full((len(names), threads, words.size * 32 // bits // threads // len(names)), 0x7E5A, dtype=np.uint16)
    for name, part in zip(names, out, strict=True):
        device.call(name, [(part.ctypes.data, part.strides[0]), *((a.ctypes.data, 0) for a in (parts, scales, zeros)), (0, 1)], threads)
    return np.concatenate(list(out), axis=1)


def stages(dtype: str, code: str, symmetric: bool, rows: int, every_place: bool):
    """(codes [rows, 128], zero points [groups, rows], indices into SCALE_BITS [groups, rows]), stage by stage, until every code has met
    every zero point under every scale and, with ``every_place``, every place of a stage has held every code."""
    count = 1 << CODES[code].bits
    zero_points = [0 if code == "e2m1" else count // 2] if symmetric else range(count)
    pairs = np.array(list(product(zero_points, range(len(SCALE_BITS[dtype])))))
    chunks = -(-len(pairs) // (2 * rows))  # a stage has two groups of 64 k
    plan = [(shift, chunk) for shift in range(0, count, 64) for chunk in range(chunks)]
    plan += [(shift, shift % chunks) for shift in range(count)] if every_place else []
    k = np.arange(128)
    for shift, chunk in plan:
        zero_point, scale = pairs[(np.arange(2 * rows) + chunk * 2 * rows) % len(pairs)].reshape(2, rows, 2).transpose(2, 0, 1)
        codes = (k % 64 + 7 * (k // 64) + 3 * np.arange(rows)[:, None] + shift) % count
        yield codes.astype(np.uint8), zero_point, scale


@pytest.mark.parametrize("slabs", THREADS)
@pytest.mark.parametrize(("dtype", "code", "symmetric", "scaled"), [(*f, *p) for f in FORMATS for p in PATHS if served(f[1], *p)])
def test_every_code_point(device: DeviceCode, dtype: str, code: str, symmetric: bool, scaled: bool, slabs: int):
    numbers, bits = CODES[code], CODES[code].bits
    threads = THREADS[slabs]
    blocks = threads // 128 * slabs
    layout, names = gemm_layout("sm_90a", bits), call_names(dtype, code, symmetric, scaled, slabs)
    every_place = scaled and slabs == 1
    met = np.zeros((1 << bits, 1 << bits, len(SCALE_BITS[dtype])), dtype=bool)  # code, zero point, scale
    held = np.zeros((blocks * 64, 128, 1 << bits), dtype=bool)
    for codes, zero_points, which in stages(dtype, code, symmetric, blocks * 64, every_place):
        scales = np.array(scale_bits(dtype, code), dtype=np.uint16)[which]
        words = layout.pack(codes)
        zeros = twins.round_to(zero_points, dtype)
        got = run_dequantize(device, names, words, scales, zeros, threads)
        twin = twins.dequantize(
            words, scales, None if symmetric else zeros, dtype=dtype, numbers=numbers, slabs=slabs, group_steps=GROUP_STEPS, scaled=scaled
        )
        np.testing.assert_array_equal(got, twin)

        group = np.arange(128) // 64
        exact = np.array(numbers.values)[codes] - zero_points.T[:, group]
        expected = twins.round_to(exact * twins.widen(scales, dtype).T[:, group] if scaled else exact, dtype)
        np.testing.assert_array_equal(in_place(got, blocks, slabs), expected)
        met[codes, zero_points.T[:, group], which.T[:, group]] = True
        if every_place:
            held[(*np.indices(codes.shape), codes)] = True
    assert met.sum() == (1 << bits) * (1 if symmetric else 1 << bits) * len(SCALE_BITS[dtype])
    assert held.all() or not every_place


def in_place(registers: np.ndarray, blocks: int, slabs: int) -> np.ndarray:
    """[threads, elements] -> [rows, 128]: PTX's A fragment, written out."""
    out = np.zeros((blocks * 64, 128), dtype=np.uint16)
    thread, index = np.indices(registers.shape)
    atom, slab, element = index // (8 * slabs), index // 8 % slabs, index % 8
    lane = thread % 32
    row = (thread // 128 * slabs + slab) * 64 + thread % 128 // 32 * 16 + lane // 4 + 8 * (element // 2 % 2)
    out[row, atom * 16 + element // 4 * 8 + lane % 4 * 2 + element % 2] = registers
    return out


def test_split_k_sums_in_split_order(device: DeviceCode):
    """Whoever arrives last, the bits are those of the twin; the ticket is zero again; only the last block is told to store."""
    registers, threads, splits, tiles = 8, 128, 3, 2
    name = f"tilebit::reduce_split_k<{registers}, {threads}, {BARRIER}>"
    rng = np.random.default_rng(0)
    sums = rng.standard_normal((tiles, splits, threads, registers)).astype(np.float32) * np.float32(10) ** rng.integers(
        -4, 5, (tiles, splits, 1, 1)
    )
    sums = sums.astype(np.float32)
    workspace = np.zeros(TICKETS + tiles * splits * threads * registers, np.int32)
    tickets, partials = workspace[:TICKETS], workspace[TICKETS:].view(np.float32)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        partials[:] = np.nan
        for tile in range(tiles):
            for place, split in enumerate(order):
                accumulators, last = sums[tile, split].copy(), np.full(threads, 7, np.int32)
                arguments = [(accumulators.ctypes.data, accumulators.strides[0]), (workspace.ctypes.data, 0), (tile, 0), (split, 0)]
                device.call(name, [*arguments, (splits, 0), (0, 1), (last.ctypes.data, 4)], threads)
                assert (last == (place == splits - 1)).all()
                stored = partials[twins.partial_index(tile, split, splits, registers, threads)]
                np.testing.assert_array_equal(stored, sums[tile, split])
            np.testing.assert_array_equal(accumulators, twins.reduce_split_k(sums[tile]))
    assert not tickets.any()
    assert np.unique(twins.partial_index(1, 2, splits, registers, threads)).size == registers * threads


@pytest.mark.parametrize("cuda_arch", [800, 900], ids=["stores", "stmatrix"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("slabs", "threads", "block_m"), [(1, 128, 16), (1, 256, 32), (2, 256, 64)])
def test_stage_transposed(dtype: str, cuda_arch: int, slabs: int, threads: int, block_m: int):
    """Every element of Y^T arrives at its place of y's row-major tile, rounded once; the padding of a row is left alone."""
    rows = threads // 128 * slabs * 64
    name = f"tilebit::stage_transposed<{TYPES[dtype]}, {slabs}, {block_m}, {threads}, {BARRIER}>"
    y = np.random.default_rng(1).standard_normal((rows, block_m)).astype(np.float32)
    row, column = np.indices(y.shape)  # PTX's accumulator fragment, written out
    thread = row // 64 // slabs * 128 + row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
    value = (row // 64 % slabs * (block_m // 8) + column // 8) * 4 + row % 16 // 8 * 2 + column % 2
    accumulators = np.full((threads, slabs * block_m // 2), np.nan, np.float32)
    accumulators[thread, value] = y
    staging = np.full((block_m, rows + 8), 0x7E5A, np.uint16)
    device = DeviceCode(SOURCE, cuda_arch)
    device.call(name, [(accumulators.ctypes.data, accumulators.strides[0]), (staging.ctypes.data, 0), (0, 1)], threads)
    expected = twins.round_to(y.T.astype(np.float64), dtype)
    np.testing.assert_array_equal(staging[:, :rows], expected)
    np.testing.assert_array_equal(twins.stage_transposed(accumulators, dtype=dtype, slabs=slabs, block_m=block_m), expected)
    assert (staging[:, rows:] == 0x7E5A).all()


# The shim and the twins' rounding, on which everything above rests

SHIM_PROBE = """
template <typename T> static void probe(const uint16_t* a, const uint16_t* b, const uint16_t* c, int n, uint16_t* out) {
  for (int i = 0; i < n; ++i) {
    T x, y, z; x.bits = a[i]; y.bits = b[i]; z.bits = c[i];
    out[i] = __hadd(x, y).bits; out[n + i] = __hsub(x, y).bits; out[2 * n + i] = __hmul(x, y).bits; out[3 * n + i] = __hfma(x, y, z).bits;
  }
}
using Bits = const uint16_t*;
extern "C" void probe_float16(Bits a, Bits b, Bits c, int n, uint16_t* out) { probe<half>(a, b, c, n, out); }
extern "C" void probe_bfloat16(Bits a, Bits b, Bits c, int n, uint16_t* out) { probe<__nv_bfloat16>(a, b, c, n, out); }
extern "C" uint32_t permute(uint32_t x, uint32_t y, uint32_t s) { return __byte_perm(x, y, s); }
"""


def nearest(value: Fraction, dtype: str) -> int:
    """Bits of the representable number nearest to ``value``, ties to even, by exact arithmetic."""
    mantissa, lowest, infinity = {"float16": (10, -14, 0x7C00), "bfloat16": (7, -126, 0x7F80)}[dtype]
    size = abs(value)
    exponent = max(lowest, size.numerator.bit_length() - size.denominator.bit_length())  # denominators are powers of two
    units = round(size / Fraction(2) ** (exponent - mantissa))  # Fraction rounds ties to even
    return min(units + ((exponent - lowest) << mantissa), infinity) | (0x8000 if value < 0 else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shim_rounds_once(dtype: str):
    """Sums, differences, products and fused multiply-adds of random bit patterns, subnormals and overflows among them."""
    rng = np.random.default_rng(2)
    infinity = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    a, b, c = (rng.integers(0, infinity, 1000).astype(np.uint16) | (rng.integers(0, 2, 1000) << 15).astype(np.uint16) for _ in range(3))
    near = rng.integers(0, 2, 1000).astype(bool)  # half of them of similar size, where sums cancel and ties happen
    b[near] = (a[near] & 0x7FFF).clip(64, infinity - 64) + rng.integers(-64, 64, near.sum()).astype(np.int16).view(np.uint16)
    out = np.zeros((4, a.size), np.uint16)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (a, b, c)]
    getattr(build(SHIM_PROBE), f"probe_{dtype}")(*pointers, a.size, ctypes.c_void_p(out.ctypes.data))
    for i in range(a.size):
        x, y, z = (Fraction(float(twins.widen(v[i], dtype))) for v in (a, b, c))
        for operation, exact in enumerate((x + y, x - y, x * y, x * y + z)):
            if exact:  # the sign of zero is not asked for
                assert out[operation, i] == nearest(exact, dtype), (operation, hex(a[i]), hex(b[i]), hex(c[i]))
                if operation < 3:
                    assert twins.round_to(np.array(float(exact)), dtype) == nearest(exact, dtype)
            else:
                assert out[operation, i] & 0x7FFF == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twins_round_every_number_to_itself(dtype: str):
    infinity = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    finite = np.concatenate([np.arange(infinity), 0x8000 + np.arange(infinity)]).astype(np.uint16)
    np.testing.assert_array_equal(twins.round_to(twins.widen(finite, dtype), dtype), finite)
    assert twins.round_to(np.array([np.inf, -np.inf, 1e39, np.nan]), dtype).tolist() == [infinity, infinity | 0x8000, infinity, 0x7FFF]


def test_the_shim_permutes_bytes():
    permute = build(SHIM_PROBE).permute
    permute.restype = ctypes.c_uint32
    words = (ctypes.c_uint32(0x33221100), ctypes.c_uint32(0x77665544))
    assert permute(*words, ctypes.c_uint32(0x7140)) == 0x77114400
    assert permute(*words, ctypes.c_uint32(0x4321)) == 0x44332211


def test_the_headers_name_this_test():
    """The header promises this comparison; a rename must not break the promise."""
    assert re.search(r"test_dequant\.py", SOURCE)
