// Work items of sequences of any lengths in one line: where one of them lies.
#pragma once
#include <stdint.h>

namespace tilebit {

// The items of all sequences: how many come before those that this thread looks at, and how many
// there are in all.
struct Line {
  int before, total;
};
// Where a work item lies; `sequence` is whose it is and `first` the first of that sequence, of
// `total` in all.
struct Place {
  int sequence, first, total;
};

// Sequence b has count(b) items, one after another. Called by all THREADS threads of a block.
template <int THREADS, typename Count>
__device__ __forceinline__ Line line_up(int batch, const Count& count) {
  __shared__ int sums[THREADS / 32];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, each = (batch + THREADS - 1) / THREADS;
  const int begin = min(thread * each, batch), end = min(begin + each, batch);
  int mine = 0;
  for (int b = begin; b < end; ++b) mine += count(b);
  int before = mine;  // of this thread and those before it in its warp
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  Line line = {before - mine, 0};
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) line.before += sums[w];
    line.total += sums[w];
  }
  return line;
}

// Place of item `item`, if there are so many, of the `line` of all threads, which call this
// together.
template <int THREADS, typename Count>
__device__ __forceinline__ Place find_item(const Line& line, int batch, const Count& count, int item) {
  __shared__ int found_sequence, found_first;
  const int each = (batch + THREADS - 1) / THREADS, begin = min(int(threadIdx.x) * each, batch), end = min(begin + each, batch);
  int before = line.before;
  for (int b = begin; b < end; ++b) {
    const int items = count(b);
    if (before <= item && item < before + items) found_sequence = b, found_first = before;
    before += items;
  }
  __syncthreads();
  return {found_sequence, found_first, line.total};
}

// Both, of an item that is known beforehand: wanted(total) names it.
template <int THREADS, typename Count, typename Wanted>
__device__ __forceinline__ Place locate(int batch, const Count& count, const Wanted& wanted) {
  const Line line = line_up<THREADS>(batch, count);
  return find_item<THREADS>(line, batch, count, wanted(line.total));
}

}  // namespace tilebit
