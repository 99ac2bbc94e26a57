// The softmax of decode attention, in the registers that scores are in: masks, weights P = 2^(score
// - top), their sums. What P is relative to moves only when a sum of P exceeds LAZY (BitDecoding's
// cooperative softmax over warps is the sum at the end of a piece). Comes after decode.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename D>
struct Softmax {
  using Cursor = typename D::Cursor;
  static constexpr int TILES = D::TILES, NT = D::NT, GROUP = D::GROUP, WINDOW = D::WINDOW, SINK_TOKENS = D::SINK_TOKENS;
  static constexpr bool CAPPED = D::CAPPED;
  static constexpr float LAZY = 32.0f;      // a lane's sum of P over some strips, so P, too: times a value's scale it must stay a finite half
  static constexpr float NOTHING = -1e30f;  // a maximum of no scores

  // The state of a piece: O^T [channel tile][column tile], and per column of this thread the
  // maximum that P is relative to, the sum of P and what all channels have in common: the sum of P
  // times zeros, and what centering O took away.
  struct State {
    float o[TILES][NT][4], top[NT][2], sum[NT][2], zeros[NT][2];
    // Subtracted from scores: of a column that has seen none nothing yet.
    __device__ __forceinline__ float shift(int nt, int i) const { return top[nt][i] == NOTHING ? 0.0f : top[nt][i]; }
  };
  __device__ __forceinline__ static void clear(float* state_of_piece) {
    State& state = view<State>(state_of_piece);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[f][nt][i] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) state.top[nt][i] = NOTHING, state.sum[nt][i] = 0.0f, state.zeros[nt][i] = 0.0f;
    }
  }

  // Scores less their columns' shifts (under a soft cap: what it caps) to P: they become 2^(score -
  // top), sums are kept. `first` is the position of the first of COUNT * 16 tokens.
  template <int COUNT>
  __device__ __forceinline__ static void soften(const void* launch, const void* cursor, float* scores, float* state_of_piece, int first) {
    const D& d = view<D>(launch);
    const typename D::Units& u = view<Cursor>(cursor).u;
    const int pass = view<Cursor>(cursor).pass;
    State& state = view<State>(state_of_piece);
    auto& s = view<float[COUNT][NT][4]>(scores);
    if constexpr (CAPPED) {
#pragma unroll
      for (int strip = 0; strip < COUNT; ++strip)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[strip][nt][i] = d.cap * tanhf(s[strip][nt][i]) - state.shift(nt, i & 1);
    }
    // Positions that the last query sees and the first one does not, or that no window reaches any
    // more.
    const int position = u.length - d.q_len;  // of the first query
    bool masked = first + COUNT * 16 > position + 1;
    if constexpr (WINDOW > 0) masked |= first < u.length - WINDOW;
    if (masked) {
#pragma unroll
      for (int strip = 0; strip < COUNT; ++strip)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = first + strip * 16 + (d.lane >> 2) + (i >> 1) * 8;
            const int own = position + ((pass * NT + nt) * 8 + (d.lane & 3) * 2 + (i & 1)) / GROUP;
            bool seen = token <= own && token < u.length;
            if constexpr (WINDOW > 0) seen &= token > own - WINDOW || token < SINK_TOKENS;
            if (!seen) s[strip][nt][i] = -INFINITY;
          }
    }
    // Sums, which are wanted anyway, tell whether some P is too high; only then is the maximum of
    // the scores looked for. They wait for that in registers, of which wide products have few.
    constexpr int TOGETHER = most(1, least(COUNT, 8 / (NT * NT)));
#pragma unroll
    for (int from = 0; from < COUNT; from += TOGETHER) {
      float p[TOGETHER][NT][4], sum[NT][2];
      weigh<COUNT, TOGETHER>(s, from, p, sum);
      bool grown = false;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 2; ++i) grown |= state.top[nt][i] == NOTHING || !(sum[nt][i] <= LAZY);
      if (__any_sync(0xffffffffu, grown)) {
        raise<COUNT, TOGETHER>(s, from, state);
        weigh<COUNT, TOGETHER>(s, from, p, sum);
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int i = 0; i < 2; ++i) state.sum[nt][i] += sum[nt][i];
#pragma unroll
        for (int strip = 0; strip < TOGETHER; ++strip)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[from + strip][nt][i] = p[strip][nt][i];
      }
    }
  }
  // P of TOGETHER strips, and its sums over this lane's tokens.
  template <int COUNT, int TOGETHER>
  __device__ __forceinline__ static void weigh(const float (&s)[COUNT][NT][4], int from, float (&p)[TOGETHER][NT][4], float (&sum)[NT][2]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      sum[nt][0] = sum[nt][1] = 0.0f;
#pragma unroll
      for (int strip = 0; strip < TOGETHER; ++strip)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[nt][i & 1] += p[strip][nt][i] = exp2_fast(s[from + strip][nt][i]);
    }
  }
  // The maxima rise to those of TOGETHER strips' scores: what is summed up so far, what is P
  // already and what is to become P follow.
  template <int COUNT, int TOGETHER>
  __device__ __forceinline__ static void raise(float (&s)[COUNT][NT][4], int from, State& state) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float above = -INFINITY;
#pragma unroll
        for (int strip = 0; strip < TOGETHER; ++strip) above = fmaxf(above, fmaxf(s[from + strip][nt][i], s[from + strip][nt][i + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) above = fmaxf(above, __shfl_xor_sync(0xffffffffu, above, step));
        const bool fresh = state.top[nt][i] == NOTHING;
        const float before = state.shift(nt, i);
        state.top[nt][i] = fresh ? fmaxf(above, NOTHING) : before + fmaxf(above, 0.0f);
        const float by = state.shift(nt, i) - before, factor = fresh ? 1.0f : exp2_fast(-by);
        state.sum[nt][i] *= factor, state.zeros[nt][i] *= factor;
#pragma unroll
        for (int f = 0; f < TILES; ++f) state.o[f][nt][i] *= factor, state.o[f][nt][i + 2] *= factor;
#pragma unroll
        for (int strip = 0; strip < COUNT; ++strip)
#pragma unroll
          for (int j = i; j < 4; j += 2) s[strip][nt][j] = strip < from ? s[strip][nt][j] * factor : s[strip][nt][j] - by;
      }
  }
};

}  // namespace tilebit
