// 4-bit floats: a sign, two bits of exponent, one of significand (OCP Microscaling Formats 1.0,
// 5.3.3).
//
// In their places in a 16-bit float, sign on sign and the other three bits at the low end of the
// exponent, they are the number 2^-14 (bf16: 2^-126) times too small, 0.5 as a subnormal: the power
// of two is in the scale, so that one product is all. Exact: a number has two significant bits.
// Comes after codecs/dequant.cuh, and in programs with raw codes after codecs/raw.cuh.
#pragma once

namespace tilebit {

struct E2m1 {
  static constexpr int BITS = 4;
  static constexpr float MIDDLE = 0.0f;
};

// x << N, of a negative N x >> -N.
template <int N>
__device__ __forceinline__ uint32_t shifted(uint32_t x) {
  return N < 0 ? x >> (N < 0 ? -N : 0) : x << (N < 0 ? 0 : N);
}

// Nibble I of either half of a word: the sign goes to bit 15, the others to the bits from LOW on.
template <int I, int LOW>
__device__ __forceinline__ uint32_t in_place(uint32_t w) {
  constexpr uint32_t THREE = 0x00070007u << LOW;
  return lop3_and_or(shifted<12 - 4 * I>(w), 0x80008000u, shifted<LOW - 4 * I>(w) & THREE);
}
template <typename T>
__device__ __forceinline__ void in_place(uint32_t w, uint32_t* out) {
  constexpr int LOW = 6;  // of bf16's exponent and of a code's significand
  out[0] = in_place<0, LOW>(w), out[1] = in_place<1, LOW>(w), out[2] = in_place<2, LOW>(w), out[3] = in_place<3, LOW>(w);
}
// fp16: a number takes its first byte alone, so four codes are brought to their places in bytes at
// once (11 instructions a word, where a pair of codes at a time takes 15).
template <>
__device__ __forceinline__ void in_place<half>(uint32_t w, uint32_t* out) {
  constexpr uint32_t LOW_THREE = 0x0e0e0e0eu, PLACES = 0x8e008e00u;
  const uint32_t odd = lop3_select(LOW_THREE, w >> 3, w), even = lop3_select(LOW_THREE, w << 1, w << 4);
  out[0] = even << 8 & PLACES, out[1] = odd << 8 & PLACES, out[2] = even & PLACES, out[3] = odd & PLACES;
}

template <>
struct Row<half, E2m1> {
  half2 scale;
  __device__ __forceinline__ Row(half s, half) : scale(__half2half2(__hmul(s, __ushort_as_half(0x7400)))) {}  // 2^14
};
template <>
struct Row<__nv_bfloat16, E2m1> {
  __nv_bfloat162 scale;
  __device__ __forceinline__ Row(__nv_bfloat16 s, __nv_bfloat16) : scale(__bfloat162bfloat162(__hmul(s, __ushort_as_bfloat16(0x7e80)))) {}  // 2^126
};
template <bool SCALED, typename T, typename Pair>
__device__ __forceinline__ void unpack(const uint32_t* words, const Row<T, E2m1>& r0, const Row<T, E2m1>& r1, Pair* out) {
  uint32_t bits[4];
  in_place<T>(words[0], bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = __hmul2(as_pair<Pair>(bits[i]), (i & 1 ? r1 : r0).scale);
}

template <typename T, typename CODE>
struct Raw;

template <>
struct Raw<half, E2m1> {
  static constexpr float OFFSET = 0.0f;
  static constexpr float INVERSE_LOW = 16384.0f, INVERSE_HIGH = 16384.0f;  // 2^14
  static constexpr uint32_t ONES = 0x04000400u;
  static constexpr bool BOTH_ROWS = false;
  __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t* a) { in_place<half>(words[0], a); }
};
// Products of numbers 2^126 too small would be lost: so these are the numbers themselves.
template <>
struct Raw<__nv_bfloat16, E2m1> {
  static constexpr float OFFSET = 0.0f;
  static constexpr float INVERSE_LOW = 1.0f, INVERSE_HIGH = 1.0f;
  static constexpr uint32_t ONES = 0x3f803f80u;
  static constexpr bool BOTH_ROWS = false;
  __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t* a) {
    in_place<__nv_bfloat16>(words[0], a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __hmul2(as_pair<__nv_bfloat162>(a[i]), __bfloat162bfloat162(__ushort_as_bfloat16(0x7e80)));  // 2^126
      a[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
};

}  // namespace tilebit
