"""A W4A16 GEMM for whole tiles, enough to show everything a kernel directory holds: tensor maps, dynamic shared memory, a dynamic m.

Schedule: one group of 128 per ``block_k`` = 128; weights are [n / 64, k / 32, 256] uint32, scales and zeros [k / 128, n].
"""

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operands import Operand
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.program import TileProgram

DEQUANTIZE = r"""
#include <cuda_fp16.h>
#include <cstdint>
template <class H>
__device__ __forceinline__ void sample_dequantize(H* a_, const uint32_t* w, const H* s_, const H* z_) {
  const half *s = (const half*)s_, *z = (const half*)z_;
  const int t = threadIdx.x & 127, r = (t >> 5) * 16 + ((t & 31) >> 2);
  const uint4 q = *reinterpret_cast<const uint4*>(w + t * 4);
  const uint32_t words[4] = {q.x, q.y, q.z, q.w};
  half2* a = reinterpret_cast<half2*>(a_);
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      uint32_t v = ((words[i] >> (4 * j)) & 0x000f000f) | 0x64006400;
      const int row = r + 8 * (j & 1);
      a[i * 4 + j] = __hmul2(__hsub2(*(half2*)&v, __half2half2(z[row])), __half2half2(s[row]));
    }
}
"""


def build(workload: Workload, schedule: Schedule, target):
    import tilelang.language as T

    n, k, bn, bm, bk = workload.n, workload.k, schedule.block_n, schedule.block_m, schedule.block_k
    threads = schedule.num_warps * 32
    m = T.dynamic("m")

    @T.macro
    def dequantize(W, S, Z, A):
        T.call_extern(
            "handle", "sample_dequantize", A.access_ptr("w"), T.address_of(W[0, 0, 0]), T.address_of(S[0, 0]), T.address_of(Z[0, 0])
        )

    @T.prim_func
    def main(
        x: T.Tensor((m, k), "float16"),
        weight: T.Tensor((n // 64, k // 32, 256), "uint32"),
        scales: T.Tensor((k // 128, n), "float16"),
        zeros: T.Tensor((k // 128, n), "float16"),
        y: T.Tensor((m, n), "float16"),
    ):
        with T.Kernel(n // bn, T.ceildiv(m, bm), threads=threads) as (bx, by):
            Xs = T.alloc_shared((bm, bk), "float16")
            Ws = T.alloc_shared((bn // 64, bk // 32, 256), "uint32")
            Ss = T.alloc_shared((1, bn), "float16")
            Zs = T.alloc_shared((1, bn), "float16")
            A = T.alloc_fragment((bn, bk), "float16")
            C = T.alloc_fragment((bn, bm), "float32")
            T.import_source(DEQUANTIZE)
            T.clear(C)
            for ko in T.Pipelined(k // bk, num_stages=schedule.num_stages):
                T.copy(weight[bx * (bn // 64), ko * (bk // 32), 0], Ws)
                T.copy(x[by * bm, ko * bk], Xs)
                T.copy(scales[ko, bx * bn], Ss)
                T.copy(zeros[ko, bx * bn], Zs)
                dequantize(Ws, Ss, Zs, A)
                T.gemm(A, Xs, C, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(bn, bm):
                if by * bm + j < m:
                    y[by * bm + j, bx * bn + i] = C[i, j]

    return main


def legal(workload: Workload, schedule: Schedule, target) -> list[str]:
    return [] if schedule.block_k == 128 else [f"block_k is {schedule.block_k}; accepted: 128"]


def operands(workload: Workload, arch: str) -> tuple[Operand, ...]:
    """As ``build`` takes them."""
    n, k = workload.n, workload.k
    groups = (k // 128, n)
    return (
        Operand("x", "float16", ("m", k)), Operand("weight", "uint32", (n // 64, k // 32, 256)), Operand("scales", "float16", groups),
        Operand("zeros", "float16", groups), Operand("y", "float16", ("m", n), written=True, read=False),
    )  # fmt: skip


RULE = Rule("sample.w4a16", "sample.w4a16", arches=("sm_80", "sm_86", "sm_89", "sm_90a"), legal=legal, operands=operands)
PROGRAM = TileProgram("sample.w4a16", "tilelang", build)
