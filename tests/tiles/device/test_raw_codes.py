"""``raw.cuh``, compiled for the host, against its numpy twin and against arithmetic: every code point, every product of a code and an x."""

from __future__ import annotations

import ctypes
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tilebit.layouts.formats import Numbers
from tilebit.tiles.compiler.headers import TYPES, device_source
from tilebit.tiles.device import twins

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import CUDA_ARCH, DeviceCode, build, needs_host_compiler

pytestmark = needs_host_compiler
CODES = {"uint4": Numbers("uint", 4), "uint8": Numbers("uint", 8), "e2m1": Numbers("e2m1", 4)}
TYPE = {"uint4": "tilebit::Uint<4>", "uint8": "tilebit::Uint<8>", "e2m1": "tilebit::E2m1"}
FORMATS = tuple(product(("float16", "bfloat16"), CODES))
SOURCE = device_source(("codecs/dequant.cuh", "codecs/raw.cuh", "codecs/e2m1.cuh"))
ROWS_R = np.array([True, True, False, False] * 2)  # of the eight A elements: rows r; the others are of rows r + 8


@pytest.fixture(scope="module")
def device() -> DeviceCode:
    return DeviceCode(SOURCE, CUDA_ARCH["gemm_stream"], [f"tilebit::Raw<{TYPES[dtype]}, {TYPE[code]}>::unpack" for dtype, code in FORMATS])


RAW_PROBE = """
template <typename T, typename CODE> static void constants(float* numbers, uint16_t* ones) {
  using R = tilebit::Raw<T, CODE>;
  const float n[4] = {R::OFFSET, R::INVERSE_LOW, R::INVERSE_HIGH, R::BOTH_ROWS};
  const uint32_t o = R::ONES;
  memcpy(numbers, n, sizeof n); memcpy(ones, &o, sizeof o);
}
extern "C" void constants_float16_uint4(float* n, uint16_t* o) { constants<half, tilebit::Uint<4>>(n, o); }
extern "C" void constants_float16_uint8(float* n, uint16_t* o) { constants<half, tilebit::Uint<8>>(n, o); }
extern "C" void constants_float16_e2m1(float* n, uint16_t* o) { constants<half, tilebit::E2m1>(n, o); }
extern "C" void constants_bfloat16_uint4(float* n, uint16_t* o) { constants<__nv_bfloat16, tilebit::Uint<4>>(n, o); }
extern "C" void constants_bfloat16_uint8(float* n, uint16_t* o) { constants<__nv_bfloat16, tilebit::Uint<8>>(n, o); }
extern "C" void constants_bfloat16_e2m1(float* n, uint16_t* o) { constants<__nv_bfloat16, tilebit::E2m1>(n, o); }
"""


def raw_constants(dtype: str, code: str) -> tuple[float, np.ndarray, np.ndarray, bool]:
    """Of ``tilebit::Raw``: the offset, the inverse of the factor of each A element [8], the bits of the factor of rows r as an operand, a
    pair [2], and whether rows r carry the operands of rows r + 8 too."""
    numbers, ones = np.zeros(4, np.float32), np.zeros(2, np.uint16)
    probe = getattr(build(SOURCE + RAW_PROBE), f"constants_{dtype}_{code}")
    probe(ctypes.c_void_p(numbers.ctypes.data), ctypes.c_void_p(ones.ctypes.data))
    offset, low, high, both_rows = (float(v) for v in numbers)
    return offset, np.array([low, low, high, high] * 2), ones, bool(both_rows)


@pytest.mark.parametrize(("dtype", "code"), FORMATS)
def test_every_code_at_every_place(device: DeviceCode, dtype: str, code: str):
    """The bits of the twin, from which offset and factor give the code back, in rows r and r + 8."""
    bits = CODES[code].bits
    per_step, count = bits // 4, 1 << bits
    place = np.arange(8)
    codes = (np.arange(count)[:, None] * np.array([1, 3, 5, 7, 9, 11, 13, 15]) + 5 * place) % count  # odd steps: each place holds each code
    if bits == 4:
        words = (codes.astype(np.uint32) << np.array([4 * (i // 2) + 16 * (i % 2) for i in range(8)], np.uint32)).sum(1, keepdims=True)
    else:
        words = (codes.reshape(-1, 2, 4).astype(np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)).sum(2)
    words = np.ascontiguousarray(words.astype(np.uint32))
    got = np.full((count, 8), 0x7E5A, np.uint16)
    arguments = [(words.ctypes.data, 4 * per_step), (got.ctypes.data, got.strides[0])]
    device.call(f"tilebit::Raw<{TYPES[dtype]}, {TYPE[code]}>::unpack", arguments, count)
    np.testing.assert_array_equal(got, twins.raw_codes(words, dtype=dtype, numbers=CODES[code]))
    assert all(set(codes[:, i]) == set(range(count)) for i in place)

    offset, inverse, ones, both_rows = raw_constants(dtype, code)
    operands = twins.widen(got, dtype)
    if both_rows:
        operands = operands - np.where(ROWS_R, np.roll(operands, -2, axis=-1), 0.0)  # as sums of row r + 8 are taken from those of row r
    np.testing.assert_array_equal(operands * inverse - offset, np.array(CODES[code].values)[codes])
    np.testing.assert_array_equal(twins.widen(ones, dtype) * inverse[0], 1.0)  # the operand whose product is FACTOR * sum(x)


@pytest.mark.parametrize(("dtype", "code"), FORMATS)
def test_products_of_raw_codes_are_exact(dtype: str, code: str):
    """A raw code, subnormal or not, times any x (up to fp16's largest) is exact in the fp32 of the tensor cores; so is what zero points
    subtract, FACTOR * x."""
    _, inverse, ones, _ = raw_constants(dtype, code)
    pairs = np.arange(256, dtype=np.uint32)  # at 4 bits the codes of rows r and r + 8 come together: every two of them
    words = pairs * 0x01010101
    raw = twins.widen(twins.raw_codes(np.repeat(words[:, None], CODES[code].bits // 4, 1), dtype=dtype, numbers=CODES[code]), dtype)
    x = twins.widen(np.arange({"float16": 0x7C00, "bfloat16": 0x7F80}[dtype], dtype=np.uint16), dtype)
    x = x[x <= 65504.0]
    factor = twins.widen(ones, dtype)[0]
    for half in (0, 1):
        products = np.append(raw[:, 2 * half], factor)[:, None] * x
        np.testing.assert_array_equal(products.astype(np.float32), products)
    np.testing.assert_array_equal(factor * x * inverse[0], x)
