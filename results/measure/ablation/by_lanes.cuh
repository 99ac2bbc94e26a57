// Four codes to four int8 by QServe's arithmetic: one multiplication, then an addition in which no byte
// carries into the next, of instructions for whole words. Comes after codecs/int8.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

struct LqqByLanes {
  static constexpr int BITS = 4;
  static constexpr bool SCALED = true, SHIFTED = true;
  static constexpr uint32_t SIGNS = 0x80808080u;
  uint32_t scale, low, signs;  // of the offset less 128: seven bits of each byte, and the eighth
  __device__ __forceinline__ LqqByLanes(uint8_t s, uint8_t o)
      : scale(s), low((o & 127u) * 0x01010101u), signs((o * 0x01010101u ^ SIGNS) & SIGNS) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t codes) const {
    const uint32_t products = codes * scale;
    return ((products & ~SIGNS) + low) ^ (products & SIGNS) ^ signs;
  }
  __device__ __forceinline__ static void unpack(const uint32_t* words, const LqqByLanes& of_row, const LqqByLanes& of_lower, uint32_t* a) {
    unpack_nibbles(words, of_row, of_lower, a);
  }
};

}  // namespace tilebit
