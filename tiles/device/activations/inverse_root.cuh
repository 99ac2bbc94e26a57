// What RMSNorm divides by.
#pragma once

namespace tilebit {

// 1 / sqrt(mean square + eps) of k values; NaN where the sum of their squares is not finite.
__device__ __forceinline__ float inverse_root(float sum, float k, float eps) {
  return sum < INFINITY ? __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, k), eps))) : __uint_as_float(0x7fc00000u);
}

}  // namespace tilebit
