// The sum of partial results under different maxima: of a block's warps, through shared memory, and
// of the blocks that share a segment, through a workspace (store/split_k.cuh has its tickets).
// Comes after softmax.cuh and store/split_k.cuh.
#pragma once
#include <stdint.h>

namespace tilebit {

template <typename D>
struct Reduce {
  using T = typename D::T;
  using Cursor = typename D::Cursor;
  using State = typename Softmax<D>::State;
  static constexpr int VALUE = D::VALUE, HEAD_DIM = D::HEAD_DIM, GROUP = D::GROUP, TILES = D::TILES, NT = D::NT;
  static constexpr int WARPS = D::WARPS, COLUMNS = D::COLUMNS, THREADS = D::THREADS;
  static constexpr bool SINKS = D::SINKS, LSE = D::LSE;
  static constexpr float NOTHING = Softmax<D>::NOTHING;
  static constexpr int SUM_PITCH = HEAD_DIM + 4;         // floats of a column of partial results: a warp's stores meet no bank twice
  static constexpr int TOPS_AT = WARPS * COLUMNS * SUM_PITCH;  // then [warp][column]{maximum, sum}
  static constexpr int PART = COLUMNS * (HEAD_DIM + 2);  // floats of a partial result in the workspace: [column][channel], then [column]{max, sum}

  // A warp's result to the shared memory `sums`.
  __device__ __forceinline__ static void store(const void* launch, const float* state_of_piece, void* shared) {
    const D& d = view<D>(launch);
    const State& state = view<State>(state_of_piece);
    float *sums = static_cast<float*>(shared), *tops = sums + TOPS_AT;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = state.sum[nt][i], zeros = state.zeros[nt][i];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, step);
          if constexpr (has_zero(VALUE)) zeros += __shfl_xor_sync(0xffffffffu, zeros, step);
        }
        const int column = nt * 8 + (d.lane & 3) * 2 + i;
        if (d.lane < 4) tops[(d.warp * COLUMNS + column) * 2] = state.top[nt][i], tops[(d.warp * COLUMNS + column) * 2 + 1] = sum;
        float* to = sums + (d.warp * COLUMNS + column) * SUM_PITCH + (d.lane >> 2);
#pragma unroll
        for (int f = 0; f < TILES; ++f) to[f * 16] = state.o[f][nt][i] + zeros, to[f * 16 + 8] = state.o[f][nt][i + 2] + zeros;
      }
  }
  // The sum of the warps' results is the answer, if they had the `whole` of a segment, or goes to
  // the workspace as partial result `part`.
  __device__ __forceinline__ static void add_warps(const void* launch, const int* cursor, const void* shared, bool whole,
                                                   void* workspace, int part, void* answers, void* log_sums) {
    const D& d = view<D>(launch);
    const Cursor& c = view<Cursor>(cursor);
    const float *sums = static_cast<const float*>(shared), *tops = sums + TOPS_AT;
    float *mine = static_cast<float*>(workspace) + TICKETS + int64_t(part) * PART, *lse = static_cast<float*>(log_sums);
    T* out = static_cast<T*>(answers);
    const int columns = min(COLUMNS, GROUP * d.q_len - c.pass * COLUMNS);
    for (int e = int(threadIdx.x) * 4; e < columns * HEAD_DIM; e += THREADS * 4) {
      const int column = e / HEAD_DIM, channel = e % HEAD_DIM;
      float top = NOTHING, sum = 0.0f;
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[(w * COLUMNS + column) * 2]);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 theirs = *reinterpret_cast<const float2*>(tops + (w * COLUMNS + column) * 2);
        add(v, sum, *reinterpret_cast<const float4*>(sums + (w * COLUMNS + column) * SUM_PITCH + channel), theirs.y, exp2_fast(theirs.x - top));
      }
      if (whole) {
        emit(d, c, column, channel, v, top, sum, out, lse);
      } else {
        __stcg(reinterpret_cast<float4*>(mine + e), v);
        if (channel == 0) __stcg(reinterpret_cast<float2*>(mine + COLUMNS * HEAD_DIM) + column, make_float2(top, sum));
      }
    }
  }
  // Whether this block is the last of `shares` to come with a partial result of the segment that
  // block `first` begins.
  __device__ __forceinline__ static bool last_of(void* workspace, int first, int shares) {
    return take_ticket<THREADS, 1>(static_cast<unsigned int*>(workspace) + first, shares - 1, threadIdx.x) == shares - 1;
  }
  // The sum of the partial results of the blocks from `first` on, a segment's.
  __device__ __forceinline__ static void add_blocks(const void* launch, const int* cursor, const void* workspace, int first, int shares,
                                                    void* answers, void* log_sums) {
    const D& d = view<D>(launch);
    const Cursor& c = view<Cursor>(cursor);
    const float* parts = static_cast<const float*>(workspace) + TICKETS;
    T* out = static_cast<T*>(answers);
    float* lse = static_cast<float*>(log_sums);
    const int columns = min(COLUMNS, GROUP * d.q_len - c.pass * COLUMNS);
    for (int e = int(threadIdx.x) * 4; e < columns * HEAD_DIM; e += THREADS * 4) {
      const int column = e / HEAD_DIM, channel = e % HEAD_DIM;
      float top = NOTHING, sum = 0.0f;
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
      constexpr int AT_ONCE = 8;  // parts that are on their way from L2 together (16: 5 % slower at 1 x 32,768 tokens)
      for (int share = 0; share < shares; share += AT_ONCE) {
        float4 part[AT_ONCE];
        float2 theirs[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const bool there = share + i < shares;
          const float* from = parts + (2 * int64_t(first + (there ? share + i : 0)) + (share + i == 0 || !there)) * PART;
          part[i] = __ldcg(reinterpret_cast<const float4*>(from + e));
          theirs[i] = __ldcg(reinterpret_cast<const float2*>(from + COLUMNS * HEAD_DIM) + column);
          if (!there) theirs[i] = make_float2(NOTHING, 0.0f);
        }
        float higher = top;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) higher = fmaxf(higher, theirs[i].x);
        const float factor = exp2_fast(top - higher);
        sum *= factor, v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor, top = higher;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
          if (share + i < shares) add(v, sum, part[i], theirs[i].y, exp2_fast(theirs[i].x - top));
      }
      emit(d, c, column, channel, v, top, sum, out, lse);
    }
  }
  // A sequence of which nothing is to be seen.
  __device__ __forceinline__ static void answer_nothing(const void* launch, int sequence, void* answers, void* sums) {
    const D& d = view<D>(launch);
    T* out = static_cast<T*>(answers);
    float* lse = static_cast<float*>(sums);
    const int elements = d.q_len * d.heads * GROUP * HEAD_DIM;
    for (int e = threadIdx.x; e < elements; e += THREADS) {
      out[int64_t(sequence) * elements + e] = from_float(0.0f, T());
      if (LSE && e % HEAD_DIM == 0)
        lse[(int64_t(sequence) * elements + e) / HEAD_DIM] = SINKS ? d.sinks[e / HEAD_DIM % (d.heads * GROUP)] : -INFINITY;
    }
  }

  // One answer: four channels of a column, whose P sum up to `sum` under the maximum `top`.
  __device__ __forceinline__ static void emit(const D& d, const Cursor& c, int column, int channel, float4 v, float top, float sum,
                                              T* out, float* lse) {
    const int n = c.pass * COLUMNS + column, head = c.head * GROUP + n % GROUP;
    if constexpr (SINKS) {
      const float sink = d.sinks[head] * LOG2_E, higher = fmaxf(top, sink), factor = exp2_fast(top - higher);
      sum = sum * factor + exp2_fast(sink - higher), top = higher;
      v.x *= factor, v.y *= factor, v.z *= factor, v.w *= factor;
    }
    const int64_t row = (int64_t(c.sequence) * d.q_len + n / GROUP) * (d.heads * GROUP) + head;
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const uint2 pairs = {pack_pair(v.x * inverse, v.y * inverse, T()), pack_pair(v.z * inverse, v.w * inverse, T())};
    *reinterpret_cast<uint2*>(out + row * HEAD_DIM + channel) = pairs;
    if constexpr (LSE) {
      if (channel == 0) lse[row] = sum > 0.0f ? (top + log2f(sum)) * LN_2 : -INFINITY;
    }
  }
  __device__ __forceinline__ static void add(float4& v, float& sum, float4 part, float part_sum, float weight) {
    sum += part_sum * weight;
    v.x += part.x * weight, v.y += part.y * weight, v.z += part.z * weight, v.w += part.w * weight;
  }
};

}  // namespace tilebit
