// What a piece sums up: O^T += V^T P^T by mma.m16n8k16. Codes are the A operand as they lie in the
// cache (granule.cuh); values' token scales go into P, their zeros are a sum of P. P goes from
// accumulator to operand by movmatrix. Comes after softmax.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename D>
struct WeightedSum {
  using T = typename D::T;
  using State = typename Softmax<D>::State;
  using Values = typename D::Values;
  using Rows = typename D::Rows;
  using ValueType = typename D::ValueType;
  static constexpr int VALUE = D::VALUE, STRIPS = D::STRIPS, TILES = D::TILES, NT = D::NT, VALUE_BYTES = D::VALUE_BYTES;
  static constexpr bool BULK = D::BULK;

  // The highest code, as register i of an A operand.
  template <typename G>
  __device__ __forceinline__ static constexpr uint32_t highest(int i) {
    return uint32_t(G::HIGHEST * (i & 1 ? int(G::ROW_FACTOR) : 1) * (i >> 1 ? int(G::COLUMN_FACTOR) : 1)) * 0x00010001u;
  }

  // O^T += V^T P^T of one strip; p is the operand. Of tokens 8..15 what codes lack of the highest
  // one is multiplied, by minus P: so sums stay about as small as centered ones, and what is
  // missing is the same for all channels. (131,072 tokens in one warp at 2 bits, modelled with sums
  // that are cut off: plain codes 15 % off, so 0.09 %.)
  template <typename G, typename C>
  __device__ __forceinline__ static void accumulate(int lane, uint32_t values, const uint32_t (&p)[NT][2], State& state) {
#pragma unroll
    for (int j = 0; j < G::LOADS; ++j) {
      uint32_t words[G::LOAD];
      load_words<G>(lane, values, j, words);
#pragma unroll
      for (int k = 0; k < G::PER_LOAD; ++k) {
        uint32_t a[4];
        G::fragment(words, k, a);
        if constexpr (G::CENTERED) a[2] ^= highest<G>(2), a[3] ^= highest<G>(3);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) mma_m16n8k16(state.o[j * G::PER_LOAD + k][nt], a, p[nt], C());
      }
    }
  }
  // Of a packed unit: O^T += V^T P^T of the values of a slot.
  __device__ __forceinline__ static void add(const void* launch, int stage, const float* weights, float* state_of_piece) {
    const D& d = view<D>(launch);
    const auto& s = view<float[STRIPS][NT][4]>(weights);
    State& state = view<State>(state_of_piece);
    const uint32_t at = d.slot(stage);
    const uint32_t highest_codes[4] = {highest<Values>(0), highest<Values>(1), highest<Values>(2), highest<Values>(3)};
    float taken[NT][4] = {};  // the highest code times signed P; in every lane the whole of it
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      uint32_t p[NT][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        half2 scales;
        float zero;  // of the middle code
        if constexpr (has_zero(VALUE)) {
          const uint32_t pair = load_shared_32(token_parameters(d.lane, at + VALUE_BYTES) + (strip * 16 + i * 8) * 4);
          const half2 parameters = *reinterpret_cast<const half2*>(&pair);
          scales = __half2half2(__low2half(parameters));
          zero = __high2float(__hfma2(scales, __float2half2_rn(0.5f * Values::HIGHEST), parameters));
          if (i == 1 && Values::COLUMN_FACTOR != 1.0f) scales = __hmul2(scales, __float2half2_rn(1.0f / Values::COLUMN_FACTOR));
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const float low = s[strip][nt][2 * i], high = s[strip][nt][2 * i + 1];
          if constexpr (has_zero(VALUE)) {
            state.zeros[nt][0] += low * zero, state.zeros[nt][1] += high * zero;
            p[nt][i] = pack_pair(i == 0 ? low : -low, i == 0 ? high : -high, half());
            p[nt][i] = transpose(multiply_pairs(p[nt][i], *reinterpret_cast<const uint32_t*>(&scales)));
          } else {
            p[nt][i] = transpose(pack_pair(low, high, ValueType()));
          }
        }
      }
      accumulate<Values, ValueType>(d.lane, at + strip * Values::BYTES, p, state);
      if constexpr (Values::CENTERED) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) mma_m16n8k16(taken[nt], highest_codes, p[nt], ValueType());
      }
    }
    if constexpr (Values::CENTERED) {  // half of it; eight lanes' zeros are one sum
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 2; ++i) state.zeros[nt][i] -= taken[nt][i] * (Values::UNIT / 16);
    }
  }
  // Of sixteen tokens of the window, of which `left` or all are tokens.
  __device__ __forceinline__ static void add_window(const void* launch, int stage, const float* weights, float* state_of_piece, int left) {
    const D& d = view<D>(launch);
    const auto& s = view<float[1][NT][4]>(weights);
    State& state = view<State>(state_of_piece);
    const uint32_t at = d.slot(stage);
    if (left < 16) {  // rows that hold no token may hold anything, NaN too, which a P of zero does not silence
      for (int f = 0; f < TILES; ++f)
        for (int i = 0; i < 4; ++i) {
          const int token = (d.lane & 3) * 2 + (i >> 1) * 8;
          const uint32_t address = at + (f * 32 + d.lane) * 16 + i * 4;
          if (token + 1 >= left) store_shared_32(address, token >= left ? 0u : load_shared_32(address) & 0xffffu);
        }
      if constexpr (BULK) fence_before_bulk_copies();
    }
    uint32_t p[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) p[nt][i] = transpose(pack_pair(s[0][nt][2 * i], s[0][nt][2 * i + 1], T()));
    accumulate<Rows, T>(d.lane, at, p, state);
  }
  // From units of packed values' codes to values.
  __device__ __forceinline__ static void scale(const void* launch, const void* cursor, float* state_of_piece) {
    if constexpr (VALUE == FLOAT) return;
    const D& d = view<D>(launch);
    State& state = view<State>(state_of_piece);
    const float unit = Values::UNIT * (VALUE == FP8 ? d.head_scales[d.heads + view<typename D::Cursor>(cursor).head] : 1.0f);
#pragma unroll
    for (int f = 0; f < TILES; ++f)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[f][nt][i] *= i < 2 ? unit : unit / Values::ROW_FACTOR;
  }
};

}  // namespace tilebit
