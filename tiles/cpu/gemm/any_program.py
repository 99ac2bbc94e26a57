"""GEMM with weights of bit planes and a codebook for each output channel, on x86-64 CPUs with AVX2.

    y[m, n] = sum_k x[m, k] * codebook[n, q[n, k]] (* token_scales[m]) (+ bias[n])

Codes q of b bits are b planes (``layouts/planes.py``), and no more is read of a store that has
others below them. A row's codebook becomes tables of byte shuffles in registers or on the stack,
with AVX-512 of permutations of words; 256 weights of a row at a time become codes and then numbers (``codebooks.py``), which are
multiplied by ``block_m`` rows of x. Sums are fp32, the lanes of a vector and ``split_k`` sets of
them, and joined in a fixed order.

A first parallel loop makes x fp32 once per call (where vdpbf16ps multiplies it stays bf16), in the order
in which numbers come, padded with zeros; a second one multiplies. Workspace of a call: x so, rows rounded up to ``block_m``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....layouts.planes import CHUNK, plane_layout
from ....schedules.gemm.cpu import Isa, isa
from ....schedules.gemm.cpu_any import PROGRAM as NAME
from ....schedules.gemm.workload import Workload
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import LOCAL_ARRAYS, THREADS, TOGETHER
from .plan import Plan

_AVX2 = Isa("avx2", 8, 16, 0)


@dataclass(frozen=True, slots=True)
class AnyPlan(Plan):
    """A plan whose rows are read in chunks of 256 k."""

    @classmethod
    def of(cls, workload: Workload, schedule: Schedule, target: Target) -> AnyPlan:
        """Raises ``ValueError`` on a target without AVX2."""
        if "avx2" not in target.features:
            raise ValueError(f"target features are {target.features}; the program needs 'avx2'")
        found = isa(target)
        return cls(workload, schedule, found if found is not None and found.lanes == 16 else _AVX2)

    @property
    def wide(self) -> bool:
        """Codebooks are looked up with AVX-512 (``codebooks_wide.py``)."""
        return self.isa.lanes == 16

    @property
    def pairs(self) -> bool:
        """Products are those of vdpbf16ps, of x as it is."""
        return self.isa.bf16_dot and self.workload.dtype == "bfloat16"

    @property
    def chunks(self) -> int:
        return -(-self.workload.k // CHUNK)

    @property
    def row_tile_words(self) -> int:
        """32-bit words of a chunk of a plane."""
        return plane_layout("cpu").words


def build(workload: Workload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc over x [m, k], weight int32 [bits, n, chunks, 8], scales [n, 2^bits], what only
    parts read, y [m, n]. Raises ``ValueError`` on a target without AVX2."""
    from tvm.script.ir_builder import IRBuilder

    from .. import vectors as v
    from ..buffers import bind_operands
    from . import any_loops as loops

    T, plan, mb = v.T, AnyPlan.of(workload, schedule, target), schedule.block_m
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({THREADS: schedule.num_warps, LOCAL_ARRAYS: True})
        buffers, sizes = bind_operands(workload.operands(target.arch))
        m = sizes["m"]
        blocks = (m + (mb - 1)) // mb
        buffers["xs"] = T.alloc_buffer((blocks * (plan.chunks * mb * CHUNK),), "uint16" if plan.pairs else "float32")

        def views() -> dict[str, Any]:
            """Flat views of all operands as the loops read them: bf16 and codebooks as their bits."""
            kinds = {name: "uint16" for name, buffer in buffers.items() if buffer.dtype == "bfloat16"}
            kinds |= {"weight": "uint32", "scales": "uint16"}
            return {name: v.flat(buffer, kinds.get(name)) for name, buffer in buffers.items()}

        with T.parallel(blocks * mb, annotations={TOGETHER: mb}) as row:
            loops.rearrange(plan, views(), row, m)
        with T.parallel(blocks * plan.n_tasks, annotations={TOGETHER: blocks}) as task, v.instructions(plan.pairs):
            loops.multiply(plan, views(), task, m)
    return builder.get()


PROGRAM = TileProgram(name=NAME, compiler="tvm", build=build, headers=("cpu_launch.c",))
