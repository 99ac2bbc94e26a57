// The bodies of cuda_ptx.h. Comes after cuda_threads.cc.

namespace tilebit_host {
char* at(uint32_t address) {
  const int owner = address >> RANK_SHIFT ? (address >> RANK_SHIFT) - 1 : rank();
  if (owner >= place.blocks || has_left(owner)) {
    fault = owner >= place.blocks ? "an address lies in a block that the cluster does not have" : "an address lies in a block that has left the cluster";
    return place.shared[rank()];
  }
  const uint32_t offset = address & ((1u << RANK_SHIFT) - 1);
  if (place.shared[owner] && offset >= SHARED_BYTES) {
    fault = "an address lies past the end of shared memory";
    return place.shared[owner];
  }
  return place.shared[owner] + offset;
}
char* at(uint32_t address, uint32_t alignment) {
  if (address % alignment) fault = "a shared address is not aligned as its instruction wants it";
  return at(address - address % alignment);
}
Mbarrier& mbarrier(uint32_t address) { return *reinterpret_cast<Mbarrier*>(at(address)); }
std::vector<char> async_view[MAX_BLOCKS];
std::vector<std::pair<Mbarrier*, const Fiber*>> fresh_barriers;
void begin_kernel() {
  fresh_barriers.clear();
  for (int block = 0; block < place.blocks; ++block)
    async_view[block].assign(place.shared[block], place.shared[block] + SHARED_BYTES), unpublished[block] = unread[block] = false;
}
void check_fenced(const void* barrier) {
  for (const auto& [fresh, _] : fresh_barriers)
    if (fresh == barrier) fault = "a barrier is used that was initialized without a fence";
}
char* viewed(char* to, int bytes) {
  for (int block = 0; place.shared_bytes && block < place.blocks; ++block)
    if (const intptr_t at = to - place.shared[block]; 0 <= at && at + bytes <= SHARED_BYTES) return async_view[block].data() + at;
  return nullptr;
}
int64_t copied_bytes[MAX_TENSORS];
Copy issue(uint32_t to, const void* source, int bytes, int read, void* barrier) {
  const char* from = static_cast<const char*>(source);
  bool known = read == 0;
  for (int i = 0; i < MAX_TENSORS; ++i)
    if (const auto& [begin, end] = place.tensors[i]; read && begin <= from && from + read <= end) known = true, copied_bytes[i] += read;
  if (!known) fault = "a copy reads past the ends of the tensors";
  if (char* seen = viewed(at(to), bytes)) {
    if (barrier && memcmp(seen, at(to), bytes)) fault = "a bulk copy overwrites what threads stored without a proxy fence";
    memset(seen, SPOILT, bytes);
  }
  if (barrier) check_fenced(barrier);
  memset(at(to), SPOILT, bytes);
  return {at(to), from, bytes, read, barrier};
}
void land(const Copy& copy) {
  memset(copy.to, 0, copy.bytes);
  if (!fault) memcpy(copy.to, copy.from, copy.read);
  if (char* seen = viewed(copy.to, copy.bytes)) memcpy(seen, copy.to, copy.bytes);
  if (copy.barrier) static_cast<Mbarrier*>(copy.barrier)->change(0, -copy.bytes);
}
void land_all_of(const void* barrier) {
  const auto others = [&](const Copy& copy) { return copy.barrier != barrier; };
  const auto first = std::stable_partition(bulk_copies.begin(), bulk_copies.end(), others);
  std::for_each(first, bulk_copies.end(), land);
  bulk_copies.erase(first, bulk_copies.end());
}
bool land_oldest() {
  if (bulk_copies.empty()) return false;
  land_all_of(bulk_copies[0].barrier);
  return true;
}
void land_until(size_t left) {
  auto& copies = me().copies;
  const size_t landed = copies.size() - min(left, copies.size());
  for (size_t i = 0; i < landed; ++i) land(copies[i]);
  copies.erase(copies.begin(), copies.begin() + landed);
}

template <typename T>
static float number(uint32_t word, int half) {
  static const std::vector<float> all = [] {
    std::vector<float> table(1 << 16);
    for (int bits = 0; bits < 1 << 16; ++bits) {
      T v;
      v.bits = uint16_t(bits);
      table[bits] = float(v.value());
    }
    return table;
  }();
  return all[uint16_t(word >> (16 * half))];
}

// mma.m16n8k16 (PTX ISA): a[row + 8 (register & 1)][column + 8 (register >> 1)], row lane / 4, column 2 (lane % 4) + half; b[k][n]: k as A's
// column, n lane / 4; d[row + 8 (i >> 1)][2 (lane % 4) + (i & 1)]. Sums are rounded once: the exact ones of a test have nothing to round.
struct MmaOperands {
  uint32_t a[4], b[2];
  float d[4];
};
template <typename T>
static void mma_m16n8k16(void** lanes) {
  double a[16][16], b[16][8];
  for (int lane = 0; lane < WARP; ++lane) {
    const auto* o = static_cast<const MmaOperands*>(lanes[lane]);
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4, column = lane % 4 * 2 + half;
      for (int i = 0; i < 4; ++i) a[row + 8 * (i & 1)][column + 8 * (i >> 1)] = number<T>(o->a[i], half);
      for (int i = 0; i < 2; ++i) b[column + 8 * i][row] = number<T>(o->b[i], half);
    }
  }
  double d[16][8];
  for (int lane = 0; lane < WARP; ++lane)
    for (int i = 0; i < 4; ++i) d[lane / 4 + 8 * (i >> 1)][lane % 4 * 2 + (i & 1)] = static_cast<MmaOperands*>(lanes[lane])->d[i];
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < WARP; ++lane)
    for (int i = 0; i < 4; ++i) static_cast<MmaOperands*>(lanes[lane])->d[i] = float(d[lane / 4 + 8 * (i >> 1)][lane % 4 * 2 + (i & 1)]);
}
template <typename T>
void mma(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaOperands o = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d0, d1, d2, d3}};
  collective("mma", &o, mma_m16n8k16<T>);
  d0 = o.d[0], d1 = o.d[1], d2 = o.d[2], d3 = o.d[3];
}
template void mma<half>(float&, float&, float&, float&, const uint32_t (&)[4], const uint32_t (&)[2]);
template void mma<__nv_bfloat16>(float&, float&, float&, float&, const uint32_t (&)[4], const uint32_t (&)[2]);

}  // namespace tilebit_host

extern "C" __attribute__((visibility("default"))) int64_t host_copied_bytes(int tensor) { return tilebit_host::copied_bytes[tensor]; }
// What Python does to a barrier.
extern "C" __attribute__((visibility("default"))) void host_mbarrier_init(void* barrier, int arrivals) { static_cast<tilebit_host::Mbarrier*>(barrier)->init(arrivals); }
extern "C" __attribute__((visibility("default"))) int host_mbarrier_change(void* barrier, int arrivals, int bytes) {
  tilebit_host::fault = nullptr;
  static_cast<tilebit_host::Mbarrier*>(barrier)->change(arrivals, bytes);
  return tilebit_host::fault != nullptr;
}
uint32_t __cvta_generic_to_shared(const void* p) {
  using namespace tilebit_host;
  return uint32_t(static_cast<const char*>(p) - place.shared[rank()]);
}
// Bits: register i of A are 32 k, from 32 (lane % 4) + 128 (i >> 1) on, of row lane / 4 + 8 (i & 1); of B of column lane / 4.
void ptx_mma_sync_aligned_m16n8k256_row_col_s32_b1_b1_s32_and_popc(int& d0, int& d1, int& d2, int& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                                                                   uint32_t a3, uint32_t b0, uint32_t b1, int, int, int, int) {
  struct Lane {
    uint32_t a[4], b[2];
    int d[4];
  } mine = {{a0, a1, a2, a3}, {b0, b1}, {d0, d1, d2, d3}};
  tilebit_host::collective("mma", &mine, [](void** lanes) {
    uint32_t a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const auto* o = static_cast<const Lane*>(lanes[lane]);
      for (int i = 0; i < 4; ++i) a[lane / 4 + 8 * (i & 1)][lane % 4 + 4 * (i >> 1)] = o->a[i];
      for (int i = 0; i < 2; ++i) b[lane / 4][lane % 4 + 4 * i] = o->b[i];
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const uint32_t *row = a[lane / 4 + 8 * (i >> 1)], *column = b[lane % 4 * 2 + (i & 1)];
        for (int word = 0; word < 8; ++word) static_cast<Lane*>(lanes[lane])->d[i] += __builtin_popcount(row[word] & column[word]);
      }
  });
  d0 = mine.d[0], d1 = mine.d[1], d2 = mine.d[2], d3 = mine.d[3];
}
void ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(int& d0, int& d1, int& d2, int& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                                                                uint32_t a3, uint32_t b0, uint32_t b1, int, int, int, int) {
  struct Lane {
    uint32_t a[4], b[2];
    int d[4];
  } mine = {{a0, a1, a2, a3}, {b0, b1}, {d0, d1, d2, d3}};
  tilebit_host::collective("mma", &mine, [](void** lanes) {
    int8_t a[16][32], b[8][32];  // of b a row is a column of the product
    for (int lane = 0; lane < 32; ++lane) {
      const auto* o = static_cast<const Lane*>(lanes[lane]);
      for (int i = 0; i < 4; ++i) memcpy(&a[lane / 4 + 8 * (i & 1)][lane % 4 * 4 + 16 * (i >> 1)], &o->a[i], 4);
      for (int i = 0; i < 2; ++i) memcpy(&b[lane / 4][lane % 4 * 4 + 16 * i], &o->b[i], 4);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int8_t *row = a[lane / 4 + 8 * (i >> 1)], *column = b[lane % 4 * 2 + (i & 1)];
        int sum = 0;
        for (int k = 0; k < 32; ++k) sum += row[k] * column[k];
        static_cast<Lane*>(lanes[lane])->d[i] += sum;
      }
  });
  d0 = mine.d[0], d1 = mine.d[1], d2 = mine.d[2], d3 = mine.d[3];
}
// The number of a finite e4m3 code; of the others NaN.
static const std::vector<double> host_e4m3_numbers = [] {
  std::vector<double> table(256);
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = (code & 0x7f) == 0x7f ? NAN : exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    table[code] = code & 0x80 ? -size : size;
  }
  return table;
}();
void ptx_mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                                                             uint32_t a3, uint32_t b0, uint32_t b1, float, float, float, float) {
  struct Lane {
    uint32_t a[4], b[2];
    float d[4];
  } mine = {{a0, a1, a2, a3}, {b0, b1}, {d0, d1, d2, d3}};
  tilebit_host::collective("mma", &mine, [](void** lanes) {
    double a[16][32], b[8][32];  // of b a row is a column of the product
    for (int lane = 0; lane < 32; ++lane) {
      const auto* o = static_cast<const Lane*>(lanes[lane]);
      for (int byte = 0; byte < 4; ++byte) {
        const auto number = [byte](uint32_t word) { return host_e4m3_numbers[uint8_t(word >> (8 * byte))]; };
        for (int i = 0; i < 4; ++i) a[lane / 4 + 8 * (i & 1)][lane % 4 * 4 + 16 * (i >> 1) + byte] = number(o->a[i]);
        for (int i = 0; i < 2; ++i) b[lane / 4][lane % 4 * 4 + 16 * i + byte] = number(o->b[i]);
      }
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        float& d = static_cast<Lane*>(lanes[lane])->d[i];
        const double *row = a[lane / 4 + 8 * (i >> 1)], *column = b[lane % 4 * 2 + (i & 1)];
        double terms[33] = {d}, largest = fabs(double(d));
        bool finite = isfinite(d);
        for (int k = 0; k < 32; ++k) {
          terms[k + 1] = row[k] * column[k];
          const double size = fabs(terms[k + 1]);
          largest = size > largest ? size : largest, finite &= size == size;
        }
        if (!finite) {
          d = NAN;
          continue;
        }
        const double quantum = largest > 0 ? ldexp(1.0, ilogb(largest) - 13) : 1.0, quanta = 1 / quantum;
        int units = 0;  // of quanta, fewer than 2^14 of each of 33 terms
        for (const double term : terms) units += int(term * quanta);
        d = float(units * quantum);
      }
  });
  d0 = mine.d[0], d1 = mine.d[1], d2 = mine.d[2], d3 = mine.d[3];
}
void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  struct Lane {
    const char* row;
    uint32_t r[4];
  } mine = {tilebit_host::at(address, 16)};
  tilebit_host::collective("ldmatrix", &mine, [](void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        memcpy(&static_cast<Lane*>(lanes[lane])->r[i], static_cast<Lane*>(lanes[8 * i + lane / 4])->row + lane % 4 * 4, 4);
  });
  r0 = mine.r[0], r1 = mine.r[1], r2 = mine.r[2], r3 = mine.r[3];
}
void ptx_ldmatrix_sync_aligned_m8n8_x2_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t address) {
  uint32_t r2, r3;
  ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(r0, r1, r2, r3, address);
}
void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  struct Lane {
    const char* row;
    uint32_t r[4];
  } mine = {tilebit_host::at(address, 16), {0, 0, 0, 0}};
  tilebit_host::collective("ldmatrix", &mine, [](void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half) {
          uint16_t element;
          memcpy(&element, static_cast<Lane*>(lanes[8 * i + lane % 4 * 2 + half])->row + lane / 4 * 2, 2);
          static_cast<Lane*>(lanes[lane])->r[i] |= uint32_t(element) << (16 * half);
        }
  });
  r0 = mine.r[0], r1 = mine.r[1], r2 = mine.r[2], r3 = mine.r[3];
}
void host_stmatrix_x4_trans(void* address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  struct Lane {
    char* row;
    uint32_t r[4];
  } mine = {static_cast<char*>(address), {r0, r1, r2, r3}};
  tilebit_host::collective("stmatrix", &mine, [](void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) {
          const uint16_t element = uint16_t(static_cast<Lane*>(lanes[lane])->r[i] >> (16 * e));
          memcpy(static_cast<Lane*>(lanes[8 * i + 2 * (lane & 3) + e])->row + 2 * (lane >> 2), &element, 2);
        }
  });
}
void ptx_movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& to, uint32_t from) {
  struct Lane {
    uint32_t brings, receives;
  } mine = {from, 0};
  tilebit_host::collective("movmatrix", &mine, [](void** lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int half = 0; half < 2; ++half) {
        const int row = lane % 4 * 2 + half, column = lane / 4;
        const uint32_t found = static_cast<Lane*>(lanes[4 * row + column / 2])->brings >> (16 * (column % 2)) & 0xffff;
        static_cast<Lane*>(lanes[lane])->receives |= found << (16 * half);
      }
  });
  to = mine.receives;
}
void ptx_ld_global_v4_u32(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) tilebit_host::fault = "a load of 16 bytes is not aligned to them";
  const uint4* words = static_cast<const uint4*>(from);
  if (tilebit_host::in_a_tensor(words)) r0 = words->x, r1 = words->y, r2 = words->z, r3 = words->w;
}
void ptx_ld_shared_v4_u32(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  uint32_t v[4];
  memcpy(v, tilebit_host::at(address, 16), 16);
  r0 = v[0], r1 = v[1], r2 = v[2], r3 = v[3];
}
void ptx_ld_shared_v2_u32(uint32_t& r0, uint32_t& r1, uint32_t address) {
  uint32_t v[2];
  memcpy(v, tilebit_host::at(address, 8), 8);
  r0 = v[0], r1 = v[1];
}
void ptx_ld_shared_u16(uint16_t& r, uint32_t address) { memcpy(&r, tilebit_host::at(address, 2), 2); }
void ptx_ld_shared_u32(uint32_t& r, uint32_t address) { memcpy(&r, tilebit_host::at(address, 4), 4); }
void ptx_st_shared_u32(uint32_t address, uint32_t v) { memcpy(tilebit_host::at(address, 4), &v, 4); }
void ptx_st_shared_u8(uint32_t address, uint32_t v) { *tilebit_host::at(address) = char(v); }
void ptx_st_global_v4_u32(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  memcpy(to, words, 16);
}
void ptx_st_shared_f32(uint32_t address, float v) { memcpy(tilebit_host::at(address, 4), &v, 4); }
void ptx_exit() { tilebit_host::leave(); }
void ptx_mov_u32(int& to, int from) { to = from; }
float host_flushed(float v) { return fabsf(v) < 0x1p-126f ? copysignf(0.0f, v) : v; }
void ptx_ex2_approx_ftz_f32(float& to, float from) { to = host_flushed(float(exp2(double(host_flushed(from))))); }
void ptx_lg2_approx_ftz_f32(float& to, float from) { to = host_flushed(float(log2(double(host_flushed(from))))); }
void ptx_rcp_approx_ftz_f32(float& to, float from) { to = host_flushed(1.0f / host_flushed(from)); }
void ptx_tanh_approx_f32(float& to, float from) { to = float(tanh(double(from))); }
uint16_t host_e4m3(float x) {
  if (x != x) return 0x7f;
  const double size = fabs(double(x)), *numbers = host_e4m3_numbers.data();
  const int above = max(1, min(0x7e, int(std::lower_bound(numbers, numbers + 0x7f, size) - numbers)));
  const double over = numbers[above] - size, under = size - numbers[above - 1];
  const int nearest = over < under || (over == under && above % 2 == 0) ? above : above - 1;
  return uint16_t(nearest | (signbit(x) ? 0x80 : 0));
}
void ptx_cvt_rn_satfinite_e4m3x2_f32(uint16_t& to, float high, float low) { to = host_e4m3(high) << 8 | host_e4m3(low); }
void ptx_cvt_rn_f16x2_f32(uint32_t& to, float high, float low) { to = uint32_t(half(high).bits) << 16 | half(low).bits; }
void ptx_cvt_rn_bf16x2_f32(uint32_t& to, float high, float low) {
  to = uint32_t(__nv_bfloat16(high).bits) << 16 | __nv_bfloat16(low).bits;
}
void ptx_bar_sync(int barrier, int threads) { tilebit_host::meet(tilebit_host::meetings[tilebit_host::rank()][barrier], threads); }
void ptx_bar_arrive(int barrier, uint32_t threads) {
  tilebit_host::Meeting& meeting = tilebit_host::meetings[tilebit_host::rank()][barrier];
  if (++meeting.arrived == threads) meeting.arrived = 0, ++meeting.generation;
}
void ptx_mbarrier_init_shared__cta_b64(uint32_t barrier, int arrivals) {
  using namespace tilebit_host;
  mbarrier(barrier).init(arrivals);
  if (place.shared_bytes) fresh_barriers.push_back({&mbarrier(barrier), &me()});
}
void ptx_fence_mbarrier_init_release_cluster() {
  auto& fresh = tilebit_host::fresh_barriers;
  fresh.erase(std::remove_if(fresh.begin(), fresh.end(), [](const auto& b) { return b.second == &tilebit_host::me(); }), fresh.end());
}
void ptx_fence_proxy_async_shared__cta() {
  using namespace tilebit_host;
  if (place.shared_bytes) memcpy(async_view[rank()].data(), place.shared[rank()], place.shared_bytes);
}
void ptx_mbarrier_arrive_shared__cta_b64(uint32_t barrier) { tilebit_host::mbarrier(barrier).change(1, 0); }
void ptx_mbarrier_arrive_shared__cluster_b64(uint32_t barrier) {
  tilebit_host::check_fenced(&tilebit_host::mbarrier(barrier));
  tilebit_host::mbarrier(barrier).change(1, 0);
}
void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t barrier, int bytes) {
  tilebit_host::mbarrier(barrier).change(0, bytes);
  tilebit_host::mbarrier(barrier).change(1, 0);
}
void ptx_mbarrier_try_wait_parity_shared__cta_b64(uint32_t barrier, int parity) {
  using namespace tilebit_host;
  Mbarrier& waited_for = mbarrier(barrier);
  if (waited_for.parity() != uint32_t(parity)) return;
  land_all_of(&waited_for);
  if (waited_for.parity() == uint32_t(parity)) wait_for_change(&waited_for.state, waited_for.state);
}
void ptx_elect_sync() { elected = tilebit_host::me().thread % tilebit_host::WARP == 0; }
void ptx_selp_u32(uint32_t& chosen, uint32_t a, uint32_t b) { chosen = elected ? a : b; }
void ptx_cp_async_ca_shared_global(uint32_t to, const void* from, int bytes, int valid_bytes) {
  using namespace tilebit_host;
  if (to % bytes || reinterpret_cast<uintptr_t>(from) % bytes) fault = "a copy is not aligned to its bytes";
  me().copies.push_back(issue(to, from, bytes, valid_bytes, nullptr));
}
void ptx_cp_async_cg_shared_global(uint32_t to, const void* from, int bytes, int valid_bytes) {
  if (bytes != 16) tilebit_host::fault = "a copy past the first cache is of 16 bytes";
  ptx_cp_async_ca_shared_global(to, from, bytes, valid_bytes);
}
void ptx_cp_async_commit_group() { tilebit_host::me().groups.push_back(tilebit_host::me().copies.size()); }
void ptx_cp_async_wait_group(int groups_left) {
  using namespace tilebit_host;
  auto& groups = me().groups;
  if (groups.size() <= size_t(groups_left)) return;
  const size_t landed = groups[groups.size() - 1 - groups_left];
  land_until(me().copies.size() - landed);
  groups.erase(groups.begin(), groups.end() - groups_left);
  for (size_t& count : groups) count -= landed;
}
void ptx_cp_async_wait_all() {
  tilebit_host::land_until(0);
  tilebit_host::me().groups.clear();
}
void ptx_cp_async_mbarrier_arrive_noinc_shared__cta_b64(uint32_t barrier) {
  tilebit_host::land_until(0);
  tilebit_host::mbarrier(barrier).change(1, 0);
}
void ptx_createpolicy_fractional_L2__evict_first_b64(uint64_t& policy, double) { policy = 1; }
void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(uint32_t to, const void* from, int bytes,
                                                                                                 uint32_t barrier, uint64_t) {
  using namespace tilebit_host;
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) fault = "a bulk copy is not aligned to 16 bytes";
  bulk_copies.push_back(issue(to, from, bytes, bytes, &mbarrier(barrier)));
}
void ptx_barrier_cluster_arrive_relaxed_aligned() {
  for (const auto& [barrier, owner] : tilebit_host::fresh_barriers)
    if (owner == &tilebit_host::me()) tilebit_host::check_fenced(barrier);
}
void ptx_barrier_cluster_wait_acquire_aligned() {
  tilebit_host::meet(tilebit_host::cluster_meeting, tilebit_host::running_blocks* tilebit_host::block_threads);
}
void ptx_mapa_shared__cluster_u32(uint32_t& remote, uint32_t address, int rank) {
  remote = uint32_t(rank + 1) << tilebit_host::RANK_SHIFT | address;
}
void host_send_to_rank(float4* address, float4 value, void* barrier, int rank) {
  using namespace tilebit_host;
  const uint32_t there = uint32_t(rank + 1) << RANK_SHIFT;
  char* to = at(there | __cvta_generic_to_shared(address));
  Mbarrier& told = mbarrier(there | __cvta_generic_to_shared(barrier));
  check_fenced(&told);
  sent_values.push_back(value);
  const Copy copy = {to, reinterpret_cast<const char*>(&sent_values.back()), sizeof value, sizeof value, &told};
  if (running_blocks == 1) return land(copy);
  memset(to, SPOILT, sizeof value);
  bulk_copies.push_back(copy);
}
