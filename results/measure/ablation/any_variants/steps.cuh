// Products of weights of any precision with some of the ideas of AnyProduct, for its ablation. They
// are added in the order in which they stand here; with all of them it is AnyProduct but for what
// is looked up in registers.
//
//   PLAIN     none: planes are rows of bits in the order of k, of which a lane loads 32 bits; the
//             bits of a code are put together one by one, and a number is looked up in its row's table
//   PERMUTED  planes lie as lanes read them, 16 bytes each, and so do their pieces of x
//   TURNED    bits become codes as 8 x 8 matrices are transposed (codecs/bit_matrix.cuh)
//   SELECTED  bits of rotated planes' words are selected, which makes a word of codes
//   APART     each lane has a table in a bank of its own
//   MERGED    tables are of pairs: a look-up gives two numbers
//
// Comes after codecs/any_product.cuh and codecs/bit_matrix.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

enum class Ideas { PLAIN, PERMUTED, TURNED, SELECTED, APART, MERGED };

template <Ideas IDEAS, typename T, int BITS, int TILES, int COLUMNS>
struct AnyStep {
  using Whole = AnyProduct<T, BITS, TILES, COLUMNS>;
  static constexpr bool PERMUTED = IDEAS >= Ideas::PERMUTED, APART = IDEAS >= Ideas::APART, MERGED = IDEAS == Ideas::MERGED;
  static constexpr int NUMBERS = 1 << BITS, NT = Whole::NT, ENTRY = Whole::ENTRY;
  static constexpr int TABLE = MERGED ? Whole::TABLE : NUMBERS * (APART ? ENTRY : 32);      // bytes, of 16 rows
  static constexpr int WORDS = IDEAS < Ideas::TURNED ? BITS : MERGED ? Whole::PERIOD : 8;  // that 32 codes of a row are in

  // Tables of the block's rows from their codebooks, T [row][2^BITS], by all its THREADS threads.
  template <int THREADS>
  __device__ __forceinline__ static void fill_tables(void* tables, const void* codebooks, int thread) {
    if constexpr (MERGED) {
      Whole::template fill_tables<THREADS>(tables, codebooks, thread);
    } else if constexpr (APART) {
      constexpr int GROUPS = NUMBERS / 8;
#pragma unroll 4
      for (int i = thread; i < TILES * 16 * GROUPS; i += THREADS) {
        const int row = i % 16, group = i / 16 % GROUPS, tile = i / 16 / GROUPS;
        const uint4 loaded = __ldg(static_cast<const uint4*>(codebooks) + (tile * 16 + row) * GROUPS + group);
        const uint32_t pairs[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        char* to = static_cast<char*>(tables) + tile * TABLE + group * 8 * ENTRY + row * 16;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t v = j % 2 ? pairs[j / 2] >> 16 : pairs[j / 2] & 0xffff;
          *reinterpret_cast<uint4*>(to + j * ENTRY) = make_uint4(v, v, v, v);
        }
      }
    } else {
#pragma unroll 4
      for (int i = thread; i < TILES * 16 * NUMBERS / 8; i += THREADS)
        static_cast<uint4*>(tables)[i] = __ldg(static_cast<const uint4*>(codebooks) + i);
    }
  }

  // Byte `q` of the words of planes, an 8 x 8 matrix: to eight bytes, byte b the code of bit b.
  __device__ __forceinline__ static void turn(const uint32_t (&planes)[BITS], int q, uint32_t& low, uint32_t& high) {
    uint32_t rows[8];  // the last plane is the lowest bit
#pragma unroll
    for (int i = 0; i < 8; ++i) rows[i] = i < BITS ? planes[i < BITS ? BITS - 1 - i : 0] : 0;
    const uint32_t two = q | (4 + q) << 4;
    low = __byte_perm(__byte_perm(rows[0], rows[1], two), __byte_perm(rows[2], rows[3], two), 0x5410);
    high = BITS > 4 ? __byte_perm(__byte_perm(rows[4], rows[5], two), __byte_perm(rows[6], rows[7], two), 0x5410) : 0;
    transpose_bits(low, high);
  }

  // planes: a word of each -> words that `code` finds the 32 codes of a row in.
  __device__ __forceinline__ static void prepare(const uint32_t (&planes)[BITS], uint32_t (&words)[WORDS]) {
    if constexpr (IDEAS < Ideas::TURNED) {
#pragma unroll
      for (int p = 0; p < BITS; ++p) words[p] = planes[p];
    } else if constexpr (IDEAS == Ideas::TURNED) {
#pragma unroll
      for (int q = 0; q < 4; ++q) turn(planes, q, words[2 * q], words[2 * q + 1]);
    } else if constexpr (MERGED) {
      Whole::select_codes(planes, words);
    } else {
      uint32_t found[Whole::PERIOD];
      Whole::select_codes(planes, found);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = Whole::PAIRS ? found[j] & 0x0f0f0f0fu : found[j];
        words[j + 4] = Whole::PAIRS ? found[j] >> 4 & 0x0f0f0f0fu : found[(j + 4) % Whole::PERIOD];
      }
    }
  }

  // The number of bit `bit` of byte `q`, in the table of a lane's row.
  __device__ __forceinline__ static uint32_t number(uint32_t table, int lane, const uint32_t (&words)[WORDS], int q, int bit) {
    if constexpr (IDEAS < Ideas::TURNED) {
      uint32_t code = 0;
#pragma unroll
      for (int p = 0; p < BITS; ++p) code |= (words[p] >> (8 * q + bit) & 1) << (BITS - 1 - p);
      return load_shared_16(table + code * 2);
    } else {
      const bool turned = IDEAS == Ideas::TURNED;
      const uint32_t word = words[turned ? 2 * q + bit / 4 : bit];
      const int byte = turned ? bit % 4 : q;
      if constexpr (APART) return load_shared_32(table + __byte_perm(word, lane * 4, 0x5504 | byte << 4));
      return load_shared_16(table + __byte_perm(word, 0, 0x4440 | byte) * 2);
    }
  }

  // Two numbers of a row, of neighbouring k: pair j of byte q. Of permuted planes' bytes its bits are
  // j and j + 4, else 2 j and 2 j + 1.
  __device__ __forceinline__ static uint32_t pair(uint32_t table, int lane, const uint32_t (&words)[WORDS], int q, int j) {
    if constexpr (MERGED) return Whole::look_up(table, lane * 4, words[j], words[j], q);
    else return Whole::joined(number(table, lane, words, q, PERMUTED ? j : 2 * j), number(table, lane, words, q, PERMUTED ? j + 4 : 2 * j + 1));
  }

  // As of AnyProduct; of plain planes every lane of a row has 64 bytes of x of its own, as they lie.
  __device__ __forceinline__ static void copy_x(SharedAddress to, const void* from_, int stride, int there, bool whole, int left, int lane) {
    if constexpr (PERMUTED) {
      Whole::copy_x(to, from_, stride, there, whole, left, lane);
    } else {
      const char* from = fresh(static_cast<const char*>(from_));
#pragma unroll
      for (int row = 0; row < COLUMNS; ++row)
        if (COLUMNS == 1 || whole || row < there)
          cp_async_16(to.address + row * Whole::PITCH + lane * 16, from + int64_t(row) * stride + lane * 16, lane * 8 < left);
    }
  }
  __device__ __forceinline__ static void load_x(SharedAddress x, int i, int lane, uint32_t (&values)[NT][4]) {
    if constexpr (PERMUTED) {
      Whole::load_x(Whole::own_x(x, lane), i, lane, values);
    } else {
      const uint32_t own = x.address + (lane >> 2) * Whole::PITCH + (lane & 3) * 64 + i / 4 * 256 + i % 4 * 16;
#pragma unroll
      for (int c = 0; c < NT; ++c)
        if (COLUMNS >= 8 || lane < COLUMNS * 4) load_shared_128(own + c * 8 * Whole::PITCH, values[c]);
    }
  }

  // As of AnyProduct, without codebooks in registers.
  __device__ __forceinline__ static void multiply(
      const uint32_t* planes, SharedAddress x, SharedAddress tables, const uint32_t*, float* sums, int lane) {
    uint32_t kept[Whole::KEEPS_X ? 8 : 1][NT][4];
    if constexpr (Whole::KEEPS_X) {
#pragma unroll
      for (int i = 0; i < 8; ++i) load_x(x, i, lane, kept[i]);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const uint32_t table = tables.address + t * TABLE + (APART ? 0 : (lane >> 2) * NUMBERS * 2);
      const uint32_t of_half[2] = {table, table + (APART ? ENTRY : TABLE) / 2};
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint32_t words[2][WORDS];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t of_row[BITS];
#pragma unroll
          for (int p = 0; p < BITS; ++p) of_row[p] = planes[(p * TILES + t) * 4 + 2 * u + h];
          prepare(of_row, words[h]);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          uint32_t loaded[NT][4];
          if constexpr (!Whole::KEEPS_X) load_x(x, u * 4 + q, lane, loaded);
          const uint32_t(&values)[NT][4] = Whole::KEEPS_X ? kept[Whole::KEEPS_X ? u * 4 + q : 0] : loaded;
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = pair(of_half[i % 2], lane, words[i % 2], q, j + i / 2);
#pragma unroll
            for (int c = 0; c < NT; ++c) mma_m16n8k16(sums + (t * NT + c) * 4, a, values[c] + j, T());
          }
        }
      }
    }
  }
};

// A lane's words of plain planes, PITCH words from row to row: 32 neighbouring k of its rows, and the
// 32 that are 128 further. As request_planes leaves them.
template <int PLANES, int TILES, int PITCH>
__device__ __forceinline__ void request_plain(uint32_t* to, const void* from_, int64_t stride, int lane) {
  const char* from = static_cast<const char*>(from_) + ((lane >> 2) * PITCH + (lane & 3)) * 4;
#pragma unroll
  for (int p = 0; p < PLANES; ++p)
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[(p * TILES + t) * 4 + i] = __ldg(reinterpret_cast<const uint32_t*>(from + p * stride) + (t * 16 + i % 2 * 8) * PITCH + i / 2 * 4);
}

}  // namespace tilebit
