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

// C as in page.cuh, and ROTARY and WARPS of a block. LANES lanes hold a row: each WORDS times two
// pairs of neighbouring channels, APART channels apart, which are turned with one another.
template <typename C>
struct Turn {
  using T = typename C::T;
  static constexpr int HEAD_DIM = C::HEAD_DIM, HALF = HEAD_DIM / 2, ROTARY = C::ROTARY;
  static constexpr int LANES = HEAD_DIM / 4 < 32 ? HEAD_DIM / 4 : 32, WORDS = HEAD_DIM / 4 / LANES;
  static constexpr int ROWS = 32 / LANES;  // of a warp at once
  static constexpr int APART = ROTARY == HALF_ROTARY ? HALF : 2;

  // The first channel of a lane's word `word`.
  __device__ __forceinline__ static int channel(int word) {
    const int pair = word * LANES + int(threadIdx.x) % LANES;
    return ROTARY == HALF_ROTARY ? 2 * pair : 4 * pair;
  }
  // The row at `from` of a token at `position`, turned if TURNED: store(channel, pair) takes every
  // two neighbouring channels.
  template <bool TURNED, typename Store>
  __device__ __forceinline__ static void move(const T* from, const float* cos_sin, int position, const Store& store) {
    uint32_t pairs[WORDS][2];
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int i = 0; i < 2; ++i) pairs[w][i] = *reinterpret_cast<const uint32_t*>(from + channel(w) + i * APART);
    if constexpr (TURNED && ROTARY != NO_ROTARY) turn(pairs, cos_sin + int64_t(position) * HEAD_DIM);
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int i = 0; i < 2; ++i) store(channel(w) + i * APART, pairs[w][i]);
  }
  __device__ __forceinline__ static void turn(uint32_t (&pairs)[WORDS][2], const float* angles) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const int at = ROTARY == HALF_ROTARY ? channel(w) : channel(w) / 2;  // of two angles
      const float2 cosine = *reinterpret_cast<const float2*>(angles + at), sine = *reinterpret_cast<const float2*>(angles + HALF + at);
      float x[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) x[i][0] = low_of(pairs[w][i], T()), x[i][1] = high_of(pairs[w][i], T());
      if constexpr (ROTARY == HALF_ROTARY)
        rotate(x[0][0], x[1][0], cosine.x, sine.x), rotate(x[0][1], x[1][1], cosine.y, sine.y);
      else
        rotate(x[0][0], x[0][1], cosine.x, sine.x), rotate(x[1][0], x[1][1], cosine.y, sine.y);
#pragma unroll
      for (int i = 0; i < 2; ++i) pairs[w][i] = pack_pair(x[i][0], x[i][1], T());
    }
  }

  // row(i, mine) for each of `rows` rows, by all warps of the block together, the first of them by
  // warp `first`. Where no row is left for some lanes of a warp, `mine` is false and i another's.
  template <typename Row>
  __device__ __forceinline__ static void each_row(int rows, int first, const Row& row) {
    const int warp = int(threadIdx.x) / 32, lanes = int(threadIdx.x) % 32 / LANES;
    for (int i = (warp + C::WARPS - first) % C::WARPS * ROWS; i < rows; i += C::WARPS * ROWS) row(min(i + lanes, rows - 1), i + lanes < rows);
  }
};

}  // namespace tilebit
