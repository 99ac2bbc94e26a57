// A warp's product of packed weights and int8 x whose groups have scales, step by step: the int32 sums
// of a step, which is a group of k or a part of one, are scaled and added to fp32 sums (MixLLM section
// 3.3). Comes after codecs/byte_product.cuh and codecs/group_sums.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// TILES tiles of 16 rows, COLUMNS columns (rows of x), RECORDS packed records a step. A thread keeps
// sums [TILES][NT][4].
template <typename T, typename CODE, int TILES, int COLUMNS, int RECORDS, Conversion HOW = Conversion::INSTRUCTION>
struct GroupProduct {
  using Step = ByteProduct<CODE, 0, TILES, COLUMNS, RECORDS>;
  static constexpr int NT = Step::NT, ROWS = Step::ROWS;
  using Sums = float[TILES][NT][4];

  // Adds the product of a step. x, weights and x_read: as ByteProduct has them, and behind each row's
  // codes its scale, fp32; parameters: scales T [ROWS], then, of codes that have them, zero points,
  // bytes [ROWS].
  template <bool SHARED_X>
  __device__ __forceinline__ static void multiply(const void* x, const void* weights, const void* parameters, float* sums_, int lane, const void* x_read) {
    Sums& sums = *reinterpret_cast<Sums*>(sums_);
    float of_columns[NT][2];
#pragma unroll
    for (int c = 0; c < NT; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = (c * 8 + (lane & 3) * 2 + i) % COLUMNS;  // those that are not there repeat others
        of_columns[c][i] = *reinterpret_cast<const float*>(static_cast<const char*>(x) + column * Step::PITCH + Step::STEP_K);
      }
    typename Step::Sums group = {};
    if constexpr (HOW == Conversion::MAGIC_START) start_sums<TILES * NT * 4>(&group[0][0][0]);
    Step::template multiply<SHARED_X>(x, weights, static_cast<const T*>(parameters) + ROWS, &group[0][0][0], lane, x_read);
    uint32_t of_rows[(2 * TILES + 3) / 4 * 4];  // of 8 rows each, twice (RawProduct::load_pairs)
#pragma unroll
    for (int i = 0; i < 2 * TILES; i += 4)
      ldmatrix_x4_transposed(shared_address(parameters) + min(i + (lane >> 3), 2 * TILES - 1) * 16, of_rows + i);
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[t][c][i] += group_to_float<HOW>(group[t][c][i]) * of_columns[c][i & 1] * to_float(*reinterpret_cast<const T*>(of_rows + 2 * t + (i >> 1)));
  }
};

// The scales of a step's group of rows of x, of which `there` are there, to where rows of PITCH bytes
// end; by a warp.
template <int ROWS, int PITCH>
__device__ __forceinline__ void copy_token_scales(SharedAddress to, const void* from, int there, int lane) {
  if (lane < ROWS && lane < there) cp_async_4(to.address + lane * PITCH, static_cast<const float*>(from) + lane, true);
}

}  // namespace tilebit
