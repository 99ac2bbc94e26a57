// Activations of a gate, in fp32: what y is of a gate and of what it lets through.
#pragma once

namespace tilebit {

struct Silu {
  __device__ __forceinline__ static float apply(float gate) { return gate / (1.0f + __expf(-gate)); }
};
// GELU's tanh form is gate * sigmoid(2 inner), which loses nothing where 1 + tanh(inner) is small.
struct GeluTanh {
  __device__ __forceinline__ static float apply(float gate) {
    const float inner = 0.7978845608028654f * fmaf(0.044715f * gate * gate, gate, gate);
    return gate / (1.0f + __expf(-2.0f * inner));
  }
};
struct Gelu {
  __device__ __forceinline__ static float apply(float gate) { return 0.5f * gate * erfcf(-0.7071067811865476f * gate); }
};

// Of the sums of an MMA's rows r and r + 8, [row half][column parity] of each column tile, rows r
// become activation(gate) * up; rows r + 8, the ups, are left as they are and not stored.
template <typename ACTIVATION, int COUNT>
__device__ __forceinline__ void gate_sums(float* sums) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
#pragma unroll
    for (int e = 0; e < 2; ++e) sums[i + e] = ACTIVATION::apply(sums[i + e]) * sums[i + 2 + e];
}

}  // namespace tilebit
