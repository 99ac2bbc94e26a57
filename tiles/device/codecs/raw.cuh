// Turn packed codes into MMA operand registers with few instructions (fp16: one a register),
// leaving scale and zero point to the accumulators.
//
// The operand is not q but raw(q) = FACTOR * q + OFFSET, exact in 16 bits; a row of the product is then
//     sum (q - z) s x = s / FACTOR * (sum raw(q) x - (OFFSET / FACTOR + z) * FACTOR * sum x),
// where FACTOR * sum x comes from the same tensor cores (an operand of constants, the FACTOR of rows r), once per group for all rows.
//   fp16, 4 bits: a nibble in the low bits of a half is the subnormal q * 2^-24, one in the next four bits 16 q * 2^-24. Row r's register keeps
//   both, (q + 16 q') * 2^-24, and the product of row r + 8, which is of 16 q', is taken from its product (BOTH_ROWS): a mask, or a byte that
//   is moved, is all, where a nibble has to be moved and masked (m = 1 to 8: 1 % of the time, H200).
//   fp16, 8 bits: a byte in the low bits of a half is q * 2^-24.
//   bf16, 4 bits: subnormals of bf16 are out of reach of an fp32 accumulator, so a nibble sits under the exponent of 128: 128 + q.
//   bf16, 8 bits: q itself, through fp32 (2^23 + q).
// Comes after codecs/dequant.cuh. Rows r (registers 0, 2 of an A fragment) and r + 8 (registers 1, 3) may differ in FACTOR.
#pragma once

namespace tilebit {

template <typename T, typename CODE>
struct Raw;

template <>
struct Raw<half, Uint<4>> {
  static constexpr float OFFSET = 0.0f;          // in units of q
  static constexpr float INVERSE_LOW = 16777216.0f, INVERSE_HIGH = 1048576.0f;  // 1 / FACTOR of rows r and r + 8: 2^24, 2^20
  static constexpr uint32_t ONES = 0x00010001u;  // FACTOR of rows r as an operand
  static constexpr bool BOTH_ROWS = true;        // the operand of a row r carries that of row r + 8 too
  __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t* a) {
    const uint32_t w = words[0];
    a[0] = w & 0x00ff00ffu;
    a[1] = w & 0x00f000f0u;
    a[2] = __byte_perm(w, 0u, 0x4341);
    a[3] = a[2] & 0x00f000f0u;
  }
};

template <>
struct Raw<half, Uint<8>> {
  static constexpr float OFFSET = 0.0f;
  static constexpr float INVERSE_LOW = 16777216.0f, INVERSE_HIGH = 16777216.0f;
  static constexpr uint32_t ONES = 0x00010001u;
  static constexpr bool BOTH_ROWS = false;
  __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = __byte_perm(words[i], 0u, 0x4140);
      a[2 * i + 1] = __byte_perm(words[i], 0u, 0x4342);
    }
  }
};

template <>
struct Raw<__nv_bfloat16, Uint<4>> {
  static constexpr float OFFSET = 128.0f;
  static constexpr float INVERSE_LOW = 1.0f, INVERSE_HIGH = 1.0f;
  static constexpr uint32_t ONES = 0x3f803f80u;
  static constexpr bool BOTH_ROWS = false;
  __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = lop3_and_or(words[0] >> (4 * i), 0x000f000fu, 0x43004300u);
  }
};

template <>
struct Raw<__nv_bfloat16, Uint<8>> {
  static constexpr float OFFSET = 0.0f;
  static constexpr float INVERSE_LOW = 1.0f, INVERSE_HIGH = 1.0f;
  static constexpr uint32_t ONES = 0x3f803f80u;
  static constexpr bool BOTH_ROWS = false;
  __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = words[i >> 1];
      const float low = __uint_as_float(__byte_perm(w, 0x4b000000u, (i & 1) ? 0x7542 : 0x7540)) - 8388608.0f;
      const float high = __uint_as_float(__byte_perm(w, 0x4b000000u, (i & 1) ? 0x7543 : 0x7541)) - 8388608.0f;
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      a[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
};

}  // namespace tilebit
