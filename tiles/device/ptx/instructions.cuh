// Instructions that CUDA C++ has no name for, one function each: matrix products and loads,
// asynchronous copies and their barriers, clusters.
#pragma once
#include <stdint.h>
#ifndef TILEBIT_HOST_EMULATION
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif
#include <type_traits>

namespace tilebit {

// A place in shared memory as instructions name it; a pointer is one as well.
struct SharedAddress {
  uint32_t address;
  __device__ __forceinline__ SharedAddress(uint32_t a) : address(a) {}
  __device__ __forceinline__ SharedAddress(const void* p) : address(static_cast<uint32_t>(__cvta_generic_to_shared(p))) {}
};
__device__ __forceinline__ uint32_t shared_address(const void* p) { return SharedAddress(p).address; }

__device__ __forceinline__ void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Of int8, with int32 sums.
__device__ __forceinline__ void mma_m16n8k32(int* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Of e4m3 (sm_89 and later), with fp32 sums of about 14 bits.
__device__ __forceinline__ void mma_m16n8k32(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Of bits: how many k have a one in both.
__device__ __forceinline__ void mma_m16n8k256(int* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// As above, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t address, uint32_t* r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_shared_128(uint32_t address, uint32_t* r) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared_64(uint32_t address, uint32_t* r) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_32(uint32_t address, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }
// The lowest byte of `v`.
__device__ __forceinline__ void store_shared_8(uint32_t address, uint32_t v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }
// 16 bytes to memory where `really`; no branch, so that what is written around it may be done meanwhile.
__device__ __forceinline__ void store_global_128(void* to, uint4 v, bool really) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4};}" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w),
               "r"(int(really))
               : "memory");
}
// 16 bytes, or 16 zeros where `valid` is false.
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.address), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// The first `bytes` of four, the others zero.
__device__ __forceinline__ void cp_async_up_to_4(SharedAddress to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to.address), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_4(SharedAddress to, const void* from, bool valid) { cp_async_up_to_4(to, from, valid ? 4 : 0); }
// The line of memory that holds `at` is on its way to the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <int BARRIER, int THREADS>
__device__ __forceinline__ void sync_group(int group) {
  if constexpr (THREADS == 32)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(BARRIER + group), "n"(THREADS) : "memory");
}
// Some of the THREADS threads do not wait for the others.
template <int BARRIER, int THREADS>
__device__ __forceinline__ void arrive_group(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(BARRIER + group), "n"(THREADS) : "memory");
}

// ---- mbarriers and bulk copies (sm_90) ----
__device__ __forceinline__ void mbarrier_init(SharedAddress barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier.address), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.address), "r"(bytes) : "memory");
}
// True in one lane of the warp, all of which call this; ptxas then knows that what follows is one
// lane's, and makes no loop over lanes of it.
__device__ __forceinline__ bool elect() {
  uint32_t elected;
  asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\nselp.u32 %0, 1, 0, elected;\n}" : "=r"(elected));
  return elected;
}
__device__ __forceinline__ void mbarrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier.address) : "memory");
}
// This thread's arrival once all its cp.async so far have landed.
__device__ __forceinline__ void mbarrier_arrive_after_copies(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.address) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(SharedAddress barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier.address), "r"(parity)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(SharedAddress to, const void* from, int bytes, SharedAddress barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to.address), "l"(from),
               "r"(bytes), "r"(barrier.address), "l"(policy)
               : "memory");
}
// What threads have stored to shared memory, and loaded from there, so far comes before bulk copies that
// are requested from now on.
__device__ __forceinline__ void fence_before_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Weights are read once: they leave the L2 cache before x and the scales do (5 % of the time at m =
// 1, three shapes, H200).
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- clusters ----
// Barriers that were initialized are seen by the cluster once it has met.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Stores of COUNT pieces, APART pieces from each other, to the same places in the shared memory of block `rank` of
// the cluster, whose barrier is told of the bytes once they are there.
template <int COUNT = 1, int APART = 1>
__device__ __forceinline__ void send_to_rank(float4* address, const float4 (&pieces)[COUNT], void* barrier, int rank) {
#ifdef TILEBIT_HOST_EMULATION
  for (int i = 0; i < COUNT; ++i) host_send_to_rank(address + i * APART, pieces[i], barrier, rank);
#else
  uint32_t to, told;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(address)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(told) : "r"(shared_address(barrier)), "r"(rank));
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to + i * APART * 16),
                 "f"(pieces[i].x), "f"(pieces[i].y), "f"(pieces[i].z), "f"(pieces[i].w), "r"(told)
                 : "memory");
#endif
}
__device__ __forceinline__ void send_to_rank(float4* address, float4 v, void* barrier, int rank) {
  const float4 one[1] = {v};
  send_to_rank(address, one, barrier, rank);
}

// The same number, or place, which the compiler cannot know: what is computed from it stays where
// it is written instead of being kept in registers throughout a loop that has none to spare
// (gemm_wgmma, 128 x 256: 1,024 bytes of spills without), and it is itself kept instead of being
// found anew.
__device__ __forceinline__ int fresh(int value) {
#ifndef TILEBIT_HOST_EMULATION
  asm volatile("" : "+r"(value));
#endif
  return value;
}
__device__ __forceinline__ const char* fresh(const char* place) {
#ifndef TILEBIT_HOST_EMULATION
  asm volatile("" : "+l"(place));
#endif
  return place;
}

__device__ __forceinline__ float to_float(half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ half from_float(float v, half) { return __float2half_rn(v); }
__device__ __forceinline__ __nv_bfloat16 from_float(float v, __nv_bfloat16) { return __float2bfloat16_rn(v); }

}  // namespace tilebit
