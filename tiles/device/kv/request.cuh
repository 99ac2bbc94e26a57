// Copies of a unit's keys or values into a slot of a warp's ring: from its page, from parts of
// several pages, or from the 16-bit window. `launch` is a Decode, `cursor` where requests have come
// to. Comes after decode.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename D>
struct Requests {
  using Cursor = typename D::Cursor;
  using P = typename D::P;
  using Rows = typename D::Rows;
  static constexpr int KEY_SCALES = D::KEY_SCALES, RESIDUAL = D::RESIDUAL, PAGE = D::PAGE, UNIT = D::UNIT;
  static constexpr int KEY_BYTES = D::KEY_BYTES, VALUE_BYTES = D::VALUE_BYTES, ARRIVALS = D::ARRIVALS;
  static constexpr int KEY_PARAMETERS = D::KEY_PARAMETERS, VALUE_PARAMETERS = D::VALUE_PARAMETERS;
  static constexpr int PIECES = D::PIECES, SLICES = D::SLICES, KEY_COPIES = D::KEY_COPIES, VALUE_COPIES = D::VALUE_COPIES;
  static constexpr bool BULK = D::BULK, ONE_PAGE = D::ONE_PAGE;

  // The page (of a packed unit) or the window that this lane will copy keys or values from; asked
  // for one unit ahead, because it is loaded.
  template <bool VALUES>
  __device__ __forceinline__ static int source(const void* launch, const void* cursor, int unit) {
    const D& d = view<D>(launch);
    const Cursor& c = view<Cursor>(cursor);
    if (!c.packed(unit)) return d.slots[c.sequence];
    int token = D::token_of(c.u, unit), piece = ONE_PAGE ? 0 : d.lane;
    if (!ONE_PAGE && d.lane >= PIECES) {
      piece -= PIECES;
      if (!VALUES && KEY_SCALES == PER_CHANNEL) token = token / RESIDUAL * RESIDUAL;
    }
    if (!ONE_PAGE && d.lane >= (VALUES ? VALUE_COPIES : KEY_COPIES)) return 0;
    return d.tables[uint32_t(c.sequence) * d.max_pages + token / PAGE + piece];  // 2^32 of them would be 16 GiB
  }
  template <bool VALUES>
  __device__ __forceinline__ static void request(const void* launch, const void* cursor, int unit, int source, int stage) {
    const D& d = view<D>(launch);
    const Cursor& c = view<Cursor>(cursor);
    if (!c.packed(unit)) {
      const char* from = d.windows + (int64_t(source) * d.heads + c.head) * P::WINDOW_BYTES + (VALUES ? P::WINDOW_VALUES_AT : 0);
      if (requests(d, stage, Rows::BYTES)) copy(d, d.slot(stage), from + (unit - c.u.packed_units) * Rows::BYTES, Rows::BYTES, stage);
      if constexpr (ARRIVALS > 1) mbarrier_arrive_after_copies(d.barrier(stage));
      return;
    }
    // Of a page's tokens before the unit, how many bytes come before its codes, or its parameters.
    constexpr int CODES = UNIT / PIECES * (VALUES ? P::VALUE_TOKEN : P::KEY_TOKEN), TOKEN = VALUES ? P::VALUE_TOKEN : P::KEY_TOKEN;
    constexpr bool BY_CHANNEL = !VALUES && KEY_SCALES == PER_CHANNEL;
    constexpr int PARAMETERS = BY_CHANNEL ? KEY_PARAMETERS / most(1, SLICES) : VALUES || SLICES ? UNIT / PIECES * P::PAIR_BYTES : 0;
    constexpr int TOTAL = VALUES ? VALUE_BYTES + VALUE_PARAMETERS : KEY_BYTES + KEY_PARAMETERS;
    int codes_at = VALUES ? P::VALUES_AT : 0, parameters_at = VALUES ? P::VALUE_PARAMETERS_AT : P::KEY_PARAMETERS_AT;
    if constexpr (PAGE > UNIT) {
      const int in_page = D::token_of(c.u, unit) % PAGE;
      codes_at += in_page * TOKEN, parameters_at += BY_CHANNEL ? in_page / RESIDUAL * P::GROUP_RECORD : in_page * P::PAIR_BYTES;
    }
    const char* page = record_of(d, source, c.head);
    const uint32_t parameters_to = d.slot(stage) + (VALUES ? VALUE_BYTES : KEY_BYTES);
    if constexpr (ONE_PAGE) {
      if (requests(d, stage, TOTAL)) {
        copy(d, d.slot(stage), page + codes_at, CODES, stage);
        if constexpr ((VALUES ? VALUE_COPIES : KEY_COPIES) > 1) copy(d, parameters_to, page + parameters_at, PARAMETERS, stage);
      }
    } else {
      copy_pieces<CODES>(d, d.slot(stage), page + codes_at, stage);
      if constexpr (PARAMETERS > 0) copy_slices<TOTAL - PIECES * CODES, PARAMETERS>(d, parameters_to, c.head, source, parameters_at);
      if constexpr (ARRIVALS > 1) mbarrier_arrive_after_copies(d.barrier(stage));
    }
  }
  // Whether this lane makes the copies of a slot, of `total` bytes, that all lanes know: bulk
  // copies are one lane's.
  __device__ __forceinline__ static bool requests(const D& d, int stage, int total) {
    if constexpr (BULK) {
      if (!elect()) return false;
      mbarrier_expect(d.barrier(stage), total);
    }
    return true;
  }
  __device__ __forceinline__ static void copy(const D& d, uint32_t to, const char* from, int bytes, int stage) {
    if constexpr (BULK) {
      bulk_copy(to, from, bytes, d.barrier(stage), d.policy);
    } else {
      for (int at = d.lane * 16; at < bytes; at += 512) cp_async_16(to + at, from + at, true);
    }
  }
  __device__ __forceinline__ static const char* record_of(const D& d, int page, int head) {
    return d.pages + uint64_t(uint32_t(page) * d.heads + head) * P::PAGE_BYTES;  // 2^32 records would be 2 TiB
  }
  // A slot's parameters, of which lane PIECES + i knows the page of the i-th slice: not bulk
  // copies, which small ones hold up.
  template <int BYTES, int SLICE>
  __device__ __forceinline__ static void copy_slices(const D& d, uint32_t to, int head, int source, int at) {
#pragma unroll
    for (int first = 0; first < BYTES; first += 512) {
      const int byte = first + d.lane * 16, page = __shfl_sync(0xffffffffu, source, PIECES + min(byte, BYTES - 16) / SLICE);
      if (byte < BYTES) cp_async_16(to + byte, record_of(d, page, head) + at + byte % SLICE, true);
    }
  }
  // A slot's codes in PIECES of BYTES, of which lane i knows where the i-th comes `from`.
  template <int BYTES>
  __device__ __forceinline__ static void copy_pieces(const D& d, uint32_t to, const char* from, int stage) {
    if constexpr (BULK) {
      if (d.lane == 0) mbarrier_expect(d.barrier(stage), PIECES * BYTES);  // a copy that lands before it waits for it
      if (d.lane < PIECES) copy(d, to + d.lane * BYTES, from, BYTES, stage);
    } else {  // one after another, all lanes together
      for (int piece = 0; piece < PIECES; ++piece) {
        const uint64_t from_there = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(from), piece);
        copy(d, to + piece * BYTES, reinterpret_cast<const char*>(from_there), BYTES, stage);
      }
    }
  }
};

}  // namespace tilebit
