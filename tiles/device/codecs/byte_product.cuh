// A warp's product of packed weights and int8 x, step by step: weights become int8 operands
// (codecs/int8.cuh), sums are int32. Comes after ptx/instructions.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// TILES tiles of 16 rows, COLUMNS columns (rows of x), RECORDS packed records a step. GROUP_STEPS:
// k32 steps of a group, 0: of all k. A thread keeps sums [TILES][NT][4].
template <typename CODE, int GROUP_STEPS, int TILES, int COLUMNS, int RECORDS>
struct ByteProduct {
  static constexpr int RECORD_K = 256 / CODE::BITS, STEP_K = RECORDS * RECORD_K, ROWS = 16 * TILES;
  static constexpr int NT = COLUMNS > 8 ? COLUMNS / 8 : 1;             // 8-column tiles
  static constexpr int ATOMS = RECORD_K / 32, WORDS = CODE::BITS / 2;  // k32 steps of a record, words of each
  static constexpr int GROUPS = GROUP_STEPS == 0 ? 0 : STEP_K / 32 > GROUP_STEPS ? STEP_K / 32 / GROUP_STEPS : 1;
  static constexpr int GROUP = GROUP_STEPS ? GROUP_STEPS : 1;  // to divide by
  static constexpr int PITCH = STEP_K + 16;                    // bytes of a row of x in a slot: ldmatrix meets no bank twice
  static constexpr int SCALE_BYTES = GROUPS * ROWS;            // of the scales in a slot, which the offsets follow
  static_assert(STEP_K % 64 == 0, "two k32 steps of x are loaded at once");
  static_assert(GROUP_STEPS % ATOMS == 0, "a record's weights share a scale");
  using Sums = int[TILES][NT][4];

  // Adds the product of a step. x: [COLUMNS][PITCH bytes]; weights: the 512-byte lines of TILES
  // tiles, record by record; parameters, of codes that have them: scales, bytes [GROUPS][ROWS], then
  // offsets, or zero points of all k [ROWS]. Where other
  // warps read the same x (SHARED_X), the barrier x_read is told as soon as this one has.
  template <bool SHARED_X>
  __device__ __forceinline__ static void multiply(const void* x, const void* weights, const void* parameters, int* sums_, int lane, const void* x_read) {
    Sums& sums = *reinterpret_cast<Sums*>(sums_);
    const uint8_t* scales = static_cast<const uint8_t*>(parameters) + (lane >> 2);
    // matrix lane / 8 of an ldmatrix is the lane / 8-th 16-byte chunk of 8 rows of x; rows that are
    // not there repeat others
    const uint32_t matrix = shared_address(x) + (lane & 7) % COLUMNS * PITCH + (lane >> 3) * 16;
    const uint32_t lines = shared_address(weights) + lane * 16;
    uint32_t b[NT][2][2];  // of two k32 steps
#pragma unroll
    for (int r = 0; r < RECORDS; ++r) {
      uint32_t words[TILES][4];
#pragma unroll
      for (int t = 0; t < TILES; ++t) load_shared_128(lines + (r * TILES + t) * 512, words[t]);
      if (r * ATOMS % 2 == 0)
#pragma unroll
        for (int c = 0; c < NT; ++c) ldmatrix_x4(matrix + c * 8 * PITCH + r * RECORD_K, &b[c][0][0]);
      if constexpr (SHARED_X)
        if (r == RECORDS - 1) {
          __syncwarp();
          if (elect()) mbarrier_arrive(x_read);
        }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const int row = (GROUPS ? r * ATOMS / GROUP * ROWS : 0) + t * 16, shift = row + SCALE_BYTES;
        const CODE low(CODE::SCALED ? scales[row] : uint8_t(0), CODE::SHIFTED ? scales[shift] : uint8_t(0));
        const CODE high(CODE::SCALED ? scales[row + 8] : uint8_t(0), CODE::SHIFTED ? scales[shift + 8] : uint8_t(0));
#pragma unroll
        for (int atom = 0; atom < ATOMS; ++atom) {
          uint32_t a[4];
          CODE::unpack(words[t] + atom * WORDS, low, high, a);
#pragma unroll
          for (int c = 0; c < NT; ++c) mma_m16n8k32(sums[t][c], a, b[c][(r * ATOMS + atom) % 2]);
        }
      }
    }
  }
};

}  // namespace tilebit
