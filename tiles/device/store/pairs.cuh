// Output channels that two rows of the weight make, r and r + 8 of 16: an index says of row r + 8 that
// what it makes is ADDED (schedules/gemm/parts.py) to what row r makes.
#pragma once

namespace tilebit {

constexpr int ADDED = -1;

// sums: of an MMA's rows r and r + 8, [row half][column parity] of each of COUNT / 4 column tiles;
// ``second``: what the index says of row r + 8.
template <int COUNT>
__device__ __forceinline__ void add_pair(float* sums, int second) {
  if (second != ADDED) return;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
#pragma unroll
    for (int e = 0; e < 2; ++e) sums[i + e] += sums[i + 2 + e];
}

// Row r + 8 of a thread's 16 rows in the first of SLABS 64-row slabs of four warps; n0: the block's first row.
template <int SLABS>
__device__ __forceinline__ int second_row(int n0, int thread) {
  return n0 + (thread >> 7) * (SLABS * 64) + ((thread >> 5) & 3) * 16 + 8 + ((thread & 31) >> 2);
}

// sums: [slab][COUNT] of such slabs, of a weight of N rows, behind which nothing is added.
template <int SLABS, int COUNT, int N>
__device__ __forceinline__ void add_pairs(float* sums, const int* channels, int n0, int thread) {
#pragma unroll
  for (int slab = 0; slab < SLABS; ++slab) {
    const int row = second_row<SLABS>(n0, thread) + slab * 64;
    add_pair<COUNT>(sums + slab * COUNT, row < N ? channels[row] : 0);
  }
}

// Of a tile that multiplies such rows as bytes (codecs/nibble_pairs.cuh) what is row r + 8 of a thread's sums lies
// so many rows of the weight further than what is row r.
constexpr int JOINED_APART = 64;

}  // namespace tilebit
