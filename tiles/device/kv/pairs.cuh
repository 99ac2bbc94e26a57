// Pairs of 16-bit numbers in a register, as operands of the tensor cores have them.
#pragma once
#include <stdint.h>

namespace tilebit {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ uint32_t pack_pair(float low, float high, half) {
  const half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float low_of(uint32_t pair, half) { return __half2float(__ushort_as_half(uint16_t(pair))); }
__device__ __forceinline__ float high_of(uint32_t pair, half) { return __half2float(__ushort_as_half(uint16_t(pair >> 16))); }
__device__ __forceinline__ float low_of(uint32_t pair, __nv_bfloat16) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair, __nv_bfloat16) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  const half2 product = __hmul2(*reinterpret_cast<const half2*>(&x), *reinterpret_cast<const half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Of each half the lower and the higher; a NaN gives way.
__device__ __forceinline__ uint32_t lower_pair(uint32_t x, uint32_t y, half) {
  const half2 pair = __hmin2(*reinterpret_cast<const half2*>(&x), *reinterpret_cast<const half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t higher_pair(uint32_t x, uint32_t y, half) {
  const half2 pair = __hmax2(*reinterpret_cast<const half2*>(&x), *reinterpret_cast<const half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t lower_pair(uint32_t x, uint32_t y, __nv_bfloat16) {
  const __nv_bfloat162 pair = __hmin2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t higher_pair(uint32_t x, uint32_t y, __nv_bfloat16) {
  const __nv_bfloat162 pair = __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// An 8 x 8 matrix of 16-bit elements, row lane / 4, columns 2 (lane % 4) and the next: transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

}  // namespace tilebit
