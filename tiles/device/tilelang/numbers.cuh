// The names of types that TileLang generates, and what it makes of pairs of them. What generated
// CUDA calls of TileLang is stated in this folder, so that a kernel includes nothing it does not
// call: TileLang's own headers hold CUTLASS, two thirds of the time that nvcc takes for a kernel.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

struct half_t {
  uint16_t bits;
  half_t() = default;
  __device__ __forceinline__ explicit half_t(float value) : bits(__half_as_ushort(__float2half_rn(value))) {}
  __device__ __forceinline__ explicit half_t(half value) : bits(__half_as_ushort(value)) {}
  __device__ __forceinline__ operator float() const { return __half2float(__ushort_as_half(bits)); }
};
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  __device__ __forceinline__ explicit bfloat16_t(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
  __device__ __forceinline__ explicit bfloat16_t(__nv_bfloat16 value) : bits(__bfloat16_as_ushort(value)) {}
  __device__ __forceinline__ operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
// Not in fp32, which would round once where TileLang rounds each time: such a kernel is compiled with
// TileLang's own headers.
half_t operator+(half_t, half_t) = delete;
half_t operator-(half_t, half_t) = delete;
half_t operator*(half_t, half_t) = delete;
half_t operator/(half_t, half_t) = delete;
bfloat16_t operator+(bfloat16_t, bfloat16_t) = delete;
bfloat16_t operator-(bfloat16_t, bfloat16_t) = delete;
bfloat16_t operator*(bfloat16_t, bfloat16_t) = delete;
bfloat16_t operator/(bfloat16_t, bfloat16_t) = delete;
struct fp8_e4_t {
  uint8_t bits;
};
using uint = unsigned int;
using uchar = unsigned char;

__device__ __forceinline__ unsigned __pack_half2(half_t low, half_t high) { return static_cast<unsigned>(high.bits) << 16 | low.bits; }
__device__ __forceinline__ unsigned __pack_nv_bfloat162(bfloat16_t low, bfloat16_t high) {
  return static_cast<unsigned>(high.bits) << 16 | low.bits;
}

namespace tl {
enum class DataType { kFloat16, kBFloat16, kFloat32, kInt8, kInt32, kFloat8_e4m3 };
}  // namespace tl
