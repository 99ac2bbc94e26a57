// The PTX that the device headers use, on host memory. Names are the instructions' (dots and colons are underscores), arguments their operands in the
// order of the text. Copies land as late as the program allows, and what they are about to overwrite is spoilt when they are issued.
//
// A shared address is an offset into the block's memory, in a cluster with the block's rank plus one in the bits from RANK_SHIFT on.
#pragma once

namespace tilebit_host {

constexpr int RANK_SHIFT = 24, SPOILT = 0x7e, SHARED_BYTES = 228 << 10;

char* at(uint32_t address);

// As `at`, for an instruction that wants a multiple of `alignment`.
char* at(uint32_t address, uint32_t alignment);

// 64 bits: arrivals of a phase and its parity; arrivals and bytes that the current phase still waits for.
struct Mbarrier {
  uint32_t state;  // parity | arrivals of a phase << 1
  int32_t pending : 10, bytes : 22;

  uint32_t parity() const { return state & 1; }
  void init(int arrivals) { state = uint32_t(arrivals) << 1, pending = arrivals, bytes = 0; }
  void change(int arrivals, int more_bytes) {
    if (arrivals > pending && !fault) fault = "a barrier was told of more arrivals than its phase waits for";
    pending -= arrivals, bytes += more_bytes;
    if (pending == 0 && bytes == 0) state ^= 1, pending = int32_t(state >> 1);
  }
};
Mbarrier& mbarrier(uint32_t address);

// ---- the asynchronous proxy ----
// Shared memory as bulk copies and wgmma see it: threads' own stores are there after a proxy fence. Only of whole kernels.
extern std::vector<char> async_view[MAX_BLOCKS];
// Barriers that were initialized, and by whom, since whose fence they may be used by copies and by other blocks.
extern std::vector<std::pair<Mbarrier*, const Fiber*>> fresh_barriers;

void begin_kernel();
void check_fenced(const void* barrier);
// Where a copy's write to `to` shows, too. Also cp.async's, which formally is none of that proxy: what has landed is there for everyone.
char* viewed(char* to, int bytes);

// How much was copied of each tensor, ever.
extern int64_t copied_bytes[MAX_TENSORS];

// Starts a copy; outside of the tensors is nothing to read.
Copy issue(uint32_t to, const void* source, int bytes, int read, void* barrier);
void land(const Copy& copy);
// The bulk copies that report to a barrier land: when it is waited for, or when nobody can go on before.
void land_all_of(const void* barrier);
bool land_oldest();
// The thread's oldest copies land, until `left` are in flight.
void land_until(size_t left);

// mma.m16n8k16 of 16-bit floats T.
template <typename T>
void mma(float& d0, float& d1, float& d2, float& d3, const uint32_t (&a)[4], const uint32_t (&b)[2]);

}  // namespace tilebit_host

uint32_t __cvta_generic_to_shared(const void* p);

// ---- matrices ----
#define TILEBIT_MMA(name, T)                                                                                                             \
  inline void name(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, \
                   float, float, float, float) {                                                                                         \
    tilebit_host::mma<T>(d0, d1, d2, d3, {a0, a1, a2, a3}, {b0, b1});                                                                    \
  }
TILEBIT_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, half)
TILEBIT_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, __nv_bfloat16)
void ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(int& d0, int& d1, int& d2, int& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                                                                uint32_t a3, uint32_t b0, uint32_t b1, int, int, int, int);
// Of e4m3: of 32 products and the sum so far each keeps the bits down to 2^-13 of the largest one's highest (Hopper).
void ptx_mma_sync_aligned_m16n8k256_row_col_s32_b1_b1_s32_and_popc(int& d0, int& d1, int& d2, int& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                                                                   uint32_t a3, uint32_t b0, uint32_t b1, int, int, int, int);
void ptx_mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                                                             uint32_t a3, uint32_t b0, uint32_t b1, float, float, float, float);

// Lane l addresses row l % 8 of matrix l / 8 and receives elements (l / 4, 2 (l % 4) + half) of each.
void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address);
// As many of them as registers: lanes 0 to 15 address.
void ptx_ldmatrix_sync_aligned_m8n8_x2_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t address);
// .trans: lane l receives elements (2 (l % 4) + half, l / 4) of each.
void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address);
// stmatrix.m8n8.x4.trans.b16: after .trans, lane l holds elements (row 2 (l % 4) + e, column l / 4) of each matrix.
void host_stmatrix_x4_trans(void* address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3);
// Lane l brings elements (l / 4, 2 (l % 4) + half) of a matrix and receives those of its transpose.
void ptx_movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& to, uint32_t from);
inline void ptx_prefetch_global_L2(const void*) {}
void ptx_ld_global_v4_u32(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, const void* from);
void ptx_ld_shared_v4_u32(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address);
void ptx_ld_shared_v2_u32(uint32_t& r0, uint32_t& r1, uint32_t address);
void ptx_ld_shared_u16(uint16_t& r, uint32_t address);
void ptx_ld_shared_u32(uint32_t& r, uint32_t address);
void ptx_st_global_v4_u32(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
void ptx_st_shared_u32(uint32_t address, uint32_t v);
void ptx_st_shared_u8(uint32_t address, uint32_t v);
void ptx_st_shared_f32(uint32_t address, float v);

// ---- threads ----
void ptx_exit();
void ptx_mov_u32(int& to, int from);

// ---- arithmetic ----
// .ftz: subnormals are zeros, of the operand and of the result. Approximations are as good as fp32 can be.
float host_flushed(float v);
void ptx_ex2_approx_ftz_f32(float& to, float from);
void ptx_lg2_approx_ftz_f32(float& to, float from);
void ptx_rcp_approx_ftz_f32(float& to, float from);
void ptx_tanh_approx_f32(float& to, float from);
// The second operand is the lower half.
// The nearest of all finite e4m3 numbers, of two as near the one with an even code.
uint16_t host_e4m3(float x);
void ptx_cvt_rn_satfinite_e4m3x2_f32(uint16_t& to, float high, float low);
void ptx_cvt_rn_f16x2_f32(uint32_t& to, float high, float low);
void ptx_cvt_rn_bf16x2_f32(uint32_t& to, float high, float low);

// ---- barriers ----
void ptx_bar_sync(int barrier, int threads);
void ptx_bar_arrive(int barrier, uint32_t threads);
void ptx_mbarrier_init_shared__cta_b64(uint32_t barrier, int arrivals);
void ptx_fence_mbarrier_init_release_cluster();
void ptx_fence_proxy_async_shared__cta();
void ptx_mbarrier_arrive_shared__cta_b64(uint32_t barrier);
void ptx_mbarrier_arrive_shared__cluster_b64(uint32_t barrier);
void ptx_mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t barrier, int bytes);
void ptx_mbarrier_try_wait_parity_shared__cta_b64(uint32_t barrier, int parity);

// ---- one lane of a warp ----
inline bool elected = false;  // of the thread that asked last: the answer is taken before another one runs
void ptx_elect_sync();
void ptx_selp_u32(uint32_t& chosen, uint32_t a, uint32_t b);

// ---- copies ----
void ptx_cp_async_ca_shared_global(uint32_t to, const void* from, int bytes, int valid_bytes);
void ptx_cp_async_cg_shared_global(uint32_t to, const void* from, int bytes, int valid_bytes);
void ptx_cp_async_commit_group();
void ptx_cp_async_wait_group(int groups_left);
void ptx_cp_async_wait_all();
void ptx_cp_async_mbarrier_arrive_noinc_shared__cta_b64(uint32_t barrier);
void ptx_createpolicy_fractional_L2__evict_first_b64(uint64_t& policy, double);
void ptx_cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(uint32_t to, const void* from, int bytes,
                                                                                                 uint32_t barrier, uint64_t);

// ---- clusters ----
// Relaxed: of what a thread did before, others see only the barriers that it fenced.
void ptx_barrier_cluster_arrive_relaxed_aligned();
void ptx_barrier_cluster_wait_acquire_aligned();
void ptx_mapa_shared__cluster_u32(uint32_t& remote, uint32_t address, int rank);
// Lands when its barrier is waited for, where the blocks of the cluster run together; else at once.
void host_send_to_rank(float4* address, float4 value, void* barrier, int rank);
