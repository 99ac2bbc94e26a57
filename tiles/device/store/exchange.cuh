// A tile that the two blocks of a cluster share, or (SPLIT > 2) clusters of two: of a cluster's blocks
// each adds up one half of its columns and sends its part of the other to the other. Comes after
// store/finish.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Columns in chunks of S::COLUMNS, of which block `rank` stores every second, from `rank` on.
// `sums` has a place for each of its own.
template <typename S>
struct Halves {
  static constexpr int SLABS = S::REGISTERS / S::SLAB_REGISTERS, OWN_CHUNKS = (S::CHUNKS + 1) / 2;
  static constexpr int COUNT = SLABS * S::COUNT;  // accumulators of a thread in a chunk
  static_assert(S::CHUNKS == 1 || S::CHUNKS % 2 == 0, "chunks come in pairs, one for each block");

  // Accumulators of the `i`-th chunk that block `rank` stores; both are in registers, so that
  // either is named outright.
  template <typename A>
  __device__ __forceinline__ static A of(const A* accumulators, int slab, int i, int element, int rank) {
    const A even = accumulators[S::start(slab, 2 * i) + element];
    if constexpr (S::CHUNKS == 1) return even;
    return rank ? accumulators[S::start(slab, 2 * i + 1) + element] : even;
  }
  __device__ __forceinline__ static constexpr bool has(int i, int rank) { return 2 * i + rank < S::CHUNKS; }
};

// Whether block `rank` stores its `i`-th chunk: it has so many, and y some of the columns. `left`: rows of x from the tile's
// first on.
template <typename S>
__device__ __forceinline__ bool stores_chunk(int left, int rank, int i) {
  return Halves<S>::has(i, rank) && (2 * i + rank) * (S::COUNT * 2) < left;
}

// sent: float4 [own chunk][slab][register / 4][thread], over the stages of the pipeline, which both
// blocks have left; barriers: one for each own chunk. `sums` takes what this block keeps.
template <typename S, int THREADS>
__device__ __forceinline__ void send_half(const typename S::Sum* accumulators, typename S::Sum* sums, void* sent, void* barriers, const void* numbers, int m,
                                          int block, int thread) {
  using H = Halves<S>;
  m = fresh(m), block = fresh(block), thread = fresh(thread);
  const int rank = block % 2, left = m - where_of(numbers).m0;
  float4* place = static_cast<float4*>(sent) + thread;
#pragma unroll
  for (int i = 0; i < H::OWN_CHUNKS; ++i) {
    uint64_t* barrier = static_cast<uint64_t*>(barriers) + i;
    if (thread == 0) mbarrier_expect(shared_address(barrier), stores_chunk<S>(left, rank, i) ? H::COUNT * THREADS * 4 : 0);
    const bool wanted = stores_chunk<S>(left, 1 - rank, i);
#pragma unroll
    for (int slab = 0; slab < H::SLABS; ++slab)
#pragma unroll
      for (int e = 0; e < S::COUNT; e += 4, place += THREADS) {
        typename S::Sum theirs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[i * H::COUNT + slab * S::COUNT + e + j] = H::of(accumulators, slab, i, e + j, rank);
          theirs[j] = H::of(accumulators, slab, i, e + j, 1 - rank);
        }
        if (wanted) send_to_rank(place, four(theirs), barrier, 1 - rank);
      }
  }
}

// Adds what has been sent of the block's own chunk I.
template <typename S, int THREADS, int I>
__device__ __forceinline__ void add_sent(typename S::Sum* sums, const void* sent, const void* numbers, int m, int block, int thread) {
  using H = Halves<S>;
  if (!stores_chunk<S>(m - where_of(numbers).m0, block % 2, I)) return;
  const float4* place = static_cast<const float4*>(sent) + I * (H::COUNT / 4) * THREADS + thread;
  typename S::Sum* chunk = sums + I * H::COUNT;
#pragma unroll
  for (int e = 0; e < H::COUNT; e += 4) {
    typename S::Sum theirs[4];
    of_four(place[e / 4 * THREADS], theirs);
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk[e + i] += theirs[i];
  }
}

// What clusters that share a tile hold of the block's half, all that was sent added, meets in the
// workspace; *last becomes 1 in the block that must store it, and `sums` the whole sums there.
template <typename O, typename S, int THREADS, int BARRIER>
__device__ __forceinline__ void meet_clusters(typename S::Sum* sums, void* workspace, int block, int thread, int* last) {
  using H = Halves<S>;
  block = fresh(block), thread = fresh(thread);
  const int half = block / O::SPLIT * 2 + block % 2, cluster = block % O::SPLIT / 2;
  reduce_split_k<H::COUNT * H::OWN_CHUNKS, THREADS, BARRIER>(sums, workspace, half, cluster, O::SPLIT / 2, thread, last);
}

// Adds what has been sent of the block's own chunk I (SENT: not yet), applies the parts, and stores that.
template <typename S, int THREADS, int I, bool SENT, typename... Parts>
__device__ __forceinline__ void store_chunk(typename S::Sum* sums, const void* sent, const void* numbers, void* staging, void* y, int m, int block, int thread,
                                            typename Parts::Operand... operands) {
  using H = Halves<S>;
  const Where where = where_of(numbers);
  const int n0 = S::first_row_of(where.n_block), m0 = where.m0;
  if (!stores_chunk<S>(m - m0, block % 2, I)) return;
  const typename S::Sum* chunk = sums + I * H::COUNT;
  const int own = 2 * I + block % 2;
  const typename S::template Channels<Parts...> channels(numbers, n0, thread);
  if constexpr (SENT) add_sent<S, THREADS, I>(sums, sent, numbers, m, block, thread);
  float values[H::COUNT];
#pragma unroll
  for (int i = 0; i < H::COUNT; ++i) values[i] = sum_of(chunk[i]);
  S::template apply<Parts...>(values, channels, numbers, own, n0, m0 + own * (S::COUNT * 2), m, thread, operands...);
  S(staging, y, m, n0, m0, thread).store(values, own, channels.places());
}

}  // namespace tilebit
