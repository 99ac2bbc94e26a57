// Rows of a low-bit KV cache, dequantized: x = q * scale + zero in fp32, rounded once. A warp loads
// a granule as decoding would and lays its 16 rows out in a piece of shared memory that is its own,
// from where they are stored by 16 bytes a lane. Comes after granule.cuh, pairs.cuh and page.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// C, written by the program, says what the cache holds (page.cuh), and THREADS of a block.
template <typename C>
struct CacheRows {
  using T = typename C::T;
  static constexpr int HEAD_DIM = C::HEAD_DIM, PAGE = C::PAGE, RESIDUAL = C::RESIDUAL, CHUNKS = HEAD_DIM / 8;  // of 16 bytes in a row

  // Scales and zeros of a fragment's 2 x 4 elements of a lane: by half of its rows (h), and by half
  // and element of its columns (j, e).
  struct Parameters {
    float scale[2][2][2], zero[2][2][2];
  };
  // An fp16 scale and its zero, low half first.
  __device__ __forceinline__ static void set_pair(Parameters& p, int h, int j, int e, uint32_t pair) {
    p.scale[h][j][e] = low_of(pair, half()), p.zero[h][j][e] = high_of(pair, half());
  }

  // Fragment `f` of a load in 16 bits of type T: register i holds row half i & 1, column half i >>
  // 1, as the operand does.
  template <int KIND>
  __device__ __forceinline__ static void dequantize(const uint32_t (&words)[Granule<KIND, HEAD_DIM>::LOAD], int f, const Parameters& p,
                                                    uint32_t (&out)[4]) {
    using G = Granule<KIND, HEAD_DIM>;
    G::fragment(words, f, out);
    if constexpr (KIND != FLOAT) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i & 1, j = i >> 1;
        const float unit = G::UNIT / ((h ? G::ROW_FACTOR : 1.0f) * (j ? G::COLUMN_FACTOR : 1.0f));  // a power of two: code = operand * unit
        const float low = fmaf(low_of(out[i], half()) * unit, p.scale[h][j][0], p.zero[h][j][0]);
        const float high = fmaf(high_of(out[i], half()) * unit, p.scale[h][j][1], p.zero[h][j][1]);
        out[i] = pack_pair(low, high, T());
      }
    }
  }

  __device__ __forceinline__ static void all_equal(Parameters& p, float scale) {
#pragma unroll
    for (int i = 0; i < 8; ++i) p.scale[i >> 2][i >> 1 & 1][i & 1] = scale, p.zero[i >> 2][i >> 1 & 1][i & 1] = 0.0f;
  }

  // How many groups of 128 tokens all sequences have, the last of each perhaps not full.
  __device__ __forceinline__ static int groups_of(int length) { return (length + RESIDUAL - 1) / RESIDUAL; }
  __device__ __forceinline__ static int count(const int* lengths, int batch, int* line) {
    view<Line>(line) = line_up<C::THREADS>(batch, [&](int b) { return groups_of(lengths[b]); });
    return view<Line>(line).total;
  }
  __device__ __forceinline__ static void find(const int* lengths, int batch, const int* line, int group, int* place) {
    view<Place>(place) = find_item<C::THREADS>(view<Line>(line), batch, [&](int b) { return groups_of(lengths[b]); }, group);
  }
  // The pages of a sequence and head.
  struct Pages {
    const char* records;  // of all pages and heads
    const int* table;     // of the sequence
    int heads, head;
    __device__ __forceinline__ const char* of(int token) const {
      return records + (int64_t(table[token / PAGE]) * heads + head) * C::PAGE_BYTES;
    }
  };

  // Keys of the granule that starts with `token` of the sequence, a multiple of 16, in the page
  // that the table names.
  __device__ __forceinline__ static void stage_keys(const void* records, const int* table, int heads, int head, int token, float head_scale,
                                                    uint32_t* staged) {
    const Pages pages = {static_cast<const char*>(records), table, heads, head};
    stage_keys_of<C::KEY, C::KEY_SCALES>(pages.of(token) + token % PAGE * C::KEY_TOKEN, pages, token, head_scale, staged);
  }
  template <int KIND, int SCALES>
  __device__ __forceinline__ static void stage_keys_of(const char* granule, const Pages& pages, int token, float head_scale,
                                                       uint32_t* staged) {
    const int lane = threadIdx.x & 31;
    using G = Granule<KIND, HEAD_DIM>;
    uint32_t words[G::LOADS][G::LOAD];
    load<KIND>(granule, words);
    Parameters p;
    all_equal(p, KIND == FP8 ? head_scale : 1.0f);
    if constexpr (SCALES == PER_TOKEN) {
      const char* page = pages.of(token);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(page + C::KEY_PARAMETERS_AT + (token % PAGE + lane / 4 + 8 * h) * C::PAIR_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) set_pair(p, h, i >> 1, i & 1, pair);
      }
    }
#pragma unroll
    for (int f = 0; f < G::FRAGMENTS; ++f) {
      if constexpr (SCALES == PER_CHANNEL) channel_parameters(p, pages, token / RESIDUAL, f);
      uint32_t a[4];
      dequantize<KIND>(words[f / G::PER_LOAD], f % G::PER_LOAD, p, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) stage(staged, lane / 4 + 8 * (i & 1), 2 * f + (i >> 1), a[i]);
    }
  }

  // Channels of fragment `f` of a group of 128 tokens: a group's record lies in slices in its
  // pages, if they are smaller.
  __device__ __forceinline__ static void channel_parameters(Parameters& p, const Pages& pages, int group, int f) {
    constexpr int SLICE = PAGE < RESIDUAL ? C::GROUP_RECORD * PAGE / RESIDUAL : C::GROUP_RECORD;
    const int at = (f * 4 + threadIdx.x % 4) * 16;
    const int token = group * RESIDUAL + (PAGE < RESIDUAL ? at / SLICE * PAGE : 0);
    const char* record = pages.of(token) + C::KEY_PARAMETERS_AT + (PAGE > RESIDUAL ? token % PAGE / RESIDUAL * SLICE : 0);
    const uint4 v = *reinterpret_cast<const uint4*>(record + at % SLICE);
    const uint32_t scales[2] = {v.y, v.w}, zeros[2] = {v.x, v.z};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = i >> 1, j = i & 1;
      p.scale[h][j][0] = low_of(scales[j], half()), p.scale[h][j][1] = high_of(scales[j], half());
      p.zero[h][j][0] = low_of(zeros[j], half()), p.zero[h][j][1] = high_of(zeros[j], half());
    }
  }

  // Values likewise; the operand's rows are channels, so each 8 x 8 matrix is transposed.
  __device__ __forceinline__ static void stage_values(const void* records, const int* table, int heads, int head, int token, float head_scale,
                                                      uint32_t* staged) {
    const char* page = Pages{static_cast<const char*>(records), table, heads, head}.of(token);
    stage_values_of<C::VALUE>(page + C::VALUES_AT + token % PAGE * C::VALUE_TOKEN, page, token, head_scale, staged);
  }
  template <int KIND>
  __device__ __forceinline__ static void stage_values_of(const char* granule, const char* page, int token, float head_scale,
                                                         uint32_t* staged) {
    const int lane = threadIdx.x & 31;
    using G = Granule<KIND, HEAD_DIM>;
    uint32_t words[G::LOADS][G::LOAD];
    load<KIND>(granule, words);
    Parameters p;
    all_equal(p, KIND == FP8 ? head_scale : 1.0f);
    if constexpr (has_zero(KIND)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(page + C::VALUE_PARAMETERS_AT + (token % PAGE + lane % 4 * 2 + 8 * j) * C::PAIR_BYTES);
#pragma unroll
        for (int h = 0; h < 2; ++h) set_pair(p, h, j, 0, pairs.x), set_pair(p, h, j, 1, pairs.y);
      }
    }
#pragma unroll
    for (int f = 0; f < G::FRAGMENTS; ++f) {
      uint32_t a[4];
      dequantize<KIND>(words[f / G::PER_LOAD], f % G::PER_LOAD, p, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) stage(staged, lane / 4 + 8 * (i >> 1), 2 * f + (i & 1), transpose(a[i]));
    }
  }
  // Of a granule of a residual window.
  __device__ __forceinline__ static void stage_window_keys(const void* windows, int slot, int heads, int head, int granule,
                                                           uint32_t* staged) {
    const char* window = static_cast<const char*>(windows) + (int64_t(slot) * heads + head) * C::WINDOW_BYTES;
    stage_keys_of<FLOAT, NO_SCALES>(window + granule * Granule<FLOAT, HEAD_DIM>::BYTES, {}, 0, 1.0f, staged);
  }
  __device__ __forceinline__ static void stage_window_values(const void* windows, int slot, int heads, int head, int granule,
                                                             uint32_t* staged) {
    const char* window = static_cast<const char*>(windows) + (int64_t(slot) * heads + head) * C::WINDOW_BYTES;
    stage_values_of<FLOAT>(window + C::WINDOW_VALUES_AT + granule * Granule<FLOAT, HEAD_DIM>::BYTES, nullptr, 0, 1.0f, staged);
  }
  // The first `rows` of 16 staged rows go to `to` and the rows after it, `pitch` elements apart.
  __device__ __forceinline__ static void store(const uint32_t* staged, void* to, int64_t pitch, int rows) {
    const int lane = threadIdx.x & 31;
    const uint4* chunks = reinterpret_cast<const uint4*>(staged);
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i) {
      const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
      if (row < rows) *reinterpret_cast<uint4*>(static_cast<T*>(to) + row * pitch + chunk * 8) = chunks[row * CHUNKS + (chunk ^ (row & 7))];
    }
  }
  // Channels 8 * chunk + 2 * (lane % 4) and the next of a row; the exclusive or spreads the rows
  // over the banks.
  __device__ __forceinline__ static void stage(uint32_t* staged, int row, int chunk, uint32_t pair) {
    staged[row * (HEAD_DIM / 2) + (chunk ^ (row & 7)) * 4 + threadIdx.x % 4] = pair;
  }

  // One lane's words of a granule.
  template <int KIND>
  __device__ __forceinline__ static void load(const char* granule, uint32_t (&words)[Granule<KIND, HEAD_DIM>::LOADS][Granule<KIND,
                                              HEAD_DIM>::LOAD]) {
    using G = Granule<KIND, HEAD_DIM>;
#pragma unroll
    for (int l = 0; l < G::LOADS; ++l) {
      const char* from = granule + (l * 32 + (threadIdx.x & 31)) * (G::LOAD * 4);
      if constexpr (G::LOAD == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        words[l][0] = v.x, words[l][1] = v.y, words[l][2] = v.z, words[l][3] = v.w;
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        words[l][0] = v.x, words[l][1] = v.y;
      }
    }
  }
};

}  // namespace tilebit
