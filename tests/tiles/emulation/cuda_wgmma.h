// Products of warpgroups (wgmma) and loads through tensor maps, on host memory. Comes after cuda_ptx.h.
//
// Both are of the asynchronous proxy: what they read and write is `async_view` (cuda_ptx.h), which a thread's own stores reach at a proxy fence.
#pragma once

// What cuTensorMapEncodeTiled makes of a tensor, the innermost dimension first; generated_kernel.py has the same fields.
struct CUtensorMap {
  static constexpr int MAX_RANK = 5, SWIZZLE_NONE = 0, SWIZZLE_128B = 3;
  const char* base;
  int64_t dims[MAX_RANK], strides[MAX_RANK], box[MAX_RANK];  // elements, bytes, elements
  int32_t rank, element_bytes, swizzle;
};

namespace tilebit_host {

constexpr int SWIZZLED_ROW = 128;  // bytes: its 16-byte chunks are exchanged among themselves

// Starts the load of a box: each of its rows a copy; zeros past the tensor's ends.
void load_box(const CUtensorMap& map, void* barrier, void* to, std::initializer_list<int> corner);

// wgmma of a warp, of 16-bit floats T: its rows of d [64, columns] (+)= a [64, 16] @ b [16, columns].
template <typename T>
void issue_product(int columns, bool across, const uint32_t* registers, uint64_t a, uint64_t b, float* d, bool keep);

// In every second call products are as late as the program allows: when they are waited for, and nobody else can go on; else at once.
void commit_products();
void await_products(size_t left);

}  // namespace tilebit_host
