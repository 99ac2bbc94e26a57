// A page of a low-bit KV cache. Where things lie in it is stated by the program, from layouts/kv.py
// (tiles/attention/cache.py), as constants of a type that functions are templates of: T, of a
// number; KEY, VALUE, KEY_SCALES and HEAD_DIM; PAGE, tokens of a page; RESIDUAL, tokens of a window
// and of a group that shares the scales of its channels; and offsets and sizes in bytes.
#pragma once
#include <stdint.h>

namespace tilebit {

enum KeyScales { NO_SCALES, PER_CHANNEL, PER_TOKEN, PER_HEAD };

// What a program declared as an array of numbers.
template <typename V>
__device__ __forceinline__ V& view(void* p) {
  return *static_cast<V*>(p);
}
template <typename V>
__device__ __forceinline__ const V& view(const void* p) {
  return *static_cast<const V*>(p);
}

// Where a lane's token of rows 0..7 has its scale and zero, in shared memory.
__device__ __forceinline__ uint32_t token_parameters(int lane, uint32_t parameters) { return parameters + (lane >> 2) * 4; }

}  // namespace tilebit
