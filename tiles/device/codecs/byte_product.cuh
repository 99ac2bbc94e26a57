// A warp's product of packed weights and x of bytes, step by step: weights become operands of bytes
// (codecs/int8.cuh, codecs/fp8.cuh). Sums are int32; of e4m3 fp32, made step by step, times the scales of
// a group where there are some, because those on tensor cores keep about 14 bits. Comes after
// ptx/instructions.cuh.
#pragma once
#include <stdint.h>
#include <type_traits>

namespace tilebit {

// TILES tiles of 16 rows, COLUMNS columns (rows of x), RECORDS packed records a step. GROUP_STEPS:
// k32 steps of a group, 0: of all k. A thread keeps SUMs [TILES][NT][4], int or float; SCALE is the type
// of a group's scale.
template <typename CODE, int GROUP_STEPS, int TILES, int COLUMNS, int RECORDS, typename SUM = int, typename SCALE = uint8_t>
struct ByteProduct {
  static constexpr int RECORD_K = 256 / CODE::BITS, STEP_K = RECORDS * RECORD_K, ROWS = 16 * TILES;
  static constexpr int NT = COLUMNS > 8 ? COLUMNS / 8 : 1;             // 8-column tiles
  static constexpr int ATOMS = RECORD_K / 32, WORDS = CODE::BITS / 2;  // k32 steps of a record, words of each
  static constexpr int GROUPS = GROUP_STEPS == 0 ? 0 : STEP_K / 32 > GROUP_STEPS ? STEP_K / 32 / GROUP_STEPS : 1;
  static constexpr int GROUP = GROUP_STEPS ? GROUP_STEPS : 1;  // to divide by
  static constexpr int PITCH = STEP_K + 16;                    // bytes of a row of x in a slot: ldmatrix meets no bank twice
  static constexpr int SCALE_BYTES = GROUPS * ROWS * int(sizeof(SCALE));  // of the scales in a slot, which the offsets follow
  static_assert(STEP_K % 64 == 0, "two k32 steps of x are loaded at once");
  static_assert(GROUP_STEPS % ATOMS == 0, "a record's weights share a scale");
  static_assert(std::is_same<SUM, int>::value || GROUPS < 2, "a step's fp32 sums are those of one group");
  using Sums = SUM[TILES][NT][4];

  // Adds the product of a step. x: [COLUMNS][PITCH bytes]; weights: the 512-byte lines of TILES
  // tiles, record by record; parameters, of codes that have them: scales [GROUPS][ROWS], then
  // offsets, or zero points of all k [ROWS]. Where other
  // warps read the same x (SHARED_X), the barrier x_read is told as soon as this one has.
  template <bool SHARED_X>
  __device__ __forceinline__ static void multiply(const void* x, const void* weights, const void* parameters, SUM* sums_, int lane, const void* x_read) {
    Sums& sums = *reinterpret_cast<Sums*>(sums_);
    if constexpr (std::is_same<SUM, int>::value) {
      accumulate<SHARED_X>(x, weights, parameters, sums, lane, x_read);
    } else {
      Sums step = {};
      accumulate<SHARED_X>(x, weights, parameters, step, lane, x_read);
      const SCALE* scales = static_cast<const SCALE*>(parameters) + (lane >> 2);
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const float scale = GROUPS ? float(scales[t * 16 + low * 8]) * CODE::UNIT : 1.0f;
#pragma unroll
          for (int c = 0; c < NT; ++c)
#pragma unroll
            for (int i = 2 * low; i < 2 * low + 2; ++i) sums[t][c][i] += step[t][c][i] * scale;
        }
    }
  }

  template <bool SHARED_X>
  __device__ __forceinline__ static void accumulate(const void* x, const void* weights, const void* parameters, Sums& sums, int lane, const void* x_read) {
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
