// Output channels of 8 bits whose nibbles are rows r and r + 8 of a packed 4-bit weight (schedules/gemm/joined.py),
// as operand registers of an integer MMA: the pairs of slab 2 s are rows r of slab s of the tile, those
// of slab 2 s + 1 rows r + 8. Storage and registers are those of codecs/int8.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Four bytes less 128, of a word of their high nibbles (row r, in the low ones) and low nibbles (row r + 8).
__device__ __forceinline__ uint32_t bytes_of_nibbles(uint32_t word) {
  return ((word << 4 & 0xf0f0f0f0u) | (word >> 4 & 0x0f0f0f0fu)) ^ 0x80808080u;
}

// As dequantize_bytes, of a stage of STRIDE rows.
template <int SLABS, int PART, int RECORDS, int STRIDE>
__device__ __forceinline__ void join_nibbles(void* a, const void* stage, int thread) {
  const int lane = thread & 127, group = thread >> 7;
  uint32_t* out = static_cast<uint32_t*>(a);
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* source =
          static_cast<const uint32_t*>(stage) + (PART * (STRIDE / 64) + 2 * (group * SLABS + slab) + half) * RECORDS * 512 + lane * 4;
#pragma unroll
      for (int record = 0; record < RECORDS; ++record) {
        const uint4 line = *reinterpret_cast<const uint4*>(source + record * 512);
        const uint32_t words[4] = {line.x, line.y, line.z, line.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) out[((record * 2 + i / 2) * SLABS + slab) * 4 + i % 2 * 2 + half] = bytes_of_nibbles(words[i]);
      }
    }
}

}  // namespace tilebit
