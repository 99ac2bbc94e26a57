// What a block of gemm_wgmma multiplies, iteration by iteration, and the hand-over of its pipeline's stages.
#pragma once
#include <stdint.h>

namespace tilebit {

// The same number, which the compiler cannot know: what is computed from it stays where it is written instead of being kept in registers
// throughout the main loop, which has none to spare (128 x 256: 1,024 bytes of spills without).
__device__ __forceinline__ int fresh(int value) {
#ifndef TILEBIT_HOST_EMULATION
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// The order of a grid's work: what iteration i of a block multiplies, see tiles/gemm/wgmma.py. m: rows of x.
// With SPLITS > 1 as many blocks share a tile, each with an equal part of its steps. Else
// CLUSTER blocks, a team, hold neighbouring tiles and count as one here: what is dealt out are places for teams, numbered by groups of GROUP
// row tiles, inside a group row tile by row tile, so that neighbours in time share x or W. The first places, between one and two a team, are
// shared: their steps are cut into equal shares, the first `extra` of them one longer.
template <int N_BLOCKS, int BLOCK_M, int STEPS, int SPLITS, int CLUSTER, int GROUP>
struct Order {
  static constexpr int PLACE_STEPS = STEPS, TEAM = CLUSTER, SPLIT = SPLITS, N_PLACES = N_BLOCKS / CLUSTER;
  int m_blocks, places, teams, waves, quota, extra;  // waves: of whole places, after the shares
  __device__ __forceinline__ explicit Order(int m) {
    m_blocks = (m + BLOCK_M - 1) / BLOCK_M;
    places = N_PLACES * m_blocks;
    teams = gridDim.x / CLUSTER;
    waves = max(places / teams - 1, 0);
    const int steps = (places - waves * teams) * STEPS;
    quota = steps / teams, extra = steps % teams;
  }
  __device__ __forceinline__ int share(int team) const { return quota + (team < extra); }
  __device__ __forceinline__ int begin(int team) const { return team * quota + min(team, extra); }
  // The team whose share holds a step of the shared places.
  __device__ __forceinline__ int owner(int step) const {
    const int longer = extra * (quota + 1);
    return step < longer ? step / (quota + 1) : extra + (step - longer) / max(quota, 1);
  }
  __device__ __forceinline__ int place(int team, int i) const {
    const int late = i - share(team);
    return late < 0 ? (begin(team) + i) / STEPS : places - (waves - late / STEPS) * teams + team;
  }
  // Row tiles of the place's group.
  __device__ __forceinline__ int rows(int place) const { return GROUP == 1 ? 1 : min(GROUP, m_blocks - place / (N_PLACES * GROUP) * GROUP); }

  __device__ __forceinline__ static int split_begin(int block) { return block % SPLITS * STEPS / SPLITS; }

  __device__ __forceinline__ static int iterations(int m, int block) {
    if constexpr (SPLITS > 1) return (block % SPLITS + 1) * STEPS / SPLITS - split_begin(block);
    const Order o(m);
    return o.share(block / CLUSTER) + o.waves * STEPS;
  }
  __device__ __forceinline__ static int step(int m, int block, int i) {
    if constexpr (SPLITS > 1) return split_begin(block) + i;
    const Order o(m);
    const int team = block / CLUSTER, late = i - o.share(team);
    return (late < 0 ? o.begin(team) + i : late) % STEPS;
  }
  __device__ __forceinline__ static int n_block(int m, int block, int i) {
    const Order o(m);
    const int place = SPLITS > 1 ? block / SPLITS : o.place(block / CLUSTER, i), inside = place % (N_PLACES * GROUP), rows = o.rows(place);
    return (rows == GROUP ? inside / GROUP : inside / rows) * CLUSTER + block % CLUSTER;  // by a constant: a tenth of the other's cost
  }
  __device__ __forceinline__ static int m_block(int m, int block, int i) {
    const Order o(m);
    const int place = SPLITS > 1 ? block / SPLITS : o.place(block / CLUSTER, i), inside = place % (N_PLACES * GROUP), rows = o.rows(place);
    return place / (N_PLACES * GROUP) * GROUP + (rows == GROUP ? inside % GROUP : inside % rows);
  }
  // Pieces of tiles that a block multiplies one after another, and the iterations of one of them.
  __device__ __forceinline__ static int pieces(int m, int block) {
    if constexpr (SPLITS > 1) return 1;
    const Order o(fresh(m));
    return o.shared_pieces(block / CLUSTER) + o.waves;
  }
  __device__ __forceinline__ static int length(int m, int block, int piece) {
    if constexpr (SPLITS > 1) return iterations(m, block);
    const Order o(fresh(m));
    const int team = fresh(block) / CLUSTER;
    return o.after(team, piece) - o.after(team, piece - 1);
  }
  // The last iteration of a piece.
  __device__ __forceinline__ static int last(int m, int block, int piece) {
    if constexpr (SPLITS > 1) return iterations(m, block) - 1;
    return Order(m).after(block / CLUSTER, piece) - 1;
  }
  // The iterations of a team before a piece ends: at the border of a tile, or with its share; then tile by tile.
  __device__ __forceinline__ int after(int team, int piece) const {
    const int first = begin(team), whole = piece + 1 - shared_pieces(team);
    return whole > 0 ? share(team) + whole * STEPS : piece < 0 ? 0 : min(share(team), (first / STEPS + piece + 1) * STEPS - first);
  }
  __device__ __forceinline__ int shared_pieces(int team) const {
    const int first = begin(team), end = first + share(team);
    return (end + STEPS - 1) / STEPS - first / STEPS;
  }
};

// A computing warp is done with a stage: one arrival at the stage's barrier in each block of the cluster, whose first block loads for all. The
// arrival is predicated: around a branch ptxas would wait for every product before it goes on to the next (C7513).
// Not `.release.cluster`: reads of shared memory need no fence, and one at that scope took 17 % of the time (28672 x 4096, m = 64, H200).
template <int CLUSTER>
__device__ __forceinline__ void release(void* barrier, int thread, bool really = true) {
  const int lane = thread & 31;
  const uint32_t mine = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  uint32_t barrier_there = mine;
  if constexpr (CLUSTER > 1) asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(mine), "r"(lane & (CLUSTER - 1)));
  const int arrives = really && lane < CLUSTER;
  if constexpr (CLUSTER == 1) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(barrier_there), "r"(arrives) : "memory");
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(barrier_there), "r"(arrives) : "memory");
  }
}

}  // namespace tilebit
