// Rows of y that are staged in shared memory go to where they belong, 16 bytes a thread.
#pragma once
#include <stdint.h>

namespace tilebit {

// staging: T [ROWS][BLOCK_N + 8], as stage_transposed leaves it; y: of [m][N], where the block's first row
// and first channel meet, from which on `rows` and `channels` are there.
template <typename T, int N, int BLOCK_N, int ROWS, int THREADS>
__device__ __forceinline__ void store_staged_rows(const void* staging, void* y, int rows, int channels, int thread) {
  constexpr int PIECES = BLOCK_N / 8;
#pragma unroll 2
  for (int i = thread; i < ROWS * PIECES; i += THREADS) {
    const int row = i / PIECES, at = i % PIECES * 8;
    if (row >= rows || at >= channels) continue;
    const T* from = static_cast<const T*>(staging) + row * (BLOCK_N + 8) + at;
    T* to = static_cast<T*>(y) + int64_t(row) * N + at;
    if constexpr (N % 8 == 0) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < min(8, channels - at); ++e) to[e] = from[e];
    }
  }
}

}  // namespace tilebit
