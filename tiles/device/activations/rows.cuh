// What stands between products: 8 values of a row, 16 bytes, in the hands of one thread. The arithmetic
// is that of schedules/activations/glue.py.
//
// R states: T, the numbers of x; K of a row; of a norm RESIDUAL, EPS and OFFSET; Activation, a type of
// store/gate.cuh. Comes after kv/pairs.cuh, store/gate.cuh, activations/inverse_root.cuh and
// activations/quantize.cuh (load_written).
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename R>
struct Eight {
  using T = typename R::T;
  static constexpr int WORDS = 4;

  __device__ __forceinline__ static bool present(int column) { return column < R::K; }

  // The norm's weight of the columns from `column` on, which no kernel of the stream writes.
  __device__ __forceinline__ static void weights(const void* norm_weight, int column, uint32_t* words) {
    uint4 read = make_uint4(0u, 0u, 0u, 0u);
    if (present(column)) read = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(norm_weight) + column));
    words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
  }
  // What is normed: x, or the residual sum, rounded and stored where the residual lay.
  __device__ __forceinline__ static void load(const void* x, void* residual, int row, int column, uint32_t* words) {
    words[0] = words[1] = words[2] = words[3] = 0u;
    if (!present(column)) return;
    const int64_t at = int64_t(row) * R::K + column;
    load_written(static_cast<const T*>(x) + at, words);
    if constexpr (R::RESIDUAL) {
      uint32_t held[WORDS];
      T* kept = static_cast<T*>(residual) + at;
      load_written(kept, held);
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        words[i] = pack_pair(low_of(words[i], T()) + low_of(held[i], T()), high_of(words[i], T()) + high_of(held[i], T()), T());
      *reinterpret_cast<uint4*>(kept) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  __device__ __forceinline__ static float sum_of_squares(const uint32_t* words) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const float low = low_of(words[i], T()), high = high_of(words[i], T());
      sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
    }
    return sum;
  }
  __device__ __forceinline__ static float inverse_root(float sum) {
    return tilebit::inverse_root(sum, float(R::K), R::EPS);
  }
  __device__ __forceinline__ static void store_normed(const uint32_t* words, const uint32_t* weight, float root, int row, int column, void* y) {
    if (!present(column)) return;
    uint32_t out[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
      out[i] = pack_pair(low_of(words[i], T()) * root * (low_of(weight[i], T()) + R::OFFSET),
                         high_of(words[i], T()) * root * (high_of(weight[i], T()) + R::OFFSET), T());
    *reinterpret_cast<uint4*>(static_cast<T*>(y) + int64_t(row) * R::K + column) = make_uint4(out[0], out[1], out[2], out[3]);
  }

  __device__ __forceinline__ static float activated(float gate) { return R::Activation::apply(gate); }
  // Eight gated values of row `row` from `column` on.
  __device__ __forceinline__ static void load_gated(const void* x, int64_t row, int column, uint32_t* out) {
    const T* from = static_cast<const T*>(x) + row * (2 * R::K) + column;
    uint32_t gates[WORDS], ups[WORDS];
    load_written(from, gates);
    load_written(from + R::K, ups);
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
      out[i] = pack_pair(activated(low_of(gates[i], T())) * low_of(ups[i], T()), activated(high_of(gates[i], T())) * high_of(ups[i], T()), T());
  }
  // Eight of a row's gated values: `index` counts them over all rows.
  __device__ __forceinline__ static void gate(const void* x, int64_t index, int rows, void* y) {
    constexpr int PER_ROW = R::K / 8;
    const int64_t row = index / PER_ROW, column = index % PER_ROW * 8;
    if (row >= rows) return;
    uint32_t out[WORDS];
    load_gated(x, row, int(column), out);
    *reinterpret_cast<uint4*>(static_cast<T*>(y) + row * R::K + column) = make_uint4(out[0], out[1], out[2], out[3]);
  }
};

}  // namespace tilebit
