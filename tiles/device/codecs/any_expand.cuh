// Weights of any precision as numbers in memory: bit planes become codes, codes numbers of their
// channel's codebook. Comes after codecs/any_product.cuh, whose words of codes these are.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename T, int BITS>
struct AnyExpand {
  using Product = AnyProduct<T, BITS, 1, 8>;
  static constexpr int NUMBERS = 1 << BITS, ROWS = 16;
  static constexpr int PITCH = NUMBERS + 2;  // of a row's codebook: rows begin in different banks

  // The codebooks of 16 rows, T [16][NUMBERS], by all THREADS threads of a block.
  template <int THREADS>
  __device__ __forceinline__ static void fill(void* tables, const void* codebooks, int thread) {
    const uint32_t* from = static_cast<const uint32_t*>(codebooks);
    uint32_t* to = static_cast<uint32_t*>(tables);
    for (int i = thread; i < ROWS * NUMBERS / 2; i += THREADS) to[i / (NUMBERS / 2) * (PITCH / 2) + i % (NUMBERS / 2)] = __ldg(from + i);
  }

  __device__ __forceinline__ static uint32_t code(const uint32_t (&words)[Product::PERIOD], int q, int j, int half) {
    return (Product::PAIRS ? words[j % Product::PERIOD] >> (8 * q + 4 * half) : words[(j + 4 * half) % Product::PERIOD] >> 8 * q) & (NUMBERS - 1);
  }

  // Pair j of lane c becomes pair c of lane j, of each four lanes: what a lane has is then neighbours.
  __device__ __forceinline__ static void gather_pairs(uint32_t (&pairs)[4], int lane) {
#pragma unroll
    for (int far = 2; far > 0; far /= 2)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = far == 2 ? i : 2 * i;
        const bool upper = lane & far;
        const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? pairs[j] : pairs[j + far], far);
        pairs[j] = upper ? got : pairs[j], pairs[j + far] = upper ? pairs[j + far] : got;
      }
  }

  // 16 rows by 256 k of planes `stride` bytes apart, by a warp; of y, `pitch` numbers a row, only what
  // has a row below `rows` and a column below `columns`, a multiple of 8.
  __device__ __forceinline__ static void step(
      const void* planes, int64_t stride, const void* tables, void* y_, int pitch, int rows, int columns, int lane) {
    uint4 stored[BITS];
#pragma unroll
    for (int p = 0; p < BITS; ++p) stored[p] = __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(planes) + p * stride) + lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = h * 8 + lane / 4;
      const uint16_t* own = static_cast<const uint16_t*>(tables) + row * PITCH;
      uint16_t* y = static_cast<uint16_t*>(y_) + static_cast<int64_t>(row) * pitch;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint32_t of_row[BITS], words[Product::PERIOD];
#pragma unroll
        for (int p = 0; p < BITS; ++p) of_row[p] = u == 0 ? (h == 0 ? stored[p].x : stored[p].y) : (h == 0 ? stored[p].z : stored[p].w);
        Product::select_codes(of_row, words);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          uint32_t numbers[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            numbers[j] = own[code(words, q, j, 0)] | static_cast<uint32_t>(own[code(words, q, j, 1)]) << 16;
          gather_pairs(numbers, lane);
          const int column = 32 * (4 * u + q) + 8 * (lane % 4);
          if (row < rows && column < columns) *reinterpret_cast<uint4*>(y + column) = make_uint4(numbers[0], numbers[1], numbers[2], numbers[3]);
        }
      }
    }
  }
};

}  // namespace tilebit
