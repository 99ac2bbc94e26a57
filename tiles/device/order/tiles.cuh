// What a block of gemm_wgmma multiplies, iteration by iteration, and the hand-over of its
// pipeline's stages.
#pragma once
#include <stdint.h>

namespace tilebit {

// The order of a grid's work: what iteration i of a block multiplies, see tiles/gemm/wgmma.py. m:
// rows of x. With SPLITS > 1 as many blocks share a tile, each with an equal part of its steps.
// Else CLUSTER blocks, a team, hold neighbouring tiles, along n or (BELOW) of rows of x, and count as one
// here: what is dealt out are places for teams, numbered by groups of GROUP row tiles, inside a group row tile by row tile, so
// that neighbours in time share x or W. The first `shared` places, less than two a team, are
// shared: their steps are cut into equal shares, the first `extra` of them one longer. None is
// where the last wave is nearly full. With TAIL > 1 none is shared: the last `cut` places, too few
// for a wave, are each dealt out as TAIL strips of BLOCK_M / TAIL rows of x, where that takes fewer
// than TAIL rounds. The last BYTES tiles along n come before all others, of every row tile, so that others come
// after them in every block.
template <int N_BLOCKS, int BLOCK_M, int STEPS, int SPLITS, int CLUSTER, int GROUP, int TAIL = 1, int BYTES = 0, bool BELOW = false>
struct Order {
  static constexpr int PLACE_STEPS = STEPS, TEAM = CLUSTER, SPLIT = SPLITS, ROWS = BLOCK_M;
  static constexpr bool TALL = BELOW;
  static constexpr int ABREAST = BELOW ? 1 : CLUSTER, N_PLACES = N_BLOCKS / ABREAST;  // a team's tiles along n; teams along n
  static constexpr int HEIGHT = BELOW ? BLOCK_M * CLUSTER : BLOCK_M;                  // rows of x of a team
  static_assert(BYTES == 0 || CLUSTER == 1, "a cluster's tiles are of one kind");
  int m_blocks, places, teams, shared, quota, extra, cut;
  Order() = default;
  __device__ __forceinline__ explicit Order(int m) {
    m_blocks = (m + HEIGHT - 1) / HEIGHT;
    places = N_PLACES * m_blocks;
    teams = gridDim.x / CLUSTER;
    const int rest = places % teams;
    const bool nearly = rest == 0 || (teams - rest) * STEPS <= SHARING_STEPS * teams;
    // With a wave more: of shares shorter than a tile, some tiles have two parts that end at the
    // same time, one of which waits for the other (28672 x 4096, H200; m = 256: 0.70 a team 162,500
    // cycles, 1.70 152,700; m = 512: 0.39 294,000, 1.39 286,000).
    shared = TAIL > 1 || nearly ? 0 : min(places, rest + teams);
    cut = TAIL > 1 && rest * TAIL <= (TAIL - 1) * teams ? rest : 0;
    quota = shared * STEPS / teams, extra = shared * STEPS % teams;
  }
  // Where BELOW it is found anew at each question: a loading thread has no registers to keep it.
  __device__ __forceinline__ static Order of(int m) { return Order(BELOW ? fresh(m) : m); }
  __device__ __forceinline__ int share(int team) const { return quota + (team < extra); }
  __device__ __forceinline__ int begin(int team) const { return team * quota + min(team, extra); }
  // The team whose share holds a step of the shared places.
  __device__ __forceinline__ int owner(int step) const {
    const int longer = extra * (quota + 1);
    return step < longer ? step / (quota + 1) : extra + (step - longer) / max(quota, 1);
  }
  // Places that the team has for itself, after its share; strips of places that are cut, after
  // these.
  __device__ __forceinline__ int whole(int team) const { return (places - shared - cut - team + teams - 1) / teams; }
  __device__ __forceinline__ int strips(int team) const { return TAIL > 1 ? (cut * TAIL - team + teams - 1) / teams : 0; }
  // The strip that iteration i multiplies, counted over all places that are cut; negative: a whole
  // tile.
  __device__ __forceinline__ int strip(int team, int i) const {
    const int late = i - whole(team) * STEPS;
    return TAIL == 1 || late < 0 ? -1 : late / STEPS * teams + team;
  }
  __device__ __forceinline__ int place(int team, int i) const {
    const int late = i - share(team), strip = this->strip(team, i);
    return strip >= 0 ? places - cut + strip / TAIL : late < 0 ? (begin(team) + i) / STEPS : shared + late / STEPS * teams + team;
  }
  // Of places dealt out to ALONG tiles along n: row tiles of the place's group, the tile along n, the row tile.
  template <int ALONG>
  __device__ __forceinline__ int rows(int place) const { return GROUP == 1 ? 1 : min(GROUP, m_blocks - place / (ALONG * GROUP) * GROUP); }
  template <int ALONG>
  __device__ __forceinline__ int along(int place) const {
    const int inside = place % (ALONG * GROUP), height = rows<ALONG>(place);
    return height == GROUP ? inside / GROUP : inside / height;  // by a constant: a tenth of the other's cost
  }
  template <int ALONG>
  __device__ __forceinline__ int row(int place) const {
    const int inside = place % (ALONG * GROUP), height = rows<ALONG>(place);
    return place / (ALONG * GROUP) * GROUP + (height == GROUP ? inside % GROUP : inside % height);
  }

  __device__ __forceinline__ static int split_begin(int block) { return block % SPLITS * STEPS / SPLITS; }

  __device__ __forceinline__ static int iterations(int m, int block) {
    if constexpr (SPLITS > 1) return (block % SPLITS + 1) * STEPS / SPLITS - split_begin(block);
    const Order o = of(m);
    return o.share(block / CLUSTER) + (o.whole(block / CLUSTER) + o.strips(block / CLUSTER)) * STEPS;
  }
  // The first of them that multiplies a strip.
  __device__ __forceinline__ static int first_strip(int m, int block) { return Order(m).whole(block / CLUSTER) * STEPS; }
  __device__ __forceinline__ static int step(int m, int block, int i) {
    if constexpr (SPLITS > 1) return split_begin(block) + i;
    const Order o = of(m);
    const int team = block / CLUSTER, late = i - o.share(team);
    return (late < 0 ? o.begin(team) + i : late) % STEPS;
  }
  // Iterations that are left of the piece of a tile that iteration i belongs to, with i.
  __device__ __forceinline__ static int left(int m, int block, int i) {
    if constexpr (SPLITS > 1) return iterations(m, block) - i;
    const int share = of(m).share(block / CLUSTER), tile = STEPS - step(m, block, i);
    return i < share ? min(tile, share - i) : tile;
  }
  __device__ __forceinline__ static int n_block(int m, int block, int i) { return of(m).n_block(block, i); }
  __device__ __forceinline__ static int of_bytes(int m, int block, int i) { return Order(m).n_block(block, i) >= N_BLOCKS - BYTES; }
  __device__ __forceinline__ static int first_row(int m, int block, int i) { return of(m).first_row(block, i); }
  __device__ __forceinline__ int n_block(int block, int i) const {
    const int where = SPLITS > 1 ? block / SPLITS : place(block / CLUSTER, i);
    if constexpr (BYTES == 0) return along<N_PLACES>(where) * ABREAST + block % ABREAST;
    const int codes = where - BYTES * m_blocks;
    return codes < 0 ? N_BLOCKS - BYTES + along<(BYTES > 0 ? BYTES : 1)>(where) : along<(N_BLOCKS > BYTES ? N_BLOCKS - BYTES : 1)>(codes);
  }
  __device__ __forceinline__ int m_block(int block, int i) const {
    const int where = SPLITS > 1 ? block / SPLITS : place(block / CLUSTER, i);
    if constexpr (BYTES == 0) return row<N_PLACES>(where);
    const int codes = where - BYTES * m_blocks;
    return codes < 0 ? row<(BYTES > 0 ? BYTES : 1)>(where) : row<(N_BLOCKS > BYTES ? N_BLOCKS - BYTES : 1)>(codes);
  }
  // Of x and y.
  __device__ __forceinline__ int first_row(int block, int i) const {
    const int in_team = BELOW ? fresh(block) % CLUSTER * BLOCK_M : 0;
    return m_block(block, i) * HEIGHT + in_team + (TAIL == 1 ? 0 : max(0, strip(block / CLUSTER, i)) % TAIL * (BLOCK_M / TAIL));
  }

  // The launch's order in shared memory, for the computing threads, ids 0..THREADS - 1, which call
  // `keep` while the first stages are on their way: they have no registers to hold it, and at the
  // end of a tile, when no product is under way, its divisions are 150 instructions in a row.
  template <int BARRIER, int THREADS>
  __device__ __forceinline__ static void keep(int m, int thread) {
    if (thread == 0) kept() = Order(m);
    sync_group<BARRIER, THREADS>(0);
  }
  __device__ __forceinline__ static Order& kept() {
    __shared__ Order order;
    return order;
  }
  // Pieces of tiles that a block multiplies one after another, and the iterations of one of them;
  // strips come after them.
  __device__ __forceinline__ static int pieces(int m, int block) {
    if constexpr (SPLITS > 1) return 1;
    const Order o = kept();
    return o.shared_pieces(block / CLUSTER) + o.whole(block / CLUSTER);
  }
  // The tile along n that iteration i multiplies.
  __device__ __forceinline__ static int tile(int m, int block, int i) { return kept().n_block(fresh(block), i); }
  __device__ __forceinline__ static int strips(int m, int block) { return kept().strips(block / CLUSTER); }
  __device__ __forceinline__ static int length(int m, int block, int piece) {
    if constexpr (SPLITS > 1) return iterations(m, block);
    const Order o = kept();
    const int team = fresh(block) / CLUSTER;
    return o.after(team, piece) - o.after(team, piece - 1);
  }
  // The last iteration of a piece.
  __device__ __forceinline__ static int last(int m, int block, int piece) {
    if constexpr (SPLITS > 1) return iterations(m, block) - 1;
    return kept().after(block / CLUSTER, piece) - 1;
  }
  // The iterations of a team before a piece ends: at the border of a tile, or with its share; then
  // tile by tile.
  __device__ __forceinline__ int after(int team, int piece) const {
    const int first = begin(team), whole = piece + 1 - shared_pieces(team);
    return whole > 0 ? share(team) + whole * STEPS : piece < 0 ? 0 : min(share(team), (first / STEPS + piece + 1) * STEPS - first);
  }
  __device__ __forceinline__ int shared_pieces(int team) const {
    const int first = begin(team), end = first + share(team);
    return first == end ? 0 : (end + STEPS - 1) / STEPS - first / STEPS;
  }
};

// A computing warp needs a stage, which mostly is there. TileLang's wait, like CUTLASS's, sleeps
// where a first look fails and wakes late (10240 x 8192, m = 256, in tiles of 192 x 128: 115,400
// cycles, so 106,900, H200).
__device__ __forceinline__ void await_stage(void* barrier, int parity) {
  mbarrier_wait(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)), parity);
}

// A computing warp is done with a stage: one arrival at the stage's barrier in each block of the
// cluster, whose first block loads for all. The arrival is predicated: around a branch ptxas would
// wait for every product before it goes on to the next (C7513). Not `.release.cluster`: reads of
// shared memory need no fence, and one at that scope took 17 % of the time (28672 x 4096, m = 64,
// H200).
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
