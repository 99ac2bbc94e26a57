// Groups of 128 tokens, quantized and packed in registers into their pages. A warp holds 16 tokens
// as the A fragments that a granule is made of: register i of fragment f holds row lane / 4 + 8 (i
// & 1), columns 16 f + 2 (lane % 4) + 8 (i >> 1) and the next, rows tokens and columns channels.
// Values' granules have them the other way round: movmatrix. Comes after new_rows.cuh and
// quantize.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename C>
struct Pack {
  using T = typename C::T;
  using N = NewRows<C>;
  using Rows = typename N::Rows;
  static constexpr int KEY = C::KEY, VALUE = C::VALUE, KEY_SCALES = C::KEY_SCALES, HEAD_DIM = C::HEAD_DIM, PAGE = C::PAGE, RESIDUAL = C::RESIDUAL;
  static constexpr int TILES = HEAD_DIM / 16, WARPS = C::WARPS, HALVES = RESIDUAL / 16 / WARPS;  // granules of a warp
  using Fragments = uint32_t[TILES][4];
  using Extremes = float[2][WARPS][HEAD_DIM];  // lowest and highest

  // Sixteen tokens of keys or values, granule `granule` of the group that begins with token
  // `group`.
  template <bool KEYS>
  __device__ __forceinline__ static void load(const void* rows, int group, int granule, uint32_t* fragments) {
    const N& n = view<N>(rows);
    Fragments& r = view<Fragments>(fragments);
    const int lane = threadIdx.x & 31;
    const int token = group + granule * 16;
#pragma unroll
    for (int f = 0; f < TILES; ++f) {
      uint32_t w[4] = {0u, 0u, 0u, 0u};
      if (token < n.old_length) {
        const uint4 words = *reinterpret_cast<const uint4*>(n.window + (KEYS ? 0 : C::WINDOW_VALUES_AT) + granule * Rows::BYTES + (f * 32 + lane) * 16);
        w[0] = words.x, w[1] = words.y, w[2] = words.z, w[3] = words.w;
        if (!KEYS) {
          const uint32_t turned = transpose(w[1]);
          w[0] = transpose(w[0]), w[1] = transpose(w[2]), w[2] = turned, w[3] = transpose(w[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int mine = token + (lane >> 2) + (i & 1) * 8, channel = f * 16 + (lane & 3) * 2 + (i >> 1) * 8;
        if (mine >= n.old_length) w[i] = KEYS ? N::key_pair(n, mine, channel) : N::value_pair(n, mine, channel);
        r[f][i] = w[i];
      }
    }
  }

  // The extremes of each channel over this warp's tokens, to the shared memory `extremes`.
  __device__ __forceinline__ static void find_extremes(const uint32_t* fragments, void* shared) {
    const auto& r = view<Fragments[HALVES]>(fragments);
    auto &lows = view<Extremes>(shared)[0], &highs = view<Extremes>(shared)[1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int f = 0; f < TILES; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // column 2 (lane % 4) + {0, 1, 8, 9}
        float low = INFINITY, high = -INFINITY;
#pragma unroll
        for (int g = 0; g < HALVES; ++g)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t pair = r[g][f][(e >> 1) * 2 + i];
            const float x = e & 1 ? high_of(pair, T()) : low_of(pair, T());
            low = fminf(low, x), high = fmaxf(high, x);
          }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
          high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
        }
        const int channel = f * 16 + (lane & 3) * 2 + (e & 1) + (e >> 1) * 8;
        if (lane < 4) lows[warp][channel] = low, highs[warp][channel] = high;
      }
  }
  // Codes with parameters of each channel over the group's tokens, which are stored too.
  __device__ __forceinline__ static void quantize_channels(const void* rows, int group, uint32_t* fragments, const void* shared) {
    constexpr float MOST = float((1 << (bits_of(KEY) % 16)) - 1);
    const N& n = view<N>(rows);
    auto& r = view<Fragments[HALVES]>(fragments);
    const auto &lows = view<Extremes>(shared)[0], &highs = view<Extremes>(shared)[1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int f = 0; f < TILES; ++f) {
      Parameters p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int channel = f * 16 + (lane & 3) * 2 + (e & 1) + (e >> 1) * 8;
        float low = lows[0][channel], high = highs[0][channel];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) low = fminf(low, lows[w][channel]), high = fmaxf(high, highs[w][channel]);
        p[e] = parameters_of(low, high, MOST);
      }
#pragma unroll
      for (int g = 0; g < HALVES; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) r[g][f][i] = codes_of<T, KEY>(r[g][f][i], p[(i >> 1) * 2], p[(i >> 1) * 2 + 1]);
      if (warp == 0 && lane < 4) {
        const int at = (f * 4 + lane) * 16;  // in the group's record, of which each page of a group has a slice
        constexpr int SLICE = PAGE < RESIDUAL ? C::GROUP_RECORD * PAGE / RESIDUAL : C::GROUP_RECORD;
        char* record = n.page_of(group + (PAGE < RESIDUAL ? at / SLICE * PAGE : 0)) + C::KEY_PARAMETERS_AT;
        if (PAGE > RESIDUAL) record += group % PAGE / RESIDUAL * SLICE;
        *reinterpret_cast<uint4*>(record + at % SLICE) = make_uint4(pack_pair(p[0].zero, p[1].zero, half()), pack_pair(p[0].scale, p[1].scale, half()),
                                                                    pack_pair(p[2].zero, p[3].zero, half()), pack_pair(p[2].scale, p[3].scale, half()));
      }
    }
  }
  // A granule of keys, whose channels may be quantized already, to its page.
  __device__ __forceinline__ static void store_keys(const void* rows, int token, uint32_t* fragments, float head_scale) {
    const N& n = view<N>(rows);
    Fragments& r = view<Fragments>(fragments);
    char* page = n.page_of(token);
    if constexpr (KEY_SCALES == PER_TOKEN) quantize_tokens<KEY>(r, page + C::KEY_PARAMETERS_AT + token % PAGE * C::PAIR_BYTES);
    if constexpr (KEY == FP8) {
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = 0; i < 4; ++i) r[f][i] = e4m3_of<T>(r[f][i], head_scale);
    }
    store<KEY>(page + token % PAGE * C::KEY_TOKEN, r);
  }
  __device__ __forceinline__ static void store_values(const void* rows, int token, uint32_t* fragments, float head_scale) {
    const N& n = view<N>(rows);
    Fragments& r = view<Fragments>(fragments);
    char* page = n.page_of(token);
    if constexpr (has_zero(VALUE)) quantize_tokens<VALUE>(r, page + C::VALUE_PARAMETERS_AT + token % PAGE * C::PAIR_BYTES);
#pragma unroll
    for (int f = 0; f < TILES; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (VALUE == FP8) r[f][i] = e4m3_of<T>(r[f][i], head_scale);
        r[f][i] = transpose(r[f][i]);
      }
      const uint32_t swapped = r[f][1];
      r[f][1] = r[f][2], r[f][2] = swapped;
    }
    store<VALUE>(page + C::VALUES_AT + token % PAGE * C::VALUE_TOKEN, r);
  }

  // Compress a granule's codes, register by register (rows and columns as the tensor cores want
  // them), and store it.
  template <int KIND>
  __device__ __forceinline__ static void store(char* granule, const Fragments& r) {
    using G = Granule<KIND, HEAD_DIM>;
    uint32_t words[G::WORDS];
#pragma unroll
    for (int w = 0; w < G::WORDS; ++w) {
      if constexpr (G::BITS == 16)
        words[w] = r[w / 4][w % 4];
      else if constexpr (G::BITS == 8)
        words[w] = __byte_perm(r[w / 2][w % 2 * 2], r[w / 2][w % 2 * 2 + 1], 0x6420);
      else if constexpr (G::BITS == 4)
        words[w] = r[w][0] | r[w][1] << 4 | r[w][2] << 8 | r[w][3] << 12;
      else
        words[w] = r[2 * w][0] | r[2 * w][1] << 2 | r[2 * w][2] << 4 | r[2 * w][3] << 6 | r[2 * w + 1][0] << 8 | r[2 * w + 1][1] << 10 |
                   r[2 * w + 1][2] << 12 | r[2 * w + 1][3] << 14;
    }
#pragma unroll
    for (int j = 0; j < G::LOADS; ++j) {
      char* to = granule + (j * 32 + (threadIdx.x & 31)) * (G::LOAD * 4);
      if constexpr (G::LOAD == 4)
        *reinterpret_cast<uint4*>(to) = make_uint4(words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
      else
        *reinterpret_cast<uint2*>(to) = make_uint2(words[2 * j], words[2 * j + 1]);
    }
  }
  // Codes of a granule with parameters of each token (over the channels), which are stored too.
  template <int KIND>
  __device__ __forceinline__ static void quantize_tokens(Fragments& r, char* parameters) {
    const int lane = threadIdx.x & 31;
    constexpr float MOST = float((1 << (bits_of(KIND) % 16)) - 1);
#pragma unroll
    for (int half_of_rows = 0; half_of_rows < 2; ++half_of_rows) {
      float low = INFINITY, high = -INFINITY;
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = half_of_rows; i < 4; i += 2) {
          low = fminf(low, fminf(low_of(r[f][i], T()), high_of(r[f][i], T())));
          high = fmaxf(high, fmaxf(low_of(r[f][i], T()), high_of(r[f][i], T())));
        }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
      }
      const Parameters p = parameters_of(low, high, MOST);
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = half_of_rows; i < 4; i += 2) r[f][i] = codes_of<T, KIND>(r[f][i], p, p);
      if ((lane & 3) == 0) reinterpret_cast<uint32_t*>(parameters)[(lane >> 2) + half_of_rows * 8] = pack_pair(p.scale, p.zero, half());
    }
  }
};

}  // namespace tilebit
