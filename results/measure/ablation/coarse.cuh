// What the dequantizing warpgroup of coarse.py does with a step's codes. Comes after codecs/int8.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// A step of codes as int8 [SLABS * 64][128] in shared memory, where 16 bytes of a row trade places as the
// tensor cores read them (128-byte swizzle).
template <typename CODE, int SLABS, int RECORDS, int GROUP_STEPS, int STRIDE>
__device__ __forceinline__ void dequantize_to_shared(void* to, const void* stage, const void* scale_rows, const void* offset_rows, int thread) {
  constexpr int STEPS = RECORDS * 2;  // of 32 k
  static_assert(STEPS * 32 == 128, "a row is one swizzled line");
  uint32_t a[STEPS * SLABS * 4];
  dequantize_bytes<CODE, SLABS, 0, RECORDS, GROUP_STEPS, STRIDE>(a, stage, scale_rows, offset_rows, thread);
  const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
  char* mine = static_cast<char*>(to) + row * 128 + (lane & 3) * 4;
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int piece = (step * 2 + (i >> 1)) ^ (row & 7);
        *reinterpret_cast<uint32_t*>(mine + (slab * 64 + (i & 1) * 8) * 128 + piece * 16) = a[(step * SLABS + slab) * 4 + i];
      }
  fence_before_bulk_copies();
  __syncwarp();  // one lane tells of all
}

}  // namespace tilebit
