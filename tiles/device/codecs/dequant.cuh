// Dequantize one thread's share of packed weights into the A operand registers of an MMA.
//
// Storage (layouts/packing.py, induced from the fragment): a record is one 64-row slab of 512
// words, thread-major: thread t of the warpgroup (or of four warps) owns words 4t..4t+3. At 4 bits
// a word holds the eight A elements of one k16 step, slots ordered 0,2,4,6,1,3,5,7, so that (w >> 4
// i) & 0x000f000f is register pair i; at 8 bits two words hold them in natural order. Every path
// computes (q - z) exactly and rounds once, in the multiplication by the scale.
// tests/tiles/test_dequant.py compiles this file for the host and compares every code point with
// the numpy twin.
#pragma once
#include <stdint.h>
#ifndef TILEBIT_HOST_EMULATION
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace tilebit {

// Kinds of codes: bits of one, and the zero point where none is stored. Others have files of their
// own.
template <int N>
struct Uint {
  static constexpr int BITS = N;
  static constexpr float MIDDLE = 1 << (N - 1);
};

__device__ __forceinline__ uint32_t lop3_and_or(uint32_t a, uint32_t mask, uint32_t magic) {
#ifdef TILEBIT_HOST_EMULATION
  return (a & mask) | magic;
#else
  uint32_t d;  // 0xea = (a & b) | c in one instruction; the compiler alone sometimes emits two
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(magic));
  return d;
#endif
}

// Bits of a where the mask has ones, of b where it has none.
__device__ __forceinline__ uint32_t lop3_select(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef TILEBIT_HOST_EMULATION
  return (mask & a) | (~mask & b);
#else
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
#endif
}

// Per-channel formats scale the accumulators instead (SCALED is false): the operand is then the
// integer q - z itself.
template <bool SCALED, typename Pair>
__device__ __forceinline__ Pair scaled(Pair value, Pair scale) {
  if constexpr (SCALED) return __hmul2(value, scale);
  return value;
}

template <typename Pair>
__device__ __forceinline__ Pair as_pair(uint32_t bits) {
  return *reinterpret_cast<Pair*>(&bits);
}

// What a kind of codes needs per row and group: the scale, and the zero point in the form its bit
// trick subtracts.
template <typename T, typename CODE>
struct Row;

// fp16, 4 bits: a nibble under the exponent of 1024 is 1024 + q; the upper one is 1024 + 16 q,
// folded by one FMA with 1/16.
template <>
struct Row<half, Uint<4>> {
  half2 scale, low, high;  // low = 1024 + z, high = -(64 + z)
  __device__ __forceinline__ Row(half s, half z)
      : scale(__half2half2(s)),
        low(__half2half2(__hadd(__ushort_as_half(0x6400), z))),
        high(__half2half2(__hneg(__hadd(__ushort_as_half(0x5400), z)))) {}
};
template <bool SCALED>
__device__ __forceinline__ void unpack(const uint32_t* words, const Row<half, Uint<4>>& r0, const Row<half, Uint<4>>& r1, half2* out) {
  const half2 sixteenth = __half2half2(__ushort_as_half(0x2c00));
  const uint32_t w = words[0], v = w >> 8;
  const half2 a = as_pair<half2>(lop3_and_or(w, 0x000f000fu, 0x64006400u));
  const half2 b = as_pair<half2>(lop3_and_or(w, 0x00f000f0u, 0x64006400u));
  const half2 c = as_pair<half2>(lop3_and_or(v, 0x000f000fu, 0x64006400u));
  const half2 d = as_pair<half2>(lop3_and_or(v, 0x00f000f0u, 0x64006400u));
  out[0] = scaled<SCALED>(__hsub2(a, r0.low), r0.scale);
  out[1] = scaled<SCALED>(__hfma2(b, sixteenth, r1.high), r1.scale);
  out[2] = scaled<SCALED>(__hsub2(c, r0.low), r0.scale);
  out[3] = scaled<SCALED>(__hfma2(d, sixteenth, r1.high), r1.scale);
}

// fp16, 8 bits: a byte under the exponent of 1024 is 1024 + q.
template <>
struct Row<half, Uint<8>> {
  half2 scale, low;
  __device__ __forceinline__ Row(half s, half z) : scale(__half2half2(s)), low(__half2half2(__hadd(__ushort_as_half(0x6400), z))) {}
};
template <bool SCALED>
__device__ __forceinline__ void unpack(const uint32_t* words, const Row<half, Uint<8>>& r0, const Row<half, Uint<8>>& r1, half2* out) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const half2 a = as_pair<half2>(__byte_perm(words[i], 0x64646464u, 0x4140));
    const half2 b = as_pair<half2>(__byte_perm(words[i], 0x64646464u, 0x4342));
    out[2 * i] = scaled<SCALED>(__hsub2(a, r0.low), r0.scale);
    out[2 * i + 1] = scaled<SCALED>(__hsub2(b, r1.low), r1.scale);
  }
}

// bf16, 4 bits: a nibble under the exponent of 128 is 128 + q (the significand has seven bits, so
// only the lowest nibble position is exact).
template <>
struct Row<__nv_bfloat16, Uint<4>> {
  __nv_bfloat162 scale, low;
  __device__ __forceinline__ Row(__nv_bfloat16 s, __nv_bfloat16 z)
      : scale(__bfloat162bfloat162(s)), low(__bfloat162bfloat162(__hadd(__ushort_as_bfloat16(0x4300), z))) {}
};
template <bool SCALED>
__device__ __forceinline__ void unpack(const uint32_t* words, const Row<__nv_bfloat16, Uint<4>>& r0, const Row<__nv_bfloat16, Uint<4>>& r1,
                                       __nv_bfloat162* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 a = as_pair<__nv_bfloat162>(lop3_and_or(words[0] >> (4 * i), 0x000f000fu, 0x43004300u));
    const Row<__nv_bfloat16, Uint<4>>& r = (i & 1) ? r1 : r0;
    out[i] = scaled<SCALED>(__hsub2(a, r.low), r.scale);
  }
}

// bf16, 8 bits: 128 + q does not fit bf16's significand; go through fp32, where 2^23 + q is exact,
// and round q - z (exact) to bf16.
template <>
struct Row<__nv_bfloat16, Uint<8>> {
  __nv_bfloat162 scale;
  float low;  // 2^23 + z
  __device__ __forceinline__ Row(__nv_bfloat16 s, __nv_bfloat16 z) : scale(__bfloat162bfloat162(s)), low(8388608.0f + __bfloat162float(z)) {}
};
template <bool SCALED>
__device__ __forceinline__ void unpack(const uint32_t* words, const Row<__nv_bfloat16, Uint<8>>& r0, const Row<__nv_bfloat16, Uint<8>>& r1,
                                       __nv_bfloat162* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t w = words[i >> 1];
    const Row<__nv_bfloat16, Uint<8>>& r = (i & 1) ? r1 : r0;
    const float a = __uint_as_float(__byte_perm(w, 0x4b000000u, (i & 1) ? 0x7542 : 0x7540)) - r.low;
    const float b = __uint_as_float(__byte_perm(w, 0x4b000000u, (i & 1) ? 0x7543 : 0x7541)) - r.low;
    out[i] = scaled<SCALED>(__floats2bfloat162_rn(a, b), r.scale);
  }
}

template <typename T>
struct PairOf;
template <>
struct PairOf<half> {
  using type = half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

// CODE: the kind of codes. SLABS 64-row slabs per warpgroup, part PART of a stage: RECORDS records
// (64 k at 4 bits, 32 k at 8) a slab, GROUP_STEPS k16 steps per scale group. a: this thread's A
// registers, by k16 step, then slab, 8 elements each. stage: uint32 [parts][slabs of the
// tile][RECORDS][512 words]. scales, zeros: [groups of the stage][STRIDE rows of the tile]; zeros
// is not read for symmetric formats. Warpgroup g owns the SLABS slabs from g * SLABS on.
template <typename T, typename CODE, bool SYMMETRIC, int SLABS, int PART, int RECORDS, int GROUP_STEPS, int STRIDE, bool SCALED>
__device__ __forceinline__ void dequantize(void* a, const void* stage, const void* scale_rows, const void* zero_rows, int thread) {
  using Pair = typename PairOf<T>::type;
  constexpr int WORDS = CODE::BITS / 4;  // words per k16 step
  constexpr int STEPS = 4 / WORDS;       // k16 steps per 128-bit load
  const T* scales = reinterpret_cast<const T*>(scale_rows);
  const T* zeros = reinterpret_cast<const T*>(zero_rows);
  const int lane = thread & 127, group = thread >> 7;
  const int row = (lane >> 5) * 16 + ((lane & 31) >> 2);
  Pair* out = reinterpret_cast<Pair*>(a);
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab) {
    const int r = (group * SLABS + slab) * 64 + row;
    const uint32_t* source = reinterpret_cast<const uint32_t*>(stage) + (PART * (STRIDE / 64) + group * SLABS + slab) * RECORDS * 512 + lane * 4;
#pragma unroll
    for (int record = 0; record < RECORDS; ++record) {
      const uint4 line = *reinterpret_cast<const uint4*>(source + record * 512);
      const uint32_t words[4] = {line.x, line.y, line.z, line.w};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int g = ((PART * RECORDS + record) * STEPS + step) / GROUP_STEPS * STRIDE + r;
        const T one = T(1.0f), implied = T(CODE::MIDDLE);
        const Row<T, CODE> r0(SCALED ? scales[g] : one, SYMMETRIC ? implied : zeros[g]);
        const Row<T, CODE> r1(SCALED ? scales[g + 8] : one, SYMMETRIC ? implied : zeros[g + 8]);
        unpack<SCALED>(words + step * WORDS, r0, r1, out + ((record * STEPS + step) * SLABS + slab) * 4);
      }
    }
  }
}

}  // namespace tilebit
