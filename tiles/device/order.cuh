// What a block of gemm_wgmma multiplies, iteration by iteration, and the hand-over of its pipeline's stages.
#pragma once
#include <stdint.h>

namespace tilebit {

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
  // Whether the block's part of a tile starts, or ends, with iteration i.
  __device__ __forceinline__ static int starts(int m, int block, int i) { return step(m, block, i) == 0 || i == 0; }
  __device__ __forceinline__ static int ends(int m, int block, int i) {
    if constexpr (SPLITS > 1) return i == iterations(m, block) - 1;
    return step(m, block, i) == STEPS - 1 || i == Order(m).share(block / CLUSTER) - 1;
  }
};

// A computing warp is done with a stage: one arrival at the stage's barrier in each block of the cluster, whose first block loads for all.
// Not `.release.cluster`: reads of shared memory need no fence, and one at that scope took 17 % of the time (28672 x 4096, m = 64, H200).
template <int CLUSTER>
__device__ __forceinline__ void release(void* barrier, int thread) {
  const int lane = thread & 31;
  const uint32_t mine = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  __syncwarp();
  if constexpr (CLUSTER == 1) {
    if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mine) : "memory");
  } else if (lane < CLUSTER) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(mine), "r"(lane));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
  }
}

}  // namespace tilebit
