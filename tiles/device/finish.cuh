// The end of a tile inside a block that has more to do: sum it if other blocks hold parts of it, scale it, store it.
//
// Comes after split_k.cuh, epilogue.cuh, order.cuh and ptx.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Where a block's part of a shared tile lies in the workspace, behind the tickets. A block whose steps are a part of one tile has one place.
// One whose steps cross tile borders has two: of the tile it begins in the middle of, and of the one (it is then its first) it does not end.
template <int TILE, bool ONE>
__device__ __forceinline__ float* share_of(void* workspace, int block, bool first) {
  return static_cast<float*>(workspace) + TICKETS + (ONE ? block : 2 * block + first) * int64_t(TILE);
}

enum class Part { ALL_BUT_MINE, ALL, NOTHING };  // of a shared tile: what lies in the workspace and this block must add up

// Hands in the block's part of a tile of `shares` parts; whoever comes last adds them up. Where shares cross tile borders (not ONE), the first
// part in the order of k is the last thing its block computes, when the others have mostly been there for long: then it is not written.
template <int REGISTERS, int THREADS, int BARRIER, bool ONE>
__device__ __forceinline__ Part hand_in(const float* accumulators, void* workspace, int tile, int shares, int block, bool first, int thread) {
  unsigned int* ticket = static_cast<unsigned int*>(workspace) + tile;
  if (!ONE && first) {
    __shared__ int complete;
    if (thread == 0) {
      complete = *static_cast<volatile unsigned int*>(ticket) == shares - 1;
      if (complete) *ticket = 0;
      __threadfence();
    }
    sync_threads<BARRIER, THREADS>();
    const bool others_are_there = complete;
    sync_threads<BARRIER, THREADS>();
    if (others_are_there) return Part::ALL_BUT_MINE;
  }
  float4* mine = reinterpret_cast<float4*>(share_of<REGISTERS * THREADS, ONE>(workspace, block, first));
#pragma unroll
  for (int i = 0; i < REGISTERS / 4; ++i)
    __stcg(mine + i * THREADS + thread, make_float4(accumulators[4 * i], accumulators[4 * i + 1], accumulators[4 * i + 2], accumulators[4 * i + 3]));
  return take_ticket<THREADS, BARRIER>(ticket, shares - 1, thread) == shares - 1 ? Part::ALL : Part::NOTHING;
}

// Registers `start`.. of one block's part of a tile.
template <int COUNT, int REGISTERS, int THREADS, bool ONE>
__device__ __forceinline__ void load_share(float* values, void* workspace, int start, int other, bool first, int thread) {
  const float4* theirs = reinterpret_cast<const float4*>(share_of<REGISTERS * THREADS, ONE>(workspace, other, first));
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) {
    const float4 v = __ldcg(theirs + (start / 4 + i) * THREADS + thread);
    values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
  }
}

// values[0..COUNT) += registers `start`.. of the parts of blocks from, from + TEAM, ... last, in the order of k.
template <int COUNT, int REGISTERS, int THREADS, int TEAM, bool ONE>
__device__ __forceinline__ void add_shares(float* values, void* workspace, int start, int first, int from, int last, int thread) {
#pragma unroll 2
  for (int other = from; other <= last; other += TEAM) {
    float theirs[COUNT];
    load_share<COUNT, REGISTERS, THREADS, ONE>(theirs, workspace, start, other, other == first, thread);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] += theirs[i];
  }
}

// What one block stores of y [m][N]: COLUMNS columns of a BLOCK_N x BLOCK_M tile at a time, from accumulators in MMA order ([slab][column / 8]
// [row half][column parity]) through `staging`, T [warpgroup][COLUMNS][rows of a warpgroup], swizzled: warpgroups do not wait for each other.
// Per-channel scales (SCALED) and a bias are applied here, in fp32.
template <typename T, int N, int SLABS, int BLOCK_N, int BLOCK_M, int COLUMNS, int THREADS, int BARRIER, bool SCALED, bool BIAS>
struct Store {
  static constexpr int COUNT = COLUMNS / 2, SLAB_REGISTERS = BLOCK_M / 2;  // accumulators of a thread: in COLUMNS of a slab, in a slab
  static constexpr int TILE = BLOCK_N * BLOCK_M, REGISTERS = TILE / THREADS, CHUNKS = BLOCK_M / COLUMNS;
  static constexpr int ROWS = BLOCK_N, OWN = 128, OWN_ROWS = SLABS * 64, PIECES = OWN_ROWS / 8;  // of the block; of a warpgroup
  using Places = Swizzled<OWN_ROWS>;

  // The thread's first accumulator of a slab's columns `chunk`.
  __device__ __forceinline__ static constexpr int start(int slab, int chunk) { return slab * SLAB_REGISTERS + chunk * COUNT; }

  __device__ __forceinline__ static void adjust(float* values, const void* scales, const void* bias, int n0, int thread) {
    if constexpr (SCALED || BIAS) {
      const int lane = thread & 31, warp = (thread >> 5) & 3, group = thread >> 7;
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const int row = min(n0 + (group * SLABS + slab) * 64 + warp * 16 + low * 8 + (lane >> 2), N - 1);
          const float scale = SCALED ? to_float(static_cast<const T*>(scales)[row]) : 1.0f;
          const float offset = BIAS ? to_float(static_cast<const T*>(bias)[row]) : 0.0f;
#pragma unroll
          for (int c = 0; c < COUNT / 4; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& v = values[slab * COUNT + c * 4 + low * 2 + e];
              v = v * scale + offset;
            }
        }
    }
  }

  // values: [slab][COUNT], the columns from m0 on.
  __device__ __forceinline__ static void store(float* values, void* staging, void* y, const void* scales, const void* bias, int m, int n0, int m0,
                                               int thread) {
    adjust(values, scales, bias, n0, thread);
    thread = fresh(thread);  // or the places of one chunk would be kept for the next: registers that a tile of 256 x 128 has not
    const int group = thread / OWN, own = thread % OWN, first = n0 + group * OWN_ROWS;
    T* mine = static_cast<T*>(staging) + group * (COLUMNS * OWN_ROWS);
    stage_transposed<T, SLABS, COLUMNS, Places, OWN, BARRIER + 1>(values, mine, own, group);
    static_assert(COLUMNS * PIECES % OWN == 0, "every thread stores as many pieces");
#pragma unroll 2
    for (int start = 0; start < COLUMNS * PIECES; start += OWN) {
      const int piece = fresh(start + own), column = piece / PIECES, at = piece % PIECES, row = first + at * 8;
      if (m0 + column >= m || (N % BLOCK_N != 0 && row >= N)) continue;
      const T* from = mine + Places::offset(column, at);
      T* to = static_cast<T*>(y) + int64_t(m0 + column) * N + row;
      if constexpr (N % 8 == 0) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int i = 0; i < min(8, N - row); ++i) to[i] = from[i];
      }
    }
  }
};

// The end of a tile; other blocks may hold parts of it (SHARED). The accumulators are left as they are: what a later product overwrites
// must not be written here, or the compiler moves all of it around in every iteration.
template <typename O, typename S, int THREADS, int BARRIER, bool SHARED>
__device__ __forceinline__ void finish_tile(const float* accumulators, void* staging, void* workspace, void* y, const void* scales, const void* bias,
                                            int m, int iteration, int block, int thread) {
  m = fresh(m), iteration = fresh(iteration), block = fresh(block), thread = fresh(thread);
  const O order = O::kept();
  const int n0 = order.n_block(block, iteration) * S::ROWS, m0 = order.m_block(block, iteration) * (S::TILE / S::ROWS);
  constexpr bool ONE = O::SPLIT > 1;
  int first = block, last = block;  // the blocks that hold parts of this tile
  int tile = block / O::SPLIT;
  if constexpr (ONE) {
    first = tile * O::SPLIT, last = first + O::SPLIT - 1;
  } else if (SHARED && iteration < order.share(block / O::TEAM)) {
    const int rank = block % O::TEAM, place = order.place(block / O::TEAM, iteration), step = place * O::PLACE_STEPS;
    tile = place * O::TEAM + rank;
    first = order.owner(step) * O::TEAM + rank, last = order.owner(step + O::PLACE_STEPS - 1) * O::TEAM + rank;
  }
  Part part = Part::NOTHING;
  if (SHARED && first != last) {
    part = hand_in<S::REGISTERS, THREADS, BARRIER, ONE>(accumulators, workspace, tile, (last - first) / O::TEAM + 1, block, block == first, thread);
    if (part == Part::NOTHING) return;
  }
  constexpr int SLABS = S::REGISTERS / S::SLAB_REGISTERS, COUNT = S::COUNT;
  constexpr bool EARLY = SLABS == 1 && THREADS <= 256;  // others have no registers for it: 256 x 128 would spill 896 bytes
  const bool sum = SHARED && part != Part::NOTHING;
  const int other = part == Part::ALL ? first : first + O::TEAM;  // whose part comes first
  float early[SLABS * COUNT];  // that part of the next columns: on its way while these are stored
  const auto load_early = [&](int chunk) {
    load_share<COUNT, S::REGISTERS, THREADS, ONE>(early, workspace, S::start(0, chunk), other, other == first, thread);
  };
  if (EARLY && sum) load_early(0);
#pragma unroll
  for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
    if (m0 + chunk * (COUNT * 2) >= m) break;
    float values[SLABS * COUNT];
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      float* mine = values + slab * COUNT;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        mine[i] = SHARED && part == Part::ALL ? 0.0f : accumulators[S::start(slab, chunk) + i];
        if (EARLY && sum) mine[i] += early[i];
      }
      if (sum)
        add_shares<COUNT, S::REGISTERS, THREADS, O::TEAM, ONE>(mine, workspace, S::start(slab, chunk), first, EARLY ? other + O::TEAM : other, last,
                                                             thread);
    }
    if (EARLY && sum && chunk + 1 < S::CHUNKS) load_early(chunk + 1);
    S::store(values, staging, y, scales, bias, m, n0, m0 + chunk * (COUNT * 2), thread);
  }
}

// ---- a tile that the blocks of a cluster share: each leaves its part in its own shared memory, then adds up some columns of all parts ----

// parked: float4 [register / 4][thread], over the stages of the pipeline, which every computing thread has left.
template <int REGISTERS, int THREADS, int BARRIER>
__device__ __forceinline__ void park_tile(const float* accumulators, void* parked, int thread) {
  thread = fresh(thread);
  sync_threads<BARRIER, THREADS>();
  float4* mine = static_cast<float4*>(parked) + thread;
#pragma unroll
  for (int i = 0; i < REGISTERS / 4; ++i)
    mine[i * THREADS] = make_float4(accumulators[4 * i], accumulators[4 * i + 1], accumulators[4 * i + 2], accumulators[4 * i + 3]);
}

// The float4 at `address` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float4 load_of_rank(const float4* address, int rank) {
#ifdef TILEBIT_HOST_EMULATION
  return host_load_of_rank(address, rank);
#else
  uint32_t remote;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remote) : "memory");
  return v;
#endif
}

// Between two barriers of the cluster. Block `rank` of it takes every SPLITS-th part of COLUMNS columns; parts are added in the order of k.
template <typename O, typename S, int THREADS, int SPLITS>
__device__ __forceinline__ void finish_split(const void* parked, void* staging, void* y, const void* scales, const void* bias, int m, int block,
                                             int thread) {
  const int n0 = O::n_block(m, block, 0) * S::ROWS, m0 = O::m_block(m, block, 0) * (S::TILE / S::ROWS);
  for (int chunk = block % SPLITS; chunk < S::CHUNKS; chunk += SPLITS) {
    if (m0 + chunk * (S::COUNT * 2) >= m) break;
    float values[S::REGISTERS / S::CHUNKS] = {};
#pragma unroll 2  // more loads in flight would need more registers than a block that shares its SM has
    for (int rank = 0; rank < SPLITS; ++rank)
#pragma unroll
      for (int slab = 0; slab < S::REGISTERS / S::SLAB_REGISTERS; ++slab)
#pragma unroll
        for (int i = 0; i < S::COUNT / 4; ++i) {
          const float4 v = load_of_rank(static_cast<const float4*>(parked) + (S::start(slab, chunk) / 4 + i) * THREADS + thread, rank);
          float* sum = values + slab * S::COUNT + 4 * i;
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
    S::store(values, staging, y, scales, bias, m, n0, m0 + chunk * (S::COUNT * 2), thread);
  }
}

}  // namespace tilebit
