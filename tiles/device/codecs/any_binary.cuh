// Products of weights of few bits and codebooks by binary tensor cores: bit planes are multiplied
// as they lie in memory, nothing is looked up and no weight is made.
//
// A codebook of b bits is a sum over sets of its planes: the number of a code is the sum over sets S
// of c[S] where all bits of S are set, and c is found once a row (numbers of codes below,
// subtracted). So y is the sum over S of c[S] times the sum over k of x where all planes of S have a
// one. x is an integer of one scale for all k, whose bits are columns of the B operand of
// mma.m16n8k256: a product counts, for 16 rows and eight bits of x, the k at which both have a one.
// An x has four digits of six bits, in base 64 and from -32 to 31, one for each lane of a row: the
// higher ones of a small x are zero, and what a lane sums is as small as x is (of two's complement a
// lane would sum the signs of all x, and lose what is small beside the largest). Counts are exact, and
// an x is off by 2^-22 of the largest of its row at most.
//
// A lane's 16 bytes of a plane (layouts/planes.py) are the A operand of 16 rows and 256 k, but for a
// rotation of plane p by p bits. Comes after ptx/instructions.cuh, ptx/lanes.cuh and
// codecs/bit_matrix.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

constexpr int BITS_OF_X = 24, BYTES_OF_X = BITS_OF_X / 8, STEP_OF_X = BYTES_OF_X * 256;  // bytes of the bits of 256 numbers
constexpr int UNITS = BITS_OF_X - 3;  // the largest of a row is 2^UNITS units or more, and less than twice as many
constexpr int DIGIT = 6;              // bits of a digit
constexpr uint32_t HALVES = 0x820820;  // 32 of each digit: added, digits are from 0 to 63

// ---- x ----

template <typename T>
__device__ __forceinline__ T from_bits(uint32_t bits);
#ifdef TILEBIT_HOST_EMULATION
template <typename T>
__device__ __forceinline__ T from_bits(uint32_t bits) {
  T v;
  v.bits = uint16_t(bits);
  return v;
}
#else
template <>
__device__ __forceinline__ half from_bits<half>(uint32_t bits) { return __ushort_as_half(bits); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_bits<__nv_bfloat16>(uint32_t bits) { return __ushort_as_bfloat16(bits); }
#endif

// The exponent by which x becomes integers: that of the largest, but none whose power of two is out
// of fp32's range.
template <typename T>
__device__ __forceinline__ int exponent_of(uint32_t largest) { return max(int(__float_as_uint(to_float(from_bits<T>(largest))) >> 23) - 127, -100); }
__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((exponent + 127) << 23); }
// The larger of `largest` and the sizes of a lane's eight numbers, as bits of the 16-bit type.
__device__ __forceinline__ uint32_t larger(uint32_t largest, SharedAddress x, int lane) {
  uint32_t v[4];
  load_shared_128(x.address + lane * 16, v);
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, max(v[i] & 0x7fff, v[i] >> 16 & 0x7fff));
  return largest;
}
// Of all WARPS warps. `shared`: a word a warp.
template <int WARPS>
__device__ __forceinline__ uint32_t largest_of_block(uint32_t largest, float* shared, int warp, int lane) {
  largest = largest_of_lanes<32>(largest);
  if (lane == 0) shared[warp] = __uint_as_float(largest);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; ++i) largest = max(largest, __float_as_uint(shared[i]));
  return largest;
}
// What an integer's unit is worth. Not a number where x has one that is not finite: so is y then.
template <typename T>
__device__ __forceinline__ float unit_of(uint32_t largest) {
  const float value = to_float(from_bits<T>(largest)), unit = power_of_two(exponent_of<T>(largest) - UNITS);
  return value - value == 0.0f ? unit : value - value;
}

// Byte i of each of four words, to words of theirs.
__device__ __forceinline__ void gather_bytes(const uint32_t (&v)[4], uint32_t (&bytes)[BYTES_OF_X]) {
  const uint32_t first = __byte_perm(v[0], v[1], 0x5140), second = __byte_perm(v[2], v[3], 0x5140);
  bytes[0] = __byte_perm(first, second, 0x5410), bytes[1] = __byte_perm(first, second, 0x7632);
  bytes[2] = __byte_perm(__byte_perm(v[0], v[1], 0x0062), __byte_perm(v[2], v[3], 0x0062), 0x5410);
}

// 256 numbers of a warp become their bits, in place: STEP_OF_X bytes, [product][lane of B][word]. Bits
// 2 s and 2 s + 1 of digit t are columns 2 t and 2 t + 1 of product s. Returns the sum of a lane's
// integers: of the eight numbers of a byte of a plane, whose bits j and j + 4 are pair j. Added to 1.5 * 2^23 a number is rounded to
// an integer.
template <typename T>
__device__ __forceinline__ int to_bits(SharedAddress x, uint32_t largest, int lane) {
  constexpr uint32_t HIGHEST[BYTES_OF_X] = {0x20202020u, 0x08080808u, 0x82828282u};  // bits of HALVES: of a signed digit they are turned
  const float scale = power_of_two(UNITS - exponent_of<T>(largest)), base = 12582912.0f;
  uint32_t v[4], n[2][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = load_shared_32(x.address + (lane >> 2) * 64 + j * 16 + (lane & 3) * 4);
  __syncwarp();
  uint32_t sum = 0u - 8 * HALVES;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float rounded = fmaf(to_float(from_bits<T>(i % 2 ? v[i / 2] >> 16 : v[i / 2] & 0xffff)), scale, base);
    n[i % 2][i / 2] = __float_as_uint(rounded) - __float_as_uint(base) + HALVES;
    sum += n[i % 2][i / 2];
  }
  const uint32_t to = x.address + (lane & 3) * 8 + (lane >> 4) * 4 + (lane >> 2 & 3);
  uint32_t low[BYTES_OF_X], high[BYTES_OF_X];
  gather_bytes(n[0], low), gather_bytes(n[1], high);
#pragma unroll
  for (int byte = 0; byte < BYTES_OF_X; ++byte) {
    low[byte] ^= HIGHEST[byte], high[byte] ^= HIGHEST[byte];
    transpose_bits(low[byte], high[byte]);
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const int digit = (byte * 8 + bit) / DIGIT, place = (byte * 8 + bit) % DIGIT;
      store_shared_8(to + place / 2 * 256 + (2 * digit + place % 2) * 32, (bit < 4 ? low : high)[byte] >> 8 * (bit % 4));
    }
  }
  return int(sum);
}

// The sum over a warp's lanes, to a word of its own.
__device__ __forceinline__ void tell_sum(float sum, float* shared, int warp, int lane) {
  sum = sum_of_lanes(sum);
  if (lane == 0) shared[warp] = sum;
}
// The sum over all WARPS warps of what they told.
template <int WARPS>
__device__ __forceinline__ float sum_of_block(const float* shared) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += shared[i];
  return sum;
}

// ---- products ----

// A slot of a warp's ring, `slot` bytes behind where rings begin: [plane] 512 bytes, then codebooks of
// 16 rows. `at`: bytes from where the first plane begins to a lane's of 16 rows and 256 k.
template <int BITS>
__device__ __forceinline__ void copy_planes(SharedAddress rings, int slot, const void* weight, int64_t at, int64_t stride, int lane) {
  const char* from = static_cast<const char*>(weight) + at;
#pragma unroll
  for (int p = 0; p < BITS; ++p) cp_async_16(rings.address + slot + p * 512 + lane * 16, from + p * stride, true);
}
// `rows`: a number of 16 rows.
template <int BITS>
__device__ __forceinline__ void copy_codebooks(SharedAddress rings, int slot, const void* codebooks, int rows, int lane) {
  constexpr int PIECES = 2 << BITS;  // of 16 bytes
  const char* from = static_cast<const char*>(codebooks) + int64_t(rows) * (PIECES * 16);
#pragma unroll
  for (int i = 0; i < (PIECES + 31) / 32; ++i)
    if (i * 32 + lane < PIECES) cp_async_16(rings.address + slot + BITS * 512 + (i * 32 + lane) * 16, from + (i * 32 + lane) * 16, true);
}

template <typename T, int BITS>
struct BinaryProduct {
  static constexpr int SETS = 1 << BITS;  // of planes; number 1 << (BITS - 1 - p) has plane p. The empty one is not multiplied

  // held: planes of 16 rows and 256 k, as they lie, and bits of x, `bits_at` bytes behind where these
  // begin.
  __device__ __forceinline__ static void hold(SharedAddress rings, int slot, SharedAddress x, int bits_at, uint32_t* held, int lane) {
#pragma unroll
    for (int p = 0; p < BITS; ++p) load_shared_128(rings.address + slot + lane * 16 + p * 512, held + p * 4);
#pragma unroll
    for (int byte = 0; byte < BYTES_OF_X; ++byte) load_shared_64(x.address + bits_at + lane * 8 + byte * 256, held + BITS * 4 + byte * 2);
  }

  // counts [SETS - 1][BYTES_OF_X][4] (+)= of what is held. FIRST: they were not set before.
  template <bool FIRST>
  __device__ __forceinline__ static void count(const uint32_t* held, int* counts) {
    uint32_t planes[BITS][4];
#pragma unroll
    for (int p = 0; p < BITS; ++p)
#pragma unroll
      for (int i = 0; i < 4; ++i) planes[p][i] = __funnelshift_l(held[p * 4 + i], held[p * 4 + i], p);
#pragma unroll
    for (int set = 1; set < SETS; ++set) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // registers of A: rows r and r + 8 of the first 128 k, then of the others
        a[i] = 0xffffffffu;
#pragma unroll
        for (int p = 0; p < BITS; ++p)
          if (set >> (BITS - 1 - p) & 1) a[i] &= planes[p][i];
      }
#pragma unroll
      for (int byte = 0; byte < BYTES_OF_X; ++byte) {
        int* d = counts + ((set - 1) * BYTES_OF_X + byte) * 4;
        if constexpr (FIRST) d[0] = d[1] = d[2] = d[3] = 0;
        mma_m16n8k256(d, a, held + BITS * 4 + byte * 2);
      }
    }
  }

  // The warp's share of y of 16 rows, to `sums`: counts times what a bit of x is worth and c[set]. A
  // lane has the digit lane % 4. The slot has codebooks; `all`: the sum of x for the share that adds
  // the empty set's part, else 0.
  __device__ __forceinline__ static void finish(SharedAddress rings, int slot, const int* counts, float all, float unit, float* sums, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (lane >> 2) + 8 * h;
      float c[SETS];
      uint32_t v[SETS / 2];
#pragma unroll
      for (int i = 0; i < SETS; i += 4) load_shared_64(rings.address + slot + BITS * 512 + (row * SETS + i) * 2, v + i / 2);
#pragma unroll
      for (int i = 0; i < SETS; ++i) c[i] = to_float(from_bits<T>(i % 2 ? v[i / 2] >> 16 : v[i / 2] & 0xffff));
#pragma unroll
      for (int bit = 1; bit < SETS; bit *= 2)
#pragma unroll
        for (int set = 0; set < SETS; ++set)
          if (set & bit) c[set] -= c[set ^ bit];
      float sum = 0.0f;
#pragma unroll
      for (int set = 1; set < SETS; ++set) {
        const int* d = counts + (set - 1) * BYTES_OF_X * 4 + 2 * h;
        sum += c[set] * float(d[0] + 2 * d[1] + 4 * (d[4] + 2 * d[5]) + 16 * (d[8] - 2 * d[9]));
      }
      sum = sum * float(1 << DIGIT * (lane & 3)) + ((lane & 3) == 0 ? c[0] * all : 0.0f);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if ((lane & 3) == 0) sums[row] = sum * unit;
    }
  }
};

}  // namespace tilebit
