// A low-bit KV cache: how codes of a granule become operands of the tensor cores, and where things lie in a page (layouts/kv.py has the same).
//
// Codes below 16 bits go to the tensor cores as fp16 numbers that cost a mask or a byte permutation: a code in the low bits of a half is the
// subnormal q * 2^-24, one `s` bits higher q * 2^(s - 24). What is not q itself is a power of two that depends on the half of the fragment's
// rows (ROW_FACTOR) and columns (COLUMN_FACTOR) alone: it is taken out again where a scale is applied anyway. Comes after ptx.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr int RESIDUAL = 128;  // tokens of a sequence's 16-bit window, and of a quantization group of keys

enum Kind { INT2 = 2, INT4 = 4, INT8 = 8, FLOAT = 16, FP8 = 108 };  // of a cached number; FLOAT: 16 bits, the queries' own type
enum KeyScales { NO_SCALES, PER_CHANNEL, PER_TOKEN, PER_HEAD };

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
  // Of integer codes, the highest, about the middle one, and minus that as an A operand: what sums must be centered on. Sums of plain codes are
  // hundreds of times what remains of them when the zeros are added, and the tensor cores cut off what they round (131,072 tokens, 8 bits: error
  // 7.7e-3, so 4e-4).
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

// Byte offsets in the record of one page of one head.
template <int KEY, int VALUE, int KEY_SCALES, int HEAD_DIM, int PAGE>
struct Page {
  static constexpr int KEY_TOKEN = HEAD_DIM * bits_of(KEY) / 8, VALUE_TOKEN = HEAD_DIM * bits_of(VALUE) / 8;  // bytes of a token's codes
  static constexpr int KEY_PARAMETERS = KEY_SCALES == PER_CHANNEL ? PAGE * HEAD_DIM * 4 / RESIDUAL : KEY_SCALES == PER_TOKEN ? PAGE * 4 : 0;
  static constexpr int VALUE_PARAMETERS = has_zero(VALUE) ? PAGE * 4 : 0;
  static constexpr int VALUES_AT = PAGE * KEY_TOKEN, KEY_PARAMETERS_AT = VALUES_AT + PAGE * VALUE_TOKEN;
  static constexpr int VALUE_PARAMETERS_AT = KEY_PARAMETERS_AT + KEY_PARAMETERS, BYTES = VALUE_PARAMETERS_AT + VALUE_PARAMETERS;
};

__device__ __forceinline__ uint32_t pack_pair(float low, float high, half) {
  const half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float low_of(uint32_t pair, half) { return __half2float(__ushort_as_half(uint16_t(pair))); }
__device__ __forceinline__ float high_of(uint32_t pair, half) { return __half2float(__ushort_as_half(uint16_t(pair >> 16))); }
__device__ __forceinline__ float low_of(uint32_t pair, __nv_bfloat16) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair, __nv_bfloat16) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  const half2 product = __hmul2(*reinterpret_cast<const half2*>(&x), *reinterpret_cast<const half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// An 8 x 8 matrix of 16-bit elements, row lane / 4, columns 2 (lane % 4) and the next: transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// Where one work item of all sequences' lies; sequence b has count(b) of them, one after another. Called by all THREADS threads of a block.
// `wanted(total)` names the item; where it is one, `sequence` is whose and `first` the first of that sequence.
struct Place {
  int sequence, first, total;
};
template <int THREADS, typename Count, typename Wanted>
__device__ __forceinline__ Place locate(int batch, const Count& count, const Wanted& wanted) {
  __shared__ int sums[THREADS / 32], found_sequence, found_first;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, each = (batch + THREADS - 1) / THREADS;
  const int begin = min(thread * each, batch), end = min(begin + each, batch);
  int mine = 0;
  for (int b = begin; b < end; ++b) mine += count(b);
  int before = mine;  // of this thread and those before it in its warp
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  Place place = {0, 0, 0};
  before -= mine;
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before += sums[w];
    place.total += sums[w];
  }
  const int item = wanted(place.total);
  for (int b = begin; b < end; ++b) {
    const int items = count(b);
    if (before <= item && item < before + items) found_sequence = b, found_first = before;
    before += items;
  }
  __syncthreads();
  place.sequence = found_sequence, place.first = found_first;
  return place;
}

}  // namespace tilebit
