// What one block of decode attention knows: its launch's operands, the sizes of a slot, and the
// line of units that the blocks share.
//
// A unit is UNIT packed tokens of a key head, or sixteen of its window. The units of all segments,
// a (sequence, key head, pass over columns) each, stand in one line. Leaves get the launch, the
// cursor and arrays of registers as the addresses of what the program declares (tiles/attention/
// decode.py). Comes after granule.cuh, page.cuh and sequences.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

__host__ __device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int least(int a, int b) { return a < b ? a : b; }

// S, written by the program: what the cache holds and where things lie in it (page.cuh), and of the
// kernel: GROUP, query heads of a key head; UNIT, tokens of a packed unit; NT, 8-column tiles of a
// pass; WARPS of a block and STAGES of a warp's ring; WINDOW, 0 or the tokens that a query sees,
// itself included; SINK_TOKENS, the first ones that it sees besides; SINKS, whether heads have a
// logit of no token; CAPPED, whether scores pass through a soft cap; LSE, whether the log-sum-exp
// is wanted; BULK, whether copies are bulk copies; FULL_WINDOWS, whether 128 newest tokens are in the
// window; LAUNCH_BYTES, of the array that a launch is kept in.
template <typename S>
struct Decode : S {
  using Keys = Granule<S::KEY, S::HEAD_DIM>;
  using Values = Granule<S::VALUE, S::HEAD_DIM>;
  using Rows = Granule<FLOAT, S::HEAD_DIM>;  // of the residual window
  using T = typename S::T;
  using P = S;  // of a page
  using KeyType = std::conditional_t<S::KEY == FLOAT, T, half>;  // of the operands of a packed unit
  using ValueType = std::conditional_t<S::VALUE == FLOAT, T, half>;
  static constexpr int UNIT = S::UNIT, PAGE = S::PAGE, WARPS = S::WARPS, STAGES = S::STAGES, KEY_SCALES = S::KEY_SCALES;
  static constexpr int RESIDUAL = S::RESIDUAL;
  static constexpr int STRIPS = UNIT / 16, TILES = S::HEAD_DIM / 16, COLUMNS = 8 * S::NT, THREADS = 32 * WARPS;
  static constexpr int KEY_BYTES = UNIT * P::KEY_TOKEN, VALUE_BYTES = UNIT * P::VALUE_TOKEN;  // parameters lie behind the codes
  static constexpr int KEY_PARAMETERS = KEY_SCALES == PER_CHANNEL ? P::GROUP_RECORD : KEY_SCALES == PER_TOKEN ? UNIT * P::PAIR_BYTES : 0;
  static constexpr int VALUE_PARAMETERS = has_zero(S::VALUE) ? UNIT * P::PAIR_BYTES : 0;
  // A slot holds the keys of a unit or its values: in halves, so that twice as many warps find
  // room.
  static constexpr int SLOT_BYTES = most(Rows::BYTES, most(KEY_BYTES + KEY_PARAMETERS, VALUE_BYTES + VALUE_PARAMETERS));
  static constexpr int RING_BYTES = WARPS * STAGES * SLOT_BYTES;
  // Pieces that a unit's keys or values, its channel parameters come in: pages, or parts of one.
  static constexpr int PIECES = PAGE < UNIT ? UNIT / PAGE : 1;
  static constexpr int SLICES = KEY_SCALES == PER_CHANNEL ? (PAGE < RESIDUAL ? RESIDUAL / PAGE : 1) : KEY_SCALES == PER_TOKEN ? PIECES : 0;
  static constexpr bool ONE_PAGE = PIECES == 1 && SLICES <= 1;  // has them all
  static constexpr int KEY_COPIES = PIECES + SLICES, VALUE_COPIES = VALUE_PARAMETERS ? 2 * PIECES : PIECES;
  // At a slot's barrier: of the lane that asks for bulk copies, and of all lanes where they copy
  // parameters from several pages.
  static constexpr int ARRIVALS = S::BULK && !ONE_PAGE && KEY_COPIES + VALUE_COPIES > 2 * PIECES ? 33 : 1;
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
    u.length = length, u.packed = (S::FULL_WINDOWS ? max(length - 1, 0) : length) / RESIDUAL * RESIDUAL;
    int packed_units = u.packed / UNIT, window_units = (length - u.packed + 15) / 16;
    u.sink = 0, u.skipped = 0;
    if constexpr (S::WINDOW > 0) {
      const int lowest = max(0, length - q_len - S::WINDOW + 1);  // the first position in the first query's window
      u.sink = min((S::SINK_TOKENS + UNIT - 1) / UNIT, packed_units);
      u.skipped = max(0, min(lowest / UNIT, packed_units) - u.sink);
      packed_units -= u.skipped;
    }
    u.packed_units = packed_units, u.total = packed_units + window_units;
    return u;
  }
  // First token of a packed unit.
  __device__ __forceinline__ static int token_of(const Units& u, int unit) { return (unit < u.sink ? unit : unit + u.skipped) * UNIT; }

  // A place in the block's share of the line, which ends with unit `end`: a segment, which begins
  // with unit `base`.
  struct Cursor {
    int sequence, head, pass, base, end;
    Units u;
    __device__ __forceinline__ bool packed(int unit) const { return unit < u.packed_units; }
  };

  __device__ __forceinline__ uint32_t slot(int stage) const { return ring + (warp * STAGES + stage) * SLOT_BYTES; }
  __device__ __forceinline__ uint32_t barrier(int stage) const { return ring + RING_BYTES + (warp * STAGES + stage) * 8; }

  // ---- leaves ----
  __device__ __forceinline__ static void open(void* launch, void* shared, const void* q, const void* pages, const void* windows, const int* tables,
                                              const int* slots, const int* lengths, const void* head_scales, const void* sinks, int batch, int q_len,
                                              int heads, int max_pages, int passes, float scale, float cap) {
    static_assert(sizeof(Decode) <= S::LAUNCH_BYTES, "the program's array holds a launch");
    Decode& d = view<Decode>(launch);
    d.q = static_cast<const T*>(q), d.pages = static_cast<const char*>(pages), d.windows = static_cast<const char*>(windows);
    d.tables = tables, d.slots = slots, d.lengths = lengths;
    d.head_scales = static_cast<const float*>(head_scales), d.sinks = static_cast<const float*>(sinks);
    d.batch = batch, d.q_len = q_len, d.heads = heads, d.max_pages = max_pages, d.passes = passes, d.scale = scale, d.cap = cap;
    d.ring = shared_address(shared), d.lane = threadIdx.x & 31, d.warp = threadIdx.x >> 5;
  }
  // Barriers of a warp's slots.
  __device__ __forceinline__ static void open_ring(void* launch) {
    Decode& d = view<Decode>(launch);
    d.policy = evict_first();
    if (d.lane < STAGES) mbarrier_init(d.barrier(d.lane), ARRIVALS);
    fence_barriers();
  }
  __device__ __forceinline__ static void await_slot(const void* launch, int stage, int phase) {
    mbarrier_wait(view<Decode>(launch).barrier(stage), phase);
  }
  // How many units all sequences have; `line` is what `find` looks for one in.
  __device__ __forceinline__ static int count(const void* launch, int* line) {
    const Decode& d = view<Decode>(launch);
    view<Line>(line) = line_up<THREADS>(d.batch, [&](int b) { return d.units(d.lengths[b]).total * d.heads * d.passes; });
    return view<Line>(line).total;
  }
  // How many of `blocks` blocks share a segment, where each is dealt one part of one segment or some
  // whole ones, so that none has parts of two; 0: they take equal shares instead, because too many
  // of them would have nothing, or one would have SLACK turns of its warps more than the mean. A cut
  // costs a meeting of a block's warps, and a ticket (16 x about 4,096 tokens at 4 bits, a segment a
  // block: 23.2 us, cut 26.3; H200).
  static constexpr int SLACK = 2;
  __device__ __forceinline__ static int parts(const void* launch, int total, int blocks) {
    const Decode& d = view<Decode>(launch);
    const int segments = d.batch * d.heads * d.passes;
    if (segments == 0) return 0;
    const int found = max(1, blocks / segments), each = (segments + blocks - 1) / blocks, used = segments * found / each;
    if (used * 8 < blocks * 7) return 0;
    bool fair = true;
    for (int b = threadIdx.x; b < d.batch; b += THREADS) {
      const int units = d.units(d.lengths[b]).total;
      fair = fair && units >= found && int64_t((units + found - 1) / found * each - SLACK * WARPS) * used <= total;
    }
    return __syncthreads_and(fair) ? found : 0;
  }
  // The first segment that `block` is dealt of those that are in `parts` parts each; the units of
  // its share, the first of which is returned, are counted from this segment on.
  __device__ __forceinline__ static int deal(const void* launch, int block, int blocks, int parts, int* cursor) {
    const Decode& d = view<Decode>(launch);
    const int of_sequence = d.heads * d.passes, segments = d.batch * of_sequence, each = (segments + blocks - 1) / blocks;
    int segment = block / parts * each, left = min(each, segments - segment), from = 0;
    Cursor c = {};
    if (left > 0) {
      c.sequence = segment / of_sequence, segment %= of_sequence;
      c.head = segment / d.passes, c.pass = segment % d.passes, c.u = d.units(d.lengths[c.sequence]);
      if (parts > 1) {
        from = c.u.total * (block % parts) / parts, c.end = c.u.total * (block % parts + 1) / parts;
      } else {
        for (int b = c.sequence; left > 0; ++b, segment = 0) {
          const int here = min(left, of_sequence - segment);
          c.end += here * d.units(d.lengths[b]).total, left -= here;
        }
      }
    }
    view<Cursor>(cursor) = c;
    return from;
  }
  // The segment of unit `begin`, of a share that ends with unit `end`.
  __device__ __forceinline__ static void find(const void* launch, const int* line, int begin, int end, int* cursor) {
    const Decode& d = view<Decode>(launch);
    const Place place =
        find_item<THREADS>(view<Line>(line), d.batch, [&](int b) { return d.units(d.lengths[b]).total * d.heads * d.passes; }, begin);
    Cursor c = {};
    c.base = begin, c.end = end;
    if (begin < end) {
      c.sequence = place.sequence, c.u = d.units(d.lengths[c.sequence]);
      const int segment = (begin - place.first) / c.u.total;
      c.head = segment / d.passes, c.pass = segment % d.passes, c.base = place.first + segment * c.u.total;
    }
    view<Cursor>(cursor) = c;
  }
  // To the next segment.
  __device__ __forceinline__ static void advance(const void* launch, int* cursor) {
    const Decode& d = view<Decode>(launch);
    Cursor& c = view<Cursor>(cursor);
    c.base += c.u.total;
    if (++c.pass < d.passes) return;
    c.pass = 0;
    if (++c.head < d.heads) return;
    c.head = 0;
    do {
      if (++c.sequence >= d.batch) return;  // then base == end
      c.u = d.units(d.lengths[c.sequence]);
    } while (c.u.total == 0);
  }
  __device__ __forceinline__ static int units_of(const void* launch, int length) { return view<Decode>(launch).units(length).total; }
  __device__ __forceinline__ static int token(const int* cursor, int unit) { return token_of(view<Cursor>(cursor).u, unit); }
  // Whether a unit's tokens were packed before the newest q_len came.
  __device__ __forceinline__ static bool settled(const void* launch, const int* cursor, int unit) {
    const Cursor& c = view<Cursor>(cursor);
    return c.packed(unit) && token_of(c.u, unit) + UNIT <= (c.u.length - view<Decode>(launch).q_len) / RESIDUAL * RESIDUAL;
  }
};

}  // namespace tilebit
