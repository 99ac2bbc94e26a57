// Asynchronous copies that a thread asks for in one go. Comes after ptx/instructions.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

// Packed weights of ROWS rows, RECORDS records deep, from row `offset` of a record on: a record has
// 64 rows of 32 bytes. `from`: the record that holds the first row; those above it are k_tiles
// records further. To [record][row].
template <int ROWS>
constexpr int SPANNED = 64 % ROWS == 0 ? 1 : (ROWS + 48 + 63) / 64;  // records, one above another, in which the rows may lie

// One bulk copy for each record that they lie in; one thread asks for them.
template <int ROWS, int RECORDS>
__device__ __forceinline__ void bulk_copy_weights(SharedAddress to, const void* from_, int offset, int k_tiles, SharedAddress barrier,
                                                  uint64_t policy) {
  constexpr int COPIES = ROWS == 64 ? 1 : RECORDS;  // 64 rows are all of a record: records follow each other
  const char* from = static_cast<const char*>(from_);
#pragma unroll
  for (int r = 0; r < COPIES; ++r)
#pragma unroll
    for (int above = 0; above < 64 * SPANNED<ROWS>; above += 64) {
      const int first = max(above - offset, 0), rows = SPANNED<ROWS> == 1 ? ROWS : min(above + 64 - offset, ROWS) - first;
      if (above < ROWS || rows > 0)
        bulk_copy(to.address + (r * ROWS + first) * 32, from + above / 64 * k_tiles * 2048 + r * 2048 + max(offset - above, 0) * 32,
                  rows * 32 * (RECORDS / COPIES), barrier, policy);
    }
}

// 16 bytes a lane of each 16 rows.
template <int ROWS, int RECORDS>
__device__ __forceinline__ void async_copy_weights(SharedAddress to, const void* from_, int offset, int k_tiles, int lane) {
  const char* from = static_cast<const char*>(from_) + offset * 32 + lane * 16;
#pragma unroll
  for (int r = 0; r < RECORDS; ++r)
#pragma unroll
    for (int row = 0; row < ROWS; row += 16) {
      const int above = SPANNED<ROWS> == 1 ? 0 : (offset + row) / 64;  // records
      cp_async_16(to.address + (r * ROWS + row) * 32 + lane * 16, from + (above * (k_tiles - 1) + r) * 2048 + row * 32, true);
    }
}

// 16 bytes of each of rows `row`, row + STEP, row + 2 STEP ... below ROWS, which lie `stride` bytes
// apart, to rows of PITCH bytes; `to` and `from` are those of the first. Of all (`whole`), or only
// of those below `there`. Zeros where they are not `inside`.
template <int ROWS, int STEP, int PITCH>
__device__ __forceinline__ void async_copy_rows(SharedAddress to, const void* from_, int stride, int row, int there, bool whole, bool inside) {
  const char* from = fresh(static_cast<const char*>(from_));  // found once, not for each row anew
  const bool all = ROWS == 1 || whole;
#pragma unroll
  for (int i = 0; i < ROWS; i += STEP)
    if ((i + STEP <= ROWS || row + i < ROWS) && (all || row + i < there))
      cp_async_16(to.address + i * PITCH, from + int64_t(i) * stride, inside);
}

// 16 bytes of one of two places.
__device__ __forceinline__ void async_copy_either(SharedAddress to, const void* one, const void* other, bool first, bool inside) {
  cp_async_16(to, first ? one : other, inside);
}

}  // namespace tilebit
