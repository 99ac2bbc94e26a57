// What follows a product: what each part does to a sum, and with which number. Comes after
// store/epilogue.cuh.
#pragma once
#include <stdint.h>
#include <string.h>

namespace tilebit {

// Parts of what follows a product (schedules/gemm/parts.py): what is done to a sum with the number
// of its output channel, or (OfRow) of its row of x, or (OfElement) of both. Operand: Number [output
// channel], [m] or [m][N], as kernels pass it.
enum class Axis { CHANNEL, ROW, ELEMENT };
template <typename T>
struct Multiply {
  static constexpr Axis AXIS = Axis::CHANNEL;
  using Number = T;
  using Operand = const void*;
  __device__ __forceinline__ static float apply(float sum, float number) { return sum * number; }
};
template <typename T>
struct Add {
  static constexpr Axis AXIS = Axis::CHANNEL;
  using Number = T;
  using Operand = const void*;
  __device__ __forceinline__ static float apply(float sum, float number) { return sum + number; }
};
// Says where a sum goes, and leaves it as it is: the column of y of its row of the weight, or ADDED.
template <typename T>
struct Place {
  static constexpr Axis AXIS = Axis::CHANNEL;
  using Number = T;
  using Operand = const void*;
  __device__ __forceinline__ static float apply(float sum, float) { return sum; }
};
template <typename P>
struct OfRow : P {
  static constexpr Axis AXIS = Axis::ROW;
};
template <typename P>
struct OfElement : P {
  static constexpr Axis AXIS = Axis::ELEMENT;
};
__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(int v) { return __int2float_rn(v); }
// A part reads a number of each output channel; one of the parts reads numbers of rows of x.
template <typename P>
constexpr bool OF_CHANNEL = P::AXIS == Axis::CHANNEL;
template <typename P>
constexpr bool ADDS = false;  // its number to a sum
template <typename T>
constexpr bool ADDS<Add<T>> = true;
template <typename... Parts>
constexpr bool HAS_ROWS = ((Parts::AXIS == Axis::ROW) || ...);
template <typename P>
__device__ __forceinline__ float number_of(typename P::Operand operand, int64_t at) {
  return to_float(static_cast<const typename P::Number*>(operand)[at]);
}

template <typename P>
__device__ __forceinline__ float number_in(uint32_t bits) {
  typename P::Number number;
  memcpy(&number, &bits, sizeof(number));
  return to_float(number);
}

}  // namespace tilebit
