"""GEMM with packed weights on x86-64 CPUs: vector code from TensorIR, one task per block of output
channels and rows.

    y[m, n] = sum_k x[m, k] * w[n, k] (* row_scales[n]) (* token_scales[m]) (+ bias[n]) (+ residual[m, n]),
    w = (number of q - z) * s

Inside a group of k the sums stay unscaled, acc = sum x (q - c); scale and zero point are applied
once per group, y += s * (acc - (z - c) * sum x), with c = 8 where a look-up table decodes
integers and 0 elsewhere. All sums are fp32. Three ways to multiply, by what the processor has:

- vdpbf16ps (AVX512-BF16): a permute looks four bits up as bf16, and every lane multiplies two
  neighbouring k. bf16 x is exact in it; fp16 x is split into the two bf16 numbers whose sum it is,
  which is exact too. Numbers that bf16 does not hold take the next way.
- AVX-512: a permute looks four bits up as fp32 (it ignores all other bits of its index: nothing is
  masked); fused multiply-add.
- AVX2, integers: mask, convert, fused multiply-add. A nibble is masked where it stands in its word
  and is too large by a power of two there; x is divided by that, once per call. Other numbers: two
  permutes look a code's low bits up, and its highest chooses between them.

That is 3 (fp16: 4), 6 and 13 vector instructions per 32 integers and row of x. Eight bits are
extended and converted to fp32 and multiplied as that; with vdpbf16ps and bf16 x as bf16, whose 8
significant bits they fit. Of int8 x codes are multiplied as integers, by vpdpbusd where the
processor has it, else by vpmaddubsw or vpmaddwd, and sums are int32 (``integers.py``). x of e4m3 is
multiplied as the bf16 that holds it, e4m3 weights in fp32 or, with vdpbf16ps, bf16; sums are fp32.

A first parallel loop rearranges x once per call into blocks of ``block_m`` rows x 32 k, padded with
zeros; a second one multiplies. Each becomes a plain C function over a range of its iterations
(``outline.py``), shared out among threads by ``device/cpu_launch.c``: no TVM runtime is needed.
Workspace of a call: x once more, as it is multiplied, and one sum per row and group, rows rounded
up to ``block_m``; of a norm, which is applied as x is rearranged, a factor for each row.
"""

from __future__ import annotations

from typing import Any

from ....schedules.gemm.cpu import PROGRAM as NAME
from ....schedules.gemm.workload import Workload
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import BITS, THREADS, TOGETHER
from .plan import Plan


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc over x [m, k], weight int32 [n tiles, k tiles, words], scales (and zeros)
    [groups, n_pad], what only parts read, y [m, n].

    Its parallel loops run over rows, padded to whole blocks of ``block_m``, and over tasks (block
    of n) x (block of m), m inner. Raises ``ValueError`` on a target without AVX2.
    """
    from tvm.script.ir_builder import IRBuilder

    from .. import vectors as v
    from ..buffers import bind_operands
    from . import loops

    T, plan, mb = v.T, Plan.of(workload, schedule, target), schedule.block_m
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({THREADS: schedule.num_warps})
        buffers, sizes = bind_operands(workload.operands(target.arch))
        m = sizes["m"]
        blocks = (m + (mb - 1)) // mb
        buffers["xs"] = T.alloc_buffer((blocks * plan.row_block_words,), "float32" if plan.dot == "float" else "int32")
        if plan.needs_sums:
            buffers["sums"] = T.alloc_buffer((blocks * (mb * plan.groups),), plan.sums_dtype)

        if workload.norm:
            buffers["factors"] = T.alloc_buffer((blocks * mb,), "float32")

        def views() -> dict[str, Any]:
            """Flat views of all operands as the loops read them: bf16 as its bits, 8-bit codes as
            bytes."""
            kinds = {name: BITS[str(buffer.dtype)] for name, buffer in buffers.items() if str(buffer.dtype) in BITS}
            if plan.bits == 8:
                kinds["weight"] = "uint8"
            return {name: v.flat(buffer, kinds.get(name)) for name, buffer in buffers.items()}

        with T.parallel(blocks * mb, annotations={TOGETHER: mb}) as row:
            loops.rearrange(plan, views(), row, m)
        with T.parallel(blocks * plan.n_tasks, annotations={TOGETHER: blocks}) as task, v.instructions(plan.isa.bf16_dot):
            loops.multiply(plan, views(), task, m)
    return builder.get()


PROGRAM = TileProgram(
    name=NAME,
    compiler="tvm",
    build=build,
    headers=("cpu_launch.c",),
)
