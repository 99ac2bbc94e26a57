// Rows of keys and values that join a low-bit KV cache: where they come from, rotated on the way,
// and where they lie in the 16-bit window. Comes after granule.cuh and turn.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Of one sequence and head; C, written by the program, says what the cache holds (page.cuh) and
// ROTARY.
template <typename C>
struct NewRows {
  using T = typename C::T;
  using Rows = Granule<FLOAT, C::HEAD_DIM>;
  static constexpr int HEAD_DIM = C::HEAD_DIM, RESIDUAL = C::RESIDUAL, ROTARY = C::ROTARY;

  const T *k, *v;  // of token old_length
  int64_t k_pitch, v_pitch;  // to the next token's
  const float* cos_sin;
  char* window;
  char* pages;       // of all sequences and heads
  const int* table;  // of this sequence's
  int heads, head, old_length;

  // `row` is that of the first new token in k and v, rows of which lie k_pitch and v_pitch elements
  // apart.
  __device__ __forceinline__ static void open(void* rows, const void* k, int k_pitch, const void* v, int v_pitch, int row, const void* cos_sin,
                                              void* windows, int slot, void* pages, const int* table, int heads, int head, int old_length) {
    static_assert(sizeof(NewRows) <= C::LAUNCH_BYTES, "the program's array holds them");
    NewRows& n = view<NewRows>(rows);
    n.k = static_cast<const T*>(k) + int64_t(row) * k_pitch + head * HEAD_DIM, n.k_pitch = k_pitch;
    n.v = static_cast<const T*>(v) + int64_t(row) * v_pitch + head * HEAD_DIM, n.v_pitch = v_pitch;
    n.cos_sin = static_cast<const float*>(cos_sin);
    n.window = static_cast<char*>(windows) + (int64_t(slot) * heads + head) * C::WINDOW_BYTES;
    n.pages = static_cast<char*>(pages), n.table = table, n.heads = heads, n.head = head, n.old_length = old_length;
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

  // Channels `channel` and the next of a new token's key, rotated.
  __device__ __forceinline__ static uint32_t key_pair(const NewRows& n, int token, int channel) {
    const T* row = n.k + (token - n.old_length) * n.k_pitch;
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(row + channel);
    if constexpr (ROTARY == NO_ROTARY) return pair;
    const float* angles = n.cos_sin + int64_t(token) * HEAD_DIM;
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
  __device__ __forceinline__ static uint32_t value_pair(const NewRows& n, int token, int channel) {
    return *reinterpret_cast<const uint32_t*>(n.v + (token - n.old_length) * n.v_pitch + channel);
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
  // Channels `channel` and the next of a new token go to the window, as its token `place`.
  __device__ __forceinline__ static void store_pair(const void* rows, int token, int place, int channel) {
    const NewRows& n = view<NewRows>(rows);
    *key_word(n.window, place, channel) = key_pair(n, token, channel);
    const uint32_t pair = value_pair(n, token, channel);
    *value_element(n.window, place, channel) = uint16_t(pair), *value_element(n.window, place, channel + 1) = uint16_t(pair >> 16);
  }
};

}  // namespace tilebit
