// Decode attention over a low-bit KV cache: every warp streams packed keys and values through a ring of its own; a block's warps share a piece of
// one (sequence, key head) and add their partial results up at its end. See tiles/attention/decode.py for the division of work.
//
// S^T = K Q^T and O^T = V^T P^T by mma.m16n8k16: codes are the A operand as they lie in the cache (kv.cuh), the query columns (the heads of a group,
// and the queries of a call) its n. Keys' channel scales go into the query operand, their zeros are one product a unit; values' token scales go into
// P, their zeros are a sum of P. Sums are centered: of codes less the middle one. P goes from accumulator to operand by movmatrix. What P is relative
// to moves only when a sum of P exceeds LAZY (BitDecoding's cooperative softmax over warps is the sum at the end of a piece). Comes after
// split_k.cuh, dependent.cuh and kv.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

__host__ __device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }

// GROUP: query heads of a key head. PAGE: tokens of a page. UNIT: tokens of a packed unit. NT: 8-column tiles of a pass. WINDOW: 0 or the tokens
// that a query sees, itself included; SINK_TOKENS: the first ones that it sees besides. CAPPED: scores pass through a soft cap.
template <typename T, int KEY, int VALUE, int KEY_SCALES, int HEAD_DIM, int GROUP, int PAGE, int UNIT, int NT, int WARPS, int STAGES, int WINDOW,
          int SINK_TOKENS, bool SINKS, bool CAPPED, bool LSE, bool BULK>
struct Decode {
  using Keys = Granule<KEY, HEAD_DIM>;
  using Values = Granule<VALUE, HEAD_DIM>;
  using Rows = Granule<FLOAT, HEAD_DIM>;  // of the residual window
  using P = Page<KEY, VALUE, KEY_SCALES, HEAD_DIM, PAGE>;
  using KeyType = std::conditional_t<KEY == FLOAT, T, half>;  // of the operands of a packed unit
  using ValueType = std::conditional_t<VALUE == FLOAT, T, half>;
  static constexpr int STRIPS = UNIT / 16, TILES = HEAD_DIM / 16, COLUMNS = 8 * NT, THREADS = 32 * WARPS;
  static constexpr int KEY_BYTES = UNIT * P::KEY_TOKEN, VALUE_BYTES = UNIT * P::VALUE_TOKEN;  // parameters lie behind the codes
  static constexpr int KEY_PARAMETERS = KEY_SCALES == PER_CHANNEL ? HEAD_DIM * 4 : KEY_SCALES == PER_TOKEN ? UNIT * 4 : 0;
  static constexpr int VALUE_PARAMETERS = has_zero(VALUE) ? UNIT * 4 : 0;
  // A slot holds the keys of a unit or its values: in halves, so that twice as many warps find room.
  static constexpr int SLOT_BYTES = most(Rows::BYTES, most(KEY_BYTES + KEY_PARAMETERS, VALUE_BYTES + VALUE_PARAMETERS));
  static constexpr int RING_BYTES = WARPS * STAGES * SLOT_BYTES, BARRIER_BYTES = BULK ? WARPS * STAGES * 8 : 0;
  static constexpr int SUM_PITCH = HEAD_DIM + 4;  // floats of a column of partial results: a warp's stores meet no bank twice
  static constexpr int SUM_BYTES = WARPS * COLUMNS * (SUM_PITCH + 2) * 4;
  // Pieces that a unit's keys or values, its channel parameters come in: pages, or parts of one.
  static constexpr int PIECES = PAGE < UNIT ? UNIT / PAGE : 1;
  static constexpr int SLICES = KEY_SCALES == PER_CHANNEL ? (PAGE < RESIDUAL ? RESIDUAL / PAGE : 1) : KEY_SCALES == PER_TOKEN ? PIECES : 0;
  static constexpr bool ONE_PAGE = PIECES == 1 && SLICES <= 1;  // has them all
  static constexpr int KEY_COPIES = PIECES + SLICES, VALUE_COPIES = VALUE_PARAMETERS ? 2 * PIECES : PIECES;
  // At a slot's barrier: of the lane that asks for bulk copies, and of all lanes where they copy parameters from several pages.
  static constexpr int ARRIVALS = BULK && !ONE_PAGE && KEY_COPIES + VALUE_COPIES > 2 * PIECES ? 33 : 1;
  static constexpr float LAZY = 32.0f;         // a lane's sum of P over some strips, so P, too: times a value's scale it must stay a finite half
  static constexpr float NOTHING = -1e30f;     // a maximum of no scores
  static constexpr int PART = COLUMNS * (HEAD_DIM + 2);  // floats of a partial result in the workspace: [column][channel], then [column]{max, sum}
  static_assert(KEY_COPIES < 32 && VALUE_COPIES < 32, "a lane knows the page of one of them");

  const T* q;
  const char *pages, *windows;
  const int *tables, *slots, *lengths;
  const float *head_scales, *sinks;
  float scale, cap;  // a score is scale * q.k in powers of two; under a soft cap it is cap * tanh(scale * q.k)
  int batch, q_len, heads, passes, max_pages;
  uint32_t ring;
  uint64_t policy;
  int lane, warp;

  // Units of a sequence: those of its packed tokens and its window's that some query may see.
  struct Units {
    int length, packed, sink, skipped, packed_units, total;
  };
  __device__ __forceinline__ Units units(int length) const {
    Units u;
    u.length = length, u.packed = length / RESIDUAL * RESIDUAL;
    int packed_units = u.packed / UNIT, window_units = (length - u.packed + 15) / 16;
    u.sink = 0, u.skipped = 0;
    if constexpr (WINDOW > 0) {
      const int lowest = max(0, length - q_len - WINDOW + 1);  // the first position in the first query's window
      u.sink = min((SINK_TOKENS + UNIT - 1) / UNIT, packed_units);
      u.skipped = max(0, min(lowest / UNIT, packed_units) - u.sink);
      packed_units -= u.skipped;
    }
    u.packed_units = packed_units, u.total = packed_units + window_units;
    return u;
  }
  // First token of a packed unit.
  __device__ __forceinline__ static int token_of(const Units& u, int unit) { return (unit < u.sink ? unit : unit + u.skipped) * UNIT; }

  // A walk over the block's units [begin, end) of all segments; a segment is a (sequence, key head, pass) and begins with unit `base`.
  struct Cursor {
    int sequence, head, pass, base, end;
    Units u;
    __device__ __forceinline__ int piece_begin(int begin) const { return max(base, begin); }
    __device__ __forceinline__ int piece_end() const { return min(base + u.total, end); }
    __device__ __forceinline__ bool more() const { return base < end; }
    __device__ __forceinline__ bool packed(int unit) const { return unit < u.packed_units; }
  };
  // Whether a unit's tokens were packed before the newest q_len came.
  __device__ __forceinline__ bool settled(const Cursor& c, int unit) const {
    return c.packed(unit) && token_of(c.u, unit) + UNIT <= (c.u.length - q_len) / RESIDUAL * RESIDUAL;
  }
  __device__ __forceinline__ void next_segment(Cursor& c) const {
    c.base += c.u.total;
    if (++c.pass < passes) return;
    c.pass = 0;
    if (++c.head < heads) return;
    c.head = 0;
    do {
      if (++c.sequence >= batch) return;  // then base == end
      c.u = units(lengths[c.sequence]);
    } while (c.u.total == 0);
  }

  __device__ __forceinline__ uint32_t slot(int stage) const { return ring + (warp * STAGES + stage) * SLOT_BYTES; }
  __device__ __forceinline__ uint32_t barrier(int stage) const { return ring + RING_BYTES + (warp * STAGES + stage) * 8; }

  // The page (of a packed unit) or the window that this lane will copy keys or values from; asked for one unit ahead, because it is loaded.
  template <bool VALUES>
  __device__ __forceinline__ int source_of(const Cursor& c, int unit) const {
    if (!c.packed(unit)) return slots[c.sequence];
    int token = token_of(c.u, unit), piece = ONE_PAGE ? 0 : lane;
    if (!ONE_PAGE && lane >= PIECES) {
      piece -= PIECES;
      if (!VALUES && KEY_SCALES == PER_CHANNEL) token = token / RESIDUAL * RESIDUAL;
    }
    if (!ONE_PAGE && lane >= (VALUES ? VALUE_COPIES : KEY_COPIES)) return 0;
    return tables[uint32_t(c.sequence) * max_pages + token / PAGE + piece];  // 2^32 of them would be 16 GiB
  }
  template <bool VALUES>
  __device__ __forceinline__ void request(const Cursor& c, int unit, int source, int stage) const {
    if (!c.packed(unit)) {
      constexpr int WINDOW_BYTES = RESIDUAL / 16 * Rows::BYTES;
      const char* from = windows + (int64_t(source) * heads + c.head) * (2 * WINDOW_BYTES) + (VALUES ? WINDOW_BYTES : 0);
      if (requests(stage, Rows::BYTES)) copy(slot(stage), from + (unit - c.u.packed_units) * Rows::BYTES, Rows::BYTES, stage);
      if constexpr (ARRIVALS > 1) mbarrier_arrive_after_copies(barrier(stage));
      return;
    }
    // Of a page's tokens before the unit, how many bytes come before its codes, or its parameters.
    constexpr int CODES = UNIT / PIECES * (VALUES ? P::VALUE_TOKEN : P::KEY_TOKEN), TOKEN = VALUES ? P::VALUE_TOKEN : P::KEY_TOKEN;
    constexpr bool BY_CHANNEL = !VALUES && KEY_SCALES == PER_CHANNEL;
    constexpr int PARAMETERS = BY_CHANNEL ? KEY_PARAMETERS / most(1, SLICES) : VALUES || SLICES ? UNIT / PIECES * 4 : 0;
    constexpr int TOTAL = VALUES ? VALUE_BYTES + VALUE_PARAMETERS : KEY_BYTES + KEY_PARAMETERS;
    int codes_at = VALUES ? P::VALUES_AT : 0, parameters_at = VALUES ? P::VALUE_PARAMETERS_AT : P::KEY_PARAMETERS_AT;
    if constexpr (PAGE > UNIT) {
      const int in_page = token_of(c.u, unit) % PAGE;
      codes_at += in_page * TOKEN, parameters_at += BY_CHANNEL ? in_page / RESIDUAL * (HEAD_DIM * 4) : in_page * 4;
    }
    const char* page = record_of(source, c.head);
    const uint32_t parameters_to = slot(stage) + (VALUES ? VALUE_BYTES : KEY_BYTES);
    if constexpr (ONE_PAGE) {
      if (requests(stage, TOTAL)) {
        copy(slot(stage), page + codes_at, CODES, stage);
        if constexpr ((VALUES ? VALUE_COPIES : KEY_COPIES) > 1) copy(parameters_to, page + parameters_at, PARAMETERS, stage);
      }
    } else {
      copy_pieces<CODES>(slot(stage), page + codes_at, stage);
      if constexpr (PARAMETERS > 0) copy_slices<TOTAL - PIECES * CODES, PARAMETERS>(parameters_to, c.head, source, parameters_at);
      if constexpr (ARRIVALS > 1) mbarrier_arrive_after_copies(barrier(stage));
    }
  }
  // Whether this lane makes the copies of a slot, of `total` bytes, that all lanes know: bulk copies are one lane's.
  __device__ __forceinline__ bool requests(int stage, int total) const {
    if constexpr (BULK) {
      if (!elect()) return false;
      mbarrier_expect(barrier(stage), total);
    }
    return true;
  }
  __device__ __forceinline__ void copy(uint32_t to, const char* from, int bytes, int stage) const {
    if constexpr (BULK) {
      bulk_copy(to, from, bytes, barrier(stage), policy);
    } else {
      for (int at = lane * 16; at < bytes; at += 512) cp_async_16(to + at, from + at, true);
    }
  }
  __device__ __forceinline__ const char* record_of(int page, int head) const {
    return pages + uint64_t(uint32_t(page) * heads + head) * P::BYTES;  // 2^32 records would be 2 TiB
  }
  // A slot's parameters, of which lane PIECES + i knows the page of the i-th slice: not bulk copies, which small ones hold up.
  template <int BYTES, int SLICE>
  __device__ __forceinline__ void copy_slices(uint32_t to, int head, int source, int at) const {
#pragma unroll
    for (int first = 0; first < BYTES; first += 512) {
      const int byte = first + lane * 16, page = __shfl_sync(0xffffffffu, source, PIECES + min(byte, BYTES - 16) / SLICE);
      if (byte < BYTES) cp_async_16(to + byte, record_of(page, head) + at + byte % SLICE, true);
    }
  }
  // A slot's codes in PIECES of BYTES, of which lane i knows where the i-th comes `from`.
  template <int BYTES>
  __device__ __forceinline__ void copy_pieces(uint32_t to, const char* from, int stage) const {
    if constexpr (BULK) {
      if (lane == 0) mbarrier_expect(barrier(stage), PIECES * BYTES);  // a copy that lands before it waits for it
      if (lane < PIECES) copy(to + lane * BYTES, from, BYTES, stage);
    } else {  // one after another, all lanes together
      for (int piece = 0; piece < PIECES; ++piece) {
        const uint64_t from_there = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(from), piece);
        copy(to + piece * BYTES, reinterpret_cast<const char*>(from_there), BYTES, stage);
      }
    }
  }

  // Query columns of a pass: column n is query n / GROUP, head n % GROUP of the group.
  __device__ __forceinline__ void load_queries(const Cursor& c, uint32_t (&out)[TILES][NT][2]) const {
    const int head = c.head;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const int n = (c.pass * NT + nt) * 8 + (lane >> 2);
      const bool inside = n < GROUP * q_len;
      const T* row = q + ((int64_t(c.sequence) * q_len + n / GROUP) * heads + head) * (GROUP * HEAD_DIM) + n % GROUP * HEAD_DIM + (lane & 3) * 2;
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = 0; i < 2; ++i) out[f][nt][i] = inside ? *reinterpret_cast<const uint32_t*>(row + f * 16 + i * 8) : 0u;
    }
  }
  // The same pair as halves: packed keys are.
  __device__ __forceinline__ static uint32_t as_half(uint32_t pair) {
    if constexpr (std::is_same_v<T, half>) return pair;
    return pack_pair(low_of(pair, T()), high_of(pair, T()), half());
  }
  __device__ __forceinline__ static uint32_t pair_of(float v) { return pack_pair(v, v, half()); }

  // s[strip][tile][i] = products of the slot's keys and the queries, in units of 1 / G::UNIT. Of keys with channel scales also, per column,
  // sums[tile] = {products of the zeros, of the scales} and middle[tile] = what centers s, of both halves of the rows.
  template <typename G, int SCALES, int COUNT, typename C>
  __device__ __forceinline__ void score(uint32_t keys, uint32_t parameters, const uint32_t (&queries)[TILES][NT][2], float (&s)[COUNT][NT][4],
                                        float (&sums)[NT][4], float (&middle)[NT][4]) const {
    const uint32_t center[4] = {G::minus_middle(0), G::minus_middle(1), G::minus_middle(2), G::minus_middle(3)};
#pragma unroll
    for (int j = 0; j < G::LOADS; ++j) {
      uint32_t b[G::PER_LOAD][NT][2];
#pragma unroll
      for (int k = 0; k < G::PER_LOAD; ++k) {
        const int f = j * G::PER_LOAD + k;
        uint32_t p[4];  // zeros of channels 2 c and the next, their scales, zeros of 2 c + 8 and the next, their scales: rows 0..7, rows 8..15
        if constexpr (SCALES == PER_CHANNEL) load_shared_128(parameters + (f * 4 + (lane & 3)) * 16, p);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          if constexpr (std::is_same_v<C, half>) {
            b[k][nt][0] = as_half(queries[f][nt][0]), b[k][nt][1] = as_half(queries[f][nt][1]);
          } else {
            b[k][nt][0] = queries[f][nt][0], b[k][nt][1] = queries[f][nt][1];
          }
          if constexpr (SCALES == PER_CHANNEL) {
            mma_m16n8k16(sums[nt], p, b[k][nt], half());
            b[k][nt][0] = multiply_pairs(b[k][nt][0], p[1]), b[k][nt][1] = multiply_pairs(b[k][nt][1], p[3]);
          }
          if constexpr (G::COLUMN_FACTOR != 1.0f) b[k][nt][1] = multiply_pairs(b[k][nt][1], pair_of(1.0f / G::COLUMN_FACTOR));
          if constexpr (SCALES == PER_CHANNEL) mma_m16n8k16(middle[nt], center, b[k][nt], half());
        }
      }
#pragma unroll
      for (int strip = 0; strip < COUNT; ++strip) {
        uint32_t words[G::LOAD];
        load_words<G>(keys + strip * G::BYTES, j, words);
#pragma unroll
        for (int k = 0; k < G::PER_LOAD; ++k) {
          uint32_t a[4];
          G::fragment(words, k, a);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) mma_m16n8k16(s[strip][nt], a, b[k][nt], C());
        }
      }
    }
  }
  // The highest code, as register i of an A operand.
  template <typename G>
  __device__ __forceinline__ static constexpr uint32_t highest(int i) {
    return uint32_t(G::HIGHEST * (i & 1 ? int(G::ROW_FACTOR) : 1) * (i >> 1 ? int(G::COLUMN_FACTOR) : 1)) * 0x00010001u;
  }
  template <typename G>
  __device__ __forceinline__ void load_words(uint32_t granule, int j, uint32_t (&words)[G::LOAD]) const {
    const uint32_t address = granule + (j * 32 + lane) * (G::LOAD * 4);
    if constexpr (G::LOAD == 4)
      load_shared_128(address, words);
    else
      load_shared_64(address, words);
  }

  // The state of a piece: O^T [channel tile][column tile], and per column of this thread the maximum that P is relative to, the sum of P and what
  // all channels have in common: the sum of P times zeros, and what centering O took away.
  struct State {
    float o[TILES][NT][4], top[NT][2], sum[NT][2], zeros[NT][2];
    // Subtracted from scores: of a column that has seen none nothing yet.
    __device__ __forceinline__ float shift(int nt, int i) const { return top[nt][i] == NOTHING ? 0.0f : top[nt][i]; }
  };
  __device__ __forceinline__ static void clear(State& state) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int f = 0; f < TILES; ++f)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[f][nt][i] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) state.top[nt][i] = NOTHING, state.sum[nt][i] = 0.0f, state.zeros[nt][i] = 0.0f;
    }
  }

  // Scores less their columns' shifts (under a soft cap: what it caps) to P: s becomes 2^(score - top), sums are kept. `first` is the position of
  // the first of COUNT * 16 tokens.
  template <int COUNT>
  __device__ __forceinline__ void soften(float (&s)[COUNT][NT][4], State& state, const Units& u, int first, int pass) const {
    if constexpr (CAPPED) {
#pragma unroll
      for (int strip = 0; strip < COUNT; ++strip)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[strip][nt][i] = cap * tanhf(s[strip][nt][i]) - state.shift(nt, i & 1);
    }
    // Positions that the last query sees and the first one does not, or that no window reaches any more.
    const int position = u.length - q_len;  // of the first query
    bool masked = first + COUNT * 16 > position + 1;
    if constexpr (WINDOW > 0) masked |= first < u.length - WINDOW;
    if (masked) {
#pragma unroll
      for (int strip = 0; strip < COUNT; ++strip)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = first + strip * 16 + (lane >> 2) + (i >> 1) * 8;
            const int own = position + ((pass * NT + nt) * 8 + (lane & 3) * 2 + (i & 1)) / GROUP;
            bool seen = token <= own && token < u.length;
            if constexpr (WINDOW > 0) seen &= token > own - WINDOW || token < SINK_TOKENS;
            if (!seen) s[strip][nt][i] = -INFINITY;
          }
    }
    // Sums, which are wanted anyway, tell whether some P is too high; only then is the maximum of the scores looked for. They wait for that in
    // registers, of which wide products have few.
    constexpr int TOGETHER = most(1, least(COUNT, 8 / (NT * NT)));
#pragma unroll
    for (int from = 0; from < COUNT; from += TOGETHER) {
      float p[TOGETHER][NT][4], sum[NT][2];
      weigh<COUNT, TOGETHER>(s, from, p, sum);
      bool grown = false;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 2; ++i) grown |= state.top[nt][i] == NOTHING || !(sum[nt][i] <= LAZY);
      if (__any_sync(0xffffffffu, grown)) {
        raise<COUNT, TOGETHER>(s, from, state);
        weigh<COUNT, TOGETHER>(s, from, p, sum);
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int i = 0; i < 2; ++i) state.sum[nt][i] += sum[nt][i];
#pragma unroll
        for (int strip = 0; strip < TOGETHER; ++strip)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[from + strip][nt][i] = p[strip][nt][i];
      }
    }
  }
  // P of TOGETHER strips, and its sums over this lane's tokens.
  template <int COUNT, int TOGETHER>
  __device__ __forceinline__ static void weigh(const float (&s)[COUNT][NT][4], int from, float (&p)[TOGETHER][NT][4], float (&sum)[NT][2]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      sum[nt][0] = sum[nt][1] = 0.0f;
#pragma unroll
      for (int strip = 0; strip < TOGETHER; ++strip)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[nt][i & 1] += p[strip][nt][i] = exp2_fast(s[from + strip][nt][i]);
    }
  }
  // The maxima rise to those of TOGETHER strips' scores: what is summed up so far, what is P already and what is to become P follow.
  template <int COUNT, int TOGETHER>
  __device__ __forceinline__ static void raise(float (&s)[COUNT][NT][4], int from, State& state) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float above = -INFINITY;
#pragma unroll
        for (int strip = 0; strip < TOGETHER; ++strip) above = fmaxf(above, fmaxf(s[from + strip][nt][i], s[from + strip][nt][i + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) above = fmaxf(above, __shfl_xor_sync(0xffffffffu, above, step));
        const bool fresh = state.top[nt][i] == NOTHING;
        const float before = state.shift(nt, i);
        state.top[nt][i] = fresh ? fmaxf(above, NOTHING) : before + fmaxf(above, 0.0f);
        const float by = state.shift(nt, i) - before, factor = fresh ? 1.0f : exp2_fast(-by);
        state.sum[nt][i] *= factor, state.zeros[nt][i] *= factor;
#pragma unroll
        for (int f = 0; f < TILES; ++f) state.o[f][nt][i] *= factor, state.o[f][nt][i + 2] *= factor;
#pragma unroll
        for (int strip = 0; strip < COUNT; ++strip)
#pragma unroll
          for (int j = i; j < 4; j += 2) s[strip][nt][j] = strip < from ? s[strip][nt][j] * factor : s[strip][nt][j] - by;
      }
  }

  // O^T += V^T P^T of one strip; p is the operand. Of tokens 8..15 what codes lack of the highest one is multiplied, by minus P: so sums stay about
  // as small as centered ones, and what is missing is the same for all channels. (131,072 tokens in one warp at 2 bits, modelled with sums that are
  // cut off: plain codes 15 % off, so 0.09 %.)
  template <typename G, typename C>
  __device__ __forceinline__ void accumulate(uint32_t values, const uint32_t (&p)[NT][2], State& state) const {
#pragma unroll
    for (int j = 0; j < G::LOADS; ++j) {
      uint32_t words[G::LOAD];
      load_words<G>(values, j, words);
#pragma unroll
      for (int k = 0; k < G::PER_LOAD; ++k) {
        uint32_t a[4];
        G::fragment(words, k, a);
        if constexpr (G::CENTERED) a[2] ^= highest<G>(2), a[3] ^= highest<G>(3);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) mma_m16n8k16(state.o[j * G::PER_LOAD + k][nt], a, p[nt], C());
      }
    }
  }

  // Where this lane's token of rows 0..7 has its scale and zero.
  __device__ __forceinline__ uint32_t parameters_of(uint32_t parameters) const { return parameters + (lane >> 2) * 4; }
  // What scores are taken less of: nothing before a soft cap.
  __device__ __forceinline__ static void minus_shifts(const State& state, float (&shift)[NT][2]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) shift[nt][i] = CAPPED ? 0.0f : -state.shift(nt, i);
  }
  // P of a packed unit's tokens, from its keys.
  __device__ __forceinline__ void weigh_packed(uint32_t at, const uint32_t (&queries)[TILES][NT][2], const float (&query_sum)[NT][2],
                                               float (&s)[STRIPS][NT][4], State& state, const Cursor& c, int unit) const {
    float sums[NT][4] = {}, middle[NT][4] = {};
    score<Keys, KEY_SCALES, STRIPS, KeyType>(at, at + KEY_BYTES, queries, s, sums, middle);
    const float key_scale = scale * Keys::UNIT * (KEY_SCALES == PER_HEAD ? head_scales[c.head] : 1.0f);
    float bias[NT][2];
    minus_shifts(state, bias);
    if constexpr (KEY_SCALES == PER_CHANNEL) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 2; ++i) bias[nt][i] += (sums[nt][i] + Keys::MIDDLE * sums[nt][2 + i]) * scale + middle[nt][i] * key_scale;
    }
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      float scales[2] = {key_scale, key_scale / Keys::ROW_FACTOR}, zeros[2] = {scale, scale};
      if constexpr (KEY_SCALES == PER_TOKEN) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t p = load_shared_32(parameters_of(at + KEY_BYTES) + (strip * 16 + i * 8) * 4);
          scales[i] *= low_of(p, half()), zeros[i] *= high_of(p, half());
        }
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float zero = KEY_SCALES == PER_TOKEN ? query_sum[nt][i & 1] * zeros[i >> 1] + bias[nt][i & 1] : bias[nt][i & 1];
          s[strip][nt][i] = s[strip][nt][i] * scales[i >> 1] + zero;
        }
    }
    soften<STRIPS>(s, state, c.u, token_of(c.u, unit), c.pass);
  }
  __device__ __forceinline__ void add_packed(uint32_t at, const float (&s)[STRIPS][NT][4], State& state) const {
    const uint32_t highest_codes[4] = {highest<Values>(0), highest<Values>(1), highest<Values>(2), highest<Values>(3)};
    float taken[NT][4] = {};  // the highest code times signed P; in every lane the whole of it
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
      uint32_t p[NT][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        half2 scales;
        float zero;  // of the middle code
        if constexpr (has_zero(VALUE)) {
          const uint32_t pair = load_shared_32(parameters_of(at + VALUE_BYTES) + (strip * 16 + i * 8) * 4);
          const half2 parameters = *reinterpret_cast<const half2*>(&pair);
          scales = __half2half2(__low2half(parameters));
          zero = __high2float(__hfma2(scales, __float2half2_rn(0.5f * Values::HIGHEST), parameters));
          if (i == 1 && Values::COLUMN_FACTOR != 1.0f) scales = __hmul2(scales, __float2half2_rn(1.0f / Values::COLUMN_FACTOR));
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const float low = s[strip][nt][2 * i], high = s[strip][nt][2 * i + 1];
          if constexpr (has_zero(VALUE)) {
            state.zeros[nt][0] += low * zero, state.zeros[nt][1] += high * zero;
            p[nt][i] = pack_pair(i == 0 ? low : -low, i == 0 ? high : -high, half());
            p[nt][i] = transpose(multiply_pairs(p[nt][i], *reinterpret_cast<const uint32_t*>(&scales)));
          } else {
            p[nt][i] = transpose(pack_pair(low, high, ValueType()));
          }
        }
      }
      accumulate<Values, ValueType>(at + strip * Values::BYTES, p, state);
      if constexpr (Values::CENTERED) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) mma_m16n8k16(taken[nt], highest_codes, p[nt], ValueType());
      }
    }
    if constexpr (Values::CENTERED) {  // half of it; eight lanes' zeros are one sum
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 2; ++i) state.zeros[nt][i] -= taken[nt][i] * (Values::UNIT / 16);
    }
  }
  // The same of sixteen tokens of the window.
  __device__ __forceinline__ void weigh_window(uint32_t at, const uint32_t (&queries)[TILES][NT][2], float (&s)[1][NT][4], State& state,
                                               const Cursor& c, int first) const {
    float none[NT][4], shift[NT][2];
    minus_shifts(state, shift);
    score<Rows, NO_SCALES, 1, T>(at, at, queries, s, none, none);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][nt][i] = s[0][nt][i] * scale + shift[nt][i & 1];
    soften<1>(s, state, c.u, first, c.pass);
  }
  // `left`: how many of the sixteen are tokens.
  __device__ __forceinline__ void add_window(uint32_t at, const float (&s)[1][NT][4], State& state, int left) const {
    if (left < 16) {  // rows that hold no token may hold anything, NaN too, which a P of zero does not silence
      for (int f = 0; f < TILES; ++f)
        for (int i = 0; i < 4; ++i) {
          const int token = (lane & 3) * 2 + (i >> 1) * 8;
          const uint32_t address = at + (f * 32 + lane) * 16 + i * 4;
          if (token + 1 >= left) store_shared_32(address, token >= left ? 0u : load_shared_32(address) & 0xffffu);
        }
      if constexpr (BULK) fence_before_bulk_copies();
    }
    uint32_t p[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) p[nt][i] = transpose(pack_pair(s[0][nt][2 * i], s[0][nt][2 * i + 1], T()));
    accumulate<Rows, T>(at, p, state);
  }
  // From units of packed values' codes to values.
  __device__ __forceinline__ void scale_packed(State& state, const Cursor& c) const {
    if constexpr (VALUE == FLOAT) return;
    const float unit = Values::UNIT * (VALUE == FP8 ? head_scales[heads + c.head] : 1.0f);
#pragma unroll
    for (int f = 0; f < TILES; ++f)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[f][nt][i] *= i < 2 ? unit : unit / Values::ROW_FACTOR;
  }

  // The sums of the queries over the channels: what a token's zero is multiplied by.
  __device__ __forceinline__ void sum_queries(const uint32_t (&queries)[TILES][NT][2], float (&query_sum)[NT][2]) const {
    constexpr uint32_t ONE = 0x3c003c00u, ONES[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float d[4] = {};
#pragma unroll
      for (int f = 0; f < TILES; ++f) {
        const uint32_t b[2] = {as_half(queries[f][nt][0]), as_half(queries[f][nt][1])};
        mma_m16n8k16(d, ONES, b, half());
      }
      query_sum[nt][0] = d[0], query_sum[nt][1] = d[1];
    }
  }

  // One answer: four channels of a column, whose P sum up to `sum` under the maximum `top`.
  __device__ __forceinline__ void emit(const Cursor& c, int column, int channel, float4 v, float top, float sum, T* out, float* lse) const {
    const int n = c.pass * COLUMNS + column, head = c.head * GROUP + n % GROUP;
    if constexpr (SINKS) {
      const float sink = sinks[head] * LOG2_E, higher = fmaxf(top, sink), factor = exp2_fast(top - higher);
      sum = sum * factor + exp2_fast(sink - higher), top = higher;
      v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
    }
    const int64_t row = (int64_t(c.sequence) * q_len + n / GROUP) * (heads * GROUP) + head;
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const uint2 pairs = {pack_pair(v.x * inverse, v.y * inverse, T()), pack_pair(v.z * inverse, v.w * inverse, T())};
    *reinterpret_cast<uint2*>(out + row * HEAD_DIM + channel) = pairs;
    if constexpr (LSE) {
      if (channel == 0) lse[row] = sum > 0.0f ? (top + log2f(sum)) * LN_2 : -INFINITY;
    }
  }

  // The end of a piece: its warps' results are added up; so are, by the block that comes last, those of the blocks that share the segment.
  __device__ __forceinline__ void finish(State& state, const Cursor& c, int begin, int blocks, int total, float* sums, void* workspace, T* out,
                                         float* lse) const {
    const int thread = threadIdx.x;
    float* tops = sums + WARPS * COLUMNS * SUM_PITCH;  // [warp][column]{maximum, sum}
    __syncthreads();                                   // nobody reads the last piece's any more
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = state.sum[nt][i], zeros = state.zeros[nt][i];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, step);
          if constexpr (has_zero(VALUE)) zeros += __shfl_xor_sync(0xffffffffu, zeros, step);
        }
        const int column = nt * 8 + (lane & 3) * 2 + i;
        if (lane < 4) tops[(warp * COLUMNS + column) * 2] = state.top[nt][i], tops[(warp * COLUMNS + column) * 2 + 1] = sum;
        float* to = sums + (warp * COLUMNS + column) * SUM_PITCH + (lane >> 2);
#pragma unroll
        for (int f = 0; f < TILES; ++f) to[f * 16] = state.o[f][nt][i] + zeros, to[f * 16 + 8] = state.o[f][nt][i + 2] + zeros;
      }
    __syncthreads();
    const bool first_here = begin <= c.base, whole = first_here && c.piece_end() == c.base + c.u.total;
    const int columns = min(COLUMNS, GROUP * q_len - c.pass * COLUMNS);
    float* parts = static_cast<float*>(workspace) + TICKETS;
    float* mine = parts + (2 * int64_t(blockIdx.x) + first_here) * PART;
    for (int e = thread * 4; e < columns * HEAD_DIM; e += THREADS * 4) {
      const int column = e / HEAD_DIM, channel = e % HEAD_DIM;
      float top = NOTHING, sum = 0.0f;
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[(w * COLUMNS + column) * 2]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 theirs = *reinterpret_cast<const float2*>(tops + (w * COLUMNS + column) * 2);
        add(v, sum, *reinterpret_cast<const float4*>(sums + (w * COLUMNS + column) * SUM_PITCH + channel), theirs.y, exp2_fast(theirs.x - top));
      }
      if (whole) {
        emit(c, column, channel, v, top, sum, out, lse);
      } else {
        __stcg(reinterpret_cast<float4*>(mine + e), v);
        if (channel == 0) __stcg(reinterpret_cast<float2*>(mine + COLUMNS * HEAD_DIM) + column, make_float2(top, sum));
      }
    }
    if (whole) return;
    // Block b's units are from b * total / blocks, so unit x belongs to block ((x + 1) * blocks - 1) / total.
    const int first = ((int64_t(c.base) + 1) * blocks - 1) / total;
    const int shares = int(((int64_t(c.base) + c.u.total) * blocks - 1) / total) - first + 1;
    if (take_ticket<THREADS, 1>(static_cast<unsigned int*>(workspace) + first, shares - 1, thread) != shares - 1) return;
    for (int e = thread * 4; e < columns * HEAD_DIM; e += THREADS * 4) {
      const int column = e / HEAD_DIM, channel = e % HEAD_DIM;
      float top = NOTHING, sum = 0.0f;
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
      constexpr int AT_ONCE = 8;  // parts that are on their way from L2 together (16: 5 % slower at 1 x 32,768 tokens)
      for (int share = 0; share < shares; share += AT_ONCE) {
        float4 part[AT_ONCE];
        float2 theirs[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const bool there = share + i < shares;
          const float* from = parts + (2 * int64_t(first + (there ? share + i : 0)) + (share + i == 0 || !there)) * PART;
          part[i] = __ldcg(reinterpret_cast<const float4*>(from + e));
          theirs[i] = __ldcg(reinterpret_cast<const float2*>(from + COLUMNS * HEAD_DIM) + column);
          if (!there) theirs[i] = make_float2(NOTHING, 0.0f);
        }
        float higher = top;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) higher = fmaxf(higher, theirs[i].x);
        const float factor = exp2_fast(top - higher);
        sum *= factor, v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor, top = higher;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
          if (share + i < shares) add(v, sum, part[i], theirs[i].y, exp2_fast(theirs[i].x - top));
      }
      emit(c, column, channel, v, top, sum, out, lse);
    }
  }
  __device__ __forceinline__ static void add(float4& v, float& sum, float4 part, float part_sum, float weight) {
    sum += part_sum * weight;
    v.x += part.x * weight, v.y += part.y * weight, v.z += part.z * weight, v.w += part.w * weight;
  }

  // A sequence of which nothing is to be seen.
  __device__ __forceinline__ void answer_nothing(int sequence, T* out, float* lse) const {
    const int elements = q_len * heads * GROUP * HEAD_DIM;
    for (int e = threadIdx.x; e < elements; e += THREADS) {
      out[int64_t(sequence) * elements + e] = from_float(0.0f, T());
      if (LSE && e % HEAD_DIM == 0)
        lse[(int64_t(sequence) * elements + e) / HEAD_DIM] = SINKS ? sinks[e / HEAD_DIM % (heads * GROUP)] : -INFINITY;
    }
  }

  // How many blocks share `total` units. All at least have a unit for every warp. Where all sequences are alike, a few fewer blocks than the
  // grid has are taken if none of them then cuts a segment that it could have had as a whole, or in equal parts with others (128 x 1,024 tokens
  // at 4 bits, with queries that are loaded a piece ahead: 57 us, so 43; H200).
  __device__ __forceinline__ int sharers(int total) const {
    const int most = max(1, min(int(gridDim.x), total / WARPS)), segments = batch * heads * passes;
    if (segments == 0 || total % segments != 0) return most;
    const int each = (segments + most - 1) / most, even = segments <= most ? most - most % segments : segments / each;
    return segments % each == 0 && even * 8 >= most * 7 ? even : most;
  }

  __device__ __forceinline__ void wait_for_copies(int stage, int phase) const {
    if constexpr (BULK) {
      mbarrier_wait(barrier(stage), phase);
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
      __syncwarp();
    }
  }

  __device__ __forceinline__ void run(void* shared, void* workspace, T* out, float* lse) {
    ring = shared_address(shared), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float* sums = reinterpret_cast<float*>(static_cast<char*>(shared) + RING_BYTES + BARRIER_BYTES);
    if constexpr (BULK) {
      policy = evict_first();
      if (lane < STAGES) mbarrier_init(barrier(lane), ARRIVALS);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      __syncwarp();
    }
    passes = (GROUP * q_len + COLUMNS - 1) / COLUMNS;

    int begin = 0, end = 0, blocks = 1;
    const auto share = [&](int total) {
      blocks = sharers(total);
      const int block = min(int(blockIdx.x), blocks);
      begin = int64_t(total) * block / blocks, end = blockIdx.x < blocks ? int64_t(total) * (block + 1) / blocks : begin;
      return begin;
    };
    const Place place = locate<THREADS>(batch, [&](int b) { return units(lengths[b]).total * heads * passes; }, share);
    Cursor c = {};
    c.base = begin, c.end = end;
    if (begin < end) {
      c.sequence = place.sequence, c.u = units(lengths[c.sequence]);
      const int segment = (begin - place.first) / c.u.total;
      c.head = segment / passes, c.pass = segment % passes, c.base = place.first + segment * c.u.total;
    }

    Cursor ahead = c;  // requests run STAGES slots ahead
    int requested = begin + warp, requested_end = c.piece_end(), key_source = 0, value_source = 0;
    const auto find_sources = [&] {
      while (requested >= requested_end) {
        if (!ahead.more()) return;
        next_segment(ahead);
        requested = ahead.base + warp, requested_end = ahead.piece_end();
      }
      key_source = source_of<false>(ahead, requested - ahead.base);
      value_source = ONE_PAGE ? key_source : source_of<true>(ahead, requested - ahead.base);
    };
    // Slots hold a unit's keys and its values by turns.
    const auto request_next = [&](int stage, bool values) {
      if (requested < requested_end) {
        if (values) {
          request<true>(ahead, requested - ahead.base, value_source, stage);
          requested += WARPS;
          find_sources();
        } else {
          request<false>(ahead, requested - ahead.base, key_source, stage);
        }
      }
      if constexpr (!BULK) asm volatile("cp.async.commit_group;" ::: "memory");
    };
    find_sources();
    // The preceding kernel of a dependent launch may write the queries, the window, and what the newest q_len tokens fill of the pages; lengths
    // and tables must be older, also than the kernel before that one where that one was launched so too. All that is settled is asked for before it
    // has ended (32 x 4,096 tokens at 4 bits: 40.0 us, so 35.2; H200).
    bool waited = !BULK;
    const auto wait = [&] {
      if (waited) return;
      wait_for_predecessor();
      launch_dependents();  // only now: all but what this kernel writes is settled for the next one, which reads early, too
      waited = true;
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      if (requested < requested_end && !settled(ahead, requested - ahead.base)) wait();
      request_next(stage, stage % 2);
    }
    wait();

    int stage = 0, phase = 0;
    const auto next_slot = [&](bool values) {  // from one of a unit's keys, or values
      __syncwarp();  // all lanes have read this one
      request_next(stage, (values + STAGES) % 2);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    uint32_t queries[TILES][NT][2];
    if (c.more()) load_queries(c, queries);
    while (c.more()) {
      float query_sum[NT][2];
      State state;
      if constexpr (KEY_SCALES == PER_TOKEN) sum_queries(queries, query_sum);
      clear(state);
      bool scaled = false;
      for (int x = c.piece_begin(begin) + warp; x < c.piece_end(); x += WARPS) {
        const int unit = x - c.base;
        wait_for_copies(stage, phase);
        if (c.packed(unit)) {
          float s[STRIPS][NT][4] = {};
          weigh_packed(slot(stage), queries, query_sum, s, state, c, unit);
          next_slot(false);
          wait_for_copies(stage, phase);
          add_packed(slot(stage), s, state);
        } else {
          if (!scaled) scale_packed(state, c), scaled = true;
          const int first = c.u.packed + (unit - c.u.packed_units) * 16;
          float s[1][NT][4] = {};
          weigh_window(slot(stage), queries, s, state, c, first);
          next_slot(false);
          wait_for_copies(stage, phase);
          add_window(slot(stage), s, state, c.u.length - first);
        }
        next_slot(true);
      }
      if (!scaled) scale_packed(state, c);
      Cursor next = c;
      next_segment(next);
      if (next.more()) load_queries(next, queries);  // they arrive while this piece is finished
      finish(state, c, begin, blocks, place.total, sums, workspace, out, lse);
      c = next;
    }
    for (int b = blockIdx.x; b < batch; b += gridDim.x)
      if (units(lengths[b]).total == 0) answer_nothing(b, out, lse);
  }
};

// The whole kernel. `scale` and `cap`: as in Decode.
template <typename D, typename T>
__device__ __forceinline__ void decode_attention(void* shared, const void* q, const void* pages, const void* windows, const void* tables, const void* slots,
                                                 const void* lengths, const void* head_scales, const void* sinks, void* workspace, void* out, void* lse,
                                                 int batch, int q_len, int heads, int max_pages, float scale, float cap) {
  D d;
  d.q = static_cast<const T*>(q), d.pages = static_cast<const char*>(pages), d.windows = static_cast<const char*>(windows);
  d.tables = static_cast<const int*>(tables), d.slots = static_cast<const int*>(slots), d.lengths = static_cast<const int*>(lengths);
  d.head_scales = static_cast<const float*>(head_scales), d.sinks = static_cast<const float*>(sinks);
  d.batch = batch, d.q_len = q_len, d.heads = heads, d.max_pages = max_pages, d.scale = scale, d.cap = cap;
  d.run(shared, workspace, static_cast<T*>(out), static_cast<float*>(lse));
}

}  // namespace tilebit
