// 4-bit codes that lie row by row as the int8 operand registers of a product: 16 bits a load. Comes after
// codecs/int8.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

struct LqqRowByRow : Lqq {
  using Lqq::Lqq;
  static constexpr int ROW_BYTES = 32;  // of a record of 64 k
  // Four codes as four bytes.
  __device__ __forceinline__ static uint32_t spread(uint32_t run) {
    const uint32_t pairs = (run | run << 8) & 0x00ff00ffu;
    return (pairs | pairs << 4) & 0x0f0f0f0fu;
  }
};

// As dequantize_bytes.
template <typename CODE, int SLABS, int PART, int RECORDS, int GROUP_STEPS, int STRIDE>
__device__ __forceinline__ void dequantize_row_by_row(void* a, const void* stage, const void* scale_rows, const void* offset_rows, int thread) {
  constexpr int STEPS = 2;  // k32 steps of a record
  const uint8_t *scales = static_cast<const uint8_t*>(scale_rows), *offsets = static_cast<const uint8_t*>(offset_rows);
  const int lane = thread & 127, group = thread >> 7, row = (lane >> 5) * 16 + ((lane & 31) >> 2);
  uint32_t* out = static_cast<uint32_t*>(a);
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab) {
    const int r = (group * SLABS + slab) * 64 + row;
    const char* source = static_cast<const char*>(stage) + (PART * (STRIDE / 64) + group * SLABS + slab) * RECORDS * 2048 + row * CODE::ROW_BYTES + (lane & 3) * 2;
#pragma unroll
    for (int record = 0; record < RECORDS; ++record)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int g = ((PART * RECORDS + record) * STEPS + step) / GROUP_STEPS * STRIDE + r;
        const CODE codes[2] = {CODE(scales[g], offsets[g]), CODE(scales[g + 8], offsets[g + 8])};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const char* from = source + record * 2048 + step * 16 + (i & 1) * 8 * CODE::ROW_BYTES + (i >> 1) * 8;
          out[((record * STEPS + step) * SLABS + slab) * 4 + i] = codes[i & 1](CODE::spread(*reinterpret_cast<const uint16_t*>(from)));
        }
      }
  }
}

}  // namespace tilebit
