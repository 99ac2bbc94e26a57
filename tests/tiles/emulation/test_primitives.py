"""What the emulation puts in place of CUDA's functions and instructions, one by one, against numpy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import ALONE, DeviceCode, KernelFault, Place, needs_host_compiler

pytestmark = needs_host_compiler
LANES = np.arange(32)
SOURCE = """
void shuffles(const float* in, float* out) {
  const int t = threadIdx.x;
  const float v = in[t];
  out[t] = __shfl_sync(0xffffffffu, v, (t * 7 + 3) & 31);
  out[32 + t] = __shfl_xor_sync(0xffffffffu, v, 5);
  out[64 + t] = __shfl_down_sync(0xffffffffu, v, 4);
  out[96 + t] = __shfl_up_sync(0xffffffffu, v, 3);
  out[128 + t] = __shfl_sync(0xffffffffu, v, 11, 8);
  out[160 + t] = __shfl_xor_sync(0xffffffffu, v, 2, 4);
  out[192 + t] = __shfl_down_sync(0xffffffffu, v, 4, 8);
  out[224 + t] = __shfl_up_sync(0xffffffffu, v, 1, 4);
  out[256 + t] = t < 20 ? __shfl_xor_sync(0x000fffffu, v, 2) : __shfl_sync(0xfff00000u, v, 31);
}
void votes(uint32_t* out) {
  const int t = threadIdx.x;
  out[t] = __ballot_sync(0xffffffffu, t % 3 == 0);
  out[32 + t] = __any_sync(0xffffffffu, t == 17);
  out[64 + t] = __any_sync(0xffffffffu, t == 77);
  out[96 + t] = __all_sync(0xffffffffu, t < 32);
  out[128 + t] = __all_sync(0xffffffffu, t != 4);
  out[160 + t] = t & 1 ? __ballot_sync(0xaaaaaaaau, t > 15) : 7u;
  out[192 + t] = __syncthreads_and(t != 9);
  out[224 + t] = __syncthreads_and(t < 32);
}
void apart() {  // half of the warp at another instruction
  if (threadIdx.x < 16) __shfl_xor_sync(0xffffffffu, 0, 1);
  else __any_sync(0xffffffffu, 1);
}
void outside() { if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 0, 16); }
void foreign() { __any_sync(0x0000ffffu, 1); }
void endless() { for (;;) __syncwarp(); }
void missing() { if (threadIdx.x) __syncwarp(); }
void transpose(const uint32_t* in, uint32_t* out) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out[threadIdx.x]) : "r"(in[threadIdx.x]));
}
void counted(const uint32_t* a, const uint32_t* b, int* d) {
  const uint32_t *x = a + threadIdx.x * 4, *y = b + threadIdx.x * 2;
  int* o = d + threadIdx.x * 4;
  asm volatile("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+r"(o[0]), "+r"(o[1]), "+r"(o[2]), "+r"(o[3]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
}
void turned(const uint32_t* in, uint32_t* out) { out[threadIdx.x] = __funnelshift_l(in[threadIdx.x], in[31 - threadIdx.x], threadIdx.x); }
void functions(const float* in, float* out) {
  const float v = in[threadIdx.x];
  float* o = out + threadIdx.x;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(o[0]) : "f"(v));
  asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(o[32]) : "f"(fabsf(v)));
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(o[64]) : "f"(v));
  asm volatile("tanh.approx.f32 %0, %1;" : "=f"(o[96]) : "f"(v));
  o[128] = __expf(v), o[160] = rsqrtf(fabsf(v)), o[192] = tanhf(v), o[224] = __fdividef(1.0f, v);
  o[256] = __uint_as_float(__float_as_uint(v)), o[288] = __logf(fabsf(v));
}
void rounded(const float* in, int* out) {
  const float v = in[threadIdx.x];
  out[threadIdx.x] = __float2int_rn(v);
  out[32 + threadIdx.x] = int(__float2uint_rn(fabsf(v)));
}
template <typename T, typename P>
uint32_t bits(P p) { return uint32_t(p.y.bits) << 16 | p.x.bits; }
void pairs(const float* a, const float* b, uint32_t* out) {
  const int t = threadIdx.x;
  const half2 x = __floats2half2_rn(a[t], b[t]), y = __float22half2_rn(make_float2(b[t], a[t])), z = __float2half2_rn(a[t]);
  uint32_t* o = out + t;
  o[0] = bits<half>(x), o[32] = bits<half>(z), o[64] = bits<half>(__hmul2(x, y)), o[96] = bits<half>(__hfma2(x, y, z));
  o[128] = bits<half>(__hmax2(x, y)), o[160] = bits<half>(__hmin2(x, y));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(o[192]) : "f"(b[t]), "f"(a[t]));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(o[224]) : "f"(b[t]), "f"(a[t]));
  o[256] = bits<__nv_bfloat16>(__floats2bfloat162_rn(a[t], b[t]));
  const float2 back = __half22float2(x);
  o[288] = bits<half>(__floats2half2_rn(back.x, back.y));
}
void loads(const uint4* in, uint32_t* out, int first) {
  const uint4 v = __ldg(in + first + threadIdx.x);
  out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
void stores(float4* out, int first) { __stcg(out + first + threadIdx.x, make_float4(1, 2, 3, float(threadIdx.x))); }
void four_floats(float* to, int at) { *reinterpret_cast<float4*>(to + at + threadIdx.x * 4) = make_float4(1, 2, 3, 4); }
void two_floats(const float* from, float* to, int at) {
  const float2 v = *reinterpret_cast<const float2*>(from + at + threadIdx.x * 2);
  to[threadIdx.x] = v.x + v.y;
}
void matrix_row(const void* in, uint32_t* out, int shift) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(in)) + (threadIdx.x & 7) * 16 + shift;
  uint32_t r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  out[threadIdx.x] = r[0];
}
"""
NAMES = (
    "shuffles", "votes", "apart", "outside", "foreign", "endless", "missing", "transpose", "counted", "turned", "functions", "rounded",
    "pairs", "loads", "stores", "four_floats", "two_floats", "matrix_row",
)  # fmt: skip
VALUES = np.array([-3.75, -1.5, -2.5, -0.5, 0.5, 1.5, 2.5, 0.1, 0.3, 7, 60, -60, 1e-3, 3.5e4, 1e-6, 2.0**-20, *np.linspace(-9, 9, 16)])


@pytest.fixture(scope="module")
def device() -> DeviceCode:
    return DeviceCode(SOURCE, 900, NAMES)


def run(device: DeviceCode, name: str, *arguments: np.ndarray | int, place: Place = ALONE) -> None:
    passed = [(a.ctypes.data, 0) if isinstance(a, np.ndarray) else (a, 0) for a in arguments]
    device.call(name, passed, 32, place)


def test_shuffles(device: DeviceCode):
    values, out = np.random.default_rng(0).normal(size=32).astype(np.float32), np.zeros((9, 32), np.float32)
    run(device, "shuffles", values, out)
    part, rest = LANES & ~7, LANES & ~3
    sources = (
        (LANES * 7 + 3) % 32,
        LANES ^ 5,
        np.where(LANES + 4 < 32, LANES + 4, LANES),
        np.where(LANES >= 3, LANES - 3, LANES),
        part + 3,
        LANES ^ 2,
        np.where(LANES % 8 + 4 < 8, LANES + 4, LANES),
        np.maximum(LANES - 1, rest),
        np.where(LANES < 20, LANES ^ 2, 31),
    )
    for row, source in zip(out, sources, strict=True):
        np.testing.assert_array_equal(row, values[source])


def test_votes(device: DeviceCode):
    out = np.zeros((8, 32), np.uint32)
    run(device, "votes", out)
    thirds, odd = sum(1 << i for i in range(0, 32, 3)), sum(1 << i for i in range(17, 32, 2))
    for row, expected in zip(out, (thirds, 1, 0, 1, 0, np.where(LANES % 2, odd, 7), 0, 1), strict=True):
        assert (row == expected).all()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("apart", "different instructions"),
        ("outside", "outside of its mask"),
        ("foreign", "not in the mask"),
        ("missing", "wait"),
        ("endless", "never ends"),
    ],
)
def test_lanes_that_do_not_meet(device: DeviceCode, name: str, sentence: str):
    with pytest.raises(KernelFault, match=sentence):
        run(device, name)


def fragment(matrix: np.ndarray) -> np.ndarray:
    """The register of each lane of an 8 x 8 matrix of 16 bits."""
    return np.ascontiguousarray(matrix.astype(np.uint16)).view(np.uint32).reshape(32)


def test_movmatrix(device: DeviceCode):
    matrix, out = np.random.default_rng(1).integers(0, 1 << 16, (8, 8)), np.zeros(32, np.uint32)
    run(device, "transpose", fragment(matrix), out)
    np.testing.assert_array_equal(out, fragment(matrix.T))


def test_products_of_bits(device: DeviceCode):
    """PTX ISA: of A a lane has row lane / 4 and the one eight below, of B column lane / 4, 32 k from 32 (lane % 4) on and 128 further."""
    generator = np.random.default_rng(5)
    a, b = generator.integers(0, 2, (16, 256)), generator.integers(0, 2, (8, 256))
    words = [(matrix.reshape(-1, 8, 32) << np.arange(32)).sum(-1).astype(np.uint32) for matrix in (a, b)]
    row, column = LANES // 4, LANES % 4
    of_a = np.stack([words[0][row + 8 * (i & 1), column + 4 * (i >> 1)] for i in range(4)], 1)
    of_b = np.stack([words[1][row, column + 4 * i] for i in range(2)], 1)
    out = np.ones((32, 4), np.int32)
    run(device, "counted", np.ascontiguousarray(of_a), np.ascontiguousarray(of_b), out)
    product = a @ b.T
    assert (out == np.stack([product[row + 8 * (i >> 1), 2 * column + (i & 1)] for i in range(4)], 1) + 1).all()


def test_funnel_shift(device: DeviceCode):
    values, out = np.random.default_rng(6).integers(0, 1 << 32, 32, dtype=np.uint32), np.zeros(32, np.uint32)
    run(device, "turned", values, out)
    wide = (values[::-1].astype(object) << 32) + values.astype(object)
    assert [int(v) for v in out] == [(int(w) << t >> 32) & 0xFFFFFFFF for t, w in enumerate(wide)]


def test_functions(device: DeviceCode):
    values, out = VALUES.astype(np.float32), np.zeros((10, 32), np.float32)
    run(device, "functions", values, out)
    v = values.astype(np.float64)
    with np.errstate(over="ignore"):
        powers, exponentials = np.exp2(v), np.exp(v)
    logarithms, roots = (np.log2(abs(v)), np.log(abs(v))), 1 / np.sqrt(abs(v))
    expected = (powers, logarithms[0], 1 / v, np.tanh(v), exponentials, roots, np.tanh(v), 1 / v, v, logarithms[1])
    for row, right in zip(out, expected, strict=True):
        np.testing.assert_allclose(row, right, rtol=2e-7, atol=1e-9 * (right is expected[1] or right is expected[9]))


def test_subnormals_are_zeros(device: DeviceCode):
    """As .ftz says, on both sides; the exponential of minus infinity is zero."""
    values = np.full(32, -np.inf, np.float32)
    values[1:4] = -126, -126.5, 1e-40
    out = np.zeros((10, 32), np.float32)
    run(device, "functions", values, out)
    assert out[0, :4].tolist() == [0, 2.0**-126, 0, 1]
    assert out[2, 3] == np.inf


def test_rounding_to_integers(device: DeviceCode):
    """Halves go to the even one."""
    out = np.zeros((2, 32), np.int32)
    run(device, "rounded", VALUES.astype(np.float32), out)
    np.testing.assert_array_equal(out, [np.rint(VALUES.astype(np.float32)), np.rint(abs(VALUES.astype(np.float32)))])


def bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Words of two 16-bit numbers: floats are rounded to fp16, uint16 are taken as they are."""
    low, high = (v if v.dtype == np.uint16 else v.astype(np.float16).view(np.uint16) for v in (low, high))
    return high.astype(np.uint32) << 16 | low


def test_pairs(device: DeviceCode):
    a, b = VALUES.astype(np.float32), VALUES[::-1].astype(np.float32)
    out = np.zeros((10, 32), np.uint32)
    run(device, "pairs", a, b, out)
    x, y = a.astype(np.float16).astype(np.float64), b.astype(np.float16).astype(np.float64)
    with np.errstate(over="ignore"):
        expected = (
            packed(a, b), packed(a, a), packed(x * y, x * y), packed(x * y + x, x * y + x), packed(np.maximum(x, y), np.maximum(x, y)),
            packed(np.minimum(x, y), np.minimum(x, y)), packed(a, b), packed(bfloat16(a), bfloat16(b)), packed(bfloat16(a), bfloat16(b)),
            packed(a, b),
        )  # fmt: skip
    for row, right in zip(out, expected, strict=True):
        np.testing.assert_array_equal(row, right)


def test_global_memory_ends_where_its_tensors_end(device: DeviceCode):
    words, out = np.arange(128, dtype=np.uint32), np.zeros(32, np.uint32)
    inside = Place.of((1,), [(0,)], [0], [(words.ctypes.data, words.ctypes.data + words.nbytes)])
    run(device, "loads", words, out, 0, place=inside)
    np.testing.assert_array_equal(out, words.reshape(32, 4).sum(1))
    run(device, "stores", words, 0, place=inside)
    np.testing.assert_array_equal(words.view(np.float32).reshape(32, 4), [[1, 2, 3, t] for t in range(32)])
    for name, arguments in (("loads", (words, out, 1)), ("stores", (words, 1))):
        with pytest.raises(KernelFault, match="past the ends"):
            run(device, name, *arguments, place=inside)


def test_vectors_are_aligned_as_a_gpu_wants_them(device: DeviceCode):
    memory, out = np.zeros(256, np.float32), np.zeros(32, np.float32)
    memory = memory[-memory.ctypes.data % 16 // 4 :]
    run(device, "four_floats", memory, 4)
    np.testing.assert_array_equal(memory[:136].reshape(34, 4)[1:33], [[1, 2, 3, 4]] * 32)
    run(device, "two_floats", memory, out, 6)
    np.testing.assert_array_equal(out, [7, 3] * 16)
    for name, arguments in (("four_floats", (memory, 6)), ("two_floats", (memory, out, 7))):
        with pytest.raises(KernelFault, match="not aligned to its type"):
            run(device, name, *arguments)


def test_shared_addresses_are_aligned(device: DeviceCode):
    memory, out = np.arange(2048, dtype=np.uint16), np.zeros(32, np.uint32)
    start = -memory.ctypes.data % 128 // 2
    block = Place.of((1,), [(0,)], [memory[start:].ctypes.data])
    run(device, "matrix_row", memory[start:], out, 0, place=block)
    np.testing.assert_array_equal(out, memory[start : start + 64].view(np.uint32))
    with pytest.raises(KernelFault, match="not aligned"):
        run(device, "matrix_row", memory[start:], out, 8, place=block)
