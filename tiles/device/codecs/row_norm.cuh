// RMSNorm of x inside a product: x times the norm's weight as it becomes an operand, and the squares of
// x, whose mean is a factor of a whole row of y. Comes after codecs/dequant.cuh (to_float).
#pragma once
#include <stdint.h>

namespace tilebit {

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b, half) {
  const half2 product = __hmul2(as_pair<half2>(a), as_pair<half2>(b));
  return *reinterpret_cast<const uint32_t*>(&product);
}
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 product = __hmul2(as_pair<__nv_bfloat162>(a), as_pair<__nv_bfloat162>(b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Two neighbouring x: adds their squares, and multiplies them by the norm's weight, rounded to T.
template <typename T>
__device__ __forceinline__ void norm_pair(uint32_t& x, uint32_t weight, float& squares) {
  const T* pair = reinterpret_cast<const T*>(&x);
  const float low = to_float(pair[0]), high = to_float(pair[1]);
  squares = fmaf(low, low, squares), squares = fmaf(high, high, squares);
  x = multiply_pairs(x, weight, T());
}

// A warp's squares, of which four lanes have parts of each column (rows of x), to `to` [column][PITCH].
template <int COLUMNS, int PITCH>
__device__ __forceinline__ void store_squares(const float* squares, float* to, int lane) {
  constexpr int NT = COLUMNS > 8 ? COLUMNS / 8 : 1;
#pragma unroll
  for (int c = 0; c < NT; ++c) {
    float sum = squares[c];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int column = c * 8 + (lane >> 2);
    if ((lane & 3) == 0 && column < COLUMNS) to[column * PITCH] = sum;
  }
}

}  // namespace tilebit
