// Products of weights of any precision: bit planes become codes, codes numbers of their channel's
// table, and these the A operand of mma.m16n8k16, in registers.
//
// A lane has 32 weights of a row in a word of each plane (layouts/planes.py): bit w - p of plane p
// is that of weight w, so bits w, w - 1, ... of plane 0, 1, ... are its code, and a word of codes is
// selected bits of the planes' words: of 4 planes a quarter of an instruction a weight. Tables lie in
// shared memory once for each lane, in a bank of its own (a random place in a row's table would meet
// the others' banks three at a time): of up to 4 bits a table of pairs, whose look-up is an operand
// register of two weights, of more one of single numbers, of two tiles of rows where there are two. A
// byte of codes becomes an address by one byte permutation. Where four COPIES take too much room, there
// are two, and two of a row's four lanes look up the row eight below meanwhile, so that none meet
// either. Comes after ptx/instructions.cuh and codecs/dequant.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

__device__ __forceinline__ uint32_t load_shared_16(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

template <typename T, int BITS, int TILES, int COLUMNS, int COPIES = 4>
struct AnyProduct {
  static constexpr bool PAIRS = BITS <= 4;
  static constexpr int PERIOD = PAIRS ? 4 : 8;  // bits from one code of a word to the next; and words of codes
  static constexpr int LAST = (1 << BITS) - 1;  // the largest code
  // Bytes of an entry: of four copies [row r, or r + 8][row % 8][copy], of two [tile][row % 8][row r, or r + 8][copy].
  static constexpr int ENTRY = 256;
  static constexpr int HALF = COPIES == 2 ? 8 : ENTRY / 2;  // bytes from row r to row r + 8
  static constexpr int TOGETHER = COPIES == 2 || (!PAIRS && TILES % 2 == 0) ? 2 : 1;  // tiles that share an entry, 16-bit numbers its words
  static constexpr int NEXT = PAIRS ? ENTRY / 2 : 2;                                   // bytes from one to the other
  static_assert(COPIES == 4 || (PAIRS && TILES % 2 == 0), "two copies are of pairs of two tiles");
  static constexpr int TABLE = ((PAIRS ? LAST * 17 : LAST) + 1) * ENTRY;  // of TOGETHER tiles; of pairs the index is second * 16 + first
  static constexpr int NT = COLUMNS > 8 ? COLUMNS / 8 : 1;  // tiles of columns
  // x lies as it is, for loads of matrices, each row's pieces of 16 bytes exchanged by the row's number;
  // of fewer than 8 rows so that a lane's of two k16 steps are a piece. No bank is met twice.
  static constexpr bool MATRICES = COLUMNS >= 8;
  static constexpr int PITCH = 512 + (MATRICES ? 0 : 64);  // bytes from one row of x to the next
  static constexpr bool KEEPS_X = TILES > 1;  // in registers, for all tiles
  static constexpr int KEPT = BITS == 3 && COLUMNS < 8;  // words of codes, of four, that are looked up in registers: shared memory is busy

  // Tables of the block's rows from their codebooks, T [row][2^BITS], by all its THREADS threads. A
  // thread loads so many neighbouring numbers of a row at once, and stores each (of pairs each
  // before one other): number by number, every load waited for the one before it.
  template <int THREADS>
  __device__ __forceinline__ static void fill_tables(void* tables, const void* codebooks, int thread) {
    constexpr int NUMBERS = 1 << BITS, AT_ONCE = PAIRS ? NUMBERS : 8, GROUPS = PAIRS ? NUMBERS : NUMBERS / 8;
    constexpr int AT_A_TIME = PAIRS ? 1 : TOGETHER, ALL = TILES / AT_A_TIME * 16 * GROUPS;
    constexpr int ROUNDS = (ALL + THREADS - 1) / THREADS;
#pragma unroll(ROUNDS < 4 ? ROUNDS : 4)
    for (int round = 0; round < ROUNDS; ++round) {
      const int i = round * THREADS + thread, row = i & 15, group = i / 16 % GROUPS, tile = i / 16 / GROUPS;
      if (ALL % THREADS != 0 && i >= ALL) break;
      const uint16_t* own = static_cast<const uint16_t*>(codebooks) + ((tile * AT_A_TIME * 16 + row) << BITS);
      const uint32_t second = PAIRS ? __ldg(own + group) : 0;
      uint2 loaded[AT_ONCE / 4], next[AT_ONCE / 4];
#pragma unroll
      for (int j = 0; j < AT_ONCE / 4; ++j) loaded[j] = __ldg(reinterpret_cast<const uint2*>(own + (PAIRS ? 0 : group * 8)) + j);
#pragma unroll
      for (int j = 0; j < AT_ONCE / 4; ++j)
        next[j] = AT_A_TIME == 2 ? __ldg(reinterpret_cast<const uint2*>(own + (16 << BITS) + group * 8) + j) : make_uint2(0, 0);
      const int at = PAIRS ? tile / TOGETHER * TABLE + tile % TOGETHER * NEXT : tile * TABLE;
      char* to = static_cast<char*>(tables) + at + (PAIRS ? group * 16 : group * 8) * ENTRY + row / 8 * HALF + row % 8 * 16;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const uint32_t two = j % 4 < 2 ? loaded[j / 4].x : loaded[j / 4].y, other = j % 4 < 2 ? next[j / 4].x : next[j / 4].y;
        const uint32_t v = PAIRS ? __byte_perm(two, second, j % 2 ? 0x5432 : 0x5410) : __byte_perm(two, other, j % 2 ? 0x7632 : 0x5410);
        if constexpr (COPIES == 4) *reinterpret_cast<uint4*>(to + j * ENTRY) = make_uint4(v, v, v, v);
        else *reinterpret_cast<uint2*>(to + j * ENTRY) = make_uint2(v, v);
      }
    }
  }

  // Whether a lane has its two rows exchanged while it looks up.
  __device__ __forceinline__ static bool exchanged(int lane) { return COPIES == 2 && lane & 2; }

  // Codebooks of up to 5 bits in a lane's registers, of ROWS of rows lane / 4, lane / 4 + 8, ...: [row] the
  // low bytes of KEPT_NUMBERS numbers, then the high ones, as byte permutations take them.
  static constexpr int KEPT_NUMBERS = BITS < 3 ? 8 : 1 << BITS;
  template <int ROWS = TILES * 2>
  __device__ __forceinline__ static void keep_codebooks(uint32_t* kept, const void* codebooks, int lane) {
    constexpr int HALF = KEPT_NUMBERS / 4;  // words of low bytes
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const char* own = static_cast<const char*>(codebooks) + (row * 8 + (lane >> 2)) * (2 << BITS);
#pragma unroll
      for (int i = 0; i < HALF; ++i) {
        const uint2 v = 4 * i < (1 << BITS) ? __ldg(reinterpret_cast<const uint2*>(own) + i) : make_uint2(0, 0);
        kept[row * 2 * HALF + i] = __byte_perm(v.x, v.y, 0x6420), kept[(row * 2 + 1) * HALF + i] = __byte_perm(v.x, v.y, 0x7531);
      }
    }
  }

  // Two pairs of numbers of a row from four codes: their last four bits, and of 5 bits the first one, each in
  // four bits.
  __device__ __forceinline__ static void permuted(const uint32_t* kept, uint32_t codes, uint32_t above, uint32_t& first, uint32_t& second) {
    const uint32_t at[3] = {BITS < 4 ? codes : codes & 0x7777u, (codes >> 1 & 0x4444u) | 0x3210u, (above << 2 & 0x4444u) | 0x3210u};
    const uint32_t low = bytes_at<KEPT_NUMBERS>(kept, at), high = bytes_at<KEPT_NUMBERS>(kept + KEPT_NUMBERS / 4, at);
    first = __byte_perm(low, high, 0x5140), second = __byte_perm(low, high, 0x7362);
  }
  // Four bytes of NUMBERS: eight that the last three bits of a code choose from, of two such ones the next bit.
  template <int NUMBERS>
  __device__ __forceinline__ static uint32_t bytes_at(const uint32_t* kept, const uint32_t (&at)[3]) {
    if constexpr (NUMBERS == 8) return __byte_perm(kept[0], kept[1], at[0]);
    else return __byte_perm(bytes_at<NUMBERS / 2>(kept, at), bytes_at<NUMBERS / 2>(kept + NUMBERS / 8, at), at[NUMBERS == 16 ? 1 : 2]);
  }

  __device__ __forceinline__ static uint32_t rotated(uint32_t v, int by) { return by % 32 == 0 ? v : v >> by % 32 | v << (32 - by % 32); }

  // planes: a word of each -> words of codes: word j has those of weights j, j + PERIOD, ..., each in
  // the low bits of PERIOD of its own. Selected in two or three steps, of which the first ones serve
  // several words.
  __device__ __forceinline__ static void select_codes(const uint32_t (&planes)[BITS], uint32_t (&words)[PERIOD]) {
    uint32_t two[4][2], four[2][4];  // [planes 2 i, 2 i + 1][weights j, modulo 2], [planes 4 i ..][modulo 4]
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t high = 2 * i < BITS ? planes[2 * i < BITS ? 2 * i : 0] : 0, low = 2 * i + 1 < BITS ? planes[2 * i + 1 < BITS ? 2 * i + 1 : 0] : 0;
        two[i][j] = lop3_select(0x55555555u << j, high, low);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) four[i][j] = lop3_select(rotated(0x99999999u, 32 - j), two[2 * i][j % 2], two[2 * i + 1][j % 2]);
#pragma unroll
    for (int j = 0; j < PERIOD; ++j) {
      const uint32_t word = PAIRS ? four[0][j % 4] : lop3_select(rotated(0xe1e1e1e1u, 32 - j), four[0][j % 4], four[1][j % 4]);
      words[j] = rotated(word, (j + 33 - BITS) % 32);
    }
  }

  // Two 16-bit numbers in a register: by a multiplication, whose units are idle where those that
  // permute and select are not.
  __device__ __forceinline__ static uint32_t joined(uint32_t low, uint32_t high) {
#ifdef TILEBIT_HOST_EMULATION
    return high << 16 | low;
#else
    uint32_t both;
    asm("mad.lo.u32 %0, %1, 65536, %2;" : "=r"(both) : "r"(high), "r"(low));
    return both;
#endif
  }

  // Two numbers of a row: of the codes of byte q of words `first` and `second`, or of pairs, of `first`.
  __device__ __forceinline__ static uint32_t look_up(uint32_t table, uint32_t lane, uint32_t first, uint32_t second, int q) {
    const uint32_t selector = 0x5504 | q << 4;  // byte q of codes above the lane's byte
    if constexpr (PAIRS) return load_shared_32(table + __byte_perm(first, lane, selector));
    return joined(load_shared_16(table + __byte_perm(first, lane, selector)), load_shared_16(table + __byte_perm(second, lane, selector)));
  }

  // A lane's share of 256 k of x is asked for: of COLUMNS rows that lie `stride` bytes apart, of all
  // (`whole`) or only of the first `there`; zeros from k `left` on, a multiple of 8.
  __device__ __forceinline__ static void copy_x(SharedAddress to, const void* from_, int stride, int there, bool whole, int left, int lane) {
    const char* from = fresh(static_cast<const char*>(from_));  // found once, not for each row anew
#pragma unroll
    for (int row = 0; row < COLUMNS; ++row) {
      const char* own = from + int64_t(row) * stride;
      if (COLUMNS == 1 || whole || row < there) {
        if constexpr (MATRICES) {
          cp_async_16(to.address + row * PITCH + (lane ^ row % 8) * 16, own + lane * 16, lane * 8 < left);
        } else {  // pair lane % 16 of 32 k: of lane % 4 the pair lane / 4 % 4
#pragma unroll
          for (int i = 0; i < 4; ++i)
            cp_async_4(to.address + row * PITCH + i * 128 + (lane >> 4) * 64 + (lane & 3) * 16 + (lane >> 2 & 3) * 4, own + i * 128 + lane * 4,
                       i * 64 + lane * 2 < left);
        }
      }
    }
  }
  // Where a lane loads x from, of what `copy_x` left at `x`.
  __device__ __forceinline__ static uint32_t own_x(SharedAddress x, int lane) {
    return MATRICES ? x.address + (lane & 7) * PITCH + (lane >> 3 ^ lane & 7) * 16 : x.address + (lane >> 2) * PITCH + (lane & 3) * 16;
  }
  // The B operands of two k16 steps, 32 k from 32 i on. Lanes whose column is not there load nothing, as
  // one that repeats another would cost what its own does: their sums, of whatever lay in the
  // registers, are not stored.
  __device__ __forceinline__ static void load_x(uint32_t own, int i, int lane, uint32_t (&values)[NT][4]) {
#pragma unroll
    for (int c = 0; c < NT; ++c) {
      if constexpr (MATRICES) ldmatrix_x4((i % 2 ? own ^ 64 : own) + c * 8 * PITCH + i / 2 * 128, values[c]);
      else if (lane < COLUMNS * 4) load_shared_128(own + i * 64, values[c]);
    }
  }

  // sums [TILES][NT][4] += weights of TILES * 16 rows times x, 256 k of both. planes: as request_planes
  // left them; x: as copy_x left it; tables: [tile] as fill_tables left them.
  __device__ __forceinline__ static void multiply(
      const uint32_t* planes, SharedAddress x, SharedAddress tables, const uint32_t* codebooks, float* sums, int lane) {
    const uint32_t column = own_x(x, lane);
    uint32_t kept[KEEPS_X ? 8 : 1][NT][4];
    if constexpr (KEEPS_X) {
#pragma unroll
      for (int i = 0; i < 8; ++i) load_x(column, i, lane, kept[i]);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const uint32_t low = tables.address + t / TOGETHER * TABLE + t % TOGETHER * NEXT, high = COPIES == 2 ? low : low + HALF;
      const uint32_t own = lane * 4, below = COPIES == 2 ? own ^ HALF : own;  // bytes of an entry at which a lane's numbers are
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint32_t words[2][PERIOD];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t of_row[BITS];
#pragma unroll
          for (int p = 0; p < BITS; ++p) {
            const uint32_t* rows = planes + (p * TILES + t) * 4 + 2 * u;
            of_row[p] = exchanged(lane) ? rows[1 - h] : rows[h];
          }
          select_codes(of_row, words[h]);
        }
        uint32_t pairs[KEPT > 0 ? KEPT : 1][2][4];
#pragma unroll
        for (int j = 0; j < KEPT; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < 2; ++i) permuted(codebooks + (t * 2 + h) * 4, words[h][j] >> 16 * i, 0, pairs[j][h][2 * i], pairs[j][h][2 * i + 1]);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          uint32_t loaded[NT][4];
          if constexpr (!KEEPS_X) load_x(column, u * 4 + q, lane, loaded);
          const uint32_t(&values)[NT][4] = KEEPS_X ? kept[KEEPS_X ? u * 4 + q : 0] : loaded;
#pragma unroll
          for (int pair = 0; pair < 4; pair += 2) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int j = pair + i;
              if (j < KEPT) {
                a[2 * i] = pairs[j < KEPT ? j : 0][0][q], a[2 * i + 1] = pairs[j < KEPT ? j : 0][1][q];
                continue;
              }
              const uint32_t one = look_up(low, own, words[0][j], words[0][(j + 4) % PERIOD], q);
              const uint32_t other = look_up(high, below, words[1][j], words[1][(j + 4) % PERIOD], q);
              a[2 * i] = exchanged(lane) ? other : one, a[2 * i + 1] = exchanged(lane) ? one : other;
            }
#pragma unroll
            for (int c = 0; c < NT; ++c) mma_m16n8k16(sums + (t * NT + c) * 4, a, values[c] + pair, T());
          }
        }
      }
    }
  }
};

// 16 bytes of memory of which no other thread of the SM reads any: they take no place in its cache.
__device__ __forceinline__ void load_alone(const void* from, uint32_t* r) {
#ifdef TILEBIT_HOST_EMULATION
  memcpy(r, from, 16);
#else
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(from));
#endif
}

// A lane's 16 bytes of each of PLANES planes and TILES tiles of 16 rows are asked for; a warp's are 512
// neighbouring ones, the planes lie `stride` bytes apart. To [plane][tile] of four words.
template <int PLANES, int TILES>
__device__ __forceinline__ void request_planes(uint32_t* to, const void* from_, int64_t stride, int lane) {
  const char* from = static_cast<const char*>(from_) + lane * 16;
#pragma unroll
  for (int p = 0; p < PLANES; ++p)
#pragma unroll
    for (int t = 0; t < TILES; ++t) load_alone(from + p * stride + t * 512, to + (p * TILES + t) * 4);
}

}  // namespace tilebit
