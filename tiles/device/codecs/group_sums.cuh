// Tensor cores' sums of a step of 128 k, scaled and added to fp32 sums:
//
//     sums[n, m] += group[n, m] * scales[n] * token_scales[m]
//
// where groups of the weight, and groups of x, have scales. Integer sums stay below 2^21 + 1 (128
// products of bytes), so that fp32 holds them exactly. Those of e4m3 keep about 14 bits on tensor
// cores (DeepSeek-V3, section 3.3.2), which is why no more than a step is summed there.
// Comes after ptx/instructions.cuh and codecs/dequant.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// How an integer becomes fp32: by I2FP; by the bits of 1.5 * 2^23 added to it, where a step of fp32 is 1
// (exact below 2^22), and that number taken away again; or by taking it away from sums that started with
// its bits (start_sums; MixLLM section 3.3).
enum class Conversion { INSTRUCTION, MAGIC_ADD, MAGIC_START };
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;

template <Conversion HOW>
__device__ __forceinline__ float group_to_float(int v) {
  if (HOW == Conversion::INSTRUCTION) return __int2float_rn(v);
  return __int_as_float(HOW == Conversion::MAGIC_ADD ? v + MAGIC_BITS : v) - MAGIC;
}

template <Conversion HOW>
__device__ __forceinline__ float group_to_float(float v) {
  return v;
}

// What a group's sums start at where they are converted by MAGIC_START.
template <int COUNT>
__device__ __forceinline__ void start_sums(int* sums) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sums[i] = MAGIC_BITS;
}

template <int COUNT>
__device__ __forceinline__ void clear_sums(float* sums) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sums[i] = 0.0f;
}

// Sums in MMA order: [slab][column / 8][row half][column parity], of SLABS slabs and BLOCK_M
// columns; a group's are of SUM, int or float. scales: T [rows of the block], times UNIT;
// token_scales: [BLOCK_M], if COLUMNS have them; both in shared memory. ``there`` says that there is a
// group to add; ``joined`` that two of the block's rows are one channel, whose scale is that of the
// second (of `own_channel` in store/tile.cuh, which not all programs that sum groups have).
template <typename T, int SLABS, int BLOCK_M, typename SUM = int, bool COLUMNS = true, int UNIT = 1, Conversion HOW = Conversion::INSTRUCTION>
__device__ __forceinline__ void add_group(float* sums, const SUM* group, const void* scales, const void* token_scales, bool there, bool joined,
                                          int thread) {
  if (!there) return;
  const int lane = thread & 31, warp = (thread >> 5) & 3, own = warp * 16 + (lane >> 2);
  const int first = joined ? (thread >> 7) * (SLABS * 128) + own + 8 : (thread >> 7) * (SLABS * 64) + own;
  const T* of_rows = static_cast<const T*>(scales) + first;
  const float* of_columns = static_cast<const float*>(token_scales) + (lane & 3) * 2;
  float rows[SLABS][2];
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
    for (int low = 0; low < 2; ++low) rows[slab][low] = float(of_rows[joined ? slab * 128 + low * 64 : slab * 64 + low * 8]) * UNIT;
#pragma unroll
  for (int c = 0; c < BLOCK_M / 8; ++c) {
    const float2 columns = COLUMNS ? *reinterpret_cast<const float2*>(of_columns + c * 8) : float2{1.0f, 1.0f};
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (slab * (BLOCK_M / 8) + c) * 4 + i;
        sums[at] += group_to_float<HOW>(group[at]) * (i & 1 ? columns.y : columns.x) * rows[slab][i >> 1];
      }
  }
}

// The scales of a group of BLOCK_M rows of x, from row ``top`` of m on, by a warp, whose lanes arrive at
// ``barrier`` when theirs have landed. Rows of [groups][m] are aligned to no more than 4 bytes, so
// that no bulk copy may bring them. Zeros beyond m.
template <int BLOCK_M>
__device__ __forceinline__ void bring_token_scales(void* to, const void* token_scales, int group, int top, int m, void* barrier, int thread) {
  const int lane = thread & 31;
  const SharedAddress place(to);
  const float* from = static_cast<const float*>(token_scales) + int64_t(group) * m;
#pragma unroll
  for (int first = 0; first < BLOCK_M; first += 32) {
    const int column = first + lane;
    if (BLOCK_M % 32 == 0 || column < BLOCK_M) {
      const bool inside = top + column < m;
      cp_async_4(place.address + column * 4, from + (inside ? top + column : 0), inside);
    }
  }
  mbarrier_arrive_after_copies(barrier);
}

}  // namespace tilebit
