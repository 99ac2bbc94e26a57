// The end of a tile inside a block that has more to do: sum it if other blocks hold parts of it,
// scale it, store it.
//
// Comes after store/split_k.cuh, store/scatter.cuh, store/tile.cuh and order/tiles.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Where a block's part of a shared tile lies in the workspace, behind the tickets. A block whose
// steps are a part of one tile has one place. One whose steps cross tile borders has two: of the
// tile it begins in the middle of, and of the one (it is then its first) it does not end.
template <int TILE, bool ONE>
__device__ __forceinline__ float* share_of(void* workspace, int block, bool first) {
  return static_cast<float*>(workspace) + TICKETS + (ONE ? block : 2 * block + first) * int64_t(TILE);
}

// What is stored of a sum.
__device__ __forceinline__ float sum_of(float v) { return v; }
__device__ __forceinline__ float sum_of(int v) { return __int2float_rn(v); }

enum class Part { ALL_BUT_MINE, ALL, NOTHING };  // of a shared tile: what lies in the workspace and this block must add up

// Hands in the block's part of a tile of `shares` parts; whoever comes last adds them up. Where
// shares cross tile borders (not ONE), the first part in the order of k is the last thing its block
// computes, when the others have mostly been there for long: then it is not written.
template <int REGISTERS, int THREADS, int BARRIER, bool ONE, typename A>
__device__ __forceinline__ Part hand_in(const A* accumulators, void* workspace, int tile, int shares, int block, bool first, int thread) {
  unsigned int* ticket = static_cast<unsigned int*>(workspace) + tile;
  if (!ONE && first) {
    __shared__ int complete;
    if (thread == 0) {
      complete = *static_cast<volatile unsigned int*>(ticket) == shares - 1;
      if (complete) *ticket = 0;
      __threadfence();
    }
    sync_group<BARRIER, THREADS>(0);
    const bool others_are_there = complete;
    sync_group<BARRIER, THREADS>(0);
    if (others_are_there) return Part::ALL_BUT_MINE;
  }
  float4* mine = reinterpret_cast<float4*>(share_of<REGISTERS * THREADS, ONE>(workspace, block, first));
#pragma unroll
  for (int i = 0; i < REGISTERS / 4; ++i)
    __stcg(mine + i * THREADS + thread, four(accumulators + 4 * i));
  return take_ticket<THREADS, BARRIER>(ticket, shares - 1, thread) == shares - 1 ? Part::ALL : Part::NOTHING;
}

// Registers `start`.. of one block's part of a tile.
template <int COUNT, int REGISTERS, int THREADS, bool ONE, typename A>
__device__ __forceinline__ void load_share(A* values, void* workspace, int start, int other, bool first, int thread) {
  const float4* theirs = reinterpret_cast<const float4*>(share_of<REGISTERS * THREADS, ONE>(workspace, other, first));
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) of_four(__ldcg(theirs + (start / 4 + i) * THREADS + thread), values + 4 * i);
}

// values[0..COUNT) += registers `start`.. of the parts of blocks from, from + TEAM, ... last, in
// the order of k, TOGETHER of them loaded at a time.
template <int COUNT, int REGISTERS, int THREADS, int TEAM, bool ONE, int TOGETHER, typename A>
__device__ __forceinline__ void add_shares(A* values, void* workspace, int start, int first, int from, int last, int thread) {
#pragma unroll TOGETHER
  for (int other = from; other <= last; other += TEAM) {
    A theirs[COUNT];
    load_share<COUNT, REGISTERS, THREADS, ONE>(theirs, workspace, start, other, other == first, thread);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += theirs[i];
  }
}

// The end of a tile, whose ``numbers`` are there; other blocks may hold parts of it (SHARED). The accumulators are left as they
// are: what a later product overwrites must not be written here, or the compiler moves all of it
// around in every iteration.
template <typename O, typename S, int THREADS, int BARRIER, bool SHARED, typename... Parts>
__device__ __forceinline__ void finish_tile(const typename S::Sum* accumulators, const void* numbers, void* staging, void* workspace, void* y,
                                            int m, int iteration, int block, int thread, typename Parts::Operand... operands) {
  m = fresh(m), iteration = fresh(iteration), block = fresh(block), thread = fresh(thread);
  constexpr bool ONE = O::SPLIT > 1;
  int first = block, last = block;  // the blocks that hold parts of this tile
  int tile = block / O::SPLIT;
  if constexpr (ONE) {
    first = tile * O::SPLIT, last = first + O::SPLIT - 1;
  } else if (const O order = O::kept(); SHARED && iteration < order.share(block / O::TEAM)) {
    const int rank = block % O::TEAM, place = order.place(block / O::TEAM, iteration), step = place * O::PLACE_STEPS;
    tile = place * O::TEAM + rank;
    first = order.owner(step) * O::TEAM + rank, last = order.owner(step + O::PLACE_STEPS - 1) * O::TEAM + rank;
  }
  constexpr int SLABS = S::REGISTERS / S::SLAB_REGISTERS, COUNT = S::COUNT;
  // Whether other warps store the tile at n0, and where they find it, or y.
  const auto are_others = [&](int n0) { return S::OF_OTHERS && S::joined(n0) && O::iterations(m, block) - iteration > SCATTER_STEPS; };
  const auto place_of = [&](bool others, int n0, int m0) -> void* {
    if constexpr (S::OF_OTHERS)
      if (others) {
        if (thread == 0) handed_tile() = {n0, m0, min(m - m0, S::ROWS_OF_X)};
        return place_to_hand_over<typename S::Number, SHARED ? 2 : 0, S::ROWS * O::ROWS>(workspace, block);
      }
    return y;
  };
  float values[SLABS * COUNT];
  const Where where = where_of(numbers);
  const int n0 = S::first_row_of(where.n_block), m0 = where.m0;
  if constexpr (S::OF_OTHERS)
    if (thread == 0 && S::joined(n0)) handed_tile().rows = 0;
  if (!SHARED || first == last) {
    const bool others = are_others(n0);
    const S store(staging, place_of(others, n0, m0), m, n0, m0, thread, others);
    const typename S::template Channels<Parts...> channels(numbers, n0, thread);
    uint4 held[S::PASSES];
    uint32_t pairs[S::PAIRS];
#pragma unroll
    for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[slab * COUNT + i] = sum_of(accumulators[S::start(slab, chunk) + i]);
      S::template apply<Parts...>(values, channels, numbers, chunk, n0, m0 + chunk * (COUNT * 2), m, thread, operands...);
      S::pack(values, pairs);
      if constexpr (S::HOLDS) {
        // Made before the chunk before is stored, not moved behind that.
#pragma unroll
        for (int i = 0; i < S::PAIRS; ++i) pairs[i] = fresh(static_cast<int>(pairs[i]));
        if (chunk > 0) store.store_held(held, chunk - 1);
      }
      if (m0 + chunk * (COUNT * 2) >= m) return;
      store.stage(pairs);
      if constexpr (S::HOLDS) store.hold(held);
      else store.store_staged(chunk, channels.places());
    }
    if constexpr (S::HOLDS) store.store_held(held, S::CHUNKS - 1);
    return;
  }
  const int shares = (last - first) / O::TEAM + 1;
  const Part part = hand_in<S::REGISTERS, THREADS, BARRIER, ONE>(accumulators, workspace, tile, shares, block, block == first, thread);
  if (part == Part::NOTHING) return;
  const bool others = are_others(n0);
  void* const whole = place_of(others, n0, m0);
  const int other = part == Part::ALL ? first : first + O::TEAM;  // whose part comes first
  // Chunks of that part that are on their way while one is added and stored (128 x 256: none 10,000
  // cycles, two 7,000). A tile of two slabs has no registers for any (256 x 128 would spill 828
  // bytes), nor has one with a gate or a residual (128 x 256: 256 and 176 bytes); with other parts, and where
  // a team's tiles lie below each other, there are registers for one (72 and 176 bytes).
  constexpr bool PLAIN = !S::GATED && ((Parts::AXIS != Axis::ELEMENT) && ...);
  constexpr int AHEAD = SLABS == 1 && THREADS <= 256 && PLAIN ? sizeof...(Parts) == 0 && !O::TALL ? 2 : 1 : 0, PLACES = AHEAD + 1;
  using A = typename S::Sum;
  A early[PLACES][AHEAD ? COUNT : 1];
  const auto load_early = [&](int chunk) {
    if (AHEAD && chunk < S::CHUNKS)
      load_share<COUNT, S::REGISTERS, THREADS, ONE>(early[chunk % PLACES], workspace, S::start(0, chunk), other, other == first, thread);
  };
#pragma unroll
  for (int chunk = 0; chunk < AHEAD; ++chunk) load_early(chunk);
#pragma unroll
  for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
    if (m0 + chunk * (COUNT * 2) >= m) return;
    load_early(chunk + AHEAD);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      A mine[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        mine[i] = part == Part::ALL ? A(0) : accumulators[S::start(slab, chunk) + i];
        if (AHEAD) mine[i] += early[chunk % PLACES][i];
      }
      add_shares<COUNT, S::REGISTERS, THREADS, O::TEAM, ONE, AHEAD ? 1 : 2>(mine, workspace, S::start(slab, chunk), first,
                                                                           AHEAD ? other + O::TEAM : other, last, thread);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) values[slab * COUNT + i] = sum_of(mine[i]);
    }
    const typename S::template Channels<Parts...> channels(numbers, n0, thread);
    S::template apply<Parts...>(values, channels, numbers, chunk, n0, m0 + chunk * (COUNT * 2), m, thread, operands...);
    const S store(staging, whole, m, n0, m0, AHEAD ? thread : fresh(thread), others);  // without registers to spare, found anew
    store.store(values, chunk, channels.places());
  }
}

}  // namespace tilebit
