"""``attention_pack_cpu``: windows that are full go to their pages, in all layers of a cache, on x86-64
CPUs, from TensorIR.

A task has one kv head of one sequence in one layer. Where the sequence's length is a multiple of 128
its last 128 tokens, which wait in the window, are quantized and packed as an append does it
(``append.py``): the same bits.
"""

from __future__ import annotations

from typing import Any

from ....schedules.attention.workload import AttentionWorkload
from ....schedules.gemm.cpu import isa
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import LOCAL_ARRAYS, THREADS

NAME = "attention_pack_cpu"


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc over the workload's operands; all sizes but heads and channels are symbolic.

    Raises ``ValueError`` on a target without AVX2.
    """
    if isa(target) is None:
        raise ValueError(f"target features are {target.features}; the CPU program needs 'avx2' or 'avx512'")
    from tvm.script.ir_builder import IRBuilder

    from .. import vectors as v
    from ..buffers import bind_operands
    from ..vectors import T
    from . import append_loops as loops

    w, dtype = workload, workload.dtype
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({THREADS: schedule.num_warps, LOCAL_ARRAYS: True})
        buffers, sizes = bind_operands(w.operands(target.arch))
        tasks = sizes["batch"] * w.heads_kv
        with T.parallel(sizes["layers"] * tasks) as task:
            arg = {name: v.flat(buffer) for name, buffer in buffers.items()}
            arg["halves"] = v.flat(buffers["pages"], "float16")
            arg["rows"] = v.flat(buffers["windows"], "uint16" if dtype == "bfloat16" else dtype)
            its = T.bind(task % tasks)
            loops.pack_window(w, arg, sizes, T.bind(task // tasks), T.bind(its // w.heads_kv), T.bind(its % w.heads_kv))
    return builder.get()


PROGRAM = TileProgram(
    name=NAME, compiler="tvm", build=build, headers=("cpu_launch.c",)
)  # fmt: skip
