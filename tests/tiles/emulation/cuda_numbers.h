// CUDA's 16-bit floats for a host compiler: every operation rounds once (to nearest, ties to even).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace tilebit_host {

inline uint64_t word_of(double value) {
  uint64_t word;
  memcpy(&word, &value, 8);
  return word;
}
inline double double_of(uint64_t word) {
  double value;
  memcpy(&value, &word, 8);
  return value;
}

// Significand bits after the point, exponent of the smallest normal, bits of infinity.
template <int MANTISSA, int MIN_EXPONENT, uint16_t INFINITY_BITS>
struct Float16 {
  uint16_t bits;
  Float16() = default;
  Float16(float value) : bits(round(value)) {}
  explicit operator float() const { return float(value()); }

  // On the bits of a double, whose exponent is EXPONENT_GAP more; its least SPARE bits are rounded away.
  static constexpr int SPARE = 52 - MANTISSA, EXPONENT_GAP = 1022 + MIN_EXPONENT;
  static constexpr uint64_t GAP = uint64_t(EXPONENT_GAP) << MANTISSA, SMALLEST = uint64_t(EXPONENT_GAP + 1) << 52;

  static uint16_t round(double value) {
    const uint64_t word = word_of(value), size = word & ~(uint64_t(1) << 63);
    const uint16_t sign = word >> 48 & 0x8000;
    if (value != value) return 0x7fff;
    if (size < SMALLEST) {  // the last bit of `units` is worth as much as that of a subnormal
      const uint64_t units = uint64_t(EXPONENT_GAP + 1 + SPARE) << 52;
      return sign | uint16_t(word_of(double_of(size) + double_of(units)) - units);
    }
    const uint64_t result = ((size + (uint64_t(1) << (SPARE - 1)) - 1 + (size >> SPARE & 1)) >> SPARE) - GAP;  // a carry runs on into the exponent
    return sign | uint16_t(result < INFINITY_BITS ? result : INFINITY_BITS);
  }
  static Float16 of(double value) {
    Float16 result;
    result.bits = round(value);
    return result;
  }
  double value() const {
    const uint64_t sign = uint64_t(bits & 0x8000) << 48, size = bits & 0x7fff;
    if (size > INFINITY_BITS) return NAN;
    if (size == INFINITY_BITS) return sign ? -INFINITY : INFINITY;
    if (size >> MANTISSA) return double_of((size + GAP) << SPARE | sign);
    const double subnormal = double(size) * double_of(SMALLEST - (uint64_t(MANTISSA) << 52));
    return sign ? -subnormal : subnormal;
  }
};

// a * b is exact in a double; the sum is rounded to odd, so that rounding it again to 16 bits rounds the exact result once.
inline double fused(double a, double b, double c) {
  const double product = a * b, sum = product + c, back = sum - product;
  const double lost = (product - (sum - back)) + (c - back);
  const uint64_t word = word_of(sum);
  if (lost == 0 || lost != lost || word & 1) return sum;
  return double_of((lost > 0) == (sum > 0) ? word + 1 : word - 1);
}

template <typename T>
struct alignas(4) Pair {
  T x, y;
};

}  // namespace tilebit_host

using half = tilebit_host::Float16<10, -14, 0x7c00>;
using __nv_bfloat16 = tilebit_host::Float16<7, -126, 0x7f80>;
using half2 = tilebit_host::Pair<half>;
using __nv_bfloat162 = tilebit_host::Pair<__nv_bfloat16>;
// As wide as CUDA aligns them: a pointer to one that is not is a fault (cuda_shim.cc).
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) int2 {
  int32_t x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// Sums and products of two 16-bit floats are exact in a double, or so nearly that its rounding cannot matter (53 >= 2 * 11 + 2 bits).
template <typename T>
T __hadd(T a, T b) { return T::of(a.value() + b.value()); }
template <typename T>
T __hsub(T a, T b) { return T::of(a.value() - b.value()); }
template <typename T>
T __hmul(T a, T b) { return T::of(a.value() * b.value()); }
template <typename T>
T __hfma(T a, T b, T c) { return T::of(tilebit_host::fused(a.value(), b.value(), c.value())); }
template <typename T>
T __hneg(T a) { a.bits ^= 0x8000; return a; }
template <typename T>
tilebit_host::Pair<T> __hadd2(tilebit_host::Pair<T> a, tilebit_host::Pair<T> b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
template <typename T>
tilebit_host::Pair<T> __hsub2(tilebit_host::Pair<T> a, tilebit_host::Pair<T> b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
template <typename T>
tilebit_host::Pair<T> __hmul2(tilebit_host::Pair<T> a, tilebit_host::Pair<T> b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
template <typename T>
tilebit_host::Pair<T> __hfma2(tilebit_host::Pair<T> a, tilebit_host::Pair<T> b, tilebit_host::Pair<T> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

// Compiled once (cuda_shim.cc).
#define TILEBIT_ARITHMETIC(LINKAGE, T)                        \
  LINKAGE template T __hadd(T, T);                            \
  LINKAGE template T __hsub(T, T);                            \
  LINKAGE template T __hmul(T, T);                            \
  LINKAGE template T __hfma(T, T, T);                         \
  LINKAGE template tilebit_host::Pair<T> __hadd2(tilebit_host::Pair<T>, tilebit_host::Pair<T>); \
  LINKAGE template tilebit_host::Pair<T> __hsub2(tilebit_host::Pair<T>, tilebit_host::Pair<T>); \
  LINKAGE template tilebit_host::Pair<T> __hmul2(tilebit_host::Pair<T>, tilebit_host::Pair<T>); \
  LINKAGE template tilebit_host::Pair<T> __hfma2(tilebit_host::Pair<T>, tilebit_host::Pair<T>, tilebit_host::Pair<T>);
extern template struct tilebit_host::Float16<10, -14, 0x7c00>;
extern template struct tilebit_host::Float16<7, -126, 0x7f80>;
TILEBIT_ARITHMETIC(extern, half)
TILEBIT_ARITHMETIC(extern, __nv_bfloat16)

// The larger, or the smaller; the other one where one is NaN.
template <typename T>
T __hmax(T a, T b) { return a.value() != a.value() || b.value() > a.value() ? b : a; }
template <typename T>
T __hmin(T a, T b) { return a.value() != a.value() || b.value() < a.value() ? b : a; }
template <typename T>
tilebit_host::Pair<T> __hmax2(tilebit_host::Pair<T> a, tilebit_host::Pair<T> b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
template <typename T>
tilebit_host::Pair<T> __hmin2(tilebit_host::Pair<T> a, tilebit_host::Pair<T> b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }

inline half __ushort_as_half(uint16_t bits) { half h; h.bits = bits; return h; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { __nv_bfloat16 h; h.bits = bits; return h; }
inline uint16_t __half_as_ushort(half a) { return a.bits; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
inline half2 __half2half2(half a) { return {a, a}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline float __half2float(half a) { return float(a.value()); }
inline half __float2half_rn(float a) { return half(a); }
inline float __bfloat162float(__nv_bfloat16 a) { return float(a.value()); }
inline __nv_bfloat16 __float2bfloat16_rn(float a) { return __nv_bfloat16(a); }
inline half2 __floats2half2_rn(float a, float b) { return {half(a), half(b)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
inline half2 __float2half2_rn(float a) { return {half(a), half(a)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float a) { return {__nv_bfloat16(a), __nv_bfloat16(a)}; }
inline half2 __float22half2_rn(float2 a) { return {half(a.x), half(a.y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {__nv_bfloat16(a.x), __nv_bfloat16(a.y)}; }
inline float2 __half22float2(half2 a) { return {__half2float(a.x), __half2float(a.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {__bfloat162float(a.x), __bfloat162float(a.y)}; }
inline half2 __halves2half2(half a, half b) { return {a, b}; }
inline half __low2half(half2 a) { return a.x; }
inline half __high2half(half2 a) { return a.y; }
inline float __low2float(half2 a) { return __half2float(a.x); }
inline float __high2float(half2 a) { return __half2float(a.y); }

inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) { return uint32_t((uint64_t(high) << 32 | low) << (by & 31) >> 32); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}
inline float __uint_as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
inline float __int_as_float(int32_t bits) { return __uint_as_float(uint32_t(bits)); }
inline uint32_t __float_as_uint(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }
inline int32_t __float_as_int(float f) { return int32_t(__float_as_uint(f)); }
inline float __int2float_rn(int32_t i) { return float(i); }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }

// fp32, each rounded once: the host compiler contracts nothing (device_code.py). What CUDA only approximates is as good as fp32 can be.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return float(exp(double(a))); }
inline float __logf(float a) { return float(log(double(a))); }
inline float __log2f(float a) { return float(log2(double(a))); }
inline float rsqrtf(float a) { return float(1.0 / sqrt(double(a))); }
inline int __float2int_rn(float a) { return int(nearbyintf(a)); }
inline uint32_t __float2uint_rn(float a) { return uint32_t(nearbyintf(a)); }
