// Weights of any precision as numbers in memory: bit planes become codes, codes numbers of their
// channel's codebook. Comes after codecs/any_operand.cuh, whose look-ups these are.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename T, int BITS>
struct AnyExpand {
  using Operand = AnyOperand<T, BITS, BITS <= 3 ? 0 : 4, BITS <= 3 ? 4 : 0>;
  static constexpr int NUMBERS = 1 << BITS, ROWS = 16, TILES = 2;  // of a warp; of a block

  // Tables of TILES * ROWS rows from their codebooks, T [row][NUMBERS], by all THREADS threads of a block,
  // or to each thread's `kept`.
  template <int THREADS>
  __device__ __forceinline__ static void fill(void* tables, uint32_t* kept, const void* codebooks, int thread) {
    if constexpr (BITS <= 3)
      Operand::Product::keep_codebooks(kept, static_cast<const T*>(codebooks) + thread / 32 % TILES * (ROWS * NUMBERS), thread % 32);
    else
      Operand::template fill<TILES * ROWS, THREADS>(tables, kept, codebooks, thread);
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

  // ROWS rows of `tile` by 256 k of planes `stride` bytes apart, by a warp; of y, `pitch` numbers a row,
  // only what has a row below `rows` and a column below `columns`, a multiple of 8.
  __device__ __forceinline__ static void step(
      const void* planes, int64_t stride, SharedAddress tables, const uint32_t* kept, void* y_, int pitch, int rows, int columns, int tile,
      int lane) {
    uint32_t stored[BITS * 4];
    request_planes<BITS, 1>(stored, planes, stride, lane);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint32_t words[2 * Operand::WORDS];
      Operand::select(stored, words, u, lane);
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        uint32_t operand[16];
        Operand::look_up(words, tables, kept, operand, g, tile, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // [k16 step's half of 64 k][row half]
          const int q = i / 2, h = i % 2, row = h * 8 + lane / 4, column = 32 * (4 * u + 2 * g + q) + 8 * (lane % 4);
          uint32_t numbers[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) numbers[j] = operand[q * 8 + j * 2 + h];
          gather_pairs(numbers, lane);
          if (row < rows && column < columns)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(y_) + static_cast<int64_t>(row) * pitch + column) =
                make_uint4(numbers[0], numbers[1], numbers[2], numbers[3]);
        }
      }
    }
  }
};

}  // namespace tilebit
