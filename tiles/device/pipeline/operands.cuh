// Register operands that one block of a cluster of two makes and both multiply: a warp sends its lanes' words to
// the same warp of the other block, through that block's shared memory ([warp][four words][lane]). Comes
// after ptx/instructions.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// WORDS words of each lane to `place` of block `rank`, whose `barrier` is told of the bytes.
template <int WORDS>
__device__ __forceinline__ void send_operand(const void* operand, void* place, void* barrier, int warp, int lane, int rank) {
  const float* words = static_cast<const float*>(operand);
  float4 pieces[WORDS / 4];
#pragma unroll
  for (int i = 0; i < WORDS / 4; ++i) pieces[i] = make_float4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  send_to_rank<WORDS / 4, 32>(static_cast<float4*>(place) + warp * (WORDS * 8) + lane, pieces, barrier, rank);
}

// What the other block's same warp sent.
template <int WORDS>
__device__ __forceinline__ void receive_operand(void* operand, SharedAddress place, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < WORDS / 4; ++i)
    load_shared_128(place.address + warp * (WORDS * 128) + i * 512 + lane * 16, static_cast<uint32_t*>(operand) + 4 * i);
}

// A warp waits for one operand more at `barrier`. Predicated, as ``release`` is (order/tiles.cuh).
template <int WORDS>
__device__ __forceinline__ void expect_operand(SharedAddress barrier, int lane) {
  const int first = lane == 0;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;}" ::"r"(barrier.address),
               "r"(WORDS * 128), "r"(first)
               : "memory");
}

// A warp has read an operand: an arrival at the `barrier` of block `rank`.
__device__ __forceinline__ void hand_back(SharedAddress barrier, int lane, int rank) {
  const int first = lane == 0;
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier.address), "r"(rank));
  asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(there), "r"(first) : "memory");
}

}  // namespace tilebit
