// A warp's product of packed weights and x, step by step, with raw codes as operands (raw.cuh).
// Comes after ptx/instructions.cuh, codecs/raw.cuh and codecs/row_norm.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// TILES tiles of 16 rows, COLUMNS columns (rows of x), RECORDS packed records a step. GROUP_STEPS:
// k16 steps of a scale group, 0: per channel. A thread keeps sums [TILES][NT][4] of what is scaled,
// products [TILES][NT][4] of the codes since, and x_sums [NT][4], FACTOR times the sum of x since.
template <typename T, typename CODE, bool SYMMETRIC, int GROUP_STEPS, int TILES, int COLUMNS, int RECORDS>
struct RawProduct {
  static constexpr int BITS = CODE::BITS, RECORD_K = 256 / BITS, STEP_K = RECORDS * RECORD_K, ROWS = 16 * TILES;
  static constexpr int NT = COLUMNS > 8 ? COLUMNS / 8 : 1;       // 8-column tiles
  static constexpr int ATOMS = RECORD_K / 16, WORDS = BITS / 4;  // k16 steps of a record, words of each
  static constexpr int GROUPS = GROUP_STEPS == 0 ? 0 : STEP_K / 16 > GROUP_STEPS ? STEP_K / 16 / GROUP_STEPS : 1;
  static constexpr int GROUP = GROUP_STEPS ? GROUP_STEPS : 1;  // to divide by
  static constexpr int PITCH = STEP_K * 2 + 16;                // bytes of a row of x in a slot: ldmatrix meets no bank twice
  static constexpr int SCALE_BYTES = GROUPS * ROWS * 2;        // of the scales in a slot, which the zero points follow
  using R = Raw<T, CODE>;
  // Whether there is anything to subtract: an offset of raw codes, or a zero point.
  static constexpr bool SUMS_X = !SYMMETRIC || R::OFFSET + CODE::MIDDLE != 0.0f;
  static_assert(!SUMS_X || GROUP_STEPS % 2 == 0, "two k16 steps of x are summed at once");
  static_assert(GROUP_STEPS == 0 || STEP_K / 16 % GROUP == 0 || GROUP % (STEP_K / 16) == 0, "a step and a group must nest");
  using Sums = float[TILES][NT][4];
  using XSums = float[NT][4];

  // Adds FACTOR * x of two k16 steps to a column tile's sum: x as the first operand, in the
  // registers in which both steps' second operands lie. Rows r and r + 8 are halves k 0..7 and
  // 8..15 of column r: one product in place of two, and no column meets another's numbers.
  __device__ __forceinline__ static void add_x(float (&sum)[4], const uint32_t* b) {
    const uint32_t ones[2] = {R::ONES, R::ONES};
    mma_m16n8k16(sum, b, ones, T());
  }
  // FACTOR * (sum of x) of this thread's columns, in rows r (i < 2) and r + 8; clears the sums.
  __device__ __forceinline__ static void take_sums(XSums& sum, XSums& of, int lane) {
#pragma unroll
    for (int c = 0; c < NT; ++c) {
      const float both = sum[c][0] + sum[c][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[c][i] = i < 2 ? __shfl_sync(0xffffffffu, both, (lane & 3) * 8 + i * 4) : of[c][i - 2] * (R::INVERSE_LOW / R::INVERSE_HIGH);
        sum[c][i] = 0.0f;
      }
    }
  }

  // In units of q, with what raw codes carry. (Adding a constant 0 would take an instruction.)
  __device__ __forceinline__ static float zero_point(T z) {
    if constexpr (SYMMETRIC) return R::OFFSET + CODE::MIDDLE;
    return R::OFFSET == 0.0f ? to_float(z) : R::OFFSET + to_float(z);
  }

  // Scale and zero point of rows r and r + 8 of each tile, a pair of 16 bits each (two of the last
  // place are spare).
  using Pairs = uint32_t[(2 * TILES + 3) / 4 * 4];
  // Of a group of the step: 8 rows' scales are the even rows of a matrix, so that its transpose
  // gives each lane its own; its odd rows are the zero points of the other 8 rows of the tile,
  // which lie in other banks (64 rows: two loads, where one a number takes sixteen). So scales are
  // where they belong, and zero points of rows r and r + 8 have changed places.
  __device__ __forceinline__ static void load_pairs(uint32_t parameters, int lane, int group, Pairs& pairs) {
    const uint32_t from = parameters + group * ROWS * 2;
    const int odd = SYMMETRIC ? 0 : lane & 1;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i += 4)
      ldmatrix_x4_transposed(from + odd * SCALE_BYTES + (min(i + (lane >> 3), 2 * TILES - 1) ^ odd) * 16, pairs + i);
  }

  // sums += scale * (product - zero * sum of x), and clears the product and the sum of x.
  __device__ __forceinline__ static void apply_group(Sums& sums, Sums& products, XSums& x_sums, const Pairs& pairs, int lane) {
    XSums of_x;
    if constexpr (SUMS_X) take_sums(x_sums, of_x, lane);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const T *low = reinterpret_cast<const T*>(pairs + 2 * t), *high = low + 2;
      const float s0 = to_float(low[0]), s1 = to_float(high[0]);
      const float z0 = zero_point(high[1]), z1 = zero_point(low[1]);
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float product = R::BOTH_ROWS && i < 2 ? products[t][c][i] - products[t][c][i + 2] : products[t][c][i];
          if constexpr (SUMS_X)
            sums[t][c][i] += (i < 2 ? s0 : s1) * (product - (i < 2 ? z0 : z1) * of_x[c][i]);
          else
            sums[t][c][i] += (i < 2 ? s0 : s1) * product;
        }
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) products[t][c][i] = 0.0f;
    }
  }

  // Adds the product of a step. x: [COLUMNS][PITCH bytes]; weights: the 512-byte lines of TILES
  // tiles, record by record; parameters: scales [GROUPS][ROWS], then zero points. Where other warps
  // read the same x (SHARED_X), the barrier x_read is told as soon as this one has. NORM: x is
  // multiplied by norm_weight, which lies as a row of x does, and its squares are added to
  // squares[NT], those of column 8 c + lane / 4.
  template <bool SHARED_X, bool NORM = false>
  __device__ __forceinline__ static void multiply(const void* x, const void* weights, const void* parameters, float* sums_, float* products_,
                                                  float* x_sums_, int lane, const void* x_read, const void* norm_weight = nullptr,
                                                  float* squares = nullptr) {
    Sums &sums = *reinterpret_cast<Sums*>(sums_), &products = *reinterpret_cast<Sums*>(products_);
    XSums& x_sums = *reinterpret_cast<XSums*>(x_sums_);
    Pairs pairs;
    // matrix lane / 8 of an ldmatrix is the lane / 8-th 16-byte chunk of 8 rows of x; rows that are
    // not there repeat others
    const uint32_t matrix = shared_address(x) + (lane & 7) % COLUMNS * PITCH + (lane >> 3) * 16;
    const uint32_t lines = shared_address(weights) + lane * 16;
#pragma unroll
    for (int r = 0; r < RECORDS; ++r) {
      uint32_t b[NT][ATOMS][2], words[TILES][4];
      const auto load_words = [&] {
#pragma unroll
        for (int t = 0; t < TILES; ++t) load_shared_128(lines + (r * TILES + t) * 512, words[t]);
      };
      if constexpr (!NORM) load_words();  // else when x is normed: registers are few
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int p = 0; p < ATOMS / 2; ++p) ldmatrix_x4(matrix + c * 8 * PITCH + r * RECORD_K * 2 + p * 64, &b[c][2 * p][0]);
      if constexpr (NORM) {
        const uint32_t row = shared_address(norm_weight) + (lane >> 3) * 16;  // the eight rows of a matrix are one
#pragma unroll
        for (int p = 0; p < ATOMS / 2; ++p) {
          uint32_t w[4];
          ldmatrix_x4(row + r * RECORD_K * 2 + p * 64, w);
#pragma unroll
          for (int c = 0; c < NT; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) norm_pair<T>(b[c][2 * p + i / 2][i % 2], w[i], squares[c]);
        }
        load_words();
      }
      if constexpr (SHARED_X)
        if (r == RECORDS - 1) {
          __syncwarp();
          if (elect()) mbarrier_arrive(x_read);
        }
#pragma unroll
      for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int c = 0; c < NT; ++c)
          if (SUMS_X && atom % 2 == 0) add_x(x_sums[c], b[c][atom]);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          uint32_t a[4];
          R::unpack(words[t] + atom * WORDS, a);
#pragma unroll
          for (int c = 0; c < NT; ++c) mma_m16n8k16(products[t][c], a, b[c][atom], T());
        }
        if constexpr (GROUPS > 1) {
          const int done = r * ATOMS + atom + 1;
          if (done % GROUP == 0) {
            load_pairs(shared_address(parameters), lane, done / GROUP - 1, pairs);
            apply_group(sums, products, x_sums, pairs, lane);
          }
        }
      }
    }
    if constexpr (GROUPS == 1) {  // a part of a group may be scaled like the whole
      load_pairs(shared_address(parameters), lane, 0, pairs);
      apply_group(sums, products, x_sums, pairs, lane);
    }
  }

  // After the last step: per-channel scales, which were left for here, of the warp's rows in global
  // memory, and the powers of two that raw codes carry.
  __device__ __forceinline__ static void finish(float* sums_, float* products_, float* x_sums_, const void* scales_, const void* zeros_, int lane) {
    Sums &sums = *reinterpret_cast<Sums*>(sums_), &products = *reinterpret_cast<Sums*>(products_);
    if constexpr (GROUP_STEPS == 0) {
      const T *scales = static_cast<const T*>(scales_), *zeros = static_cast<const T*>(zeros_);
      Pairs pairs;
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        const int row = i * 8 + (lane >> 2);
        T* pair = reinterpret_cast<T*>(pairs + i);
        pair[0] = scales[row], pair[1] = zeros[i % 2 ? row - 8 : row + 8];  // as load_pairs leaves them
      }
      apply_group(sums, products, *reinterpret_cast<XSums*>(x_sums_), pairs, lane);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[t][c][i] *= i < 2 ? R::INVERSE_LOW : R::INVERSE_HIGH;
  }
};

}  // namespace tilebit
