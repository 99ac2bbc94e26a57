// The end of a tile inside a block that has more to do: sum it if other blocks hold parts of it,
// scale it, store it.
//
// Comes after store/split_k.cuh, store/epilogue.cuh, store/gate.cuh, store/pairs.cuh, store/parts.cuh, store/scatter.cuh, order/tiles.cuh and
// ptx/instructions.cuh.
#pragma once
#include <stdint.h>
#include <type_traits>

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

// What one block stores of y [m][N], or (WIDTH, with a part Place) [m][WIDTH], or (GATE, an activation of gate.cuh: of 16 rows the first 8
// are gates) [m][N / 2]: COLUMNS columns of a BLOCK_N x BLOCK_M tile at a time, from accumulators (A: fp32 or int32) in MMA order ([slab][column / 8]
// [row half][column parity]) through `staging`: numbers of rows of x where a part has some, fp32 [warpgroup][LARGEST_M], then T
// [warpgroup][COLUMNS][rows of a warpgroup]. Warpgroups do not wait for each other. From row JOINED of the weight on, a multiple of
// BLOCK_N, tiles are BLOCK_N bytes of 2 BLOCK_N rows of nibbles, which (SCATTERED) others store by the index, from
// where `y` says then.
template <typename T, int N, int SLABS, int BLOCK_N, int BLOCK_M, int COLUMNS, int THREADS, int BARRIER, typename A = float, int WIDTH = 0,
          typename GATE = void, int JOINED = 1 << 30, bool SCATTERED = false>
struct Store {
  using Sum = A;
  using Number = T;
  static constexpr int COLUMNS_OF_Y = WIDTH, ROWS_OF_X = BLOCK_M;
  static constexpr bool OF_OTHERS = SCATTERED;
  static constexpr int COUNT = COLUMNS / 2, SLAB_REGISTERS = BLOCK_M / 2;  // accumulators of a thread: in COLUMNS of a slab, in a slab
  static constexpr int TILE = BLOCK_N * BLOCK_M, REGISTERS = TILE / THREADS, CHUNKS = BLOCK_M / COLUMNS;
  static constexpr int ROWS = BLOCK_N, OWN = 128, OWN_ROWS = SLABS * 64, PIECES = OWN_ROWS / 8;  // of the block; of a warpgroup
  static constexpr int MEETING = BARRIER + 1;  // named barriers of warpgroups, from here on
  static constexpr bool JOINS = JOINED < N;
  static_assert(!JOINS || (SLABS == 1 && WIDTH > 0 && JOINED % BLOCK_N == 0), "pairs of rows are two slabs of a warpgroup's tile of one");
  static constexpr bool GATED = !std::is_same_v<GATE, void>;
  static constexpr int OF_Y = GATED ? 2 : 1, Y = N / OF_Y, STORED = PIECES / OF_Y;  // rows for each column of y; its columns; pieces that are stored
  static constexpr bool SPARE = COLUMNS * STORED % OWN != 0;                       // threads that store nothing in a last pass
  static constexpr int PASSES = (COLUMNS * STORED + OWN - 1) / OWN;  // of a warpgroup over what it has staged, 16 bytes a thread
  static_assert(COLUMNS % 16 == 0 && COLUMNS * PIECES % OWN == 0, "two matrices of eight columns are staged, every thread stores as many pieces");

  // The first row of the weight of a tile; whether two of its rows are one channel.
  __device__ __forceinline__ static int first_row_of(int tile) {
    return JOINS && tile > JOINED / BLOCK_N ? JOINED + (tile - JOINED / BLOCK_N) * (2 * BLOCK_N) : tile * BLOCK_N;
  }
  __device__ __forceinline__ static bool joined(int row) { return JOINS && row >= JOINED; }

  // The thread's first accumulator of a slab's columns `chunk`.
  __device__ __forceinline__ static constexpr int start(int slab, int chunk) { return slab * SLAB_REGISTERS + chunk * COUNT; }
  // Where a warpgroup stages rows 8 piece.. of a column. The pieces of a column trade places, so
  // that a matrix's eight columns fall into different banks.
  __device__ __forceinline__ static constexpr int place(int column, int piece) { return column * OWN_ROWS + (piece ^ (column & 7)) * 8; }

  // A thread's way through a tile's end: what it needs of addresses, found once; all else are
  // constant distances from there (a third of the instructions: a tile of 128 x 256 took 4,400
  // cycles to store, so 2,500; H200). Only where a warpgroup has three or four slabs do the pieces
  // of a thread not lie one below the other.
  static constexpr bool BELOW = WIDTH == 0 && OWN % STORED == 0 && OWN / STORED % 8 == 0;
  T* staged;                 // where it stages its first matrix
  const T* source;           // what it stores: its first piece, or all that the warpgroup has staged; the same of y
  T* y;
  int columns, rows;         // of y from there on
  int own, group;
  bool for_others;

  __device__ __forceinline__ Store(void* staging, void* whole, int m, int n0, int m0, int thread, bool others = false)
      : own(thread % OWN), group(thread / OWN), for_others(SCATTERED && others) {
    const int lane = own & 31, warp = own >> 5, column = BELOW ? own / STORED : 0, at = BELOW ? own % STORED : 0;
    T* mine = static_cast<T*>(staging) + group * (COLUMNS * OWN_ROWS);
    staged = mine + place((lane >> 4) * 8 + (lane & 7), warp * 2 + ((lane >> 3) & 1));
    source = mine + place(column, OF_Y * at);
    const int row = (n0 + group * OWN_ROWS * (joined(n0) ? 2 : 1)) / OF_Y + at * 8;
    y = static_cast<T*>(whole) + (for_others ? 0 : WIDTH > 0 ? int64_t(m0) * WIDTH : int64_t(m0 + column) * Y + row);
    columns = m - m0 - column, rows = Y - row;
  }

  // Of one slab a thread has registers for where the tile lies, and its channels' numbers, while products are
  // under way (of two, 256 x 128 x 256: 64 bytes of spills).
  static constexpr bool EARLY = SLABS == 1;

  // Of a tile of bytes: the column of y of the number that is staged at `place` of its BLOCK_N, -1 of none.
  __device__ __forceinline__ static int column_of(int n0, int place, const void* channels) {
    const int row = n0 + place / OWN_ROWS * (2 * OWN_ROWS) + place % 16 / 8 * JOINED_APART + place % OWN_ROWS / 16 * 16 + place % 8;
    const int column = row < N ? static_cast<const int*>(channels)[row] : -1;
    return static_cast<unsigned>(column) < static_cast<unsigned>(WIDTH) ? column : -1;
  }

  // Where a thread stores what it finds staged, by the index: the columns of y of its rows of the weight,
  // -1 of none.
  struct Places {
    static constexpr int COUNT = WIDTH > 0 ? (OWN_ROWS + OWN - 1) / OWN : 0;
    int to[COUNT > 0 ? COUNT : 1];

    __device__ __forceinline__ void ask(int n0, int thread, const void* channels) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const int row = thread % OWN % OWN_ROWS + i * OWN, first = n0 + thread / OWN * OWN_ROWS * (joined(n0) ? 2 : 1);
        const int of_weight = first + (joined(n0) ? row % 16 / 8 * JOINED_APART + row / 16 * 16 + row % 8 : row);
        to[i] = row < OWN_ROWS && of_weight < N ? static_cast<const volatile int*>(channels)[of_weight] : -1;
      }
    }
  };

  // Numbers of the parts for a thread's output channels of a tile.
  template <typename... Parts>
  struct Channels {
    static constexpr int PARTS = sizeof...(Parts), WORDS = SLABS * 2 * (PARTS > 0 ? PARTS : 1);
    uint32_t bits[WORDS];
    Places places;

    __device__ __forceinline__ void ask(int n0, int thread, typename Parts::Operand... operands) {
#pragma unroll
      for (int i = 0; i < SLABS * 2; ++i) {
        int part = 0;
        ((bits[i * PARTS + part++] = OF_CHANNEL<Parts> ? bits_of<Parts>(operands, channel(n0, i / 2, i % 2, thread, ADDS<Parts>)) : 0u), ...);
      }
      if constexpr (WIDTH > 0) places.ask(n0, thread, last_operand(operands...));
    }
    __device__ __forceinline__ Places places_of(int n0, int thread, typename Parts::Operand... operands) const {
      Places found{};
      if constexpr (WIDTH > 0 && EARLY) found = places;
      if constexpr (WIDTH > 0 && !EARLY) found.ask(n0, thread, last_operand(operands...));
      return found;
    }
    template <typename P>
    __device__ __forceinline__ float of(int slab, int low, int part) const {
      return OF_CHANNEL<P> ? number_in<P>(bits[(slab * 2 + low) * PARTS + part]) : 0.0f;
    }
  };

  // Of two rows that are one channel scales are those of the second, and what is added belongs to the first.
  __device__ __forceinline__ static int channel(int n0, int slab, int low, int thread, bool added = false) {
    const int lane = thread & 31, warp = (thread >> 5) & 3, group = thread >> 7;
    if (joined(n0)) return min(n0 + joined_row<SLABS>(thread) + low * JOINED_APART - (added ? 8 : 0), N - 1);
    return min(n0 + (group * SLABS + slab) * 64 + warp * 16 + low * 8 + (lane >> 2), N - 1);
  }

  // Where a warpgroup has the numbers of a tile's rows of x, and what is staged begins.
  __device__ __forceinline__ static float* rows_at(void* staging, int thread) { return static_cast<float*>(staging) + thread / OWN * LARGEST_M; }
  template <typename... Parts>
  __device__ __forceinline__ static void* behind_rows(void* staging) {
    return static_cast<float*>(staging) + (HAS_ROWS<Parts...> ? THREADS / OWN * LARGEST_M : 0);
  }

  __device__ __forceinline__ static void ask_rows(void* staging, const void* numbers, int m0, int m, int thread) {
    const SharedAddress to(rows_at(staging, thread));
    const float* from = static_cast<const float*>(numbers) + m0;
#pragma unroll
    for (int first = 0; first < BLOCK_M; first += OWN) {
      const int row = first + thread % OWN;
      const bool there = row < m - m0;
      if (BLOCK_M % OWN == 0 || row < BLOCK_M) cp_async_4(to.address + row * 4, there ? from + row : numbers, there);
    }
  }

  template <typename P>
  __device__ __forceinline__ static float number(float early, float of_row, typename P::Operand operand, int channel, int row) {
    if (P::AXIS == Axis::CHANNEL) return EARLY ? early : number_of<P>(operand, channel);
    return P::AXIS == Axis::ROW ? of_row : number_of<P>(operand, int64_t(row) * N + channel);
  }

  // Applies the parts to values [slab][COUNT], whose first column, `chunk`'s of the tile, is row `first` of x, one after
  // another, in fp32.
  template <typename... Parts>
  __device__ __forceinline__ static void apply(float* values, const Channels<Parts...>& channels, void* staging, int chunk, int n0, int first, int m,
                                               int thread, typename Parts::Operand... operands) {
    if constexpr (sizeof...(Parts) > 0) {
      const float2* rows = reinterpret_cast<const float2*>(rows_at(staging, thread) + chunk * COLUMNS) + (thread & 3);
#pragma unroll
      for (int c = 0; c < COUNT / 4; ++c) {
        const float2 of_rows = HAS_ROWS<Parts...> ? rows[c * 4] : float2{0.0f, 0.0f};
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& v = values[slab * COUNT + c * 4 + i];
            const int at = channel(n0, slab, i >> 1, thread), row = min(first + c * 8 + (thread & 3) * 2 + (i & 1), m - 1);
            int part = 0;
            ((v = Parts::apply(v, number<Parts>(channels.template of<Parts>(slab, i >> 1, part), i & 1 ? of_rows.y : of_rows.x, operands, at, row)), ++part), ...);
          }
      }
    }
    if constexpr (GATED) gate_sums<GATE, SLABS * COUNT>(values);
    if (joined(n0)) return;
    if constexpr (WIDTH > 0 && EARLY)
      add_pair<COUNT>(values, N % 16 == 0 || second_row<SLABS>(n0, thread) < N ? static_cast<int>(channels.bits[channels.WORDS - 1]) : 0);
    if constexpr (WIDTH > 0 && !EARLY) add_pairs<SLABS, COUNT, N>(values, last_operand(operands...), n0, thread);
  }

  // values: [slab][COUNT], of the columns `chunk` of the tile.
  __device__ __forceinline__ void store(const float* values, int chunk, const Places& places) const {
    sync_group<MEETING, OWN>(group);  // all have read what lay there
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
      for (int c = 0; c < COLUMNS / 16; ++c) {
        // Matrices: (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15; lane l
        // addresses column l % 8 of matrix l / 8.
        const float* v = values + slab * COUNT + c * 8;
        stmatrix_x4_trans(staged + slab * 64 + c * (16 * OWN_ROWS), pack_pair(v[0], v[1], T()), pack_pair(v[2], v[3], T()),
                          pack_pair(v[4], v[5], T()), pack_pair(v[6], v[7], T()));
      }
    sync_group<MEETING, OWN>(group);
    if (SCATTERED && for_others)
      hand_over(chunk);
    else if constexpr (WIDTH > 0)
      place_channels(chunk, places);
    else
      place_rows(chunk);
  }

  // Puts what is staged of the columns `chunk` where others look for it, [row of x][BLOCK_N].
  __device__ __forceinline__ void hand_over(int chunk) const {
#pragma unroll
    for (int index = own; index < COLUMNS * PIECES; index += OWN) {
      const int column = index / PIECES, at = index % PIECES;
      __stcg(reinterpret_cast<uint4*>(y + (chunk * COLUMNS + column) * BLOCK_N + group * OWN_ROWS + at * 8),
             *reinterpret_cast<const uint4*>(source + place(column, at)));
    }
    __syncwarp();  // a lane says that it is there
  }

  // Stores what is staged of the columns `chunk` in the order of y: 16 bytes of a row of y a thread.
  __device__ __forceinline__ void place_rows(int chunk) const {
#pragma unroll 2
    for (int pass = 0; pass < PASSES; ++pass) {
      const int index = BELOW ? pass * OWN : pass * OWN + own, column = index / STORED, at = index % STORED;
      if (chunk * COLUMNS + column >= columns || (N % BLOCK_N != 0 && at * 8 >= rows) || (SPARE && (BELOW ? own / STORED : 0) + column >= COLUMNS)) continue;
      const T* from = source + (BELOW ? column * OWN_ROWS : place(column, OF_Y * at));
      T* to = y + int64_t(chunk * COLUMNS + column) * Y + at * 8;
      if constexpr (Y % 8 == 0) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int i = 0; i < min(8, rows - at * 8); ++i) to[i] = from[i];
      }
    }
  }

  // Stores what is staged of the columns `chunk` by the index: a thread the numbers of one output
  // channel, 2 bytes each, for all rows of x, so that a warp's lie near each other where the index
  // is sorted. What would lie outside of y is not stored.
  __device__ __forceinline__ void place_channels(int chunk, const Places& places) const {
    constexpr int TOGETHER = OWN_ROWS < OWN ? OWN / OWN_ROWS : 1;  // columns
    const int first = TOGETHER > 1 ? own / OWN_ROWS : 0;
#pragma unroll
    for (int i = 0; i < Places::COUNT; ++i) {
      const int row = own % OWN_ROWS + i * OWN;
      if (static_cast<unsigned>(places.to[i]) >= static_cast<unsigned>(WIDTH)) continue;
      T* to = y + int64_t(chunk * COLUMNS + first) * WIDTH + places.to[i];
#pragma unroll 8
      for (int column = 0; column < COLUMNS; column += TOGETHER)
        if (chunk * COLUMNS + first + column < columns) to[int64_t(column) * WIDTH] = source[place(first + column, row / 8) + row % 8];
    }
  }
};

// Where the tile lies (n0, m0), and numbers of its parts: found and asked for when its last product is
// on its way, so that its end waits neither for divisions nor for memory
// (results/notes/wgmma-parts-ahead.md). ``channels``: words of ``Channels``. Numbers of rows of x, fp32 [m], come to shared
// memory, for each warpgroup by itself: those of the tile before have been read, because since then it
// has met at a barrier.
template <typename O, typename S, typename... Parts>
__device__ __forceinline__ void ask_end(int* where, void* channels, void* staging, int m, int iteration, int block, int thread,
                                        typename Parts::Operand... operands) {
  m = fresh(m), iteration = fresh(iteration), block = fresh(block), thread = fresh(thread);
  const O order = O::kept();
  if constexpr (S::EARLY || HAS_ROWS<Parts...>) where[1] = order.first_row(block, iteration);
  ((Parts::AXIS == Axis::ROW ? S::ask_rows(staging, operands, where[1], m, thread) : void()), ...);
  if constexpr (S::EARLY) {
    where[0] = S::first_row_of(order.n_block(block, iteration));
    static_cast<typename S::template Channels<Parts...>*>(channels)->ask(where[0], thread, operands...);
  }
}

// The warpgroup has what it asked for.
template <typename S, typename... Parts>
__device__ __forceinline__ void await_rows(int thread) {
  if constexpr (HAS_ROWS<Parts...>) {
    cp_async_await();
    sync_group<S::MEETING, S::OWN>(thread / S::OWN);
  }
}

// The end of a tile (`where` and `asked` are what `ask_end` found); other blocks may hold parts of it (SHARED). The accumulators are left as they
// are: what a later product overwrites must not be written here, or the compiler moves all of it
// around in every iteration.
template <typename O, typename S, int THREADS, int BARRIER, bool SHARED, typename... Parts>
__device__ __forceinline__ void finish_tile(const typename S::Sum* accumulators, const int* where, const void* asked, void* staging, void* workspace, void* y,
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
  if constexpr (S::OF_OTHERS)
    if (thread == 0 && S::joined(where[0])) handed_tile().rows = 0;
  await_rows<S, Parts...>(thread);
  float values[SLABS * COUNT];
  if (!SHARED || first == last) {
    const int n0 = S::EARLY ? where[0] : S::first_row_of(O::kept().n_block(block, iteration));
    const int m0 = S::EARLY ? where[1] : O::kept().first_row(block, iteration);
    const bool others = are_others(n0);
    const S store(S::template behind_rows<Parts...>(staging), place_of(others, n0, m0), m, n0, m0, thread, others);
    const auto& channels = *static_cast<const typename S::template Channels<Parts...>*>(asked);
#pragma unroll
    for (int chunk = 0; chunk < S::CHUNKS; ++chunk) {
      if (m0 + chunk * (COUNT * 2) >= m) return;
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) values[slab * COUNT + i] = sum_of(accumulators[S::start(slab, chunk) + i]);
      S::template apply<Parts...>(values, channels, staging, chunk, n0, m0 + chunk * (COUNT * 2), m, thread, operands...);
      store.store(values, chunk, channels.places_of(n0, thread, operands...));
    }
    return;
  }
  // Where it lies is found anew: registers are few here.
  const O order = O::kept();
  const int n0 = S::first_row_of(order.n_block(block, iteration)), m0 = order.first_row(block, iteration);
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
    typename S::template Channels<Parts...> channels;
    if constexpr (S::EARLY) channels.ask(n0, thread, operands...);
    S::template apply<Parts...>(values, channels, staging, chunk, n0, m0 + chunk * (COUNT * 2), m, thread, operands...);
    const S store(S::template behind_rows<Parts...>(staging), whole, m, n0, m0, AHEAD ? thread : fresh(thread), others);  // without registers to spare, found anew
    store.store(values, chunk, channels.places_of(n0, thread, operands...));
  }
}

}  // namespace tilebit
