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

// Where numbers are looked up: of 3 bits in registers; else in shared memory, a table in a bank of its
// own for each of the four lanes that look up a row, or for two of them, which meet in it.
enum class Tables { REGISTERS, FOUR, TWO };

template <typename T, int BITS, Tables WHERE>
struct AnyOperand {
  using Product = AnyProduct<T, BITS, 1, 8>;
  // An entry has the numbers of one code: [row r of 16, or r + 8][warps, by twos][row % 8][copy][warp % 2].
  static constexpr int NUMBERS = 1 << BITS, ENTRY = 256, COPIES = WHERE == Tables::TWO ? 2 : 4, WARPS = 8 / COPIES;
  static constexpr int TABLE = NUMBERS * ENTRY;  // bytes, of WARPS warps' 16 rows each
  static constexpr int WORDS = WHERE == Tables::REGISTERS ? 4 : 8, KEPT = 4;  // registers of a row: of 128 k's codes, of its codebook

  // Tables of ROWS rows from their codebooks, T [row][NUMBERS], by all THREADS threads: or to each
  // thread's `kept`.
  template <int ROWS, int THREADS>
  __device__ __forceinline__ static void fill(void* tables, uint32_t* kept, const void* codebooks, int thread) {
    if constexpr (WHERE == Tables::REGISTERS) {
      Product::keep_codebooks(kept, static_cast<const T*>(codebooks) + thread / 32 * (16 * NUMBERS), thread % 32);
    } else {  // eight numbers of two rows, of neighbouring warps, at once
      for (int i = thread; i < ROWS * NUMBERS / 16; i += THREADS) {
        const int row = i % 16, group = i / 16 % (NUMBERS / 8), warps = i / 16 / (NUMBERS / 8);
        const uint4* from = static_cast<const uint4*>(codebooks) + (warps * 32 + row) * (NUMBERS / 8) + group;
        const uint4 one = __ldg(from), other = __ldg(from + 16 * (NUMBERS / 8));
        char* to = static_cast<char*>(tables) + place(2 * warps) + group * 8 * ENTRY + row / 8 * (ENTRY / 2) + row % 8 * (COPIES * 4);
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

  // planes: a lane's four words of each. words [row half][WORDS]: of registers, those of
  // Product::select_codes, four bits a code; else a byte is a code, words j and j + 4 have those of pair j.
  // Of 128 k, the first or the second (u) of a step.
  __device__ __forceinline__ static void select(const uint32_t* planes, uint32_t* words, int u) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t of_row[BITS], found[Product::PERIOD];
#pragma unroll
      for (int p = 0; p < BITS; ++p) of_row[p] = planes[p * 4 + 2 * u + h];
      Product::select_codes(of_row, found);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (WHERE == Tables::REGISTERS) {
          words[h * WORDS + j] = found[j];
        } else {
          words[h * WORDS + j] = Product::PAIRS ? found[j] & 0x0f0f0f0fu : found[j];
          words[h * WORDS + j + 4] = Product::PAIRS ? found[j] >> 4 & 0x0f0f0f0fu : found[(j + 4) % Product::PERIOD];
        }
      }
    }
  }

  // Bytes from where tables begin to a warp's numbers in an entry of its table.
  __device__ __forceinline__ static int place(int warp) { return warp / WARPS * TABLE + warp / 2 % (WARPS / 2) * 64 + warp % 2 * 2; }

  // Of the code in byte q; `own`: the byte of an entry at which a lane's number is.
  __device__ __forceinline__ static uint32_t number(uint32_t table, uint32_t own, uint32_t word, int q) {
    return load_shared_16(table + __byte_perm(word, own, 0x5504 | q << 4));
  }

  // operand [k16 step][4] of half g of 128 k: rows lane / 4 and lane / 4 + 8 of the warp's 16, of the
  // step's first 8 k, then of the others.
  __device__ __forceinline__ static void look_up(
      const uint32_t* words, SharedAddress tables, const uint32_t* kept, void* operand, int g, int warp, int lane) {
    uint32_t* a = static_cast<uint32_t*>(operand);
    if constexpr (WHERE == Tables::REGISTERS) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          Product::permuted(kept + h * KEPT, words[h * WORDS + j] >> 16 * g, a[j / 2 * 4 + j % 2 * 2 + h], a[8 + j / 2 * 4 + j % 2 * 2 + h]);
      return;
    }
    const uint32_t table = tables.address + place(warp), own = ((lane >> 2) * COPIES + (lane & (COPIES - 1))) * 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int h = i % 2, j = i % 8 / 2, q = 2 * g + i / 8;
      const uint32_t of_half = table + h * (ENTRY / 2);
      const uint32_t first = number(of_half, own, words[h * WORDS + j], q), second = number(of_half, own, words[h * WORDS + j + 4], q);
      a[i] = Product::joined(first, second);
    }
  }
};

}  // namespace tilebit
