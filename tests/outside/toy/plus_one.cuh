// The numbers 1 to 16: unsigned codes whose zero point is -1.
#pragma once

namespace toy {

struct PlusOne {
  static constexpr int BITS = 4;
  static constexpr float MIDDLE = -1.0f;
};

}  // namespace toy

namespace tilebit {

template <>
struct Row<half, toy::PlusOne> : Row<half, Uint<4>> {
  using Row<half, Uint<4>>::Row;
};

}  // namespace tilebit
