// Deterministic split-k: every block stores its fp32 partial tile, the last to arrive sums all of
// them in split order.
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
// (156.4 us, so 152.5, H200).
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

// THREADS threads (id `thread`, 0..THREADS-1) of the block call this with their REGISTERS accumulators.
// *last becomes 1 in the block that must store the tile, whose accumulators then hold the whole sum, and 0 in every other.
template <int REGISTERS, int THREADS, int BARRIER>
__device__ __forceinline__ void reduce_split_k(float* accumulators, void* workspace, int tile, int split, int splits, int thread, int* last) {
  static_assert(REGISTERS % 4 == 0, "accumulators move as float4");
  constexpr int CHUNK = REGISTERS * THREADS;
  float* partials = static_cast<float*>(workspace) + TICKETS;
  float4* mine = reinterpret_cast<float4*>(partials + (int64_t(tile) * splits + split) * CHUNK);
#pragma unroll
  for (int i = 0; i < REGISTERS / 4; ++i)
    __stcg(mine + i * THREADS + thread, make_float4(accumulators[4 * i], accumulators[4 * i + 1], accumulators[4 * i + 2], accumulators[4 * i + 3]));
  *last = take_ticket<THREADS, BARRIER>(static_cast<unsigned int*>(workspace) + tile, splits - 1, thread) == splits - 1;
  if (!*last) return;
#pragma unroll
  for (int i = 0; i < REGISTERS; ++i) accumulators[i] = 0.0f;
  for (int s = 0; s < splits; ++s) {
    const float4* theirs = reinterpret_cast<const float4*>(partials + (int64_t(tile) * splits + s) * CHUNK);
#pragma unroll
    for (int i = 0; i < REGISTERS / 4; ++i) {
      const float4 v = __ldcg(theirs + i * THREADS + thread);
      accumulators[4 * i] += v.x;
      accumulators[4 * i + 1] += v.y;
      accumulators[4 * i + 2] += v.z;
      accumulators[4 * i + 3] += v.w;
    }
  }
}

}  // namespace tilebit
