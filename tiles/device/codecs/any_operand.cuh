// Weights of any precision as the register operand of wgmma, and x in the order of k in which bit
// planes hold it.
//
// The operand is made 64 k at a time, of two groups of 32 k: a lane's pair of numbers j of the first
// group and of the second are one k16 step. So a row of 64 k of x lies in shared memory as eight
// pieces of 16 bytes, piece 2 j + group: pair j of each of the group's four eighths. Comes after
// codecs/any_product.cuh, whose words of codes these are.
#pragma once
#include <stdint.h>

namespace tilebit {

__device__ __forceinline__ uint32_t load_shared_16(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
// Of four 8 x 8 matrices of 16-bit elements lane l holds elements (l / 4, 2 (l % 4) + e) of each and
// addresses row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Where numbers are looked up: of 3 bits in registers; in shared memory once for each of the four lanes
// that look up a row, in a bank of its own; there once, a row's table as it lies in memory, where lanes
// meet each other's banks.
enum class Tables { REGISTERS, OWN, SHARED };

template <typename T, int BITS, Tables WHERE>
struct AnyOperand {
  using Product = AnyProduct<T, BITS, 1, 8>;
  static constexpr bool OWN = WHERE == Tables::OWN;
  static constexpr int NUMBERS = 1 << BITS, ENTRY = Product::ENTRY;
  static constexpr int TABLE = OWN ? NUMBERS * ENTRY : 16 * NUMBERS * 2;  // bytes, of 16 rows

  // Tables of ROWS rows from their codebooks, T [row][NUMBERS], by all THREADS threads: or to each
  // thread's `kept`.
  template <int ROWS, int THREADS>
  __device__ __forceinline__ static void fill(void* tables, uint32_t* kept, const void* codebooks, int thread) {
    if constexpr (WHERE == Tables::REGISTERS) {
      Product::keep_codebooks(kept, static_cast<const T*>(codebooks) + thread / 32 * (16 * NUMBERS), thread % 32);
      return;
    }
    const uint4* from = static_cast<const uint4*>(codebooks);
    for (int i = thread; i < ROWS * NUMBERS / 8; i += THREADS) {
      const uint4 numbers = __ldg(from + i);
      if constexpr (OWN) {
        const int row = i * 8 / NUMBERS, first = i * 8 % NUMBERS;
        char* to = static_cast<char*>(tables) + row / 16 * TABLE + first * ENTRY + row % 16 * 16;
        const uint32_t pairs[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t v = j % 2 ? pairs[j / 2] >> 16 : pairs[j / 2] & 0xffff;
          *reinterpret_cast<uint4*>(to + j * ENTRY) = make_uint4(v, v, v, v);
        }
      } else {
        static_cast<uint4*>(tables)[i] = numbers;
      }
    }
  }

  // planes: a lane's 16 bytes of each. words [row half][8]: a byte is a code, words j and j + 4 have
  // those of pair j; or, for registers, a byte of word j is both. Of 128 k, the first or the second (u)
  // of a step.
  __device__ __forceinline__ static void select(const uint32_t* planes, uint32_t* words, int u) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t of_row[BITS], found[Product::PERIOD];
#pragma unroll
      for (int p = 0; p < BITS; ++p) of_row[p] = planes[p * 4 + 2 * h + u];
      Product::select_codes(of_row, found);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[h * 8 + j] = Product::PAIRS && WHERE != Tables::REGISTERS ? found[j] & 0x0f0f0f0fu : found[j];
        words[h * 8 + j + 4] = Product::PAIRS ? found[j] >> 4 & 0x0f0f0f0fu : found[(j + 4) % Product::PERIOD];
      }
    }
  }

  __device__ __forceinline__ static uint32_t number(uint32_t table, uint32_t lane, uint32_t word, int q) {
    if constexpr (OWN) return load_shared_32(table + __byte_perm(word, lane, 0x5504 | q << 4));
    return load_shared_16(table + __byte_perm(word, 0, 0x4440 | q) * 2);
  }

  // operand [k16 step][4] of half g of 128 k: rows lane / 4 and lane / 4 + 8 of the warp's 16, of the
  // first group, then of the second.
  __device__ __forceinline__ static void look_up(
      const uint32_t* words, SharedAddress tables, const uint32_t* kept, void* operand, int g, int warp, int lane) {
    uint32_t* a = static_cast<uint32_t*>(operand);
    if constexpr (WHERE == Tables::REGISTERS) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) Product::permuted(kept + h * 4, words[h * 8 + j] >> 16 * g, a[j * 4 + h], a[j * 4 + 2 + h]);
      return;
    }
    const uint32_t own = tables.address + warp * TABLE;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i % 2, q = 2 * g + i / 2;
        const uint32_t table = own + (OWN ? h * (ENTRY / 2) : ((lane >> 2) + 8 * h) * (NUMBERS * 2));
        const uint32_t first = number(table, lane * 4, words[h * 8 + j], q), second = number(table, lane * 4, words[h * 8 + j + 4], q);
        a[j * 4 + i] = Product::joined(first, second);
      }
  }
};

// Puts a slot's ROWS rows of 64 k of x, as TMA left them, into the order of the operand, in place:
// pieces of 16 bytes are exchanged both before and after as the swizzle of 128 bytes has them. Warp
// `warp` of four does eight rows of every 32. Of every other of these a lane has an eighth: stmatrix,
// which gathers what four lanes have, then meets no bank twice.
template <int ROWS>
__device__ __forceinline__ void order_slot(SharedAddress slot, int warp, int lane) {
  constexpr int LINE = 128, GROUPS = ROWS / 32, TOGETHER = GROUPS < 4 ? GROUPS : 4;
  const int row = lane / 8 * 2, target = (lane & 7) / 2 * 2;  // of the rows that begin with the first: read, and written to
#pragma unroll
  for (int first = 0; first < GROUPS; first += TOGETHER) {
    uint32_t values[TOGETHER * 2][4];
#pragma unroll
    for (int i = 0; i < TOGETHER * 2; ++i)
      if (first + i / 2 < GROUPS) {
        const int r = row + i % 2;
        load_shared_128(slot.address + ((first + i / 2) * 32 + warp * 8 + r) * LINE + ((lane & 7) ^ r) * 16, values[i]);
      }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TOGETHER * 2; ++i)
      if (first + i / 2 < GROUPS) {
        const int r = target + i % 2;
        stmatrix_x4(slot.address + ((first + i / 2) * 32 + warp * 8 + r) * LINE + ((lane >> 3) * 2 + (lane & 1) ^ r) * 16, values[i]);
      }
  }
}

}  // namespace tilebit
