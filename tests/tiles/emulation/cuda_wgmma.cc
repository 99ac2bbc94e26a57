// The bodies of cuda_wgmma.h. Comes after cuda_ptx.cc.

namespace tilebit_host {
constexpr int PLAIN_ALIGNED = 128;  // what a box without a swizzle begins at a multiple of, bytes
// Where byte `address` of shared memory lies under the swizzle of 128 bytes.
static uint32_t swizzled(uint32_t address) { return address ^ (address / SWIZZLED_ROW % 8 * 16); }
void load_box(const CUtensorMap& map, void* barrier, void* to, std::initializer_list<int> corner) {
  const int* first = corner.begin();
  Mbarrier& told = mbarrier(__cvta_generic_to_shared(barrier));
  const uint32_t target = __cvta_generic_to_shared(to);
  if (int(corner.size()) != map.rank) fault = "a load has another rank than its tensor map";
  const bool plain = map.swizzle == CUtensorMap::SWIZZLE_NONE;
  const int row_bytes = map.box[0] * map.element_bytes;
  if (plain ? row_bytes % 16 != 0 : map.swizzle != CUtensorMap::SWIZZLE_128B || row_bytes != SWIZZLED_ROW) fault = "a tensor map that the emulation does not know";
  if (target % (plain ? PLAIN_ALIGNED : 8 * SWIZZLED_ROW)) fault = "a box is not aligned to what its swizzle repeats after";
  if (fault) return;
  int64_t rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
  for (int64_t row = 0; row < rows; ++row) {
    const char* from = map.base + first[0] * map.element_bytes;
    bool inside = first[0] >= 0;
    for (int64_t d = 1, rest = row; d < map.rank; rest /= map.box[d++]) {
      const int64_t at = first[d] + rest % map.box[d];
      inside &= 0 <= at && at < map.dims[d], from += at * map.strides[d];
    }
    for (int chunk = 0; chunk < row_bytes; chunk += 16) {  // a row ends with whole ones
      const uint32_t at = target + row * row_bytes + chunk;
      bulk_copies.push_back(issue(plain ? at : swizzled(at), from + chunk, 16, inside && first[0] + (chunk + 16) / map.element_bytes <= map.dims[0] ? 16 : 0, &told));
    }
  }
}
// The lower 32 bits of a matrix descriptor are changed as numbers; here they are the address in units of 16 bytes, then those of 14 bits each.
struct Matrix {
  uint32_t address, leading, stride;
  explicit Matrix(uint64_t descriptor) : address((descriptor & 0x3fff) * 16), leading((descriptor >> 16 & 0x3fff) * 16), stride((descriptor >> 32 & 0x3fff) * 16) {
    if (descriptor >> 62 != 1) fault = "a matrix descriptor whose swizzle the emulation does not know";
  }
  // Element (row, k) of 16 bits; rows lie along k, 64 elements each, eight rows together (PTX ISA: K-major), ...
  uint32_t along_k(int row, int k) const { return swizzled(address + row / 8 * stride + row % 8 * SWIZZLED_ROW + k * 2); }
  // ... or k is the row, and 64 elements of a line are together (MN-major).
  uint32_t across_k(int row, int k) const { return swizzled(address + row / 64 * leading + k / 8 * stride + k % 8 * SWIZZLED_ROW + row % 64 * 2); }
};

// The eight elements that lie together from `address` on, a multiple of 16 bytes: no swizzle parts them.
template <typename T>
static void elements(uint32_t address, double* to, int step) {
  if (address + 16 > SHARED_BYTES) {
    fault = "a product reads past the end of shared memory";
    for (int i = 0; i < 8; ++i) to[i * step] = 0;
    return;
  }
  uint16_t bits[8];
  memcpy(bits, async_view[rank()].data() + address, 16);
  for (int i = 0; i < 8; ++i) to[i * step] = number<T>(bits[i], 0);
}

// A warp's 16 rows of d [64, columns] (+)= a [64, 16] @ b [16, columns]; where a lane has what of a and d is mma.m16n8k16's place, column by column.
// A sum is in the order of k.
template <typename T>
static void wgmma_rows(void** lanes) {
  const auto lane_of = [&](int lane) -> const WarpProduct& { return *static_cast<const WarpProduct*>(lanes[lane]); };
  const WarpProduct& first = lane_of(0);
  const Matrix b(first.b);
  static double left[16][16], right[16][256], sums[256];
  for (int row = 0; row < 16; ++row)
    if (first.registers) {
      for (int k = 0; k < 16; ++k) left[row][k] = number<T>(lane_of(row % 8 * 4 + k % 8 / 2).registers[row / 8 + k / 8 * 2], k % 2);
    } else {
      for (int k = 0; k < 16; k += 8) elements<T>(Matrix(first.a).along_k(first.warp * 16 + row, k), &left[row][k], 1);
    }
  if (first.across) {
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < first.columns; column += 8) elements<T>(b.across_k(column, k), &right[k][column], 1);
  } else {
    for (int column = 0; column < first.columns; ++column)
      for (int k = 0; k < 16; k += 8) elements<T>(b.along_k(column, k), &right[k][column], 256);
  }
  for (int row = 0; row < 16; ++row) {
    const auto of_sum = [&](int column) -> float& {
      return lane_of(row % 8 * 4 + column % 8 / 2).d[column / 8 * 4 + row / 8 * 2 + column % 2];
    };
    for (int column = 0; column < first.columns; ++column) sums[column] = first.keep ? of_sum(column) : 0.0f;
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < first.columns; ++column) sums[column] += left[row][k] * right[k][column];
    for (int column = 0; column < first.columns; ++column) of_sum(column) = float(sums[column]);
  }
}

template <typename T>
void issue_product(int columns, bool across, const uint32_t* registers, uint64_t a, uint64_t b, float* d, bool keep) {
  me().issued.push_back({wgmma_rows<T>, columns, across, me().thread / WARP % 4, registers, a, b, d, keep});
}
template void issue_product<half>(int, bool, const uint32_t*, uint64_t, uint64_t, float*, bool);
template void issue_product<__nv_bfloat16>(int, bool, const uint32_t*, uint64_t, uint64_t, float*, bool);

void commit_products() {
  Fiber& fiber = me();
  fiber.product_groups.push_back(fiber.issued.size());
  if (late_products) return;
  for (WarpProduct& product : fiber.issued) collective("wgmma", &product, product.rows);
  fiber.issued.clear(), fiber.product_groups.back() = 0;
}
void await_products(size_t left) {
  Fiber& fiber = me();
  if (fiber.product_groups.size() <= left) return;
  if (late_products) let_others_go_first();
  const size_t done = fiber.product_groups[fiber.product_groups.size() - 1 - left];
  for (size_t i = 0; i < done; ++i) collective("wgmma", &fiber.issued[i], fiber.issued[i].rows);
  fiber.issued.erase(fiber.issued.begin(), fiber.issued.begin() + done);
  fiber.product_groups.erase(fiber.product_groups.begin(), fiber.product_groups.end() - left);
  for (size_t& count : fiber.product_groups) count -= done;
}
}  // namespace tilebit_host
