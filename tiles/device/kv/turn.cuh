// A row, the channels of one head of one token, on its way through the registers of neighbouring
// lanes: normalized and turned by its rotary embedding, if asked, in fp32 rounded once. All rows are
// read here, wherever they go, so that the same row gives the same bits. Comes after pairs.cuh and
// page.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

enum Rotary { NO_ROTARY, HALF_ROTARY, INTERLEAVED_ROTARY };  // which channels are a pair: (i, i + head_dim / 2), (2 i, 2 i + 1)

__device__ __forceinline__ void rotate(float& x, float& y, float cosine, float sine) {
  const float turned = __fmaf_rn(x, cosine, -__fmul_rn(y, sine));
  y = __fmaf_rn(y, cosine, __fmul_rn(x, sine)), x = turned;
}

// C as in page.cuh; ROTARY, ROTARY_DIM, NORM, NORM_EPS and NORM_OFFSET; WARPS that share rows. LANES lanes
// hold a row: each WORDS times two pairs of neighbouring channels, which are turned with one another
// (channels from ROTARY_DIM on are not).
template <typename C>
struct Turn {
  using T = typename C::T;
  static constexpr int HEAD_DIM = C::HEAD_DIM, DIM = C::ROTARY_DIM, HALF = DIM / 2, ROTARY = C::ROTARY;
  static constexpr int LANES = HEAD_DIM / 4 < 32 ? HEAD_DIM / 4 : 32, WORDS = HEAD_DIM / 4 / LANES;
  static constexpr int ROWS = 32 / LANES;  // of a warp at once
  using Numbers = float[WORDS][2][2];

  __device__ __forceinline__ static bool turns(int word) { return DIM == HEAD_DIM || 4 * (word * LANES + int(threadIdx.x) % LANES) < DIM; }
  // The first channel of pair `i` of a lane's word `word`.
  __device__ __forceinline__ static int channel(int word, int i) {
    const int at = word * LANES + int(threadIdx.x) % LANES;
    return ROTARY == HALF_ROTARY && turns(word) ? 2 * at + i * HALF : 4 * at + i * 2;
  }
  // The row at `from` of a token at `position`, normalized and turned if TURNED: store(channel,
  // pair) takes every two neighbouring channels. A whole warp calls this.
  template <bool TURNED, typename Store>
  __device__ __forceinline__ static void move(const T* from, const float* cos_sin, const T* norm, int position, const Store& store) {
    uint32_t pairs[WORDS][2];
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int i = 0; i < 2; ++i) pairs[w][i] = *reinterpret_cast<const uint32_t*>(from + channel(w, i));
    if constexpr (TURNED && (C::NORM || ROTARY != NO_ROTARY)) {
      Numbers x;
#pragma unroll
      for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int i = 0; i < 2; ++i) x[w][i][0] = low_of(pairs[w][i], T()), x[w][i][1] = high_of(pairs[w][i], T());
      if constexpr (C::NORM) normalize(x, norm);
      if constexpr (ROTARY != NO_ROTARY) turn(x, cos_sin + int64_t(position) * DIM);
#pragma unroll
      for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int i = 0; i < 2; ++i) pairs[w][i] = pack_pair(x[w][i][0], x[w][i][1], T());
    }
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int i = 0; i < 2; ++i) store(channel(w, i), pairs[w][i]);
  }
  __device__ __forceinline__ static void normalize(Numbers& x, const T* norm) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int i = 0; i < 2; ++i) sum = __fmaf_rn(x[w][i][0], x[w][i][0], sum), sum = __fmaf_rn(x[w][i][1], x[w][i][1], sum);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fmaf_rn(sum, 1.0f / HEAD_DIM, C::NORM_EPS)));
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t weights = *reinterpret_cast<const uint32_t*>(norm + channel(w, i));
        x[w][i][0] = __fmul_rn(__fmul_rn(x[w][i][0], factor), __fadd_rn(low_of(weights, T()), C::NORM_OFFSET));
        x[w][i][1] = __fmul_rn(__fmul_rn(x[w][i][1], factor), __fadd_rn(high_of(weights, T()), C::NORM_OFFSET));
      }
  }
  __device__ __forceinline__ static void turn(Numbers& x, const float* angles) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      if (!turns(w)) continue;
      const int at = ROTARY == HALF_ROTARY ? channel(w, 0) : channel(w, 0) / 2;  // of two angles
      const float2 cosine = *reinterpret_cast<const float2*>(angles + at), sine = *reinterpret_cast<const float2*>(angles + HALF + at);
      if constexpr (ROTARY == HALF_ROTARY)
        rotate(x[w][0][0], x[w][1][0], cosine.x, sine.x), rotate(x[w][0][1], x[w][1][1], cosine.y, sine.y);
      else
        rotate(x[w][0][0], x[w][0][1], cosine.x, sine.x), rotate(x[w][1][0], x[w][1][1], cosine.y, sine.y);
    }
  }

  // row(i, mine) for each of `rows` rows, by WARPS warps together, the first of them by warp
  // `first`. Where no row is left for some lanes of a warp, `mine` is false and i another's.
  template <typename Row>
  __device__ __forceinline__ static void each_row(int rows, int first, const Row& row) {
    const int warp = int(threadIdx.x) / 32, lanes = int(threadIdx.x) % 32 / LANES;
    for (int i = (warp + C::WARPS - first) % C::WARPS * ROWS; i < rows; i += C::WARPS * ROWS) row(min(i + lanes, rows - 1), i + lanes < rows);
  }
};

}  // namespace tilebit
