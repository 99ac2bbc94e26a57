"""``attention_append_cpu``: new keys and values join a low-bit KV cache, on x86-64 CPUs, from
TensorIR.

    scale = fp16((max - min) / (2^bits - 1)), or 1 where that is 0;   zero = fp16(min)
    code = clamp(rint((x - zero) * (1 / scale)), 0, 2^bits - 1)

all in fp32, IEEE, nothing fused: bit for bit ``layouts/kv_quantize.py``. A task has one kv head of
one sequence: groups of 128 tokens that are complete now, of rows that waited in the window and of
new ones (rotated on the way, if asked, and the queries of the group with them), are quantized and
packed, granule by granule, in the words that decoding will read; the rest goes to the window in 16
bits. The arithmetic does not depend on where a row came from, so appending token by token gives the
bits that appending all at once gives.
"""

from __future__ import annotations

from typing import Any

from ....schedules.attention.workload import AttentionWorkload
from ....schedules.gemm.cpu import isa
from ....schedules.operands import present
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import LOCAL_ARRAYS, THREADS

NAME = "attention_append_cpu"


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
        batch, max_pages = sizes["batch"], sizes["max_pages"]
        with T.parallel(batch * w.heads_kv) as task:
            arg = {name: v.flat(buffer, "uint16" if buffer.dtype == "bfloat16" else None) for name, buffer in buffers.items()}
            arg["halves"] = v.flat(buffers["pages"], "float16")
            arg["rows"] = v.flat(buffers["windows"], "uint16" if dtype == "bfloat16" else dtype)
            pitch = {o.name: sizes[o.pitch] for o in present(w.operands(target.arch)) if o.apart}
            loops.append_rows(w, arg, pitch, T.bind(task // w.heads_kv), T.bind(task % w.heads_kv), max_pages)
    return builder.get()


PROGRAM = TileProgram(
    name=NAME, compiler="tvm", build=build, headers=("cpu_launch.c",)
)  # fmt: skip
