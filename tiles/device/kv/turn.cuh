// A row, the channels of one head of one token, turned by its rotary embedding by the lanes of a
// warp together, wherever it goes: fp32, rounded once. Comes after pairs.cuh and page.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

enum Rotary { NO_ROTARY, HALF_ROTARY, INTERLEAVED_ROTARY };  // which channels are a pair: (i, i + head_dim / 2), (2 i, 2 i + 1)

__device__ __forceinline__ void rotate(float& x, float& y, float cosine, float sine) {
  const float turned = __fmaf_rn(x, cosine, -__fmul_rn(y, sine));
  y = __fmaf_rn(y, cosine, __fmul_rn(x, sine)), x = turned;
}

// C as in page.cuh, and ROTARY. LANES neighbouring lanes hold a row: each WORDS times two pairs of
// neighbouring channels, which are turned with one another.
template <typename C>
struct Turn {
  using T = typename C::T;
  static constexpr int HEAD_DIM = C::HEAD_DIM, HALF = HEAD_DIM / 2, ROTARY = C::ROTARY;
  static constexpr int LANES = HEAD_DIM / 4 < 32 ? HEAD_DIM / 4 : 32, WORDS = HEAD_DIM / 4 / LANES;
  static constexpr int ROWS = 32 / LANES;                          // of a warp at once
  static constexpr int APART = ROTARY == HALF_ROTARY ? HALF : 2;   // from a lane's first pair of channels to its second

  // The first channel of word `word` of a lane.
  __device__ __forceinline__ static int channel(int word) {
    const int pair = word * LANES + int(threadIdx.x) % LANES;
    return ROTARY == HALF_ROTARY ? 2 * pair : 4 * pair;
  }
  // Row `from` of a token at `position`, turned, to row `to`.
  __device__ __forceinline__ static void move(const T* from, const float* cos_sin, int position, T* to) {
    const float* angles = cos_sin + int64_t(position) * HEAD_DIM;
    uint32_t pairs[WORDS][2];
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int i = 0; i < 2; ++i) pairs[w][i] = *reinterpret_cast<const uint32_t*>(from + channel(w) + i * APART);
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
      for (int i = 0; i < 2; ++i) *reinterpret_cast<uint32_t*>(to + channel(w) + i * APART) = pack_pair(x[i][0], x[i][1], T());
    }
  }

  // Rows of tokens `begin` to `end` of heads `head` to `head + heads` of the queries go to `out`,
  // [tokens, all_heads, HEAD_DIM]; `first`: the row of q and out that token 0 would have. A block
  // does it together.
  __device__ __forceinline__ static void queries(const void* q, int pitch, const void* cos_sin, int first, int begin, int end, int head, int heads,
                                                 int all_heads, void* out) {
    for (int i = int(threadIdx.x) / LANES; i < (end - begin) * heads; i += C::THREADS / LANES) {
      const int position = begin + i / heads, mine = head + i % heads;
      const int64_t row = int64_t(first) + position;
      move(static_cast<const T*>(q) + row * pitch + mine * HEAD_DIM, static_cast<const float*>(cos_sin), position,
           static_cast<T*>(out) + (row * all_heads + mine) * HEAD_DIM);
    }
  }
};

}  // namespace tilebit
