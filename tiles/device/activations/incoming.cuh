// What is quantized where it is not x itself: the residual sum, or a gate's activation times what it
// gates, as 16 values of x's dtype in the hands of one thread.
//
// R states what Eight (rows.cuh) reads: T; K of a row, with its padding; RESIDUAL; Activation; and GATED,
// else x is one row of K. Comes after rows.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename R>
struct Incoming {
  static constexpr int HALF = 8;  // values in 16 bytes

  // 16 values of row `row` from `column` on; zeros behind the last column, and of a row that is not
  // there. Each is loaded once in a launch: the residual is stored here.
  __device__ __forceinline__ static void load(const void* x, void* residual, int row, int rows, int column, uint32_t* raw) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = column + h * HALF;
      uint32_t* words = raw + 4 * h;
      words[0] = words[1] = words[2] = words[3] = 0u;
      if (row >= rows || !Eight<R>::present(at)) continue;
      if constexpr (R::GATED)
        Eight<R>::load_gated(x, row, at, words);
      else
        Eight<R>::load(x, residual, row, at, words);
    }
  }
};

}  // namespace tilebit
