// Tiles of bytes that other warps of the block store: columns of y lie apart, each number in a sector of its own,
// of which an SM sends about one a clock, 8,192 clocks for 128 x 128. Meanwhile the next tile is multiplied.
// Comes after store/split_k.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Steps that a block has left, at least, when others store its tile: fewer, and they are done later than its
// computing warps would be.
constexpr int SCATTER_STEPS = 12;

// What has been handed over: the tile's first row of the weight and of x, and its rows of x, none of a tile that
// is stored otherwise.
struct HandedTile {
  int n0, m0, rows;
};
__device__ __forceinline__ HandedTile& handed_tile() {
  __shared__ HandedTile tile;
  return tile;
}

// Where a block's tile lies, TILE numbers [row of x][output channel], behind tickets and SHARES shares for each block.
template <typename T, int SHARES, int TILE>
__device__ __forceinline__ T* place_to_hand_over(void* workspace, int block) {
  return reinterpret_cast<T*>(static_cast<float*>(workspace) + TICKETS + SHARES * gridDim.x * int64_t(TILE)) + block * int64_t(TILE);
}

// Stores by the index what has been handed over, by WARPS warps: a lane an output channel, TOGETHER rows of x on
// their way at once.
template <typename S, int SHARES, int ROWS, int WARPS>
__device__ __forceinline__ void scatter_tile(void* workspace, const void* channels, void* y, int block, int thread) {
  using T = typename S::Number;
  constexpr int TOGETHER = 8;
  const HandedTile tile = handed_tile();
  for (int first = thread / 32 * 32; first < S::ROWS; first += WARPS * 32) {
    const int place = first + thread % 32, column = S::column_of(tile.n0, place, channels);
    const T* from = place_to_hand_over<T, SHARES, S::ROWS * ROWS>(workspace, block) + place;
    T* to = static_cast<T*>(y) + int64_t(tile.m0) * S::COLUMNS_OF_Y + column;
    for (int row = 0; row < tile.rows; row += TOGETHER) {
      T numbers[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
        if (row + i < tile.rows) numbers[i] = __ldcg(from + (row + i) * S::ROWS);
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
        if (row + i < tile.rows && column >= 0) to[int64_t(row + i) * S::COLUMNS_OF_Y] = numbers[i];
    }
  }
  __syncwarp();  // a lane says that it is stored
}

}  // namespace tilebit
