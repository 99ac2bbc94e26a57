// How codes of a granule of a low-bit KV cache become operands of the tensor cores (layouts/kv.py
// has their order).
//
// Codes below 16 bits go to the tensor cores as fp16 numbers that cost a mask or a byte
// permutation: a code in the low bits of a half is the subnormal q * 2^-24, one `s` bits higher q *
// 2^(s - 24). What is not q itself is a power of two that depends on the half of the fragment's
// rows (ROW_FACTOR) and columns (COLUMN_FACTOR) alone: it is taken out again where a scale is
// applied anyway. Comes after ptx/instructions.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

enum Kind { INT2 = 2, INT4 = 4, INT8 = 8, FLOAT = 16, FP8 = 108 };  // of a cached number; FLOAT: 16 bits, the queries' own type

__host__ __device__ constexpr int bits_of(int kind) { return kind % 100; }
__host__ __device__ constexpr bool has_zero(int kind) { return kind == INT2 || kind == INT4 || kind == INT8; }

// One lane's words of a granule (16 tokens x HEAD_DIM), and its fragments of m16n8k16's A.
template <int KIND, int HEAD_DIM>
struct Granule {
  static constexpr int BITS = bits_of(KIND), WORDS = HEAD_DIM * BITS / 64;      // of a lane
  static constexpr int LOAD = WORDS < 4 ? WORDS : 4, LOADS = WORDS / LOAD;      // words of one load
  static constexpr int FRAGMENTS = HEAD_DIM / 16, PER_LOAD = FRAGMENTS / LOADS;
  static constexpr int BYTES = WORDS * 128;
  static constexpr float ROW_FACTOR = KIND == INT4 ? 16.0f : KIND == INT2 ? 4.0f : 1.0f;  // of rows 8..15
  static constexpr float COLUMN_FACTOR = KIND == INT2 ? 16.0f : 1.0f;                     // of columns 8..15
  // Of integer codes, the highest, about the middle one, and minus that as an A operand: what sums
  // must be centered on. Sums of plain codes are hundreds of times what remains of them when the
  // zeros are added, and the tensor cores cut off what they round (131,072 tokens, 8 bits: error
  // 7.7e-3 without, 4e-4 with it).
  static constexpr bool CENTERED = has_zero(KIND);
  static constexpr int HIGHEST = CENTERED ? (1 << (BITS % 16)) - 1 : 0, MIDDLE = (HIGHEST + 1) / 2;
  __device__ __forceinline__ static constexpr uint32_t minus_middle(int i) {
    return 0x80008000u | uint32_t(MIDDLE * (i & 1 ? int(ROW_FACTOR) : 1) * (i >> 1 ? int(COLUMN_FACTOR) : 1)) * 0x00010001u;
  }
  static constexpr float UNIT = KIND == FLOAT ? 1.0f : KIND == FP8 ? 256.0f : 16777216.0f;  // code = operand * UNIT / factors

  // Fragment `f` (0 .. PER_LOAD - 1) of the words of one load.
  __device__ __forceinline__ static void fragment(const uint32_t (&w)[LOAD], int f, uint32_t (&a)[4]) {
    if constexpr (KIND == FLOAT) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = w[i];
    } else if constexpr (KIND == INT8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = __byte_perm(w[2 * f + (i >> 1)], 0u, i & 1 ? 0x4342 : 0x4140);
    } else if constexpr (KIND == FP8) {  // sign, then seven bits one place lower: e4m3 * 2^-8, subnormals too
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t high = __byte_perm(w[2 * f + (i >> 1)], 0u, i & 1 ? 0x3424 : 0x1404);
        a[i] = (high & 0x80008000u) | (high >> 1 & 0x3f803f80u);
      }
    } else if constexpr (KIND == INT4) {
      const uint32_t low = w[f], high = low >> 8;
      a[0] = low & 0x000f000fu, a[1] = low & 0x00f000f0u, a[2] = high & 0x000f000fu, a[3] = high & 0x00f000f0u;
    } else {
      const uint32_t v = f & 1 ? w[f >> 1] >> 8 : w[f >> 1];
      a[0] = v & 0x00030003u, a[1] = v & 0x000c000cu, a[2] = v & 0x00300030u, a[3] = v & 0x00c000c0u;
    }
  }
};

// A lane's words of load `j` of a granule in shared memory.
template <typename G>
__device__ __forceinline__ void load_words(int lane, uint32_t granule, int j, uint32_t (&words)[G::LOAD]) {
  const uint32_t address = granule + (j * 32 + lane) * (G::LOAD * 4);
  if constexpr (G::LOAD == 4)
    load_shared_128(address, words);
  else
    load_shared_64(address, words);
}

}  // namespace tilebit
