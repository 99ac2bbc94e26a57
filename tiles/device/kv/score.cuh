// Queries as an operand, and scores: S^T = K Q^T by mma.m16n8k16 of the keys that a slot holds.
// Codes are the A operand as they lie in the cache (granule.cuh). Keys' channel scales go into the
// query operand, their zeros are one product a unit. Sums are centered: of codes less the middle
// one. Comes after softmax.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename D>
struct Scores {
  using T = typename D::T;
  using Cursor = typename D::Cursor;
  using State = typename Softmax<D>::State;
  using Keys = typename D::Keys;
  using Rows = typename D::Rows;
  using KeyType = typename D::KeyType;
  static constexpr int KEY_SCALES = D::KEY_SCALES, HEAD_DIM = D::HEAD_DIM, GROUP = D::GROUP, KEY_BYTES = D::KEY_BYTES;
  static constexpr int STRIPS = D::STRIPS, TILES = D::TILES, NT = D::NT;
  static constexpr bool CAPPED = D::CAPPED;
  using Queries = uint32_t[TILES][NT][2];
  using QuerySum = float[NT][2];
  using UnitScores = float[STRIPS][NT][4];
  using WindowScores = float[1][NT][4];

  // Query columns of a pass: column n is query n / GROUP, head n % GROUP of the group.
  __device__ __forceinline__ static void load_queries(const void* launch, const void* cursor, uint32_t* queries) {
    const D& d = view<D>(launch);
    const Cursor& c = view<Cursor>(cursor);
    Queries& out = view<Queries>(queries);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const int n = (c.pass * NT + nt) * 8 + (d.lane >> 2);
      const bool inside = n < GROUP * d.q_len;
      const T* row = d.q + ((int64_t(c.sequence) * d.q_len + n / GROUP) * d.heads + c.head) * (GROUP * HEAD_DIM) + n % GROUP * HEAD_DIM + (d.lane & 3) * 2;
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = 0; i < 2; ++i) out[f][nt][i] = inside ? *reinterpret_cast<const uint32_t*>(row + f * 16 + i * 8) : 0u;
    }
  }
  // The same pair as halves: packed keys are.
  __device__ __forceinline__ static uint32_t as_half(uint32_t pair) {
    if constexpr (std::is_same_v<T, half>) return pair;
    return pack_pair(low_of(pair, T()), high_of(pair, T()), half());
  }
  __device__ __forceinline__ static uint32_t pair_of(float v) { return pack_pair(v, v, half()); }

  // s[strip][tile][i] = products of the slot's keys and the queries, in units of 1 / G::UNIT. Of
  // keys with channel scales also, per column, sums[tile] = {products of the zeros, of the scales}
  // and middle[tile] = what centers s, of both halves of the rows.
  template <typename G, int SCALES, int COUNT, typename C>
  __device__ __forceinline__ static void multiply(const D& d, uint32_t keys, uint32_t parameters, const Queries& queries, float (&s)[COUNT][NT][4], float (&sums)[NT][4],
                                                    float (&middle)[NT][4]) {
    const uint32_t center[4] = {G::minus_middle(0), G::minus_middle(1), G::minus_middle(2), G::minus_middle(3)};
#pragma unroll
    for (int j = 0; j < G::LOADS; ++j) {
      uint32_t b[G::PER_LOAD][NT][2];
#pragma unroll
      for (int k = 0; k < G::PER_LOAD; ++k) {
        const int f = j * G::PER_LOAD + k;
        uint32_t p[4];  // zeros of channels 2 c and the next, their scales, zeros of 2 c + 8 and the next, their scales: rows 0..7, rows 8..15
        if constexpr (SCALES == PER_CHANNEL) load_shared_128(parameters + (f * 4 + (d.lane & 3)) * 16, p);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          if constexpr (std::is_same_v<C, half>) {
            b[k][nt][0] = as_half(queries[f][nt][0]), b[k][nt][1] = as_half(queries[f][nt][1]);
          } else {
            b[k][nt][0] = queries[f][nt][0], b[k][nt][1] = queries[f][nt][1];
          }
          if constexpr (SCALES == PER_CHANNEL) {
            mma_m16n8k16(sums[nt], p, b[k][nt], half());
            b[k][nt][0] = multiply_pairs(b[k][nt][0], p[1]), b[k][nt][1] = multiply_pairs(b[k][nt][1], p[3]);
          }
          if constexpr (G::COLUMN_FACTOR != 1.0f) b[k][nt][1] = multiply_pairs(b[k][nt][1], pair_of(1.0f / G::COLUMN_FACTOR));
          if constexpr (SCALES == PER_CHANNEL) mma_m16n8k16(middle[nt], center, b[k][nt], half());
        }
      }
#pragma unroll
      for (int strip = 0; strip < COUNT; ++strip) {
        uint32_t words[G::LOAD];
        load_words<G>(d.lane, keys + strip * G::BYTES, j, words);
#pragma unroll
        for (int k = 0; k < G::PER_LOAD; ++k) {
          uint32_t a[4];
          G::fragment(words, k, a);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) mma_m16n8k16(s[strip][nt], a, b[k][nt], C());
        }
      }
    }
  }

  // The sums of the queries over the channels: what a token's zero is multiplied by.
  __device__ __forceinline__ static void sum_queries(const uint32_t* operand, float* sums) {
    const Queries& queries = view<Queries>(operand);
    QuerySum& query_sum = view<QuerySum>(sums);
    constexpr uint32_t ONE = 0x3c003c00u, ONES[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float products[4] = {};
#pragma unroll
      for (int f = 0; f < TILES; ++f) {
        const uint32_t b[2] = {as_half(queries[f][nt][0]), as_half(queries[f][nt][1])};
        mma_m16n8k16(products, ONES, b, half());
      }
      query_sum[nt][0] = products[0], query_sum[nt][1] = products[1];
    }
  }

  // What scores are taken less of: nothing before a soft cap.
  __device__ __forceinline__ static void minus_shifts(const State& state, float (&shift)[NT][2]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) shift[nt][i] = CAPPED ? 0.0f : -state.shift(nt, i);
  }
  template <int COUNT>
  __device__ __forceinline__ static void clear(float (&s)[COUNT][NT][4]) {
#pragma unroll
    for (int strip = 0; strip < COUNT; ++strip)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[strip][nt][i] = 0.0f;
  }
  // Scores of a packed unit's tokens in `scores` [strip][column tile][register], less their
  // columns' shifts, from the keys of a slot.
  __device__ __forceinline__ static void score(const void* launch, const void* cursor, int stage, const uint32_t* queries, const float* sum_of_queries, float* scores,
                                              const float* state) {
    const D& d = view<D>(launch);
    const Cursor& c = view<Cursor>(cursor);
    const QuerySum& query_sum = view<QuerySum>(sum_of_queries);
    UnitScores& s = view<UnitScores>(scores);
    clear(s);
    const uint32_t at = d.slot(stage);
    float sums[NT][4] = {}, middle[NT][4] = {};
    multiply<Keys, KEY_SCALES, STRIPS, KeyType>(d, at, at + KEY_BYTES, view<Queries>(queries), s, sums, middle);
    const float key_scale = d.scale * Keys::UNIT * (KEY_SCALES == PER_HEAD ? d.head_scales[c.head] : 1.0f);
    float bias[NT][2];
    minus_shifts(view<State>(state), bias);
    if constexpr (KEY_SCALES == PER_CHANNEL) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 2; ++i) bias[nt][i] += (sums[nt][i] + Keys::MIDDLE * sums[nt][2 + i]) * d.scale + middle[nt][i] * key_scale;
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      float scales[2] = {key_scale, key_scale / Keys::ROW_FACTOR}, zeros[2] = {d.scale, d.scale};
      if constexpr (KEY_SCALES == PER_TOKEN) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t p = load_shared_32(token_parameters(d.lane, at + KEY_BYTES) + (strip * 16 + i * 8) * 4);
          scales[i] *= low_of(p, half()), zeros[i] *= high_of(p, half());
        }
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float zero = KEY_SCALES == PER_TOKEN ? query_sum[nt][i & 1] * zeros[i >> 1] + bias[nt][i & 1] : bias[nt][i & 1];
          s[strip][nt][i] = s[strip][nt][i] * scales[i >> 1] + zero;
        }
    }
  }
  // The same of sixteen tokens of the window.
  __device__ __forceinline__ static void score_window(const void* launch, int stage, const uint32_t* queries, float* scores,
                                                      const float* state) {
    const D& d = view<D>(launch);
    WindowScores& s = view<WindowScores>(scores);
    clear(s);
    const uint32_t at = d.slot(stage);
    float none[NT][4], shift[NT][2];
    minus_shifts(view<State>(state), shift);
    multiply<Rows, NO_SCALES, 1, T>(d, at, at, view<Queries>(queries), s, none, none);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][nt][i] = s[0][nt][i] * d.scale + shift[nt][i & 1];
  }
};

}  // namespace tilebit
