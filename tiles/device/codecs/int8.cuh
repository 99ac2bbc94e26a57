// Weights as the int8 operand registers of an integer MMA.
//
// Storage: as in codecs/dequant.cuh, induced from the fragment of m64nNk32 and m16n8k32, whose
// registers hold four neighbouring k of a row: 0 of row r, 1 of row r + 8, 2 and 3 the same 16 k
// further. At 4 bits the low nibbles of a word are register 0 (or 2), the high ones register 1 (or
// 3): one load serves both operands (LiquidGEMM 5.2). At 8 bits a word is a register.
// Comes after codecs/dequant.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// The registers of a k32 step from its two words of 4-bit codes: those of row r by ``low``, of row
// r + 8 by ``high``.
template <typename CODE>
__device__ __forceinline__ void unpack_nibbles(const uint32_t* words, const CODE& low, const CODE& high, uint32_t* a) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a[2 * i] = low(words[i] & 0x0f0f0f0fu);
    a[2 * i + 1] = high(words[i] >> 4 & 0x0f0f0f0fu);
  }
}

// LiquidGEMM's two levels (section 4): q8 = q4 * s + o - 128, where q4 * s + o is at most 255 for
// every code, so that four weights are one multiplication and one exclusive or: no byte carries into
// the next.
struct Lqq {
  static constexpr int BITS = 4;
  static constexpr bool SCALED = true, SHIFTED = true;
  uint32_t scale, offsets;
  __device__ __forceinline__ Lqq(uint8_t s, uint8_t o) : scale(s), offsets(o * 0x01010101u) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t codes) const { return (codes * scale + offsets) ^ 0x80808080u; }
  __device__ __forceinline__ static void unpack(const uint32_t* words, const Lqq& low, const Lqq& high, uint32_t* a) {
    unpack_nibbles(words, low, high, a);
  }
};

// q - z of codes and zero points from 0 to 15, as (q + (128 - z)) - 128: a sum from 113 to 143 carries
// into no other byte, and the exclusive or takes 128 away. The scale, a channel's, belongs to the sums.
struct Shifted {
  static constexpr int BITS = 4;
  static constexpr bool SCALED = false, SHIFTED = true;
  uint32_t offsets;
  __device__ __forceinline__ Shifted(uint8_t, uint8_t z) : offsets((128u - z) * 0x01010101u) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t codes) const { return (codes + offsets) ^ 0x80808080u; }
  __device__ __forceinline__ static void unpack(const uint32_t* words, const Shifted& low, const Shifted& high, uint32_t* a) {
    unpack_nibbles(words, low, high, a);
  }
};

// Bytes less 128; their scale belongs to the sums.
struct Centered {
  static constexpr int BITS = 8;
  static constexpr bool SCALED = false, SHIFTED = false;
  __device__ __forceinline__ Centered(uint8_t, uint8_t) {}
  __device__ __forceinline__ static void unpack(const uint32_t* words, const Centered&, const Centered&, uint32_t* a) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = words[i] ^ 0x80808080u;
  }
};

// As dequantize, of bytes. a: this thread's A registers, by k32 step, then slab, four registers
// each. GROUP_STEPS k32 steps share a scale and an offset (or zero point); where the code has them
// (SCALED, SHIFTED) they are bytes [groups of the stage][STRIDE rows of the tile].
template <typename CODE, int SLABS, int PART, int RECORDS, int GROUP_STEPS, int STRIDE>
__device__ __forceinline__ void dequantize_bytes(void* a, const void* stage, const void* scale_rows, const void* offset_rows, int thread) {
  constexpr int WORDS = CODE::BITS / 2;  // words per k32 step
  constexpr int STEPS = 4 / WORDS;       // k32 steps per 128-bit load
  const uint8_t *scales = static_cast<const uint8_t*>(scale_rows), *offsets = static_cast<const uint8_t*>(offset_rows);
  const int lane = thread & 127, group = thread >> 7;
  const int row = (lane >> 5) * 16 + ((lane & 31) >> 2);
  uint32_t* out = static_cast<uint32_t*>(a);
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab) {
    const int r = (group * SLABS + slab) * 64 + row;
    const uint32_t* source = static_cast<const uint32_t*>(stage) + (PART * (STRIDE / 64) + group * SLABS + slab) * RECORDS * 512 + lane * 4;
#pragma unroll
    for (int record = 0; record < RECORDS; ++record) {
      const uint4 line = *reinterpret_cast<const uint4*>(source + record * 512);
      const uint32_t words[4] = {line.x, line.y, line.z, line.w};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int g = ((PART * RECORDS + record) * STEPS + step) / GROUP_STEPS * STRIDE + r;
        const CODE low(CODE::SCALED ? scales[g] : uint8_t(0), CODE::SHIFTED ? offsets[g] : uint8_t(0));
        const CODE high(CODE::SCALED ? scales[g + 8] : uint8_t(0), CODE::SHIFTED ? offsets[g + 8] : uint8_t(0));
        CODE::unpack(words + step * WORDS, low, high, out + ((record * STEPS + step) * SLABS + slab) * 4);
      }
    }
  }
}

}  // namespace tilebit
