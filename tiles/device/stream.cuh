// The small-m GEMM: every warp streams its own packed weights through a ring of its own and multiplies with mma.sync; no barrier of the
// block is met before the last product. See tiles/gemm/stream.py for the division of work.
//
// A step is RECORDS packed records deep in k. Its slot of the ring holds x [COLUMNS][STEP_K + 8] (16 bytes of padding a row, so that
// ldmatrix meets no bank twice) and, for each of the WARPS_N warps that share x, the 512-byte lines of TILES 16-row tiles, scales and zero
// points. Comes after ptx/instructions.cuh and codecs/raw.cuh. BULK: the weights arrive by 1-D bulk copies behind an mbarrier (sm_90), else by cp.async.
#pragma once
#include <stdint.h>

namespace tilebit {

// GROUP_STEPS: k16 steps of a scale group, 0: per channel. Threads: 32 * WARPS_N * WARPS_K; warp w is row group w % WARPS_N.
template <typename T, int BITS, bool SYMMETRIC, int GROUP_STEPS, int TILES, int WARPS_N, int WARPS_K, int COLUMNS, int RECORDS, int STAGES, bool BULK>
struct Stream {
  static constexpr int RECORD_K = 256 / BITS, STEP_K = RECORDS * RECORD_K;
  static constexpr int ROWS = 16 * TILES, BLOCK_ROWS = ROWS * WARPS_N;  // of a warp, of the block
  static constexpr int NT = COLUMNS > 8 ? COLUMNS / 8 : 1;              // 8-column tiles
  static constexpr int ATOMS = RECORD_K / 16, WORDS = BITS / 4;         // k16 steps of a record, words of each
  static constexpr int GROUPS = GROUP_STEPS == 0 ? 0 : (STEP_K / 16 > GROUP_STEPS ? STEP_K / 16 / GROUP_STEPS : 1);  // that a step touches
  static constexpr int PITCH = STEP_K * 2 + 16;
  // Bulk copies to places off a line of 128 bytes are slow (57344 x 8192 at m = 1: 64.7 us with weights 272 bytes into a slot, so 58.5; H200).
  static constexpr int LINE = BULK ? 128 : 16;
  static constexpr int X_BYTES = (COLUMNS * PITCH + LINE - 1) / LINE * LINE;
  static constexpr int WEIGHT_BYTES = TILES * 512 * RECORDS, SCALE_BYTES = GROUPS * ROWS * 2;
  static constexpr int WARP_BYTES = (WEIGHT_BYTES + SCALE_BYTES * (SYMMETRIC ? 1 : 2) + LINE - 1) / LINE * LINE;
  static constexpr int SLOT_BYTES = X_BYTES + WARPS_N * WARP_BYTES;
  static constexpr int RING_BYTES = WARPS_K * STAGES * SLOT_BYTES;
  static constexpr int SUM_PITCH = BLOCK_ROWS + 4;  // floats of a column of partial sums: a warp's stores meet no bank twice
  static constexpr int SUM_BYTES = WARPS_K * COLUMNS * SUM_PITCH * 4, USED = RING_BYTES + WARPS_K * STAGES * 16;
  static constexpr int GATHER_AT = ((USED > SUM_BYTES ? USED : SUM_BYTES) + 15) / 16 * 16;  // bytes: what a cluster's blocks send each other
  static constexpr int THREADS = 32 * WARPS_N * WARPS_K;
  static constexpr int ROW_TILES = TILES, COLUMN_TILES = NT, WARPS_IN_ROW = WARPS_N, WARPS_IN_K = WARPS_K, X_COLUMNS = COLUMNS;
  static constexpr bool BULKY = BULK;
  // Warps that share x may be most of a step apart: each says when it has read x, where else they meet at a step's end. It pays where many or tall
  // warps share x for 16 columns (in alternation, H200: 57344 x 8192 2.6 to 5.8 %, 28672 x 4096 2.3 %) and costs 1 % elsewhere.
  static constexpr bool APART = BULK && WARPS_N > 1 && NT > 1 && BLOCK_ROWS >= 192;
  static_assert(GROUP_STEPS % 2 == 0, "two k16 steps of x are summed at once");
  static_assert(GROUP_STEPS == 0 || STEP_K / 16 % (GROUP_STEPS ? GROUP_STEPS : 1) == 0 || GROUP_STEPS % (STEP_K / 16) == 0, "a step and a group must nest");
  using R = Raw<T, BITS>;

  // What a step's scales and zero points are copied in: pieces of 8 rows, first those of all scales.
  static constexpr int CHUNKS = ROWS / 8, OF_SCALES = (GROUPS > 0 ? GROUPS : 1) * CHUNKS, PIECES = GROUPS > 0 ? OF_SCALES * (SYMMETRIC ? 1 : 2) : 0;
  static constexpr int X_CHUNKS = STEP_K / 8, X_ROWS = 32 * WARPS_N / X_CHUNKS;  // of x: 16 bytes each of a row, rows that one pass copies

  const T *x, *scales, *zeros;
  const char* weight;
  int m, kx, k_tiles, n_pad, groups, row0, column0;
  uint32_t slots, barriers;
  uint64_t policy;
  int lane, wn, wk;
  // Places at step 0, from which a step is one multiplication away. Found anew for every step, requests were 146 of a step's 711 instructions
  // (5120 x 27648 at m = 16: 28.6 us, so 26.6, with copies by an elected lane and scales by ldmatrix; H200).
  const char* lines;            // of the warp's weights: the record that holds its first row
  int offset;                   // of that row in the record
  uint32_t piece_from, x_from;  // of this lane: its piece of the scales or zero points, its chunk of x, in elements

  __device__ __forceinline__ uint32_t slot(int stage) const { return slots + (wk * STAGES + stage) * SLOT_BYTES; }
  __device__ __forceinline__ uint32_t mine(int stage) const { return slot(stage) + X_BYTES + wn * WARP_BYTES; }
  __device__ __forceinline__ uint32_t barrier(int stage) const { return barriers + (wk * STAGES + stage) * 8; }  // the slot is filled
  __device__ __forceinline__ uint32_t read(int stage) const { return barrier(stage) + WARPS_K * STAGES * 8; }    // and its x has been read

  // No step reaches past k: known at compile time, where it saves a dozen instructions a step.
  __device__ __forceinline__ bool whole() const { return kx % STEP_K == 0; }

  __device__ __forceinline__ void find_places() {
    const int row = row0 + wn * ROWS, x_row = (wn * 32 + lane) / X_CHUNKS;
    lines = weight + int64_t(row / 64) * k_tiles * 2048;  // a record holds 64 rows, 32 bytes each
    offset = row % 64;
    piece_from = piece(lane);
    x_from = x_row * kx + lane % X_CHUNKS * 8;
  }
  __device__ __forceinline__ uint32_t piece(int c) const {
    return c % OF_SCALES / CHUNKS * n_pad + row0 + wn * ROWS + c % CHUNKS * 8;
  }

  // Request this warp's weights of a step.
  __device__ __forceinline__ void request_weight(int step, int stage) {
    constexpr int SPANNED = 64 % ROWS == 0 ? 1 : (ROWS + 48 + 63) / 64;  // records, one above another, in which the warp's rows may lie
    const uint32_t to = mine(stage);
    const char* from = lines + int64_t(step) * (RECORDS * 2048);
    if constexpr (BULK) {
      if (elect()) {
        mbarrier_expect(barrier(stage), WEIGHT_BYTES);
        constexpr int COPIES = TILES == 4 ? 1 : RECORDS;  // four tiles are all of a record: records follow each other
#pragma unroll
        for (int r = 0; r < COPIES; ++r)
#pragma unroll
          for (int above = 0; above < 64 * SPANNED; above += 64) {
            const int first = max(above - offset, 0), rows = SPANNED == 1 ? ROWS : min(above + 64 - offset, ROWS) - first;
            if (above < ROWS || rows > 0)
              bulk_copy(to + (r * ROWS + first) * 32, from + above / 64 * k_tiles * 2048 + r * 2048 + max(offset - above, 0) * 32,
                        rows * 32 * (RECORDS / COPIES), barrier(stage), policy);
          }
      }
    } else {
#pragma unroll
      for (int r = 0; r < RECORDS; ++r)
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          const int above = SPANNED == 1 ? 0 : (offset + t * 16) / 64;  // records
          const char* line = from + (above * (k_tiles - 1) + r) * 2048 + (offset + t * 16) * 32;
          cp_async_16(to + (r * TILES + t) * 512 + lane * 16, line + lane * 16, true);
        }
    }
  }

  // Request this warp's scales and zero points of a step; in the loop next to x, because three idle loads come before each run of such copies.
  __device__ __forceinline__ void request_scales(int step, int stage) {
    const uint32_t to = mine(stage) + WEIGHT_BYTES;
    // Not bulk copies: so small ones cost the weights 5 % of their rate (57344 x 8192 at m = 1: 67.7 us, so 63.9, H200).
    const int first = GROUP_STEPS == 0 ? 0 : step * (STEP_K / 16) / (GROUP_STEPS ? GROUP_STEPS : 1);
#pragma unroll
    for (int i = 0; i < (PIECES + 31) / 32; ++i) {
      const int c = i * 32 + lane;
      if (c < PIECES) {
        const bool inside = whole() || first + c % OF_SCALES / CHUNKS < groups;  // the last step may reach past k: no scale there, or it could be NaN
        cp_async_16(to + c * 16, (c < OF_SCALES ? scales : zeros) + int64_t(first) * n_pad + (i == 0 ? piece_from : piece(c)), inside);
      }
    }
  }

  // Request this warp's share of the step's x; rows past m are left as they are (their columns of y are not stored), k past kx is zero.
  __device__ __forceinline__ void request_x(int step, int stage) {
    if (COLUMNS == 1 || column0 + COLUMNS <= m)
      copy_x<true>(step, stage);
    else
      copy_x<false>(step, stage);
    if constexpr (BULK)
      mbarrier_arrive_after_copies(barrier(stage));
    else
      asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <bool ALL>
  __device__ __forceinline__ void copy_x(int step, int stage) {
    const int row = (wn * 32 + lane) / X_CHUNKS;
    const bool inside = whole() || step * STEP_K + lane % X_CHUNKS * 8 < kx;
    const T* from = x + int64_t(column0) * kx + step * STEP_K + x_from;
    const uint32_t to = slot(stage) + row * PITCH + lane % X_CHUNKS * 16;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += X_ROWS)
      if ((i + X_ROWS <= COLUMNS || row + i < COLUMNS) && (ALL || column0 + row + i < m))
        cp_async_16(to + i * PITCH, from + int64_t(i) * kx, inside);
  }

  // Adds FACTOR * x of two k16 steps to a column tile's `sum`: x as the first operand, in the registers in which both steps' second operands
  // lie. Rows r and r + 8 are halves k 0..7 and 8..15 of column r: one product in place of two, and no column meets another's numbers.
  __device__ __forceinline__ static void add_x(float (&sum)[4], const uint32_t* b) {
    const uint32_t ones[2] = {R::ONES, R::ONES};
    mma_m16n8k16(sum, b, ones, T());
  }
  // FACTOR * (sum of x) of this thread's columns of the column tiles, in rows r (i < 2) and r + 8; clears the sums.
  __device__ __forceinline__ void take_sums(float (&sum)[NT][4], float (&of)[NT][4]) const {
#pragma unroll
    for (int c = 0; c < NT; ++c) {
      const float both = sum[c][0] + sum[c][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[c][i] = i < 2 ? __shfl_sync(0xffffffffu, both, (lane & 3) * 8 + i * 4) : of[c][i - 2] * (R::INVERSE_LOW / R::INVERSE_HIGH);
        sum[c][i] = 0.0f;
      }
    }
  }

  // In units of q, with what raw codes carry. (Adding a constant 0 would take an instruction.)
  __device__ __forceinline__ static float zero_point(T z) {
    if constexpr (SYMMETRIC) return R::OFFSET + float(1 << (BITS - 1));
    return R::OFFSET == 0.0f ? to_float(z) : R::OFFSET + to_float(z);
  }

  // Scale and zero point of rows r and r + 8 of each tile, a pair of 16 bits each (two of the last place are spare).
  using Pairs = uint32_t[(2 * TILES + 3) / 4 * 4];
  // Of a group of the step: 8 rows' scales are the even rows of a matrix, so that its transpose gives each lane its own; its odd rows are the
  // zero points of the other 8 rows of the tile, which lie in other banks (64 rows: two loads, where one a number takes sixteen). So scales are
  // where they belong, and zero points of rows r and r + 8 have changed places.
  __device__ __forceinline__ void load_pairs(int stage, int group, Pairs& pairs) const {
    const uint32_t from = mine(stage) + WEIGHT_BYTES + group * ROWS * 2;
    const int odd = SYMMETRIC ? 0 : lane & 1;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i += 4)
      ldmatrix_x4_transposed(from + odd * SCALE_BYTES + (min(i + (lane >> 3), 2 * TILES - 1) ^ odd) * 16, pairs + i);
  }

  // acc[tile][column tile][4] += scale * (product - zero * sum of x), and clears the product and the sum.
  using Sums = float[TILES][NT][4];
  __device__ __forceinline__ void apply_group(Sums& acc, Sums& d, float (&sum)[NT][4], const Pairs& pairs) {
    float of_x[NT][4];
    take_sums(sum, of_x);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const T *low = reinterpret_cast<const T*>(pairs + 2 * t), *high = low + 2;
      const float s0 = to_float(low[0]), s1 = to_float(high[0]);
      const float z0 = zero_point(high[1]), z1 = zero_point(low[1]);
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float product = R::BOTH_ROWS && i < 2 ? d[t][c][i] - d[t][c][i + 2] : d[t][c][i];
          acc[t][c][i] += (i < 2 ? s0 : s1) * (product - (i < 2 ? z0 : z1) * of_x[c][i]);
        }
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) d[t][c][i] = 0.0f;
    }
  }

  __device__ __forceinline__ void multiply(int stage, Sums& acc, Sums& d, float (&sum)[NT][4]) {
    Pairs pairs;
    // matrix lane / 8 of an ldmatrix is the lane / 8-th 16-byte chunk of 8 rows of x; rows that are not there repeat others
    const uint32_t matrix = slot(stage) + (lane & 7) % COLUMNS * PITCH + (lane >> 3) * 16;
    const uint32_t lines = mine(stage) + lane * 16;
#pragma unroll
    for (int r = 0; r < RECORDS; ++r) {
      uint32_t b[NT][ATOMS][2], words[TILES][4];
#pragma unroll
      for (int t = 0; t < TILES; ++t) load_shared_128(lines + (r * TILES + t) * 512, words[t]);
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int p = 0; p < ATOMS / 2; ++p) ldmatrix_x4(matrix + c * 8 * PITCH + r * RECORD_K * 2 + p * 64, &b[c][2 * p][0]);
      if constexpr (APART)
        if (r == RECORDS - 1) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(read(stage));
        }
#pragma unroll
      for (int atom = 0; atom < ATOMS; ++atom) {
#pragma unroll
        for (int c = 0; c < NT; ++c)
          if (atom % 2 == 0) add_x(sum[c], b[c][atom]);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          uint32_t a[4];
          R::unpack(words[t] + atom * WORDS, a);
#pragma unroll
          for (int c = 0; c < NT; ++c) mma_m16n8k16(d[t][c], a, b[c][atom], T());
        }
        if constexpr (GROUPS > 1) {
          const int done = r * ATOMS + atom + 1;
          if (done % (GROUP_STEPS ? GROUP_STEPS : 1) == 0) {
            load_pairs(stage, done / (GROUP_STEPS ? GROUP_STEPS : 1) - 1, pairs);
            apply_group(acc, d, sum, pairs);
          }
        }
      }
    }
    if constexpr (GROUPS == 1) {  // a part of a group may be scaled like the whole
      load_pairs(stage, 0, pairs);
      apply_group(acc, d, sum, pairs);
    }
  }

  // The last partial sums: per-channel scales, which were left for here, and the powers of two that raw codes carry.
  __device__ __forceinline__ void finish(Sums& acc, Sums& d, float (&sum)[NT][4]) {
    if constexpr (GROUP_STEPS == 0) {
      Pairs pairs;
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) {
        const int row = row0 + wn * ROWS + i * 8 + (lane >> 2);
        T* pair = reinterpret_cast<T*>(pairs + i);
        pair[0] = scales[row], pair[1] = zeros[i % 2 ? row - 8 : row + 8];  // as load_pairs leaves them
      }
      apply_group(acc, d, sum, pairs);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int c = 0; c < NT; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[t][c][i] *= i < 2 ? R::INVERSE_LOW : R::INVERSE_HIGH;
  }

  // This warp's sums over its share of the steps begin + wk, begin + wk + WARPS_K, ... below end.
  __device__ __forceinline__ void accumulate(int begin, int end, Sums& acc) {
    Sums d = {};
    float sum[NT][4] = {};
    find_places();
    if constexpr (BULK) {
      if (wn == 0 && lane < STAGES) mbarrier_init(barrier(lane), 33 * WARPS_N);
      if (APART && wn == 0 && lane < STAGES) mbarrier_init(read(lane), WARPS_N);
      fence_barriers();
      sync_group<1, 32 * WARPS_N>(wk);
      launch_dependents();
    }
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage)
      if (begin + wk + stage * WARPS_K < end) {
        request_weight(begin + wk + stage * WARPS_K, stage);
        request_scales(begin + wk + stage * WARPS_K, stage);
      }
    if constexpr (BULK) wait_for_predecessor();
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) request_x_or_nothing(begin + wk + stage * WARPS_K, end, stage);
    int stage = 0, phase = 0;
    for (int step = begin + wk; step < end; step += WARPS_K) {
      if constexpr (BULK) {
        mbarrier_wait(barrier(stage), phase);
      } else {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        sync_group<1, 32 * WARPS_N>(wk);
      }
      multiply(stage, acc, d, sum);
      const int next = step + STAGES * WARPS_K;
      __syncwarp();  // nobody else reads the warp's own weights
      if (next < end) request_weight(next, stage);
      if constexpr (APART)
        mbarrier_wait(read(stage), phase);
      else
        sync_group<1, 32 * WARPS_N>(wk);  // all that share the slot have read x
      if (next < end) request_scales(next, stage);
      request_x_or_nothing(next, end, stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    finish(acc, d, sum);
  }
  __device__ __forceinline__ void request_x_or_nothing(int step, int end, int stage) {
    if (step < end)
      request_x(step, stage);
    else if constexpr (!BULK)
      asm volatile("cp.async.commit_group;" ::: "memory");
  }
};

// y[column0 + c][row0 + r] of one block. blockIdx.z is one of `splits` shares of k, summed in order: by the cluster that holds them (BULK),
// each of whose blocks is sent what it stores and told of it (meeting twice, with fences, 4096 x 4096 at m = 8: 6.7 us, so 6.3, H200); or by the
// block that arrives last, through `workspace` (tickets, then fp32 sums).
template <typename S, typename T, bool BIAS>
__device__ __forceinline__ void stream_gemm(void* ring, const void* x, const void* weight, const void* scales, const void* zeros, const void* bias,
                                            void* workspace, void* y, int m, int n, int kx, int k_tiles, int n_pad, int groups, int steps,
                                            int splits) {
  constexpr int COLUMNS = S::X_COLUMNS, ROWS = S::BLOCK_ROWS, ELEMENTS = ROWS * COLUMNS;
  const int thread = threadIdx.x, share = blockIdx.z;
  S s;
  s.x = static_cast<const T*>(x), s.scales = static_cast<const T*>(scales), s.zeros = static_cast<const T*>(zeros);
  s.weight = static_cast<const char*>(weight);
  s.m = m, s.kx = kx, s.k_tiles = k_tiles, s.n_pad = n_pad, s.groups = groups, s.row0 = blockIdx.x * ROWS, s.column0 = blockIdx.y * COLUMNS;
  s.slots = shared_address(ring), s.barriers = s.slots + S::RING_BYTES;
  const int warp = __shfl_sync(0xffffffffu, thread >> 5, 0);  // so the compiler knows that it is the warp's
  s.lane = thread & 31, s.wn = warp % S::WARPS_IN_ROW, s.wk = warp / S::WARPS_IN_ROW;
  if constexpr (S::BULKY) s.policy = evict_first();
  void* gathered = static_cast<char*>(ring) + S::GATHER_AT;  // a barrier, and 16 bytes on float4 [block][what this block stores / 4]
  if constexpr (S::BULKY)
    if (splits > 1) {
      if (thread == 0) mbarrier_init(shared_address(gathered), 1);
      fence_barriers();
      cluster_arrive();
    }
  float acc[S::ROW_TILES][S::COLUMN_TILES][4] = {};
  s.accumulate(share * steps / splits, (share + 1) * steps / splits, acc);

  __syncthreads();  // the ring becomes sums [k share of the block][column][SUM_PITCH]
  float* sums = static_cast<float*>(ring);
  const int wn = (thread >> 5) % S::WARPS_IN_ROW, wk = (thread >> 5) / S::WARPS_IN_ROW;  // found anew: the loop has no registers for them
#pragma unroll
  for (int t = 0; t < S::ROW_TILES; ++t)
#pragma unroll
    for (int c = 0; c < S::COLUMN_TILES; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = c * 8 + (s.lane & 3) * 2 + (i & 1), row = (wn * S::ROW_TILES + t) * 16 + (s.lane >> 2) + (i >> 1) * 8;
        if (column < COLUMNS) sums[(wk * COLUMNS + column) * S::SUM_PITCH + row] = acc[t][c][i];
      }
  __syncthreads();
  const auto store = [&](int e, float v) {
    const int row = s.row0 + e % ROWS, column = s.column0 + e / ROWS;
    if (row >= n || column >= m) return;
    if constexpr (BIAS) v += to_float(static_cast<const T*>(bias)[row]);
    static_cast<T*>(y)[int64_t(column) * n + row] = from_float(v, T());
  };
  const auto block_sum = [&](int e) {
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < S::WARPS_IN_K; ++w) v += sums[(w * COLUMNS + e / ROWS) * S::SUM_PITCH + e % ROWS];
    return v;
  };
  if (splits == 1) {
    for (int e = thread; e < ELEMENTS; e += S::THREADS) store(e, block_sum(e));
  } else if constexpr (S::BULKY) {
    constexpr int PIECES = ELEMENTS / 4;
    const int each = (PIECES + splits - 1) / splits, own = max(0, min(each, PIECES - share * each));
    float4* parts = static_cast<float4*>(gathered) + 1;
    if (thread == 0) mbarrier_expect(shared_address(gathered), own * (splits - 1) * 16);
    cluster_wait();  // all have a barrier
    for (int piece = thread; piece < PIECES; piece += S::THREADS) {
      const int owner = piece / each, e = piece * 4;
      float4* place = parts + share * each + piece % each;
      const float4 v = make_float4(block_sum(e), block_sum(e + 1), block_sum(e + 2), block_sum(e + 3));
      if (owner == share)
        *place = v;
      else
        send_to_rank(place, v, gathered, owner);
    }
    __syncthreads();
    mbarrier_wait(shared_address(gathered), 0);
    for (int piece = thread; piece < own; piece += S::THREADS) {
      float4 v = parts[piece];
      for (int rank = 1; rank < splits; ++rank) {
        const float4 part = parts[rank * each + piece];
        v.x += part.x, v.y += part.y, v.z += part.z, v.w += part.w;
      }
      const int e = (share * each + piece) * 4;
      store(e, v.x), store(e + 1, v.y), store(e + 2, v.z), store(e + 3, v.w);
    }
  } else {
    const int tile = blockIdx.y * gridDim.x + blockIdx.x;
    float* partials = static_cast<float*>(workspace) + TICKETS + int64_t(tile) * splits * ELEMENTS;
    for (int e = thread; e < ELEMENTS; e += S::THREADS) __stcg(partials + share * ELEMENTS + e, block_sum(e));
    if (take_ticket<S::THREADS, 0>(static_cast<unsigned int*>(workspace) + tile, splits - 1, thread) != splits - 1) return;
    for (int e = thread; e < ELEMENTS; e += S::THREADS) {
      float v = 0.0f;
      for (int other = 0; other < splits; ++other) v += __ldcg(partials + other * ELEMENTS + e);
      store(e, v);
    }
  }
}

}  // namespace tilebit
