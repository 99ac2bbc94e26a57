// fp32 to e4m3: to nearest, ties to even, saturating at 448.
#pragma once
#include <stdint.h>

namespace tilebit {

// By bits, for every device.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
  const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;                               // NaN
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;                       // 448
  const float a = __uint_as_float(magnitude);
  if (magnitude < 0x3c800000u) return sign | uint32_t(rintf(a * 512.0f));  // below 2^-6: steps of 2^-9
  return sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
}

// Two in the low half of a word, `low` below: the same codes, by the instruction where there is one.
__device__ __forceinline__ uint32_t to_e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return to_e4m3(low) | to_e4m3(high) << 8;
#endif
}

}  // namespace tilebit
