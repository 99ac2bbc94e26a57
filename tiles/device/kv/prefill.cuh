// Softmax of attention over tiles of 16-bit keys, in the registers of the tensor cores'
// accumulators: score tiles come, weights go, nothing passes through shared memory. Comes after
// ptx/instructions.cuh, pairs.cuh and sequences.cuh.
//
// A warp holds 16 query rows. Of a tile's accumulators a lane (g = lane / 4, c = lane % 4) has, at
// 4 n + 2 h + e, row g + 8 h and column 8 n + 2 c + e: a row is spread over the four lanes of a
// quad, and the weights, rounded to 16 bits, lie in the same order as the operand of the second
// product wants them. `thread` counts the computing threads of the block.
#pragma once
#include <stdint.h>

namespace tilebit {

constexpr float LOWEST = -1e30f;  // the maximum of nothing: finite, so that no difference of two of them is a NaN

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// What a block computes: ROWS query rows of one sequence against tiles of COLUMNS keys, the last
// visible tile first, so that the diagonal, which needs a mask, comes before all that does not.
struct PrefillTile {
  int rows;            // of the sequence from the block's first on; may be more than ROWS
  int first_row;       // in q and out
  int first_key;       // of the sequence, in k and v
  int keys;            // of the sequence
  int position;        // of the block's first row among the sequence's keys: it sees keys up to this one (negative: none)
  int last;            // key tile of step 0
  int masked, clear;   // steps below `masked` and from `clear` on need a mask
  int steps;           // at least 1; past those of the window come the tiles of the sink tokens
  int near;            // steps before the tiles of the sink tokens
  int sink_tiles;
};

// The `index`-th tile of ROWS query rows in the order of the sequences, the last rows of each
// first: those see most and must not start last. A block that has no tile ends here. Called by all
// THREADS threads of a block.
template <int THREADS, int ROWS, int COLUMNS, int WINDOW, int SINK_TOKENS>
__device__ __forceinline__ void find_tile_or_exit(const int* cu_q, const int* cu_kv, int batch, int index, int* fields) {
  const Place place = locate<THREADS>(batch, [&](int b) { return (cu_q[b + 1] - cu_q[b] + ROWS - 1) / ROWS; }, [&](int) { return index; });
  if (index >= place.total) {
    asm volatile("exit;");
    return;
  }
  PrefillTile& tile = *reinterpret_cast<PrefillTile*>(fields);
  const int sequence = place.sequence, queries = cu_q[sequence + 1] - cu_q[sequence];
  const int row = ((queries + ROWS - 1) / ROWS - 1 - (index - place.first)) * ROWS;
  tile.rows = queries - row;
  tile.first_row = cu_q[sequence] + row;
  tile.first_key = cu_kv[sequence];
  tile.keys = cu_kv[sequence + 1] - tile.first_key;
  tile.position = tile.keys - queries + row;
  const int seen = min(tile.keys, tile.position + min(ROWS, tile.rows));
  tile.last = max(seen - 1, 0) / COLUMNS;
  const int first = WINDOW > 0 ? min(max(tile.position - WINDOW + 1, 0) / COLUMNS, tile.last) : 0;
  tile.near = tile.last - first + 1;
  tile.masked = max(tile.last - max(tile.position + 1, 0) / COLUMNS + 1, 1);
  tile.sink_tiles = WINDOW > 0 ? min((SINK_TOKENS + COLUMNS - 1) / COLUMNS, first) : 0;
  tile.steps = tile.near + tile.sink_tiles;
  // tiles from here on lie inside the window of every row
  const int inside = WINDOW > 0 ? (max(tile.position + ROWS - WINDOW, 0) + COLUMNS - 1) / COLUMNS : 0;
  tile.clear = min(tile.near, max(tile.last - inside + 1, tile.masked));
}

// Key tile of a step.
__device__ __forceinline__ int key_tile(const PrefillTile& tile, int step) {
  return step < tile.near ? tile.last - step : tile.near + tile.sink_tiles - 1 - step;
}
// First key of a step's tile, among the sequence's.
template <int COLUMNS>
__device__ __forceinline__ int step_key(const int* fields, int step) {
  return key_tile(*reinterpret_cast<const PrefillTile*>(fields), step) * COLUMNS;
}

// The softmax of one lane's two rows so far: maxima of the scores, this lane's share of the sums,
// and the factor that the last step gives to all that was summed before it.
struct RowState {
  float maximum[2], sum[2], rescale[2];
};

__device__ __forceinline__ void begin_rows(float* row_state) {
  *reinterpret_cast<RowState*>(row_state) = {{LOWEST, LOWEST}, {0.0f, 0.0f}, {1.0f, 1.0f}};
}

// Scores of keys that a row does not see become -infinity.
template <int COLUMNS, int WINDOW, int SINK_TOKENS>
__device__ __forceinline__ void mask_scores(float* scores, const PrefillTile& tile, int step, int thread) {
  const int first = key_tile(tile, step) * COLUMNS + thread % 4 * 2;  // this lane's first key
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int last = tile.position + thread / 32 * 16 + thread % 32 / 4 + 8 * h - first;  // visible column
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; ++i) {
      const int column = i / 2 * 8 + i % 2;
      bool visible = column <= last;
      if constexpr (WINDOW > 0) visible = visible && (column > last - WINDOW || column < SINK_TOKENS - first);
      float& score = scores[i / 2 * 4 + 2 * h + i % 2];
      if (!visible) score = -INFINITY;
    }
  }
}

enum Mask { NO_MASK, MASK, MASK_WHERE_NEEDED };

// A tile of products q.k becomes weights 2^(scale * q.k - shift), not yet rounded. With CAPPED the
// scores are tanh(q.k * argument / 2 log2(e)) instead of q.k, so that `scale` is the cap's.
template <int COLUMNS, int WINDOW, int SINK_TOKENS, bool CAPPED, int MASKING>
__device__ __forceinline__ void softmax_step(float* scores, float* row_state, const int* fields, int step, float scale, float argument, int thread) {
  const PrefillTile& tile = *reinterpret_cast<const PrefillTile*>(fields);
  RowState& state = *reinterpret_cast<RowState*>(row_state);
  if constexpr (CAPPED) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) scores[i] = 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(scores[i] * argument));
  }
  if (MASKING == MASK || (MASKING == MASK_WHERE_NEEDED && (step < tile.masked || step >= tile.clear)))
    mask_scores<COLUMNS, WINDOW, SINK_TOKENS>(scores, tile, step, thread);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* row = scores + 2 * h;
    float even = state.maximum[h], odd = even;  // two chains: half the latency
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) even = fmaxf(even, row[4 * n]), odd = fmaxf(odd, row[4 * n + 1]);
    const float maximum = quad_max(fmaxf(even, odd)), shift = maximum * scale;
    // The difference first: of a row that has seen nothing, the residue of a contracted product and
    // difference would be 2^(1e21).
    state.rescale[h] = exp2_fast((state.maximum[h] - maximum) * scale);
    state.maximum[h] = maximum;
    float sums[2] = {state.sum[h] * state.rescale[h], 0.0f};
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        row[4 * n + e] = exp2_fast(row[4 * n + e] * scale - shift);
        sums[e] += row[4 * n + e];
      }
    }
    state.sum[h] = sums[0] + sums[1];
  }
}

// ptxas would move the exponentials behind the wait for a product that runs meanwhile. It does not
// move this store, which never happens (sums are not negative) and which takes all of them.
__device__ __forceinline__ void weights_before_wait(const float* row_state) {
  const RowState& state = *reinterpret_cast<const RowState*>(row_state);
  asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never st.shared.f32 [%1], %0;\n}" ::"f"(state.sum[0] + state.sum[1]), "r"(0)
               : "memory");
}

// Weights, rounded to 16 bits, as the next product's operand.
template <typename T, int COLUMNS>
__device__ __forceinline__ void round_weights(const float* weights, void* operand) {
  uint32_t* pairs = static_cast<uint32_t*>(operand);
#pragma unroll
  for (int i = 0; i < COLUMNS / 4; ++i) pairs[i] = pack_pair(weights[2 * i], weights[2 * i + 1], T());
}

template <int HEAD_DIM>
__device__ __forceinline__ void rescale_rows(float* out, const float* state) {
  const float* rescale = reinterpret_cast<const RowState*>(state)->rescale;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] *= rescale[i / 2 % 2];
}

// Rows of the values' first tile beyond the sequence are zeroed: they have no weight, but what lies
// there may be no number. The tile is HEAD_DIM / 64 panels of COLUMNS rows of 128 bytes, in the
// shared memory of `THREADS` threads that call this.
template <int COLUMNS, int HEAD_DIM, int THREADS, int BARRIER>
__device__ __forceinline__ void zero_tail(void* values, const int* fields, int thread) {
  const PrefillTile& tile = *reinterpret_cast<const PrefillTile*>(fields);
  const int keys = max(tile.keys - tile.last * COLUMNS, 0);
  if (keys >= COLUMNS) return;
  uint4* chunks = static_cast<uint4*>(values);
#pragma unroll
  for (int panel = 0; panel < HEAD_DIM / 64; ++panel)
    for (int i = keys * 8 + thread % THREADS; i < COLUMNS * 8; i += THREADS) chunks[panel * COLUMNS * 8 + i] = make_uint4(0, 0, 0, 0);
  fence_before_bulk_copies();
  sync_group<BARRIER, THREADS>(thread / THREADS);
}

// out = sum of weights * values / sum of weights (0 where a row saw nothing), staged in `staging`
// for 16-byte stores, and the log-sum-exp. A row's `sink` is a logit of no key. `staging` is the
// place of the ROWS queries, panels of 64 columns: each warp stages in its own rows of every panel,
// because the THREADS that share a product may be done while others still multiply theirs.
template <typename T, int ROWS, int HEAD_DIM, bool SINKS, bool LSE, int THREADS, int BARRIER>
__device__ __forceinline__ void finish_rows(float* out, float* row_state, const int* fields, void* staging, void* to, const float* sinks, float* lse,
                                            int head, int heads, float scale, int thread) {
  const PrefillTile& tile = *reinterpret_cast<const PrefillTile*>(fields);
  const RowState& state = *reinterpret_cast<const RowState*>(row_state);
  const int warp = thread / 32, lane = thread % 32, rows = min(tile.rows - warp * 16, 16);
  const int64_t first = tile.first_row + warp * 16;
  constexpr int PANEL = ROWS * 32;  // words
  uint32_t* staged = static_cast<uint32_t*>(staging) + warp * 16 * 32;
  sync_group<BARRIER, THREADS>(thread / THREADS);  // all warps of a product have read what lay here
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    float sum = quad_sum(state.sum[h]), maximum = state.maximum[h] * scale, kept = 1.0f;
    if constexpr (SINKS) {
      const float sink = sinks[head] * LOG2_E, before = maximum;
      maximum = fmaxf(maximum, sink), kept = exp2_fast(before - maximum), sum = sum * kept + exp2_fast(sink - maximum);
    }
    const float factor = sum > 0.0f ? kept / sum : 0.0f;
    if constexpr (LSE) {
      if (lane % 4 == 0 && row < rows) lse[(first + row) * heads + head] = sum > 0.0f ? (maximum + log2f(sum)) * LN_2 : -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)  // the exclusive or spreads the rows over the banks
      staged[n / 8 * PANEL + row * 32 + (n % 8 ^ (row & 7)) * 4 + lane % 4] = pack_pair(out[4 * n + 2 * h] * factor, out[4 * n + 2 * h + 1] * factor, T());
  }
  __syncwarp();
  constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes in a row
  const uint4* chunks = reinterpret_cast<const uint4*>(staged);
  uint4* target = static_cast<uint4*>(to);
#pragma unroll
  for (int i = 0; i < CHUNKS / 2; ++i) {
    const int row = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
    if (row < rows) target[((first + row) * heads + head) * CHUNKS + chunk] = chunks[chunk / 8 * (PANEL / 4) + row * 8 + (chunk % 8 ^ (row & 7))];
  }
}

// ROWS rows of HEAD_DIM elements, `pitch` elements apart from `from` on, on their way to shared
// memory; zeros in place of those from `rows` on. As TMA lays them out with a swizzle of 128 bytes:
// panels of 64 columns, 16-byte chunks exchanged within a row of a panel.
template <typename T, int ROWS, int HEAD_DIM, int THREADS>
__device__ __forceinline__ void load_rows(void* to, const void* from, int64_t pitch, int rows, int thread) {
  constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes in a row
  const uint32_t base = shared_address(to);
#pragma unroll
  for (int i = 0; i < ROWS * CHUNKS / THREADS; ++i) {
    const int row = (i * THREADS + thread) / CHUNKS, chunk = (i * THREADS + thread) % CHUNKS;
    const T* source = static_cast<const T*>(from) + (row < rows ? row * pitch + chunk * 8 : 0);
    cp_async_16(base + ((chunk / 8 * ROWS + row) * 8 + (chunk % 8 ^ row % 8)) * 16, source, row < rows);
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the youngest PENDING groups of this thread's copies have landed.
template <int PENDING>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Added to an address, it keeps the compiler from computing the address once and holding it in
// registers throughout a loop.
__device__ __forceinline__ int opaque_zero() {
  int zero;
  asm volatile("mov.u32 %0, 0;" : "=r"(zero));
  return zero;
}

// The warpgroups take turns in handing products to the tensor cores, so that one's softmax runs
// under another's products (Shah et al., FlashAttention-3, section 3.1). GROUPS of them, on GROUPS
// named barriers from BARRIER on.
template <int BARRIER>
__device__ __forceinline__ void await_turn(int thread) {
  asm volatile("bar.sync %0, 256;" ::"r"(BARRIER + thread / 128) : "memory");
}
template <int GROUPS, int BARRIER>
__device__ __forceinline__ void pass_turn(int thread) {
  const int next = thread / 128 + 1;
  asm volatile("bar.arrive %0, 256;" ::"r"(BARRIER + (next == GROUPS ? 0 : next)) : "memory");
}

}  // namespace tilebit
