// A warp's sums, left for others to add up: in its own block's shared memory, in another block's.
// Comes after ptx/instructions.cuh and store/split_k.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// sums [TILES][column tile][4] of TILES tiles of 16 rows and COLUMNS columns, to [column][PITCH]
// from the first row on.
template <int TILES, int COLUMNS, int PITCH, typename S>
__device__ __forceinline__ void store_sums(const S* sums, S* to, int lane) {
  constexpr int NT = COLUMNS > 8 ? COLUMNS / 8 : 1;
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int c = 0; c < NT; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = c * 8 + (lane & 3) * 2 + (i & 1), row = t * 16 + (lane >> 2) + (i >> 1) * 8;
        if (column < COLUMNS) to[column * PITCH + row] = sums[(t * NT + c) * 4 + i];
      }
}

// Four values (of integers their bits) to the same place in block `owner` of the cluster, whose
// barrier is told of them; at once where that is this block.
template <typename S>
__device__ __forceinline__ void keep_or_send(void* place, const S* values, void* barrier, int owner, int rank) {
  const float4 v = four(values);
  if (owner == rank)
    *static_cast<float4*>(place) = v;
  else
    send_to_rank(static_cast<float4*>(place), v, barrier, owner);
}

}  // namespace tilebit
