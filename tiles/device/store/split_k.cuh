// Deterministic split-k: every block stores its partial tile, the last to arrive sums all of them in
// split order.
//
// A workspace is TICKETS words, one per output tile, zero between launches (atomicInc wraps, so a
// launch needs no memset and a captured graph can be replayed), then partial tiles [register /
// 4][thread] float4: any order serves, because writer and reader are the same thread of their
// block; this one makes each store a contiguous 512-byte line per warp. Comes after
// ptx/instructions.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Publishes what the block's THREADS threads have stored and says how many blocks came before; the
// one that finds `others` of them may read what all have stored. One thread's fences are for all:
// what comes before a barrier comes before its fence, and what comes after, after. A fence of every
// thread takes as long as all their stores, one by one: 3 % of 10240 x 8192, m = 512, stream_k
// (156.4 us, by one thread 152.5; H200).
template <int THREADS, int BARRIER>
__device__ __forceinline__ int take_ticket(void* ticket, int others, int thread) {
  __shared__ int arrived;
  sync_group<BARRIER, THREADS>(0);
  if (thread == 0) {
    __threadfence();
    arrived = atomicInc(static_cast<unsigned int*>(ticket), others);
    __threadfence();
  }
  sync_group<BARRIER, THREADS>(0);
  return arrived;
}

// Accumulators are fp32 or (A) int32, which become fp32 when all parts of a tile are added up. They
// travel four at a time, integers as the bits of a float4.
__device__ __forceinline__ float as_bits(float v) { return v; }
__device__ __forceinline__ float as_bits(int v) { return __int_as_float(v); }
__device__ __forceinline__ void of_bits(float bits, float& v) { v = bits; }
__device__ __forceinline__ void of_bits(float bits, int& v) { v = __float_as_int(bits); }
template <typename A>
__device__ __forceinline__ float4 four(const A* v) {
  return make_float4(as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3]));
}
template <typename A>
__device__ __forceinline__ void of_four(float4 bits, A* v) {
  of_bits(bits.x, v[0]), of_bits(bits.y, v[1]), of_bits(bits.z, v[2]), of_bits(bits.w, v[3]);
}

// THREADS threads (id `thread`, 0..THREADS-1) of the block call this with their REGISTERS accumulators.
// *last becomes 1 in the block that must store the tile, whose accumulators then hold the whole sum, and 0 in every other.
template <int REGISTERS, int THREADS, int BARRIER, typename A = float>
__device__ __forceinline__ void reduce_split_k(A* accumulators, void* workspace, int tile, int split, int splits, int thread, int* last) {
  static_assert(REGISTERS % 4 == 0, "accumulators move as float4");
  constexpr int CHUNK = REGISTERS * THREADS;
  float* partials = static_cast<float*>(workspace) + TICKETS;
  float4* mine = reinterpret_cast<float4*>(partials + (int64_t(tile) * splits + split) * CHUNK);
#pragma unroll
  for (int i = 0; i < REGISTERS / 4; ++i)
    __stcg(mine + i * THREADS + thread, four(accumulators + 4 * i));
  *last = take_ticket<THREADS, BARRIER>(static_cast<unsigned int*>(workspace) + tile, splits - 1, thread) == splits - 1;
  if (!*last) return;
#pragma unroll
  for (int i = 0; i < REGISTERS; ++i) accumulators[i] = A(0);
  for (int s = 0; s < splits; ++s) {
    const float4* theirs = reinterpret_cast<const float4*>(partials + (int64_t(tile) * splits + s) * CHUNK);
#pragma unroll
    for (int i = 0; i < REGISTERS / 4; ++i) {
      A v[4];
      of_four(__ldcg(theirs + i * THREADS + thread), v);
      accumulators[4 * i] += v[0], accumulators[4 * i + 1] += v[1], accumulators[4 * i + 2] += v[2], accumulators[4 * i + 3] += v[3];
    }
  }
}

}  // namespace tilebit
