// Stage an accumulator tile in shared memory, transposed to y's row-major [m][n] order.
//
// The accumulators hold Y^T (MMA rows are output channels), so a direct store would write 2 bytes
// at a time, each with its own address and predicate: at 128 x 256 x 128 and k = 4096 that epilogue
// cost 8 % of the kernel (209 us against 192 staged, n = k = m = 4096, H200).
//
// Comes after ptx/instructions.cuh, which has sync_group.
#pragma once
#include <stdint.h>
#ifndef TILEBIT_HOST_EMULATION
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace tilebit {

__device__ __forceinline__ uint32_t pack_pair(float a, float b, half) {
  const half2 v = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t pack_pair(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&v);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Four 8 x 8 matrices of 16-bit elements, transposed: lane l holds elements (2 (l % 4) + e, l / 4)
// of each and addresses row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4_trans(void* address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
#ifdef TILEBIT_HOST_EMULATION
  host_stmatrix_x4_trans(address, r0, r1, r2, r3);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(address))),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
#endif
}
#endif

// SLABS 64-row slabs per warpgroup, BLOCK_M columns, accumulators in MMA order: [slab][column /
// 8][row half][column parity]. staging: T [BLOCK_M][rows + 8], so that a matrix's eight columns
// fall into different banks. The block's THREADS threads call it; the barrier first lets all of
// them leave what lay there.
template <typename T, int SLABS, int BLOCK_M, int THREADS, int BARRIER>
__device__ __forceinline__ void stage_transposed(const float* accumulators, void* staging, int thread) {
  static_assert(BLOCK_M % 16 == 0, "two 8-column matrices are stored at a time");
  constexpr int PITCH = THREADS / 128 * SLABS * 64 + 8;
  sync_group<BARRIER, THREADS>(0);
  const int lane = thread & 31, warp = (thread >> 5) & 3, warpgroup = thread >> 7;
  T* tile = reinterpret_cast<T*>(staging);
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab) {
    const int piece = (warpgroup * SLABS + slab) * 8 + warp * 2;
#pragma unroll
    for (int c = 0; c < BLOCK_M / 16; ++c) {
      const float* v = accumulators + (slab * (BLOCK_M / 8) + 2 * c) * 4;
      const uint32_t r0 = pack_pair(v[0], v[1], T()), r1 = pack_pair(v[2], v[3], T());
      const uint32_t r2 = pack_pair(v[4], v[5], T()), r3 = pack_pair(v[6], v[7], T());
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      // Matrices: (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15; lane l
      // addresses column l % 8 of matrix l / 8.
      T* address = tile + (c * 16 + (lane >> 4) * 8 + (lane & 7)) * PITCH + (piece + ((lane >> 3) & 1)) * 8;
      stmatrix_x4_trans(address, r0, r1, r2, r3);
#else
      const uint32_t values[4] = {r0, r1, r2, r3};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          T* p = tile + (c * 16 + (i >> 1) * 8 + (lane & 3) * 2 + e) * PITCH + (piece + (i & 1)) * 8 + (lane >> 2);
          *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(values[i] >> (16 * e));
        }
#endif
    }
  }
  sync_group<BARRIER, THREADS>(0);
}

}  // namespace tilebit
