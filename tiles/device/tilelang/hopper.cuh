// What TileLang calls of Hopper: barriers in shared memory, loads of tiles by tensor maps, clusters,
// and what goes around products of warpgroups (those themselves are generated: compiler/prelude.py).
#pragma once
#include <stdint.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};

namespace tl {

// Of barriers, their words in shared memory.
__device__ __forceinline__ void mbarrier_init(uint64_t& word, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%1], %0;" ::"r"(arrivals), "r"(shared_address(&word)));
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t& word) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)));
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t& word, int rank, uint32_t asked) {
  const uint32_t address = shared_address(&word);
  if (asked)
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(address),
        "r"(rank));
}
__device__ __forceinline__ void mbarrier_expect_tx(uint64_t& word, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.shared::cta.b64 [%1], %0;" ::"r"(bytes), "r"(shared_address(&word)));
}
__device__ __forceinline__ void mbarrier_wait(uint64_t& word, int parity) {
  const uint32_t address = shared_address(&word), ticks = 10000000;  // of one try
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@done bra DONE;\n"
      "bra AGAIN;\n"
      "DONE:\n"
      "}" ::"r"(address),
      "r"(parity), "r"(ticks));
}

}  // namespace tl

struct Barrier {
  uint64_t word;
  __device__ __forceinline__ uint64_t& storage() const { return *const_cast<uint64_t*>(&word); }
  __device__ __forceinline__ void init(uint32_t arrivals) const { tl::mbarrier_init(storage(), arrivals); }
  __device__ __forceinline__ void arrive() const { tl::mbarrier_arrive(storage()); }
  __device__ __forceinline__ void arrive(uint32_t rank, uint32_t asked = 1) const { tl::mbarrier_arrive(storage(), rank, asked); }
  __device__ __forceinline__ void expect_transaction(uint32_t bytes) const { tl::mbarrier_expect_tx(storage(), bytes); }
  __device__ __forceinline__ void wait(uint32_t parity) const { tl::mbarrier_wait(storage(), parity); }
};

namespace tl {

__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;"); }
// Before products of warpgroups, whose operand in shared memory threads may have written. Where bulk
// copies alone write it, a program defines STAGES_ARE_COPIED: the fence waits for all that a thread has
// on its way, stores of the tile before among it (results/notes/wgmma-parts-ahead.md).
__device__ __forceinline__ void fence_proxy_async() {
#ifndef STAGES_ARE_COPIED
  asm volatile("fence.proxy.async.shared::cta;");
#endif
}

__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;"); }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;");
  cluster_wait();
}
__device__ __forceinline__ int block_rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

template <uint32_t REGISTERS>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <uint32_t REGISTERS>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ uint32_t elected_of_warp() {
  uint32_t elected = 0, lane = 0;
  asm volatile(
      "{\n"
      ".reg .b32 %%lane;\n"
      ".reg .pred %%elected;\n"
      "elect.sync %%lane|%%elected, %2;\n"
      "@%%elected mov.s32 %1, 1;\n"
      "mov.s32 %0, %%lane;\n"
      "}"
      : "+r"(lane), "+r"(elected)
      : "r"(0xffffffff));
  return elected;
}
__device__ __forceinline__ int warp_of_block() { return threadIdx.x / 32; }
// Whether this is the thread of its warp that speaks, and its warp the first of THREADS (0: of the
// block).
template <int THREADS>
__device__ __forceinline__ bool tl_shuffle_elect() {
  if constexpr (THREADS == 0)
    return elected_of_warp() && warp_of_block() == 0;
  else if constexpr (THREADS == 32)
    return elected_of_warp();
  else
    return elected_of_warp() && warp_of_block() % ((THREADS + 31) / 32) == 0;
}

// ---- tiles by tensor maps, two or three coordinates, the innermost first ----
enum class CacheHintSm90 : uint64_t {  // in the second cache, as createpolicy would encode it
  EVICT_NORMAL = 0x1000000000000000,
  EVICT_FIRST = 0x12F0000000000000,
};
__device__ __forceinline__ void prefetch_tma_descriptor(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
#define TILEBIT_OWN_SHARED "shared::cta"
#else
#define TILEBIT_OWN_SHARED "shared::cluster"
#endif
template <CacheHintSm90 HINT = CacheHintSm90::EVICT_NORMAL>
__device__ __forceinline__ void tma_load(const CUtensorMap& map, Barrier& barrier, const void* to, int32_t c0, int32_t c1) {
  const uint64_t from = reinterpret_cast<uint64_t>(&map);
  const uint32_t arrives = shared_address(&barrier), there = shared_address(to);
  asm volatile("cp.async.bulk.tensor.2d." TILEBIT_OWN_SHARED
               ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(there),
               "l"(from), "r"(arrives), "r"(c0), "r"(c1), "l"(static_cast<uint64_t>(HINT))
               : "memory");
}
template <CacheHintSm90 HINT = CacheHintSm90::EVICT_NORMAL>
__device__ __forceinline__ void tma_load(const CUtensorMap& map, Barrier& barrier, const void* to, int32_t c0, int32_t c1, int32_t c2) {
  const uint64_t from = reinterpret_cast<uint64_t>(&map);
  const uint32_t arrives = shared_address(&barrier), there = shared_address(to);
  asm volatile("cp.async.bulk.tensor.3d." TILEBIT_OWN_SHARED
               ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(there),
               "l"(from), "r"(arrives), "r"(c0), "r"(c1), "r"(c2), "l"(static_cast<uint64_t>(HINT))
               : "memory");
}
#undef TILEBIT_OWN_SHARED
__device__ __forceinline__ void tma_load_multicast(const CUtensorMap& map, Barrier& barrier, const void* to, uint16_t blocks, int32_t c0, int32_t c1) {
  const uint64_t from = reinterpret_cast<uint64_t>(&map);
  const uint32_t arrives = shared_address(&barrier), there = shared_address(to);
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(there),
      "l"(from), "r"(arrives), "r"(c0), "r"(c1), "h"(blocks), "l"(static_cast<uint64_t>(CacheHintSm90::EVICT_NORMAL))
      : "memory");
}

// ---- around wgmma ----
// Where a tile lies in shared memory: its address in units of 16 bytes in bits 0 to 13, its leading and
// its row stride likewise in bits 16 to 29 and 32 to 45, its swizzle in bits 62 and 63.
union GmmaDescriptor {
  uint64_t bits;
  uint32_t halves[2];  // the lower one first: an offset never reaches the upper
  uint16_t quarters[4];
  template <typename T>
  __device__ __forceinline__ GmmaDescriptor operator+(const T& offset) const {
    GmmaDescriptor moved = *this;
    moved.halves[0] += static_cast<uint32_t>(offset);
    return moved;
  }
  __device__ __forceinline__ operator uint64_t() const { return bits; }
};
template <int LAYOUT, int LEADING, int STRIDE, typename T>
__device__ __forceinline__ void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* start) {
  descriptor.quarters[0] = shared_address(start) >> 4 & 0x3fff;
  descriptor.quarters[1] = LEADING;
  descriptor.quarters[2] = STRIDE;
  descriptor.quarters[3] = LAYOUT << 14;
}
template <typename T>
__device__ __forceinline__ void increase_descriptor_offset(GmmaDescriptor& descriptor, T bytes) {
  descriptor.halves[0] += bytes >> 4;
}

__device__ __forceinline__ void warpgroup_fence_operand(uint32_t* registers, int count) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
__device__ __forceinline__ void warpgroup_fence_operand(float* registers, int count) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

}  // namespace tl

#endif
