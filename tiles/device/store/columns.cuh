// A tile of sums to y, transposed, straight from registers: where y is little beside the weight.
// Comes after ptx/instructions.cuh, for from_float.
#pragma once
#include <stdint.h>

namespace tilebit {

// The sums of a warp's 16 output channels and COLUMNS rows of x, in the order of MMA. y: of [m][n], where
// the block's first row and first channel meet, from which on `rows` and `channels` are there.
template <typename T, int COLUMNS>
__device__ __forceinline__ void store_columns(const float* sums, void* y, int n, int rows, int channels, int thread) {
  const int lane = thread & 31, channel = thread / 32 * 16 + lane / 4;
  T* out = static_cast<T*>(y);
#pragma unroll
  for (int c = 0; c < COLUMNS / 8; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = c * 8 + lane % 4 * 2 + i % 2, at = channel + i / 2 * 8;
      if (row < rows && at < channels) out[int64_t(row) * n + at] = from_float(sums[c * 4 + i], T());
    }
}

}  // namespace tilebit
