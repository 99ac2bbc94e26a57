// From numbers to codes, bit for bit as layouts/kv_quantize.py has them: plain fp32 operations in
// their order. Comes after granule.cuh, pairs.cuh and codecs/e4m3.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

struct Parameters {
  float scale, inverse, zero;
};
// Scale and zero point of codes up to `most` for numbers from `low` to `high`, rounded to halves as
// they are stored.
__device__ __forceinline__ Parameters parameters_of(float low, float high, float most) {
  Parameters p;
  p.scale = __half2float(__float2half_rn(__fdiv_rn(__fsub_rn(high, low), most)));
  if (!(p.scale > 0.0f)) p.scale = 1.0f;
  p.zero = __half2float(__float2half_rn(__fadd_rn(low, 0.0f)));  // +0, whichever of the zeros the minimum was
  p.inverse = __fdiv_rn(1.0f, p.scale);
  return p;
}
__device__ __forceinline__ uint32_t code_of(float x, const Parameters& p, float most) {
  return uint32_t(fminf(fmaxf(rintf(__fmul_rn(__fsub_rn(x, p.zero), p.inverse)), 0.0f), most));
}
// Codes of two numbers, each with parameters of its own, in the halves of a word.
template <typename T, int KIND>
__device__ __forceinline__ uint32_t codes_of(uint32_t pair, const Parameters& low, const Parameters& high) {
  constexpr float MOST = float((1 << (bits_of(KIND) % 16)) - 1);
  return code_of(low_of(pair, T()), low, MOST) | code_of(high_of(pair, T()), high, MOST) << 16;
}
template <typename T>
__device__ __forceinline__ uint32_t e4m3_of(uint32_t pair, float scale) {
  return to_e4m3(__fdiv_rn(low_of(pair, T()), scale)) | to_e4m3(__fdiv_rn(high_of(pair, T()), scale)) << 16;
}

}  // namespace tilebit
