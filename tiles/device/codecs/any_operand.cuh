// Weights of any precision as the register operand of wgmma, 64 k at a time, of two groups of 32 k:
// of each pairs 0 and 1 are a lane's numbers of a row in one k16 step, 2 and 3 in the next. Comes after
// codecs/any_product.cuh, whose words of codes these are.
#pragma once
#include <stdint.h>

namespace tilebit {

// A warp's planes of a step, as they lie in shared memory in slabs of 64 rows, to [plane] four words.
template <int PLANES, int ROWS>
__device__ __forceinline__ void read_planes(uint32_t* to, SharedAddress planes, int warp, int lane) {
#pragma unroll
  for (int p = 0; p < PLANES; ++p) load_shared_128(planes.address + p * (ROWS * 32) + warp * 512 + lane * 16, to + p * 4);
}

// Numbers are looked up in shared memory, of whose tables there are so many COPIES: 4, in a bank of its own
// for each of the four lanes that look up a row; or 2, of which two lanes look up one of their rows while the
// others look up the other one, so that none meet either; or none. And so many pairs of a lane's four,
// PERMUTED, are looked up in registers: of up to 4 bits of both its rows, of 5 of one.
template <typename T, int BITS, int COPIES, int PERMUTED>
struct AnyOperand {
  using Product = AnyProduct<T, BITS, 1, 8>;
  // An entry has the numbers of one code: of four copies [row r of 16, or r + 8][row % 8][copy][warp % 2], of two
  // [warps, by twos][row % 8][row r, or r + 8][copy][warp % 2].
  static constexpr int NUMBERS = 1 << BITS, ENTRY = 256, WARPS = COPIES == 2 ? 4 : 2;
  static constexpr int TABLE = NUMBERS * ENTRY;  // bytes, of WARPS warps' 16 rows each
  static constexpr int KEPT_ROWS = BITS <= 4 ? 2 : 1, KEPT = Product::KEPT_NUMBERS / 2;  // rows whose codebooks are in registers; of each so many
  static constexpr int WORDS = COPIES > 0 ? 8 : 4;  // of a row: 128 k's codes
  static constexpr int HALF = COPIES == 2 ? 8 : ENTRY / 2;  // bytes from row r to row r + 8
  static_assert(COPIES != 2 || PERMUTED == 0, "rows that are exchanged have no codebooks in registers");

  // Whether a lane has its two rows exchanged while it looks up.
  __device__ __forceinline__ static bool exchanged(int lane) { return COPIES == 2 && lane & 2; }

  // Tables of ROWS rows from their codebooks, T [row][NUMBERS], by all THREADS threads: or to each
  // thread's `kept`, its warp's; or both.
  template <int ROWS, int THREADS>
  __device__ __forceinline__ static void fill(void* tables, uint32_t* kept, const void* codebooks, int thread) {
    if constexpr (PERMUTED > 0)
      Product::template keep_codebooks<KEPT_ROWS>(kept, static_cast<const T*>(codebooks) + thread / 32 * (16 * NUMBERS), thread % 32);
    if constexpr (COPIES > 0) {  // eight numbers of two rows, of neighbouring warps, at once
      for (int i = thread; i < ROWS * NUMBERS / 16; i += THREADS) {
        const int row = i % 16, group = i / 16 % (NUMBERS / 8), warps = i / 16 / (NUMBERS / 8);
        const uint4* from = static_cast<const uint4*>(codebooks) + (warps * 32 + row) * (NUMBERS / 8) + group;
        const uint4 one = __ldg(from), other = __ldg(from + 16 * (NUMBERS / 8));
        char* to = static_cast<char*>(tables) + place(2 * warps) + group * 8 * ENTRY + row / 8 * HALF + row % 8 * 16;
        const uint32_t pairs[2][4] = {{one.x, one.y, one.z, one.w}, {other.x, other.y, other.z, other.w}};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t v = __byte_perm(pairs[0][j / 2], pairs[1][j / 2], j % 2 ? 0x7632 : 0x5410);
          if constexpr (COPIES == 4) *reinterpret_cast<uint4*>(to + j * ENTRY) = make_uint4(v, v, v, v);
          else *reinterpret_cast<uint2*>(to + j * ENTRY) = make_uint2(v, v);
        }
      }
    }
  }

  // Whether pair j of row half h is looked up in registers.
  __device__ __forceinline__ static constexpr bool permutes(int j, int h) { return j < PERMUTED && h < KEPT_ROWS; }

  // planes: a lane's four words of each. words [row half][WORDS], of pair j words j and j + 4: in one a byte
  // is a code of the first number, in the other of the second; of pairs that are permuted, in one four bits
  // are the last ones of either number's code, in the other those above. Of 128 k, the first or the second
  // (u) of a step.
  __device__ __forceinline__ static void select(const uint32_t* planes, uint32_t* words, int u, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t of_row[BITS], found[Product::PERIOD];
#pragma unroll
      for (int p = 0; p < BITS; ++p) of_row[p] = exchanged(lane) ? planes[p * 4 + 2 * u + 1 - h] : planes[p * 4 + 2 * u + h];
      Product::select_codes(of_row, found);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t *first = words + h * WORDS + j, one = found[j], other = found[(j + 4) % Product::PERIOD];
        if constexpr (WORDS == 4) *first = one;
        else if (Product::PAIRS) first[0] = permutes(j, h) ? one : one & 0x0f0f0f0fu, first[4] = one >> 4 & 0x0f0f0f0fu;
        else if (permutes(j, h)) first[0] = lop3_select(0x0f0f0f0fu, one, other << 4), first[4] = lop3_select(0x0f0f0f0fu, one >> 4, other);
        else first[0] = one, first[4] = other;
      }
    }
  }

  // Bytes from where tables begin to a warp's numbers in an entry of its table.
  __device__ __forceinline__ static int place(int warp) { return warp / WARPS * TABLE + warp / 2 % (WARPS / 2) * (ENTRY / 2) + warp % 2 * 2; }

  // Of the code in byte q; `own`: the byte of an entry at which a lane's number is.
  __device__ __forceinline__ static uint32_t number(uint32_t table, uint32_t own, uint32_t word, int q) {
    return load_shared_16(table + __byte_perm(word, own, 0x5504 | q << 4));
  }

  // operand [k16 step][4] of half g of 128 k: rows lane / 4 and lane / 4 + 8 of the warp's 16, of the
  // step's first 8 k, then of the others.
  __device__ __forceinline__ static void look_up(
      const uint32_t* words, SharedAddress tables, const uint32_t* kept, void* operand, int g, int warp, int lane) {
    uint32_t* a = static_cast<uint32_t*>(operand);
#pragma unroll
    for (int i = 0; i < 2 * PERMUTED; ++i) {
      const int h = i % 2, j = i / 2;
      const uint32_t* own = words + h * WORDS + j;
      if (permutes(j, h)) Product::permuted(kept + h * KEPT, own[0] >> 16 * g, BITS > 4 ? own[4] >> 16 * g : 0, a[i], a[8 + i]);
    }
    if constexpr (COPIES == 0) return;
    const uint32_t table = tables.address + place(warp);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int h = i % 2, j = i % 8 / 2, q = 2 * g + i / 8;
      if (permutes(j, h)) continue;
      const uint32_t of_half = COPIES == 2 ? table : table + h * HALF, own = COPIES == 2 ? lane * 4 ^ h * HALF : lane * 4;
      const uint32_t first = number(of_half, own, words[h * WORDS + j], q), second = number(of_half, own, words[h * WORDS + j + 4], q);
      a[i] = Product::joined(first, second);
    }
    if constexpr (COPIES == 2) {
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const uint32_t one = a[i], other = a[i + 1];
        a[i] = exchanged(lane) ? other : one, a[i + 1] = exchanged(lane) ? one : other;
      }
    }
  }
};

}  // namespace tilebit
