// What TileLang calls of any GPU: asynchronous copies by thread, named barriers, matrices of shared
// memory, products of a warp, the order of tiles.
#pragma once
#include <stdint.h>

namespace tl {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int LEFT>
__device__ __forceinline__ void cp_async_wait() {
  if constexpr (LEFT == 0)
    asm volatile("cp.async.wait_all;");
  else
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}
// BYTES of global memory; past the first cache where they are 16.
template <int BYTES>
__device__ __forceinline__ void cp_async_gs(const void* to, const void* from) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES));
}
// Zeros where they are not there.
template <int BYTES>
__device__ __forceinline__ void cp_async_gs_conditional(const void* to, const void* from, bool there) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const int read = there ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(read));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(read));
}

__device__ __forceinline__ void __sync_thread_partial(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads));
}

__device__ __forceinline__ void ptx_ldmatrix_x2(const void* from, void* to) {
  int32_t* r = static_cast<int32_t*>(to);
  asm volatile("ldmatrix.sync.aligned.x2.m8n8.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(from)));
}
__device__ __forceinline__ void ptx_ldmatrix_x4(const void* from, void* to) {
  int32_t* r = static_cast<int32_t*>(to);
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(from)));
}
__device__ __forceinline__ void ptx_ldmatrix_x4_trans(const void* from, void* to) {
  int32_t* r = static_cast<int32_t*>(to);
  asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(from)));
}

// d += a * b of m16n8k16 in 16-bit floats, of m16n8k32 in e4m3.
template <DataType A, DataType B, DataType C, int M, int N, int K, bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void mma_sync(float* d, const unsigned* a, const unsigned* b) {
  constexpr bool eight = A == DataType::kFloat8_e4m3;
  static_assert(A == B && C == DataType::kFloat32 && M == 16 && N == 8 && K == (eight ? 32 : 16) && !A_ACROSS && B_ACROSS);
  if constexpr (A == DataType::kFloat16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
  else if constexpr (A == DataType::kBFloat16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]));
}
// d += a * b of m16n8k32 in int8.
template <DataType A, DataType B, DataType C, int M, int N, int K, bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void mma_sync(unsigned* d, const unsigned* a, const unsigned* b) {
  static_assert(A == DataType::kInt8 && A == B && C == DataType::kInt32 && M == 16 && N == 8 && K == 32 && !A_ACROSS && B_ACROSS);
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3]));
}

// The tile of this block where panels of PANEL rows of tiles are gone through column by column, every
// other panel backwards.
template <int PANEL>
__device__ __forceinline__ dim3 rasterization2DRow() {
  const unsigned block = blockIdx.x + blockIdx.y * gridDim.x, blocks = gridDim.x * gridDim.y, size = PANEL * gridDim.x;
  const unsigned at = block % size, panel = block / size, panels = (blocks + size - 1) / size;
  const unsigned rows = panel + 1 < panels ? PANEL : (blocks - panel * size) / gridDim.x;
  const unsigned column = (panel & 1) ? gridDim.x - 1 - at / rows : at / rows;
  return {column, at % rows + panel * PANEL, blockIdx.z};
}

}  // namespace tl
