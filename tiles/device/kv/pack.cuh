// Groups of 128 tokens, quantized and packed in registers into their pages. A warp holds 16 tokens
// as the A fragments that a granule is made of: register i of fragment f holds row lane / 4 + 8 (i
// & 1), columns 16 f + 2 (lane % 4) + 8 (i >> 1) and the next, rows tokens and columns channels.
// Of values rows are channels and columns tokens. Comes after new_rows.cuh and quantize.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename C>
struct Pack {
  using T = typename C::T;
  using N = NewRows<C>;
  using Rows = typename N::Rows;
  static constexpr int KEY = C::KEY, VALUE = C::VALUE, KEY_SCALES = C::KEY_SCALES, HEAD_DIM = C::HEAD_DIM, PAGE = C::PAGE, RESIDUAL = C::RESIDUAL;
  static constexpr int TILES = HEAD_DIM / 16, WARPS = C::WARPS, GRANULE = 16;
  static constexpr int PITCH = HEAD_DIM + 8;  // of a new row in shared memory: 16 bytes more than it has, so that eight lie in different banks
  static_assert(WARPS * GRANULE == RESIDUAL, "a granule for each warp");
  using Fragments = uint32_t[TILES][4];
  using Extremes = uint2[8][PITCH / 2];               // of a warp: lowest and highest of two tokens, of two neighbouring channels each
  using ChannelParameters = float4[HEAD_DIM / 2];     // 1 / scale and zero of a channel, and of the next

  __device__ __forceinline__ static int warp() { return int(threadIdx.x) / 32 % WARPS; }  // of those that have keys, or values

  // The rows of a window that is full, the last of `length` tokens, in one of several layers of
  // `num_pages` pages and `num_slots` windows each.
  __device__ __forceinline__ static void open_full(void* rows, void* pages, void* windows, int slot, const int* table, int heads, int head, int length, int layer,
                                                   int num_pages, int num_slots) {
    char* its_pages = static_cast<char*>(pages) + int64_t(layer) * num_pages * heads * C::PAGE_BYTES;
    char* its_windows = static_cast<char*>(windows) + int64_t(layer) * num_slots * heads * C::WINDOW_BYTES;
    N::open(rows, nullptr, 0, nullptr, 0, 0, nullptr, nullptr, its_windows, slot, its_pages, table, heads, head, length, length, -1);
  }

  // The window's part of a group is asked for, keys or values: it comes from memory.
  template <bool KEYS>
  __device__ __forceinline__ static void prefetch(const void* rows) {
    const N& n = view<N>(rows);
    if (n.group + warp() * GRANULE >= n.old_length) return;
#pragma unroll
    for (int line = (threadIdx.x & 31) * 128; line < Rows::BYTES; line += 32 * 128)
      prefetch_l2(n.window + (KEYS ? 0 : C::WINDOW_VALUES_AT) + warp() * Rows::BYTES + line);
  }

  // This warp's sixteen tokens, keys or values, of the group: what
  // waited in the window, and new rows, which pass through the shared memory `staged`.
  template <bool KEYS>
  __device__ __forceinline__ static void load(const void* rows, void* staged, uint32_t* fragments) {
    const N& n = view<N>(rows);
    Fragments& r = view<Fragments>(fragments);
    const int lane = threadIdx.x & 31, token = n.group + warp() * GRANULE, old = n.old_length - token;
    __syncwarp();  // no value is loaded before keys are stored, as registers are few; and what was staged before has been read
    if (old > 0) {
      const char* waiting = n.window + (KEYS ? 0 : C::WINDOW_VALUES_AT) + warp() * Rows::BYTES;
#pragma unroll
      for (int f = 0; f < TILES; ++f) {
        const uint4 words = *reinterpret_cast<const uint4*>(waiting + (f * 32 + lane) * 16);
        r[f][0] = words.x, r[f][1] = words.y, r[f][2] = words.z, r[f][3] = words.w;
      }
    }
    if (old < GRANULE) {
      T* mine = static_cast<T*>(staged) + warp() * GRANULE * PITCH;
      for (int i = max(old, 0); i < GRANULE; i += Turn<C>::ROWS) {
        const int row = i + lane / Turn<C>::LANES;
        T* to = mine + min(row, GRANULE - 1) * PITCH;
        const T* from = KEYS ? n.key(token + min(row, GRANULE - 1)) : n.value(token + min(row, GRANULE - 1));
        Turn<C>::template move<KEYS>(from, n.cos_sin, n.k_norm, token + min(row, GRANULE - 1), [&](int channel, uint32_t pair) {
          if (row < GRANULE) *reinterpret_cast<uint32_t*>(to + channel) = pair;
        });
      }
      __syncwarp();
      const int matrix = lane >> 3, upper = KEYS ? matrix & 1 : matrix >> 1, right = KEYS ? matrix >> 1 : matrix & 1;
      const uint32_t from = shared_address(mine + (upper * 8 + (lane & 7)) * PITCH + right * 8);
      uint32_t kept[2];  // of tokens that waited, in registers of the lower and the upper eight
#pragma unroll
      for (int half_of_tokens = 0; half_of_tokens < 2; ++half_of_tokens) {
        const int first = half_of_tokens * 8 + (KEYS ? lane >> 2 : (lane & 3) * 2);
        kept[half_of_tokens] = (first < old ? 0x0000ffffu : 0u) | (first + (KEYS ? 0 : 1) < old ? 0xffff0000u : 0u);
      }
#pragma unroll
      for (int f = 0; f < TILES; ++f) {
        uint32_t fresh[4];
        if constexpr (KEYS)
          ldmatrix_x4(from + f * 32, fresh);
        else
          ldmatrix_x4_transposed(from + f * 32, fresh);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t mask = kept[KEYS ? i & 1 : i >> 1];
          r[f][i] = old > 0 ? (r[f][i] & mask) | (fresh[i] & ~mask) : fresh[i];
        }
      }
    }
  }

  // The extremes of each channel over two tokens of this warp's, to its part of `shared`, where new
  // rows were staged.
  __device__ __forceinline__ static void find_extremes(const uint32_t* fragments, void* shared) {
    const auto& r = view<Fragments>(fragments);
    Extremes& mine = view<Extremes[WARPS]>(shared)[warp()];
    const int lane = threadIdx.x & 31;
    __syncwarp();  // they have been read
#pragma unroll
    for (int f = 0; f < TILES; ++f)
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // columns 2 (lane % 4) + 8 e and the next
        Range<T> range;
        range.take(r[f][2 * e]), range.take(r[f][2 * e + 1]);
        mine[lane >> 2][f * 8 + (lane & 3) + e * 4] = make_uint2(range.low, range.high);
      }
  }
  // Of all warps' extremes in `shared` the parameters of each channel, to the shared memory
  // `parameters` and to the group's record, of which each page of a group has a slice.
  __device__ __forceinline__ static void find_parameters(const void* rows, const void* shared, void* parameters) {
    constexpr float MOST = float((1 << (bits_of(KEY) % 16)) - 1);
    constexpr int SLICE = PAGE < RESIDUAL ? C::GROUP_RECORD * PAGE / RESIDUAL : C::GROUP_RECORD;
    const N& n = view<N>(rows);
    const auto& extremes = view<Extremes[WARPS]>(shared);
    for (int i = threadIdx.x; i < HEAD_DIM * 2; i += WARPS * 32) {  // four lanes for two channels
      const int part = i & 3, channel = i / 4 * 2 + (part & 1);
      Range<T> range;
#pragma unroll
      for (int w = 0; w < WARPS; ++w)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const uint2 found = extremes[w][part * 2 + row][i / 4];
          range.take_low(found.x), range.take_high(found.y);
        }
      range.join(1), range.join(2);
      if (part > 1) continue;
      const Parameters p = channel & 1 ? parameters_of(high_of(range.low, T()), high_of(range.high, T()), MOST)
                                       : parameters_of(low_of(range.low, T()), low_of(range.high, T()), MOST);
      reinterpret_cast<float2*>(parameters)[channel] = make_float2(p.inverse, p.zero);
      const int at = (channel / 16 * 4 + channel % 8 / 2) * 16;
      char* record = n.page_of(n.group + (PAGE < RESIDUAL ? at / SLICE * PAGE : 0)) + C::KEY_PARAMETERS_AT;
      if (PAGE > RESIDUAL) record += n.group % PAGE / RESIDUAL * SLICE;
      uint16_t* to = reinterpret_cast<uint16_t*>(record + at % SLICE + channel % 16 / 8 * 8) + (channel & 1);
      to[0] = uint16_t(pack_pair(p.zero, 0.0f, half())), to[2] = uint16_t(pack_pair(p.scale, 0.0f, half()));
    }
  }
  // Codes with the parameters of each channel.
  __device__ __forceinline__ static void quantize_channels(uint32_t* fragments, const void* parameters) {
    auto& r = view<Fragments>(fragments);
    const auto& channels = view<ChannelParameters>(parameters);
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int f = 0; f < TILES; ++f)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 p = channels[f * 8 + (lane & 3) + e * 4];
        const Parameters low = {0.0f, p.x, p.y}, high = {0.0f, p.z, p.w};
#pragma unroll
        for (int i = 2 * e; i < 2 * e + 2; ++i) r[f][i] = codes_of<T, KEY>(r[f][i], low, high);
      }
  }
  // A granule of keys, whose channels may be quantized already, to its page.
  __device__ __forceinline__ static void store_keys(const void* rows, uint32_t* fragments, float head_scale) {
    const N& n = view<N>(rows);
    Fragments& r = view<Fragments>(fragments);
    const int token = n.group + warp() * GRANULE;
    char* page = n.page_of(token);
    if constexpr (KEY_SCALES == PER_TOKEN) quantize_rows(r, page + C::KEY_PARAMETERS_AT + token % PAGE * C::PAIR_BYTES);
    if constexpr (KEY == FP8) quantize_fp8(r, head_scale);
    store<KEY>(page + token % PAGE * C::KEY_TOKEN, r);
  }
  __device__ __forceinline__ static void store_values(const void* rows, uint32_t* fragments, float head_scale) {
    const N& n = view<N>(rows);
    Fragments& r = view<Fragments>(fragments);
    const int token = n.group + warp() * GRANULE;
    char* page = n.page_of(token);
    if constexpr (has_zero(VALUE)) quantize_columns(r, page + C::VALUE_PARAMETERS_AT + token % PAGE * C::PAIR_BYTES);
    if constexpr (VALUE == FP8) quantize_fp8(r, head_scale);
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
  __device__ __forceinline__ static void quantize_fp8(Fragments& r, float head_scale) {
    const Divisor scale(head_scale);
#pragma unroll
    for (int f = 0; f < TILES; ++f)
#pragma unroll
      for (int i = 0; i < 4; ++i) r[f][i] = e4m3_of<T>(r[f][i], scale);
  }
  // Codes of keys with parameters of each token (over the channels), which are stored too: tokens
  // are rows.
  __device__ __forceinline__ static void quantize_rows(Fragments& r, char* parameters) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      Range<T> range;
#pragma unroll
      for (int f = 0; f < TILES; ++f) range.take(r[f][upper]), range.take(r[f][upper + 2]);
#pragma unroll
      for (int step = 1; step < 4; step *= 2) range.join(step);
      const float low = fminf(low_of(range.low, T()), high_of(range.low, T())), high = fmaxf(low_of(range.high, T()), high_of(range.high, T()));
      const Parameters p = parameters_of(low, high, float((1 << (bits_of(KEY) % 16)) - 1));
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = upper; i < 4; i += 2) r[f][i] = codes_of<T, KEY>(r[f][i], p, p);
      if ((lane & 3) == 0) reinterpret_cast<uint32_t*>(parameters)[(lane >> 2) + upper * 8] = pack_pair(p.scale, p.zero, half());
    }
  }
  // Of values: tokens are columns, two in each register.
  __device__ __forceinline__ static void quantize_columns(Fragments& r, char* parameters) {
    constexpr float MOST = float((1 << (bits_of(VALUE) % 16)) - 1);
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int right = 0; right < 2; ++right) {
      Range<T> range;
#pragma unroll
      for (int f = 0; f < TILES; ++f) range.take(r[f][2 * right]), range.take(r[f][2 * right + 1]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) range.join(step);
      const Parameters p = parameters_of(low_of(range.low, T()), low_of(range.high, T()), MOST);
      const Parameters next = parameters_of(high_of(range.low, T()), high_of(range.high, T()), MOST);
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = 2 * right; i < 2 * right + 2; ++i) r[f][i] = codes_of<T, VALUE>(r[f][i], p, next);
      if (lane < 4)
        reinterpret_cast<uint2*>(parameters)[lane + right * 4] = make_uint2(pack_pair(p.scale, p.zero, half()), pack_pair(next.scale, next.zero, half()));
    }
  }
};

}  // namespace tilebit
