// Rows of keys and values that join a low-bit KV cache: where they come from, rotated on the way,
// and where they lie in the 16-bit window. Comes after granule.cuh and turn.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Of one sequence and head; C, written by the program, says what the cache holds (page.cuh), ROTARY,
// and FULL_WINDOWS, whether a sequence's one new token stays in a window that it fills.
template <typename C>
struct NewRows {
  using T = typename C::T;
  using Rows = Granule<FLOAT, C::HEAD_DIM>;
  static constexpr int HEAD_DIM = C::HEAD_DIM, RESIDUAL = C::RESIDUAL;

  const T *k, *v;  // of token old_length
  int64_t k_pitch, v_pitch;  // to the next token's
  const float* cos_sin;
  const T* k_norm;
  char* window;
  char* pages;       // of all sequences and heads
  const int* table;  // of this sequence's
  int heads, head, old_length, length, row;
  int group;   // first token of the group that this block packs, if it is complete
  bool first;  // of this sequence's work items

  // `row` is that of the first new token in k and v, rows of which lie k_pitch and v_pitch elements
  // apart.
  __device__ __forceinline__ static void open(void* rows, const void* k, int k_pitch, const void* v, int v_pitch, int row, const void* cos_sin,
                                              const void* k_norm, void* windows, int slot, void* pages, const int* table, int heads, int head, int old_length, int length,
                                              int index) {
    static_assert(sizeof(NewRows) <= C::LAUNCH_BYTES, "the program's array holds them");
    if (threadIdx.x != 0) return;
    NewRows& n = view<NewRows>(rows);
    n.k = static_cast<const T*>(k) + int64_t(row) * k_pitch + head * HEAD_DIM, n.k_pitch = k_pitch;
    n.v = static_cast<const T*>(v) + int64_t(row) * v_pitch + head * HEAD_DIM, n.v_pitch = v_pitch;
    n.cos_sin = static_cast<const float*>(cos_sin), n.k_norm = static_cast<const T*>(k_norm);
    n.window = static_cast<char*>(windows) + (int64_t(slot) * heads + head) * C::WINDOW_BYTES;
    n.pages = static_cast<char*>(pages), n.table = table, n.heads = heads, n.head = head, n.old_length = old_length, n.length = length, n.row = row;
    n.group = old_length / RESIDUAL * RESIDUAL + index * RESIDUAL, n.first = index == 0;
  }

  // Work items of a sequence: the groups that its new tokens fill, or one where they fill none.
  __device__ __forceinline__ static int items(int length, int added) { return added > 0 ? max(1, length / RESIDUAL - (length - added) / RESIDUAL) : 0; }
  __device__ __forceinline__ static int count(const int* lengths, const int* starts, int batch, int* line) {
    view<Line>(line) = line_up<C::THREADS>(batch, [&](int b) { return items(lengths[b], starts[b + 1] - starts[b]); });
    return view<Line>(line).total;
  }
  __device__ __forceinline__ static void find(const int* lengths, const int* starts, int batch, const int* line, int item, int* place) {
    view<Place>(place) =
        find_item<C::THREADS>(view<Line>(line), batch, [&](int b) { return items(lengths[b], starts[b + 1] - starts[b]); }, item);
  }

  __device__ __forceinline__ char* page_of(int token) const { return pages + (int64_t(table[token / C::PAGE]) * heads + head) * C::PAGE_BYTES; }

  __device__ __forceinline__ const T* key(int token) const { return k + (token - old_length) * k_pitch; }
  __device__ __forceinline__ const T* value(int token) const { return v + (token - old_length) * v_pitch; }
  // Queries of this group's tokens, and the last group's of those after it, too: HEADS of them, from
  // `first` on of `all`, for each token; their rows lie `pitch` elements apart and go to `out`
  // [tokens, all, HEAD_DIM].
  template <int HEADS>
  __device__ __forceinline__ static void turn_queries(const void* rows, const void* q, int pitch, const void* q_norm, int first, int all, void* out) {
    const NewRows& n = view<NewRows>(rows);
    const int begin = max(n.group, n.old_length), end = n.group + 2 * RESIDUAL > n.length ? n.length : n.group + RESIDUAL;
    Turn<C>::each_row((end - begin) * HEADS, 2 % C::WARPS, [&](int i, bool mine) {
      const int position = begin + i / HEADS, its = first + i % HEADS;
      const int64_t row = n.row + (position - n.old_length);
      T* to = static_cast<T*>(out) + (row * all + its) * HEAD_DIM;
      Turn<C>::template move<true>(static_cast<const T*>(q) + row * pitch + its * HEAD_DIM, n.cos_sin, static_cast<const T*>(q_norm), position, [&](int channel, uint32_t pair) {
        if (mine) *reinterpret_cast<uint32_t*>(to + channel) = pair;
      });
    });
  }
  // The 32-bit word of the window that holds a key's channels `channel` (even) and the next.
  __device__ __forceinline__ static uint32_t* key_word(char* window, int token, int channel) {
    const int fragment = channel / 16, i = (token % 16) / 8 + (channel % 16) / 8 * 2, owner = token % 8 * 4 + channel % 8 / 2;
    return reinterpret_cast<uint32_t*>(window + token / 16 * Rows::BYTES) + (fragment * 32 + owner) * 4 + i;
  }
  // The 16-bit element of the window that holds a value's channel.
  __device__ __forceinline__ static uint16_t* value_element(char* window, int token, int channel) {
    const int fragment = channel / 16, i = (channel % 16) / 8 + (token % 16) / 8 * 2, owner = channel % 8 * 4 + token % 8 / 2;
    return reinterpret_cast<uint16_t*>(window + C::WINDOW_VALUES_AT + token / 16 * Rows::BYTES) + ((fragment * 32 + owner) * 4 + i) * 2 + token % 2;
  }
  // New tokens that fill no group go to the window, their keys or their values, by all warps of the
  // sequence's first block together, or by those that have the keys or the values.
  template <bool KEYS>
  __device__ __forceinline__ static void store_rows(const void* rows) {
    const NewRows& n = view<NewRows>(rows);
    if (!n.first) return;
    const int group = (C::FULL_WINDOWS ? n.old_length : n.length) / RESIDUAL * RESIDUAL, begin = max(group, n.old_length);
    if constexpr (KEYS) return store_keys(n, group, begin);
    Turn<C>::each_row(n.length - begin, 1 % C::WARPS, [&](int i, bool mine) {
      Turn<C>::template move<false>(n.value(begin + i), n.cos_sin, n.k_norm, begin + i, [&](int channel, uint32_t pair) {
        if (!mine) return;
        *value_element(n.window, begin + i - group, channel) = uint16_t(pair);
        *value_element(n.window, begin + i - group, channel + 1) = uint16_t(pair >> 16);
      });
    });
  }
  __device__ __forceinline__ static void store_keys(const NewRows& n, int group, int begin) {
    Turn<C>::each_row(n.length - begin, 0, [&](int i, bool mine) {
      Turn<C>::template move<true>(n.key(begin + i), n.cos_sin, n.k_norm, begin + i, [&](int channel, uint32_t pair) {
        if (mine) *key_word(n.window, begin + i - group, channel) = pair;
      });
    });
  }
};

}  // namespace tilebit
