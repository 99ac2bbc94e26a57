// Where things lie in a page of a low-bit KV cache: the numbers are layouts/kv.py's, written by the program (tiles/attention/cache.py).
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
