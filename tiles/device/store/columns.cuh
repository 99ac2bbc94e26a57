// A tile of sums to y, transposed, straight from registers: where y is little beside the weight.
// Comes after store/epilogue.cuh, for pack_pair.
#pragma once
#include <stdint.h>

namespace tilebit {

// A computing warp's 16 output channels of COLUMNS rows of x, sums in the order of MMA: y [m][n] at its
// first row and the block's first channel, of which `rows` and `channels` are there.
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
