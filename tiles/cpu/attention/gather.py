"""``attention_gather_cpu``: the rows of a low-bit KV cache, dequantized, on x86-64 CPUs, from
TensorIR.

    out[t] = fp16 or bf16 of (code * scale + zero),   products exact, the sum in fp32 rounded once

A task has one group of up to 128 tokens of one kv head. Vectors are decoded as decode reads them
(``granules.py``), each lane's token and channel being known here, and laid out as rows in a tile of
16 tokens on the way.
"""

from __future__ import annotations

from typing import Any

from ....layouts.kv import RESIDUAL
from ....schedules.attention.workload import AttentionWorkload
from ....schedules.gemm.cpu import isa
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import LOCAL_ARRAYS, THREADS
from .granules import LANES

NAME = "attention_gather_cpu"


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc over the workload's operands; all sizes but heads and channels are symbolic.

    Raises ``ValueError`` on a target without AVX2.
    """
    vectors = isa(target)
    if vectors is None:
        raise ValueError(f"target features are {target.features}; the CPU program needs 'avx2' or 'avx512'")
    from tvm.script.ir_builder import IRBuilder

    from .. import vectors as v
    from ..buffers import bind_operands
    from ..vectors import T
    from . import gather_loops as loops
    from .sequence_tasks import find_sequence

    w = workload
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({THREADS: schedule.num_warps, LOCAL_ARRAYS: True})
        buffers, sizes = bind_operands(w.operands(target.arch))
        batch, max_pages, total = (sizes[name] for name in ("batch", "max_pages", "total_kv"))
        with T.parallel((total // RESIDUAL + batch) * w.heads_kv) as task:
            arg = {name: v.flat(buffer, "uint16" if buffer.dtype == "bfloat16" else None) for name, buffer in buffers.items()}
            arg["halves"] = v.flat(buffers["pages"], "float16")
            groups = T.bind(task // w.heads_kv)
            b, group = find_sequence(groups, batch, lambda b: (arg["lengths"][b] + (RESIDUAL - 1)) // RESIDUAL)
            with T.If(b >= 0), T.Then():
                loops.gather_group(w, arg, b, group, T.bind(task % w.heads_kv), max_pages, vectors.lanes == LANES)
    return builder.get()


PROGRAM = TileProgram(
    name=NAME, compiler="tvm", build=build, headers=("cpu_launch.c",)
)  # fmt: skip
