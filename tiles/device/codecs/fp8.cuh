// Weights as the e4m3 operand registers of mma.m16n8k32 and m64nNk32, for `dequantize_bytes`.
// Comes after codecs/int8.cuh, where their storage is described.
#pragma once
#include <stdint.h>

namespace tilebit {

// e4m3 as it is stored; scales belong to the sums.
struct E4m3 {
  static constexpr int BITS = 8, UNIT = 1;
  static constexpr bool SCALED = false, SHIFTED = false;
  __device__ __forceinline__ E4m3(uint8_t, uint8_t) {}
  __device__ __forceinline__ static void unpack(const uint32_t* words, const E4m3&, const E4m3&, uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = words[i];
  }
};

// q - 8 of 4-bit codes, UNIT = 2^9 times too small, which the scales of sums make good: an e4m3 number below 2^-6 is
// its low four bits times 2^-9, and none of these magnitudes, 0 to 8, needs more. A code below 8 is
// 8 - q with the sign: its three bits inverted, and 1; five instructions for four weights.
struct SignedNibbles {
  static constexpr int BITS = 4, UNIT = 512;
  static constexpr bool SCALED = false, SHIFTED = false;
  __device__ __forceinline__ SignedNibbles(uint8_t, uint8_t) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t codes) const {
    const uint32_t below = (~codes >> 3) & 0x01010101u;
    return ((codes & 0x07070707u) ^ below * 7u) + below * 0x81u;
  }
  __device__ __forceinline__ static void unpack(const uint32_t* words, const SignedNibbles& low, const SignedNibbles& high, uint32_t* a) {
    unpack_nibbles(words, low, high, a);
  }
};

}  // namespace tilebit
