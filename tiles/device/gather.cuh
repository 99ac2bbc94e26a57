// Rows of a low-bit KV cache, dequantized: x = q * scale + zero in fp32, rounded once. A block has 128 tokens of one key head, packed or in the
// 16-bit window; a warp takes a granule at a time, loads it as decoding would, and stores rows by 16 bytes a lane through a piece of shared
// memory that is its own. Comes after ptx.cuh, dependent.cuh and kv.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename T, int KEY, int VALUE, int KEY_SCALES, int HEAD_DIM, int PAGE, int WARPS>
struct Gather {
  using P = Page<KEY, VALUE, KEY_SCALES, HEAD_DIM, PAGE>;
  using Window = Page<FLOAT, FLOAT, NO_SCALES, HEAD_DIM, RESIDUAL>;
  static constexpr int GRANULES = RESIDUAL / 16, CHUNKS = HEAD_DIM / 8;  // of a group; of 16 bytes in a row
  static constexpr int STAGED_WORDS = 16 * HEAD_DIM / 2;                 // of a warp: 16 rows

  const char *pages, *windows;
  const int *table, *slots;
  const float* head_scales;  // keys' of all heads, then values'
  uint32_t* staged;          // this warp's
  int heads, head, lane;

  __device__ __forceinline__ const char* page_of(int token) const {
    return pages + (int64_t(table[token / PAGE]) * heads + head) * P::BYTES;
  }

  // One lane's words of a granule.
  template <int KIND>
  __device__ __forceinline__ void load(const char* granule, uint32_t (&words)[Granule<KIND, HEAD_DIM>::LOADS][Granule<KIND, HEAD_DIM>::LOAD]) const {
    using G = Granule<KIND, HEAD_DIM>;
#pragma unroll
    for (int l = 0; l < G::LOADS; ++l) {
      const char* from = granule + (l * 32 + lane) * (G::LOAD * 4);
      if constexpr (G::LOAD == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        words[l][0] = v.x, words[l][1] = v.y, words[l][2] = v.z, words[l][3] = v.w;
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        words[l][0] = v.x, words[l][1] = v.y;
      }
    }
  }

  // The first `rows` of 16 rows, of which this lane has words (row, 4 bytes) anywhere in `staged`, go to `to` and the rows after it.
  __device__ __forceinline__ void store(T* to, int rows) const {
    __syncwarp();
    const uint4* chunks = reinterpret_cast<const uint4*>(staged);
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i) {
      const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
      if (row < rows) *reinterpret_cast<uint4*>(to + int64_t(row) * heads * HEAD_DIM + chunk * 8) = chunks[row * CHUNKS + (chunk ^ (row & 7))];
    }
    __syncwarp();
  }
  // Channels 8 * chunk + 2 * (lane % 4) and the next of a row; the exclusive or spreads the rows over the banks.
  __device__ __forceinline__ void stage(int row, int chunk, uint32_t pair) const {
    staged[row * (HEAD_DIM / 2) + (chunk ^ (row & 7)) * 4 + lane % 4] = pair;
  }

  // Scales and zeros of a fragment's 2 x 4 elements of a lane: by half of its rows (h), and by half and element of its columns (j, e).
  struct Parameters {
    float scale[2][2][2], zero[2][2][2];
  };
  // An fp16 scale and its zero, low half first.
  __device__ __forceinline__ static void set_pair(Parameters& p, int h, int j, int e, uint32_t pair) {
    p.scale[h][j][e] = low_of(pair, half()), p.zero[h][j][e] = high_of(pair, half());
  }

  // Fragment `f` of a load in 16 bits of type T: register i holds row half i & 1, column half i >> 1, as the operand does.
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

  __device__ __forceinline__ void all_equal(Parameters& p, float scale) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) p.scale[i >> 2][i >> 1 & 1][i & 1] = scale, p.zero[i >> 2][i >> 1 & 1][i & 1] = 0.0f;
  }

  // Keys of the granule that starts with `token` of the sequence, a multiple of 16, in `page`.
  template <int KIND, int SCALES>
  __device__ __forceinline__ void keys(const char* granule, const char* page, int token, T* to, int rows) const {
    using G = Granule<KIND, HEAD_DIM>;
    uint32_t words[G::LOADS][G::LOAD];
    load<KIND>(granule, words);
    Parameters p;
    all_equal(p, KIND == FP8 ? head_scales[head] : 1.0f);
    if constexpr (SCALES == PER_TOKEN) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(page + P::KEY_PARAMETERS_AT + (token % PAGE + lane / 4 + 8 * h) * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) set_pair(p, h, i >> 1, i & 1, pair);
      }
    }
#pragma unroll
    for (int f = 0; f < G::FRAGMENTS; ++f) {
      if constexpr (SCALES == PER_CHANNEL) channel_parameters(p, token / RESIDUAL, f);
      uint32_t a[4];
      dequantize<KIND>(words[f / G::PER_LOAD], f % G::PER_LOAD, p, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) stage(lane / 4 + 8 * (i & 1), 2 * f + (i >> 1), a[i]);
    }
    store(to, rows);
  }

  // Channels of fragment `f` of a group of 128 tokens: a group's record lies in slices in its pages, if they are smaller.
  __device__ __forceinline__ void channel_parameters(Parameters& p, int group, int f) const {
    constexpr int SLICE = PAGE < RESIDUAL ? P::KEY_PARAMETERS : HEAD_DIM * 4;
    const int at = (f * 4 + lane % 4) * 16;
    const int token = group * RESIDUAL + (PAGE < RESIDUAL ? at / SLICE * PAGE : 0);
    const char* record = page_of(token) + P::KEY_PARAMETERS_AT + (PAGE > RESIDUAL ? token % PAGE / RESIDUAL * SLICE : 0);
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
  template <int KIND>
  __device__ __forceinline__ void values(const char* granule, const char* page, int token, T* to, int rows) const {
    using G = Granule<KIND, HEAD_DIM>;
    uint32_t words[G::LOADS][G::LOAD];
    load<KIND>(granule, words);
    Parameters p;
    all_equal(p, KIND == FP8 ? head_scales[heads + head] : 1.0f);
    if constexpr (has_zero(KIND)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(page + P::VALUE_PARAMETERS_AT + (token % PAGE + lane % 4 * 2 + 8 * j) * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) set_pair(p, h, j, 0, pairs.x), set_pair(p, h, j, 1, pairs.y);
      }
    }
#pragma unroll
    for (int f = 0; f < G::FRAGMENTS; ++f) {
      uint32_t a[4];
      dequantize<KIND>(words[f / G::PER_LOAD], f % G::PER_LOAD, p, a);
#pragma unroll
      for (int i = 0; i < 4; ++i) stage(lane / 4 + 8 * (i >> 1), 2 * f + (i & 1), transpose(a[i]));
    }
    store(to, rows);
  }

  // Keys (unit 0 .. GRANULES - 1) or values of sixteen tokens of the group that begins with `first`, of which there are `length` in all.
  __device__ __forceinline__ void unit(int unit, int sequence, int first, int length, T* out_k, T* out_v) const {
    const int granule = unit % GRANULES, token = first + granule * 16, rows = min(length - token, 16);
    if (rows <= 0) return;
    const int64_t at = int64_t(granule) * 16 * heads * HEAD_DIM;
    if (length - first < RESIDUAL) {
      const char* window = windows + (int64_t(slots[sequence]) * heads + head) * Window::BYTES;
      if (unit < GRANULES)
        keys<FLOAT, NO_SCALES>(window + granule * Granule<FLOAT, HEAD_DIM>::BYTES, nullptr, token, out_k + at, rows);
      else
        values<FLOAT>(window + Window::VALUES_AT + granule * Granule<FLOAT, HEAD_DIM>::BYTES, nullptr, token, out_v + at, rows);
      return;
    }
    const char* page = page_of(token);
    if (unit < GRANULES)
      keys<KEY, KEY_SCALES>(page + token % PAGE / 16 * Granule<KEY, HEAD_DIM>::BYTES, page, token, out_k + at, rows);
    else
      values<VALUE>(page + P::VALUES_AT + token % PAGE / 16 * Granule<VALUE, HEAD_DIM>::BYTES, page, token, out_v + at, rows);
  }
};

// Block (index, head) of the grid: the `index`-th group of 128 tokens of all sequences. `staging` has WARPS * STAGED_WORDS words. Sequence b's
// first lengths[b] rows lie from row cu_kv[b] of out_k and out_v on.
template <typename G, typename T, int WARPS>
__device__ __forceinline__ void gather_group(void* staging, const void* pages, const void* windows, const int* tables, const int* slots,
                                             const int* lengths, const int* cu_kv, const void* head_scales, void* out_k, void* out_v, int batch, int heads,
                                             int max_pages, int head, int index) {
  const Place place = locate<WARPS * 32>(batch, [&](int b) { return (lengths[b] + RESIDUAL - 1) / RESIDUAL; }, [&](int) { return index; });
  if (index >= place.total) return;
  const int warp = threadIdx.x / 32, sequence = place.sequence, first = (index - place.first) * RESIDUAL;
  G gather;
  gather.pages = static_cast<const char*>(pages), gather.windows = static_cast<const char*>(windows);
  gather.table = tables + int64_t(sequence) * max_pages, gather.slots = slots, gather.head_scales = static_cast<const float*>(head_scales);
  gather.staged = static_cast<uint32_t*>(staging) + warp * G::STAGED_WORDS;
  gather.heads = heads, gather.head = head, gather.lane = threadIdx.x % 32;
  const int64_t row = (int64_t(cu_kv[sequence]) + first) * heads + head;
  for (int u = warp; u < 2 * G::GRANULES; u += WARPS)
    gather.unit(u, sequence, first, lengths[sequence], static_cast<T*>(out_k) + row * G::CHUNKS * 8, static_cast<T*>(out_v) + row * G::CHUNKS * 8);
}

}  // namespace tilebit
