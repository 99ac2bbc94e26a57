// Matrices of bits (Warren, Hacker's Delight, 7-3).
#pragma once
#include <stdint.h>

namespace tilebit {

// Eight bytes, transposed: byte i of what comes has bit i of each.
__device__ __forceinline__ void transpose_bits(uint32_t& low, uint32_t& high) {
  uint32_t t = (low ^ low >> 7) & 0x00aa00aau;
  low ^= t ^ t << 7;
  t = (high ^ high >> 7) & 0x00aa00aau;
  high ^= t ^ t << 7;
  t = (low ^ low >> 14) & 0x0000ccccu;
  low ^= t ^ t << 14;
  t = (high ^ high >> 14) & 0x0000ccccu;
  high ^= t ^ t << 14;
  const uint32_t upper = (low >> 4 & 0x0f0f0f0fu) | (high & 0xf0f0f0f0u);
  low = (low & 0x0f0f0f0fu) | (high << 4 & 0xf0f0f0f0u), high = upper;
}

}  // namespace tilebit
