// What generated code calls of TileLang's own headers, and its names of types. Comes after cuda_ptx.h and cuda_wgmma.h.
#pragma once

using half_t = half;
using bfloat16_t = __nv_bfloat16;
struct fp8_e4_t {
  uint8_t bits;
};
using uint = unsigned;
using uchar = unsigned char;
struct uint1 {
  uint32_t x;
};

// A barrier in shared memory (CUTLASS's ClusterTransactionBarrier).
struct Barrier {
  uint64_t state;
  uint32_t address() { return __cvta_generic_to_shared(this); }
  void init(int arrivals) { ptx_mbarrier_init_shared__cta_b64(address(), arrivals); }
  void arrive() { ptx_mbarrier_arrive_shared__cta_b64(address()); }
  void expect_transaction(int bytes) { tilebit_host::mbarrier(address()).change(0, bytes); }
  void wait(int parity) { ptx_mbarrier_try_wait_parity_shared__cta_b64(address(), parity); }
};

namespace tl {

enum class DataType { kFloat16, kBFloat16, kFloat32, kInt8, kInt32, kFloat8_e4m3 };
template <DataType>
struct Stored;
template <>
struct Stored<DataType::kFloat16> {
  using T = half;
};
template <>
struct Stored<DataType::kBFloat16> {
  using T = __nv_bfloat16;
};

inline void cp_async_commit() { ptx_cp_async_commit_group(); }
template <int N>
void cp_async_wait() { ptx_cp_async_wait_group(N); }
template <int BYTES>
void cp_async_gs_conditional(const void* to, const void* from, bool there) {
  ptx_cp_async_ca_shared_global(__cvta_generic_to_shared(to), from, BYTES, there ? BYTES : 0);
}
template <int BYTES>
void cp_async_gs(const void* to, const void* from) { cp_async_gs_conditional<BYTES>(to, from, true); }
inline void __sync_thread_partial(int barrier, int threads) { ptx_bar_sync(barrier, threads); }
inline void cluster_arrive_relaxed() { ptx_barrier_cluster_arrive_relaxed_aligned(); }
inline void cluster_wait() { ptx_barrier_cluster_wait_acquire_aligned(); }
inline void cluster_sync() { cluster_arrive_relaxed(), cluster_wait(); }
inline void fence_barrier_init() { ptx_fence_mbarrier_init_release_cluster(); }
inline void fence_proxy_async() { ptx_fence_proxy_async_shared__cta(); }
template <int REGISTERS>
void warpgroup_reg_alloc() {}
template <int REGISTERS>
void warpgroup_reg_dealloc() {}

// One thread of the block, or of each group of THREADS.
template <int THREADS>
bool tl_shuffle_elect() { return (THREADS ? threadIdx.x % max(THREADS, 1) : threadIdx.x) == 0; }

// ---- mma.sync ----
inline void ptx_ldmatrix_x4(const void* from, void* to) {
  uint32_t* r = static_cast<uint32_t*>(to);
  ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(r[0], r[1], r[2], r[3], __cvta_generic_to_shared(from));
}
inline void ptx_ldmatrix_x4_trans(const void* from, void* to) {
  uint32_t* r = static_cast<uint32_t*>(to);
  ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(r[0], r[1], r[2], r[3], __cvta_generic_to_shared(from));
}
inline void ptx_ldmatrix_x2(const void* from, void* to) {
  uint32_t* r = static_cast<uint32_t*>(to);
  ptx_ldmatrix_sync_aligned_m8n8_x2_shared_b16(r[0], r[1], __cvta_generic_to_shared(from));
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool, bool>
void mma_sync(unsigned* sums, const unsigned* a, const unsigned* b) {
  static_assert(A == DataType::kInt8 && A == B && C == DataType::kInt32 && M == 16 && N == 8 && K == 32, "a product that the emulation does not know");
  int* d = reinterpret_cast<int*>(sums);
  ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], 0, 0, 0, 0);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool, bool>
void mma_sync(float* d, const unsigned* a, const unsigned* b) {
  static_assert(A == B && C == DataType::kFloat32 && M == 16 && N == 8, "a product that the emulation does not know");
  if constexpr (A == DataType::kFloat8_e4m3) {
    static_assert(K == 32, "a product that the emulation does not know");
    ptx_mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], 0, 0, 0, 0);
  } else {
    static_assert(K == 16, "a product that the emulation does not know");
    tilebit_host::mma<typename Stored<A>::T>(d[0], d[1], d[2], d[3], {a[0], a[1], a[2], a[3]}, {b[0], b[1]});
  }
}

// ---- tensor maps and wgmma ----
inline void prefetch_tma_descriptor(const CUtensorMap*) {}
enum class CacheHintSm90 { EVICT_NORMAL, EVICT_FIRST };
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, typename... Corner>
void tma_load(const CUtensorMap* map, Barrier& barrier, void* to, Corner... corner) {
  tilebit_host::load_box(*map, &barrier, to, {int(corner)...});
}

struct GmmaDescriptor {
  uint64_t bits = 0;
  template <typename T>
  GmmaDescriptor operator+(T offset) const { return {(bits & ~0xffffffffull) | uint32_t(uint32_t(bits) + uint32_t(offset))}; }
  explicit operator uint64_t() const { return bits; }
};
template <int LAYOUT, int LEADING, int STRIDE, typename T>
void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* start) {
  descriptor.bits = uint64_t(LAYOUT) << 62 | uint64_t(STRIDE) << 32 | uint64_t(LEADING) << 16 | __cvta_generic_to_shared(start) >> 4;
}
template <typename T>
void increase_descriptor_offset(GmmaDescriptor& descriptor, T offset) { descriptor = descriptor + (offset >> 4); }

template <typename T>
void warpgroup_fence_operand(T*, int) {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() { tilebit_host::commit_products(); }
template <int LEFT>
void wait_wgmma() { tilebit_host::await_products(LEFT); }
template <DataType A, DataType B, DataType C, int M, int N, int K, bool A_ACROSS, bool B_ACROSS, int, int>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* d, bool keep) {
  static_assert(A == B && C == DataType::kFloat32 && M == 64 && K == 16 && !A_ACROSS, "a product that the emulation does not know");
  tilebit_host::issue_product<typename Stored<A>::T>(N, B_ACROSS, nullptr, a, b, reinterpret_cast<float*>(d), keep);
}
template <DataType A, DataType B, DataType C, int M, int N, int K, bool A_ACROSS, bool B_ACROSS, int, int>
void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* d, bool keep) {
  static_assert(A == B && C == DataType::kFloat32 && M == 64 && K == 16 && !A_ACROSS, "a product that the emulation does not know");
  tilebit_host::issue_product<typename Stored<A>::T>(N, B_ACROSS, a, 0, b, reinterpret_cast<float*>(d), keep);
}

}  // namespace tl
