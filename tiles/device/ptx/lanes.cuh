// Lanes of a warp with one another.
#pragma once
#include <stdint.h>

namespace tilebit {

// Over LANES neighbouring lanes, for all of them.
template <int LANES>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t value) {
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

}  // namespace tilebit
