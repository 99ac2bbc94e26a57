// New keys and values join a low-bit KV cache: into the sequence's 16-bit window, and whenever 128 tokens are together, quantized and packed in
// registers into their pages. See tiles/attention/append.py. Comes after ptx.cuh and kv.cuh.
//
// A warp holds 32 of the 128 tokens as the A fragments that a granule is made of: register i of fragment f holds row lane / 4 + 8 (i & 1), columns
// 16 f + 2 (lane % 4) + 8 (i >> 1) and the next, rows tokens and columns channels. Values' granules have them the other way round: movmatrix.
#pragma once
#include <stdint.h>

namespace tilebit {

enum Rotary { NO_ROTARY, HALF_ROTARY, INTERLEAVED_ROTARY };  // which channels are a pair: (i, i + head_dim / 2), (2 i, 2 i + 1)

// e4m3 of x: round to nearest even, saturating at 448.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
  const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;                               // NaN
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;                       // 448
  const float a = __uint_as_float(magnitude);
  if (magnitude < 0x3c800000u) return sign | uint32_t(rintf(a * 512.0f));  // below 2^-6: steps of 2^-9
  return sign | ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
}

struct Parameters {
  float scale, inverse, zero;
};
// Scale and zero point of codes up to `most` for numbers from `low` to `high`, rounded to halves as they are stored.
__device__ __forceinline__ Parameters parameters_of(float low, float high, float most) {
  Parameters p;
  p.scale = __half2float(__float2half_rn(__fdiv_rn(__fsub_rn(high, low), most)));
  if (!(p.scale > 0.0f)) p.scale = 1.0f;
  p.zero = __half2float(__float2half_rn(__fadd_rn(low, 0.0f)));  // +0, whichever of the zeros the minimum was
  p.inverse = __fdiv_rn(1.0f, p.scale);
  return p;
}
__device__ __forceinline__ uint32_t code_of(float x, const Parameters& p, float most) {
  return uint32_t(fminf(fmaxf(rintf(__fmul_rn(__fsub_rn(x, p.zero), p.inverse)), 0.0f), most));
}

template <typename T, int KEY, int VALUE, int KEY_SCALES, int HEAD_DIM, int PAGE, int ROTARY>
struct Append {
  using P = Page<KEY, VALUE, KEY_SCALES, HEAD_DIM, PAGE>;
  using Rows = Granule<FLOAT, HEAD_DIM>;
  static constexpr int TILES = HEAD_DIM / 16, THREADS = 128, HALVES = 2;  // granules of a warp

  const T *k, *v;
  char *pages, *windows;
  const int *tables, *starts, *lengths;
  const float *head_scales, *cos_sin;
  int heads, max_pages;
  int head, first_row, old_length, length;  // rows of k and v from first_row on are tokens old_length .. length - 1
  const int* table;
  char* window;
  int lane, warp;

  __device__ __forceinline__ static void rotate(float& x, float& y, float cosine, float sine) {
    const float turned = __fmaf_rn(x, cosine, -__fmul_rn(y, sine));
    y = __fmaf_rn(y, cosine, __fmul_rn(x, sine)), x = turned;
  }
  // Channels `channel` and the next of a new token's key, rotated.
  __device__ __forceinline__ uint32_t key_pair(int token, int channel) const {
    const T* row = k + (int64_t(first_row + token - old_length) * heads + head) * HEAD_DIM;
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(row + channel);
    if constexpr (ROTARY == NO_ROTARY) return pair;
    const float* angles = cos_sin + int64_t(token) * HEAD_DIM;
    float low = low_of(pair, T()), high = high_of(pair, T());
    constexpr int HALF = HEAD_DIM / 2;
    if constexpr (ROTARY == INTERLEAVED_ROTARY) {
      rotate(low, high, angles[channel / 2], angles[HALF + channel / 2]);
    } else {
      const bool upper = channel >= HALF;
      const int i = channel % HALF;
      const uint32_t other = *reinterpret_cast<const uint32_t*>(row + (upper ? i : i + HALF));
      float low_other = low_of(other, T()), high_other = high_of(other, T());
      if (upper) {
        rotate(low_other, low, angles[i], angles[HALF + i]);
        rotate(high_other, high, angles[i + 1], angles[HALF + i + 1]);
      } else {
        rotate(low, low_other, angles[i], angles[HALF + i]);
        rotate(high, high_other, angles[i + 1], angles[HALF + i + 1]);
      }
    }
    return pack_pair(low, high, T());
  }
  __device__ __forceinline__ uint32_t value_pair(int token, int channel) const {
    return *reinterpret_cast<const uint32_t*>(v + (int64_t(first_row + token - old_length) * heads + head) * HEAD_DIM + channel);
  }
  // The 32-bit word of the window that holds a key's channels `channel` (even) and the next.
  __device__ __forceinline__ uint32_t* key_word(int token, int channel) const {
    const int fragment = channel / 16, i = (token % 16) / 8 + (channel % 16) / 8 * 2, owner = token % 8 * 4 + channel % 8 / 2;
    return reinterpret_cast<uint32_t*>(window + token / 16 * Rows::BYTES) + (fragment * 32 + owner) * 4 + i;
  }
  // The 16-bit element of the window that holds a value's channel.
  __device__ __forceinline__ uint16_t* value_element(int token, int channel) const {
    const int fragment = channel / 16, i = (channel % 16) / 8 + (token % 16) / 8 * 2, owner = channel % 8 * 4 + token % 8 / 2;
    return reinterpret_cast<uint16_t*>(window + (RESIDUAL / 16 + token / 16) * Rows::BYTES) + ((fragment * 32 + owner) * 4 + i) * 2 + token % 2;
  }
  // New tokens of the group that begins at `group` go to the window.
  __device__ __forceinline__ void store_window(int group) const {
    const int begin = max(group, old_length);
    for (int e = threadIdx.x; e < (length - begin) * (HEAD_DIM / 2); e += THREADS) {
      const int token = begin + e / (HEAD_DIM / 2), channel = e % (HEAD_DIM / 2) * 2;
      *key_word(token - group, channel) = key_pair(token, channel);
      const uint32_t pair = value_pair(token, channel);
      *value_element(token - group, channel) = uint16_t(pair), *value_element(token - group, channel + 1) = uint16_t(pair >> 16);
    }
  }

  // Fragments of this warp's 16 tokens from `token` on, of keys or values (rows tokens, columns channels).
  template <bool KEYS>
  __device__ __forceinline__ void load(int group, int granule, uint32_t (&r)[TILES][4]) const {
    const int token = group + granule * 16;
#pragma unroll
    for (int f = 0; f < TILES; ++f) {
      uint32_t w[4] = {0u, 0u, 0u, 0u};
      if (token < old_length) {
        const uint4 words = *reinterpret_cast<const uint4*>(window + ((KEYS ? 0 : RESIDUAL / 16) + granule) * Rows::BYTES + (f * 32 + lane) * 16);
        w[0] = words.x, w[1] = words.y, w[2] = words.z, w[3] = words.w;
        if (!KEYS) {
          const uint32_t turned = transpose(w[1]);
          w[0] = transpose(w[0]), w[1] = transpose(w[2]), w[2] = turned, w[3] = transpose(w[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int mine = token + (lane >> 2) + (i & 1) * 8, channel = f * 16 + (lane & 3) * 2 + (i >> 1) * 8;
        if (mine >= old_length) w[i] = KEYS ? key_pair(mine, channel) : value_pair(mine, channel);
        r[f][i] = w[i];
      }
    }
  }
  __device__ __forceinline__ char* page_of(int token) const {
    return pages + (int64_t(table[token / PAGE]) * heads + head) * P::BYTES;
  }
  // Compress a granule's codes, register by register (rows and columns as the tensor cores want them), and store it.
  template <int KIND>
  __device__ __forceinline__ void store(char* granule, const uint32_t (&r)[TILES][4]) const {
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
      char* to = granule + (j * 32 + lane) * (G::LOAD * 4);
      if constexpr (G::LOAD == 4)
        *reinterpret_cast<uint4*>(to) = make_uint4(words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
      else
        *reinterpret_cast<uint2*>(to) = make_uint2(words[2 * j], words[2 * j + 1]);
    }
  }
  template <int KIND>
  __device__ __forceinline__ static uint32_t codes_of(uint32_t pair, const Parameters& low, const Parameters& high) {
    constexpr float MOST = float((1 << (bits_of(KIND) % 16)) - 1);
    return code_of(low_of(pair, T()), low, MOST) | code_of(high_of(pair, T()), high, MOST) << 16;
  }
  __device__ __forceinline__ static uint32_t e4m3_of(uint32_t pair, float scale) {
    return to_e4m3(__fdiv_rn(low_of(pair, T()), scale)) | to_e4m3(__fdiv_rn(high_of(pair, T()), scale)) << 16;
  }
  // Codes of a granule with parameters of each token (over the channels), which are stored too.
  template <int KIND>
  __device__ __forceinline__ void quantize_tokens(uint32_t (&r)[TILES][4], char* parameters) const {
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
        for (int i = half_of_rows; i < 4; i += 2) r[f][i] = codes_of<KIND>(r[f][i], p, p);
      if ((lane & 3) == 0) reinterpret_cast<uint32_t*>(parameters)[(lane >> 2) + half_of_rows * 8] = pack_pair(p.scale, p.zero, half());
    }
  }

  // The whole group that begins at `group` goes to its pages.
  __device__ __forceinline__ void pack(int group) const {
    uint32_t r[HALVES][TILES][4];
#pragma unroll
    for (int g = 0; g < HALVES; ++g) load<true>(group, warp * HALVES + g, r[g]);
    if constexpr (KEY_SCALES == PER_CHANNEL) quantize_channels(group, r);
#pragma unroll
    for (int g = 0; g < HALVES; ++g) {
      const int token = group + (warp * HALVES + g) * 16;
      char* page = page_of(token);
      if constexpr (KEY_SCALES == PER_TOKEN) quantize_tokens<KEY>(r[g], page + P::KEY_PARAMETERS_AT + token % PAGE * 4);
      if constexpr (KEY == FP8) {
#pragma unroll
        for (int f = 0; f < TILES; ++f)
#pragma unroll
          for (int i = 0; i < 4; ++i) r[g][f][i] = e4m3_of(r[g][f][i], head_scales[head]);
      }
      store<KEY>(page + token % PAGE * P::KEY_TOKEN, r[g]);
    }
#pragma unroll
    for (int g = 0; g < HALVES; ++g) {
      const int granule = warp * HALVES + g, token = group + granule * 16;
      char* page = page_of(token);
      load<false>(group, granule, r[g]);
      if constexpr (has_zero(VALUE)) quantize_tokens<VALUE>(r[g], page + P::VALUE_PARAMETERS_AT + token % PAGE * 4);
#pragma unroll
      for (int f = 0; f < TILES; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (VALUE == FP8) r[g][f][i] = e4m3_of(r[g][f][i], head_scales[heads + head]);
          r[g][f][i] = transpose(r[g][f][i]);
        }
        const uint32_t swapped = r[g][f][1];
        r[g][f][1] = r[g][f][2], r[g][f][2] = swapped;
      }
      store<VALUE>(page + P::VALUES_AT + token % PAGE * P::VALUE_TOKEN, r[g]);
    }
  }
  // Codes with parameters of each channel (over the group's tokens): lanes, then warps through shared memory.
  __device__ __forceinline__ void quantize_channels(int group, uint32_t (&r)[HALVES][TILES][4]) const {
    constexpr float MOST = float((1 << (bits_of(KEY) % 16)) - 1);
    __shared__ float lows[THREADS / 32][HEAD_DIM], highs[THREADS / 32][HEAD_DIM];
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
    __syncthreads();
#pragma unroll
    for (int f = 0; f < TILES; ++f) {
      Parameters p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int channel = f * 16 + (lane & 3) * 2 + (e & 1) + (e >> 1) * 8;
        float low = lows[0][channel], high = highs[0][channel];
#pragma unroll
        for (int w = 1; w < THREADS / 32; ++w) low = fminf(low, lows[w][channel]), high = fmaxf(high, highs[w][channel]);
        p[e] = parameters_of(low, high, MOST);
      }
#pragma unroll
      for (int g = 0; g < HALVES; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) r[g][f][i] = codes_of<KEY>(r[g][f][i], p[(i >> 1) * 2], p[(i >> 1) * 2 + 1]);
      if (warp == 0 && lane < 4) {
        const int at = (f * 4 + lane) * 16;  // in the group's record, of which each page of a group has a slice
        constexpr int SLICE = PAGE < RESIDUAL ? HEAD_DIM * 4 * PAGE / RESIDUAL : HEAD_DIM * 4;
        char* record = page_of(group + (PAGE < RESIDUAL ? at / SLICE * PAGE : 0)) + P::KEY_PARAMETERS_AT;
        if (PAGE > RESIDUAL) record += group % PAGE / RESIDUAL * SLICE;
        *reinterpret_cast<uint4*>(record + at % SLICE) = make_uint4(pack_pair(p[0].zero, p[1].zero, half()), pack_pair(p[0].scale, p[1].scale, half()),
                                                                    pack_pair(p[2].zero, p[3].zero, half()), pack_pair(p[2].scale, p[3].scale, half()));
      }
    }
    __syncthreads();  // the next group's may overwrite them
  }
};

// Block (x, head): x counts the groups that each sequence's new tokens fill, or one where they fill none; that block also writes the window.
template <typename A, typename T>
__device__ __forceinline__ void append_tokens(const void* k, const void* v, const void* starts, const void* lengths, const void* tables, const void* slots,
                                              void* pages, void* windows, const void* head_scales, const void* cos_sin, int batch, int heads,
                                              int max_pages) {
  wait_for_predecessor();  // all operands may be its
  launch_dependents();     // a decode reads early what this call does not write
  A a;
  a.k = static_cast<const T*>(k), a.v = static_cast<const T*>(v), a.pages = static_cast<char*>(pages);
  a.starts = static_cast<const int*>(starts), a.lengths = static_cast<const int*>(lengths);
  a.head_scales = static_cast<const float*>(head_scales), a.cos_sin = static_cast<const float*>(cos_sin);
  a.heads = heads, a.max_pages = max_pages, a.head = blockIdx.y, a.lane = threadIdx.x & 31, a.warp = threadIdx.x >> 5;
  const auto full_groups = [&](int b) {
    const int length = a.lengths[b], old = length - (a.starts[b + 1] - a.starts[b]);
    return length / RESIDUAL - old / RESIDUAL;
  };
  const auto items = [&](int b) { return a.starts[b + 1] > a.starts[b] ? max(1, full_groups(b)) : 0; };
  const int item = blockIdx.x;
  const Place place = locate<A::THREADS>(batch, items, [&](int) { return item; });
  if (item >= place.total) return;
  const int b = place.sequence, index = item - place.first;
  a.first_row = a.starts[b], a.length = a.lengths[b], a.old_length = a.length - (a.starts[b + 1] - a.starts[b]);
  a.table = static_cast<const int*>(tables) + int64_t(b) * max_pages;
  a.window = static_cast<char*>(windows) + (int64_t(static_cast<const int*>(slots)[b]) * heads + a.head) * (2 * RESIDUAL / 16 * A::Rows::BYTES);
  const int group = (a.old_length / RESIDUAL + index) * RESIDUAL, full = full_groups(b);
  if (full > 0) a.pack(group);
  if (index > 0) return;
  __syncthreads();  // the window has been read
  a.store_window(a.length / RESIDUAL * RESIDUAL);
}

}  // namespace tilebit
