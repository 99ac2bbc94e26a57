// Activations to 8-bit codes: what a thread does with a chunk of 16 values of a row, and lanes of a
// warp with one another. The arithmetic is that of schedules/activations/workload.py.
//
// R states: T, the numbers of x and of a norm's weight; COLUMNS of x, a multiple of 8, and
// CODE_COLUMNS, one of 16; NORM, SMOOTH, K, EPS and OFFSET of the norm; E4M3, else int8; LARGEST code, FLOOR
// of the largest value; AGAIN: values are computed for the codes once more, so that none are kept from
// the search for the largest (1,024 threads of four chunks: up to 92 bytes of spills without); KEEPING:
// that many threads of a block keep the norm's weight and the factors of their columns, and pointers
// are to what `keep` wrote; 0: none does.
// Comes after ptx/instructions.cuh, ptx/lanes.cuh, kv/pairs.cuh and codecs/e4m3.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

constexpr uint32_t INFINITE = 0x7f800000u;  // the bits of every finite magnitude are fewer, those of NaNs more

// 16 bytes that the preceding kernel may have written. Left to the compiler, which sees that nothing
// here writes them, the load would be of the kind for memory that never changes.
__device__ __forceinline__ void load_written(const void* from, uint32_t* r) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(from));
}

template <typename R>
struct Chunk {
  using T = typename R::T;
  static constexpr int HALF = 8;  // values in 16 bytes

  __device__ __forceinline__ static bool present(int column) { return column < R::COLUMNS; }
  // A number from which nothing was computed yet, as far as the compiler knows.
  __device__ __forceinline__ static uint32_t again(uint32_t number) { return R::AGAIN ? uint32_t(fresh(int(number))) : number; }

  // 16 values of row `row` of x from `column` on; zeros behind the last column, and of a row that is
  // not there.
  __device__ __forceinline__ static void load(const void* x, int row, int rows, int column, uint32_t* raw) {
    const T* from = static_cast<const T*>(x) + int64_t(row) * R::COLUMNS + column;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t* words = raw + 4 * h;
      words[0] = words[1] = words[2] = words[3] = 0u;
      if (row < rows && present(column + h * HALF)) load_written(from + h * HALF, words);
    }
  }
  __device__ __forceinline__ static float sum_of_squares(const uint32_t* raw) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const float low = low_of(raw[i], T()), high = high_of(raw[i], T());
      sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
    }
    return sum;
  }

  // What all rows share of the 16 columns from `column` on, the norm's weight and the factors, zeros
  // behind the last column, to shared memory: four values of all threads, then the next four.
  __device__ __forceinline__ static void keep(const void* norm_weight, const void* smooth, int column, void* weights, void* factors) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int at = column + 4 * q;
      if constexpr (R::NORM) {
        const T* from = static_cast<const T*>(norm_weight) + at;
        static_cast<uint2*>(weights)[q * R::KEEPING] = present(at) ? __ldg(reinterpret_cast<const uint2*>(from)) : make_uint2(0u, 0u);
      }
      if constexpr (R::SMOOTH) {
        const float* from = static_cast<const float*>(smooth) + at;
        static_cast<float4*>(factors)[q * R::KEEPING] =
            present(at) ? __ldg(reinterpret_cast<const float4*>(from)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
  // Of 4 values from `column` on, `within` a chunk.
  __device__ __forceinline__ static uint2 weight_of(const void* norm_weight, int column, int within) {
    if constexpr (R::KEEPING) return static_cast<const uint2*>(norm_weight)[within / 4 * R::KEEPING];
    return __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(norm_weight) + column));
  }
  __device__ __forceinline__ static float4 factors_of(const void* smooth, int column, int within) {
    if constexpr (R::KEEPING) return static_cast<const float4*>(smooth)[within / 4 * R::KEEPING];
    return __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(smooth) + column));
  }

  __device__ __forceinline__ static float raised(float weight) {
    if constexpr (R::OFFSET != 0.0f) return __fadd_rn(weight, R::OFFSET);
    return weight;
  }
  // What is quantized: 4 values, `within` the chunk from `column` on. Four at a time, because registers
  // are short where a thread holds four chunks.
  __device__ __forceinline__ static void values(const uint32_t* chunk, int column, int within, float inverse_root, const void* norm_weight,
                                                const void* smooth, float* y) {
    const uint32_t* raw = chunk + within / 2;
    const uint32_t first = again(raw[0]), second = again(raw[1]);
    y[0] = low_of(first, T()), y[1] = high_of(first, T()), y[2] = low_of(second, T()), y[3] = high_of(second, T());
    column = int(again(uint32_t(column + within)));
    if (!present(column)) return;  // zeros
    if constexpr (R::NORM) {
      const uint2 weight = weight_of(norm_weight, column, within);
      y[0] = __fmul_rn(__fmul_rn(y[0], inverse_root), raised(low_of(weight.x, T())));
      y[1] = __fmul_rn(__fmul_rn(y[1], inverse_root), raised(high_of(weight.x, T())));
      y[2] = __fmul_rn(__fmul_rn(y[2], inverse_root), raised(low_of(weight.y, T())));
      y[3] = __fmul_rn(__fmul_rn(y[3], inverse_root), raised(high_of(weight.y, T())));
    }
    if constexpr (R::SMOOTH) {
      const float4 factors = factors_of(smooth, column, within);
      y[0] = __fmul_rn(y[0], factors.x), y[1] = __fmul_rn(y[1], factors.y);
      y[2] = __fmul_rn(y[2], factors.z), y[3] = __fmul_rn(y[3], factors.w);
    }
  }

  // The bits of the largest magnitude of the chunk; a NaN is larger than all numbers.
  __device__ __forceinline__ static uint32_t largest(const uint32_t* raw, int column, float inverse_root, const void* norm_weight, const void* smooth) {
    uint32_t most = 0u;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float y[4];
      values(raw, column, 4 * q, inverse_root, norm_weight, smooth, y);
#pragma unroll
      for (int i = 0; i < 4; ++i) most = max(most, __float_as_uint(y[i]) & 0x7fffffffu);
    }
    return most;
  }

  // The chunk's codes, of values of which `most` are the bits of the largest, to 16 bytes of `codes`.
  __device__ __forceinline__ static void store(const uint32_t* raw, int row, int rows, int column, uint32_t most, float inverse_root, const void* norm_weight,
                                               const void* smooth, void* codes) {
    if (row >= rows || column >= R::CODE_COLUMNS) return;
    const float inverse = __fdiv_rn(R::LARGEST, amax_of(most));
    const uint32_t kept = most < INFINITE ? ~0u : 0u;
    uint32_t words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float y[4];
      values(raw, column, 4 * q, inverse_root, norm_weight, smooth, y);
      words[q] = codes_of(y, inverse) & kept;
    }
    char* to = static_cast<char*>(codes) + int64_t(row) * R::CODE_COLUMNS + column;
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ __forceinline__ static float amax_of(uint32_t most) { return __uint_as_float(max(most, __float_as_uint(R::FLOOR))); }
  __device__ __forceinline__ static float scale_of(uint32_t most) {
    return most < INFINITE ? __fdiv_rn(amax_of(most), R::LARGEST) : __uint_as_float(0x7fc00000u);
  }
  // Four codes. Behind the point of a number of 2^23 and above there is no bit: adding 1.5 * 2^23
  // rounds, once, and the integer lies in the low bits.
  __device__ __forceinline__ static uint32_t codes_of(const float* y, float inverse) {
    if constexpr (R::E4M3) {
      const uint32_t low = to_e4m3_pair(__fmul_rn(y[0], inverse), __fmul_rn(y[1], inverse));
      return low | to_e4m3_pair(__fmul_rn(y[2], inverse), __fmul_rn(y[3], inverse)) << 16;
    } else {
      uint32_t code[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) code[i] = __float_as_uint(__fmaf_rn(y[i], inverse, 12582912.0f));
      return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
    }
  }

  // 1 / sqrt(mean square + eps); NaN where the sum of squares is not finite.
  __device__ __forceinline__ static float inverse_root(float sum) {
    return sum < INFINITY ? __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, R::K), R::EPS))) : __uint_as_float(0x7fc00000u);
  }
};

}  // namespace tilebit
