// A tile as a block stores it: what its end needs, and its way to y.
//
// Comes after store/epilogue.cuh, store/gate.cuh, store/pairs.cuh, store/parts.cuh and ptx/instructions.cuh.
#pragma once
#include <stdint.h>
#include <type_traits>

namespace tilebit {

// What a tile's end needs in shared memory (``numbers``), which a warp that does not compute brings while its products are
// under way, so that it waits neither for divisions nor for memory (results/notes/wgmma-ends-ahead.md): where the tile lies; then
// for each part of channels as many words as the tile has rows of the weight, of which the first bytes are their numbers; then
// those of its rows of x, fp32, if a part has some.
struct Where {
  int n_block, m0;  // number along n; first row of x
};
constexpr int NUMBERS_AT = 16;  // bytes
// At one place for all threads: what depends on it parts no lanes. Where lanes may part in a loop over tiles, each finds the
// addresses of products by itself (results/notes/wgmma-lanes-part.md).
__device__ __forceinline__ Where where_of(const void* numbers) { return *static_cast<const Where*>(numbers); }

// What one block stores of y [m][N], or (WIDTH, with a part Place) [m][WIDTH], or (GATE, an activation of gate.cuh: of 16 rows
// the first 8 are gates) [m][N / 2]: COLUMNS columns of a BLOCK_N x BLOCK_M tile at a time, from accumulators (A: fp32 or int32)
// in MMA order ([slab][column / 8][row half][column parity]) through `staging`, T [warpgroup][COLUMNS][rows of a warpgroup].
// Warpgroups do not wait for each other. From row JOINED of the weight on, a multiple of BLOCK_N, tiles are BLOCK_N bytes of
// 2 BLOCK_N rows of nibbles, which (SCATTERED) others store by the index, from where `y` says then.
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

  // Of one slab a thread has registers for its channels' numbers, and for what it has read of staged columns while it makes the
  // next ones.
  static constexpr bool EARLY = SLABS == 1, HOLDS = EARLY && WIDTH == 0 && Y % 8 == 0;

  // Of a tile of bytes: the column of y of the number that is staged at `place` of its BLOCK_N, -1 of none.
  __device__ __forceinline__ static int column_of(int n0, int place, const void* channels) {
    const int row = n0 + place / OWN_ROWS * (2 * OWN_ROWS) + place % 16 / 8 * JOINED_APART + place % OWN_ROWS / 16 * 16 + place % 8;
    const int column = row < N ? static_cast<const int*>(channels)[row] : -1;
    return static_cast<unsigned>(column) < static_cast<unsigned>(WIDTH) ? column : -1;
  }

  // Of ``numbers``: words of a part of channels, bytes before those of rows of x.
  static constexpr int CHANNELS = BLOCK_N * (JOINS ? 2 : 1);
  template <typename... Parts>
  static constexpr int ROWS_AT = NUMBERS_AT + (int(OF_CHANNEL<Parts>) + ... + 0) * CHANNELS * 4;
  // The first row of the weight of a thread's warpgroup, from the tile's first on.
  __device__ __forceinline__ static int own_first(int n0, int thread) { return thread / OWN * (joined(n0) ? 2 * OWN_ROWS : OWN_ROWS); }

  // By the lanes of a warp.
  template <typename... Parts>
  __device__ __forceinline__ static void bring(void* numbers, int n0, int m0, int m, int lane, typename Parts::Operand... operands) {
    const SharedAddress all(numbers);
    ((Parts::AXIS == Axis::ROW ? bring_rows(all.address + ROWS_AT<Parts...>, operands, m0, m, lane) : void()), ...);
    uint32_t to = all.address + NUMBERS_AT;
    ((OF_CHANNEL<Parts> ? (bring_channels<Parts>(to, operands, n0, lane), void(to += CHANNELS * 4)) : void()), ...);
  }
  __device__ __forceinline__ static void bring_rows(uint32_t to, const void* operand, int m0, int m, int lane) {
#pragma unroll 1  // few registers
    for (int row = lane; row < BLOCK_M; row += 32) {
      const bool there = row < m - m0;
      cp_async_4(to + row * 4, static_cast<const float*>(operand) + (there ? m0 + row : 0), there);
    }
  }
  template <typename P>
  __device__ __forceinline__ static void bring_channels(uint32_t to, const void* operand, int n0, int lane) {
    constexpr int SIZE = sizeof(typename P::Number);
#pragma unroll 1
    for (int at = lane * 4; at < CHANNELS * SIZE; at += 32 * 4) {
      const int bytes = min(4, max(0, (N - n0) * SIZE - at));
      cp_async_up_to_4(to + at, static_cast<const char*>(operand) + (bytes > 0 ? n0 * SIZE + at : 0), bytes);
    }
  }
  template <typename P>
  __device__ __forceinline__ static uint32_t bits_at(const void* numbers, int channel) {
    if constexpr (sizeof(typename P::Number) == 2) return static_cast<const uint16_t*>(numbers)[channel];
    else return static_cast<const uint32_t*>(numbers)[channel];
  }

  // Where a thread stores what it finds staged, by the index: the columns of y of its rows of the weight,
  // -1 of none.
  struct Places {
    static constexpr int COUNT = WIDTH > 0 ? (OWN_ROWS + OWN - 1) / OWN : 0;
    int to[COUNT > 0 ? COUNT : 1];
  };

  // Numbers of the parts for a thread's output channels of a tile; of one slab in registers.
  template <typename... Parts>
  struct Channels {
    static constexpr int PARTS = sizeof...(Parts), WORDS = EARLY && PARTS > 0 ? 2 * PARTS : 1;
    static constexpr int LAST = (int(OF_CHANNEL<Parts>) + ... + 0) - 1;  // part of channels: the index, where there is one
    const char* numbers;
    int n0, thread;
    uint32_t bits[WORDS];

    __device__ __forceinline__ Channels(const void* all, int n0, int thread)
        : numbers(static_cast<const char*>(all) + NUMBERS_AT), n0(n0), thread(thread) {
      if constexpr (EARLY) {
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          int part = 0, at = 0;
          ((bits[low * PARTS + part++] = OF_CHANNEL<Parts> ? read<Parts>(0, low, at++) : 0u), ...);
        }
      }
    }
    template <typename P>
    __device__ __forceinline__ uint32_t read(int slab, int low, int at) const {
      return bits_at<P>(numbers + at * (CHANNELS * 4), own_first(n0, thread) + own_channel(n0, slab, low, thread, ADDS<P>));
    }
    // Of a part, which is the `at`-th of channels.
    template <typename P>
    __device__ __forceinline__ float of(int slab, int low, int part, int at) const {
      if constexpr (!OF_CHANNEL<P>) return 0.0f;
      else return number_in<P>(EARLY ? bits[low * PARTS + part] : read<P>(slab, low, at));
    }
    // What the index says of the second of two rows.
    __device__ __forceinline__ int second(int slab) const {
      return bits_at<Place<int>>(numbers + LAST * (CHANNELS * 4), own_first(n0, thread) + own_channel(n0, slab, 1, thread));
    }
    __device__ __forceinline__ Places places() const {
      Places found{};
#pragma unroll
      for (int i = 0; i < Places::COUNT; ++i) {
        const int row = thread % OWN % OWN_ROWS + i * OWN;
        const int of_weight = own_first(n0, thread) + (joined(n0) ? row % 16 / 8 * JOINED_APART + row / 16 * 16 + row % 8 : row);
        const bool there = row < OWN_ROWS && n0 + of_weight < N;
        found.to[i] = there ? static_cast<int>(bits_at<Place<int>>(numbers + LAST * (CHANNELS * 4), of_weight)) : -1;
      }
      return found;
    }
  };

  // Of those of a warpgroup; of two rows that are one channel scales are those of the second, and what is added belongs
  // to the first.
  __device__ __forceinline__ static int own_channel(int n0, int slab, int low, int thread, bool added = false) {
    const int row = ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2);
    return joined(n0) ? row + low * JOINED_APART + (added ? 0 : 8) : row + slab * 64 + low * 8;
  }

  template <typename P>
  __device__ __forceinline__ static float number(float of_channel, float of_row, typename P::Operand operand, int channel, int row) {
    if (P::AXIS == Axis::CHANNEL) return of_channel;
    return P::AXIS == Axis::ROW ? of_row : number_of<P>(operand, int64_t(row) * N + min(channel, N - 1));
  }

  // Applies the parts to values [slab][COUNT], whose first column, `chunk`'s of the tile, is row `first` of x, one after
  // another, in fp32.
  template <typename... Parts>
  __device__ __forceinline__ static void apply(float* values, const Channels<Parts...>& channels, const void* numbers, int chunk, int n0, int first, int m,
                                               int thread, typename Parts::Operand... operands) {
    if constexpr (sizeof...(Parts) > 0) {
      const float2* rows = reinterpret_cast<const float2*>(static_cast<const char*>(numbers) + ROWS_AT<Parts...>) + chunk * (COLUMNS / 2) + (thread & 3);
#pragma unroll
      for (int c = 0; c < COUNT / 4; ++c) {
        const float2 of_rows = HAS_ROWS<Parts...> ? rows[c * 4] : float2{0.0f, 0.0f};
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& v = values[slab * COUNT + c * 4 + i];
            const int channel = n0 + own_first(n0, thread) + own_channel(n0, slab, i >> 1, thread), row = min(first + c * 8 + (thread & 3) * 2 + (i & 1), m - 1);
            int part = 0, at = 0;
            ((v = Parts::apply(v, number<Parts>(channels.template of<Parts>(slab, i >> 1, part, at), i & 1 ? of_rows.y : of_rows.x, operands, channel, row)),
              ++part, at += OF_CHANNEL<Parts>),
             ...);
          }
      }
    }
    if constexpr (GATED) gate_sums<GATE, SLABS * COUNT>(values);
    if (joined(n0)) return;
    if constexpr (WIDTH > 0) {
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) add_pair<COUNT>(values + slab * COUNT, channels.second(slab));  // 0 behind the last row
    }
  }

  // values: [slab][COUNT], by twos.
  static constexpr int PAIRS = SLABS * COUNT / 2;
  __device__ __forceinline__ static void pack(const float* values, uint32_t* pairs) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) pairs[i] = pack_pair(values[2 * i], values[2 * i + 1], T());
  }

  // Stages columns of the tile.
  __device__ __forceinline__ void stage(const uint32_t* pairs) const {
    sync_group<MEETING, OWN>(group);  // all have read what lay there
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
      for (int c = 0; c < COLUMNS / 16; ++c) {
        // Matrices: (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15; lane l
        // addresses column l % 8 of matrix l / 8.
        const uint32_t* v = pairs + slab * (COUNT / 2) + c * 4;
        stmatrix_x4_trans(staged + slab * 64 + c * (16 * OWN_ROWS), v[0], v[1], v[2], v[3]);
      }
    sync_group<MEETING, OWN>(group);
  }
  // Stores them, the columns `chunk`.
  __device__ __forceinline__ void store_staged(int chunk, const Places& places) const {
    if (SCATTERED && for_others)
      hand_over(chunk);
    else if constexpr (WIDTH > 0)
      place_channels(chunk, places);
    else
      place_rows(chunk);
  }
  __device__ __forceinline__ void store(const float* values, int chunk, const Places& places) const {
    uint32_t pairs[PAIRS];
    pack(values, pairs);
    stage(pairs);
    store_staged(chunk, places);
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

  // Of what is staged of some columns, in the order of y, a thread's piece of a pass: 16 bytes of a row of y.
  struct Piece {
    int column, at;  // from where the thread's first one lies
    bool there;      // in COLUMNS
  };
  __device__ __forceinline__ Piece piece(int pass) const {
    const int index = BELOW ? pass * OWN : pass * OWN + own, column = index / STORED;
    return {column, index % STORED, !SPARE || (BELOW ? own / STORED : 0) + column < COLUMNS};
  }
  __device__ __forceinline__ const T* place_of(const Piece& p) const { return source + (BELOW ? p.column * OWN_ROWS : place(p.column, OF_Y * p.at)); }
  // Where it is stored, of the columns `chunk`, and whether.
  __device__ __forceinline__ T* goal_of(const Piece& p, int chunk) const { return y + int64_t(chunk * COLUMNS + p.column) * Y + p.at * 8; }
  __device__ __forceinline__ bool in_y(const Piece& p, int chunk) const {
    return p.there && chunk * COLUMNS + p.column < columns && (N % BLOCK_N == 0 || p.at * 8 < rows);
  }

  // What is staged is read before the next columns are made, and stored after that: loads and arithmetic do not wait for one
  // another (results/notes/wgmma-ends-ahead.md).
  __device__ __forceinline__ void hold(uint4* held) const {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
      if (const Piece p = piece(pass); p.there) held[pass] = *reinterpret_cast<const uint4*>(place_of(p));
  }
  __device__ __forceinline__ void store_held(const uint4* held, int chunk) const {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) store_global_128(goal_of(piece(pass), chunk), held[pass], in_y(piece(pass), chunk));
  }

  // Without branches of lanes, where y's rows allow it (results/notes/wgmma-lanes-part.md).
  __device__ __forceinline__ void place_rows(int chunk) const {
#pragma unroll 2
    for (int pass = 0; pass < PASSES; ++pass) {
      const Piece p = piece(pass);
      const T* from = place_of(p);
      T* to = goal_of(p, chunk);
      if constexpr (Y % 8 == 0) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (p.there) v = *reinterpret_cast<const uint4*>(from);
        store_global_128(to, v, in_y(p, chunk));
      } else {
        if (!in_y(p, chunk)) continue;
        for (int i = 0; i < min(8, rows - p.at * 8); ++i) to[i] = from[i];
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

// A warp brings what the end of the tile of an iteration needs; its lanes arrive twice at ``barrier``, now and when what they have
// asked for has landed. A thread that does not compute has no registers to keep the order.
template <typename O, typename S, typename... Parts>
__device__ __forceinline__ void bring_numbers(void* numbers, int m, int block, int iteration, void* barrier, int thread, typename Parts::Operand... operands) {
  const int lane = thread & 31, n_block = O::n_block(fresh(m), block, iteration), m0 = O::first_row(fresh(m), block, iteration);
  if (lane == 0) *static_cast<Where*>(numbers) = {n_block, m0};
  S::template bring<Parts...>(numbers, S::first_row_of(n_block), m0, m, lane, operands...);
  mbarrier_arrive_after_copies(barrier);
  mbarrier_arrive(barrier);
}

}  // namespace tilebit
