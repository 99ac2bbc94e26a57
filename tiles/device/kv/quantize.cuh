// From numbers to codes, bit for bit as layouts/kv_quantize.py has them: plain fp32 operations in
// their order. Comes after granule.cuh, pairs.cuh and codecs/e4m3.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// x / scale as an fp32 division rounds it, wherever that matters to a half or an e4m3 number: what
// rounds to zero or is beyond their range is not corrected. A division by what is the same for many
// costs five instructions with the inverse (Markstein, 1990), and a scale that is no usual number
// loses nothing when both are multiplied by a power of two.
struct Divisor {
  float scale, inverse, factor;
  __device__ __forceinline__ explicit Divisor(float s) {
    factor = fabsf(s) < 5.421010862427522e-20f ? 7.922816251426434e28f : fabsf(s) > 1.8446744073709552e19f ? 5.421010862427522e-20f : 1.0f;
    scale = __fmul_rn(s, factor), inverse = __fdiv_rn(1.0f, scale);
  }
  __device__ __forceinline__ float quotient(float number) const {
    const float x = __fmul_rn(number, factor), first = __fmul_rn(x, inverse);
    const float second = __fmaf_rn(__fmaf_rn(-first, scale, x), inverse, first);
    const float third = __fmaf_rn(__fmaf_rn(-second, scale, x), inverse, second);
    return fabsf(first) >= 9.313225746154785e-10f && fabsf(first) <= 1048576.0f ? third : first;
  }
};
struct Parameters {
  float scale, inverse, zero;
};
// Scale and zero point of codes up to `most` for numbers from `low` to `high`, rounded to halves as
// they are stored.
__device__ __forceinline__ Parameters parameters_of(float low, float high, float most) {
  Parameters p;
  p.scale = __half2float(__float2half_rn(Divisor(most).quotient(__fsub_rn(high, low))));
  if (!(p.scale > 0.0f)) p.scale = 1.0f;
  p.zero = __half2float(__float2half_rn(__fadd_rn(low, 0.0f)));  // +0, whichever of the zeros the minimum was
  p.inverse = __fdiv_rn(1.0f, p.scale);
  return p;
}
// 8388608 plus the code, whose low half is the code: what a number below 2^22 leaves there is
// rounded to the nearest whole one, ties to even.
__device__ __forceinline__ uint32_t code_of(float x, const Parameters& p, float most) {
  const float q = fminf(fmaxf(__fmul_rn(__fsub_rn(x, p.zero), p.inverse), 0.0f), most);
  return __float_as_uint(__fadd_rn(q, 8388608.0f));
}
// Codes of two numbers, each with parameters of its own, in the halves of a word.
template <typename T, int KIND>
__device__ __forceinline__ uint32_t codes_of(uint32_t pair, const Parameters& low, const Parameters& high) {
  constexpr float MOST = float((1 << (bits_of(KIND) % 16)) - 1);
  return __byte_perm(code_of(low_of(pair, T()), low, MOST), code_of(high_of(pair, T()), high, MOST), 0x5410);
}

// The lowest and the highest of numbers, two of each side by side.
template <typename T>
struct Range {
  uint32_t low = pack_pair(INFINITY, INFINITY, T()), high = pack_pair(-INFINITY, -INFINITY, T());
  __device__ __forceinline__ void take_low(uint32_t pair) { low = lower_pair(low, pair, T()); }
  __device__ __forceinline__ void take_high(uint32_t pair) { high = higher_pair(high, pair, T()); }
  __device__ __forceinline__ void take(uint32_t pair) { take_low(pair), take_high(pair); }
  // With that of the lane whose number differs by the bit `step`.
  __device__ __forceinline__ void join(int step) {
    take_low(__shfl_xor_sync(0xffffffffu, low, step)), take_high(__shfl_xor_sync(0xffffffffu, high, step));
  }
};

template <typename T>
__device__ __forceinline__ uint32_t e4m3_of(uint32_t pair, const Divisor& scale) {
  return __byte_perm(to_e4m3_pair(scale.quotient(low_of(pair, T())), scale.quotient(high_of(pair, T()))), 0u, 0x4140);
}

}  // namespace tilebit
