"""``quantize_cpu``: rows of activations to 8-bit codes on x86-64 CPUs, from TensorIR.

    scale = amax / largest,    code = round(y * (largest / amax)),    amax = max(|y|, floor)

of a token or of each 128 values of it, with y = x (* rsqrt(mean(x^2) + eps) * (norm_weight +
offset)) (* smooth), and x perhaps the residual sum, or a gate's activation times what it gates:
``schedules/activations/workload.py`` says it exactly. A task is a row, which is read two times, with
a norm three times, from the cache it came to at the first; what y is made of is computed again, so
that nothing of a row is kept but the residual sum, which is written first.
"""

from __future__ import annotations

from typing import Any

from ....schedules.activations.workload import QuantizeWorkload
from ....schedules.gemm.cpu import isa
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import LOCAL_ARRAYS, THREADS

NAME = "quantize_cpu"


def build(workload: QuantizeWorkload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc over x [m, k], of a gate [m, 2 k], residual [m, k], norm_weight and smooth [k] where
    there are any, codes int8 [m, k], scales fp32 [m] or [groups, m]; m is symbolic.

    Raises ``ValueError`` on a target without AVX2.
    """
    if isa(target) is None:
        raise ValueError(f"target features are {target.features}; the CPU program needs 'avx2' or 'avx512'")
    from tvm.script.ir_builder import IRBuilder

    from .. import vectors as v
    from ..buffers import bind_operands
    from ..vectors import T
    from . import quantize_loops as loops

    w = workload
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({THREADS: schedule.num_warps, LOCAL_ARRAYS: True})
        buffers, sizes = bind_operands(w.operands(target.arch))
        with T.parallel(sizes["m"]) as row:
            arg = {name: v.flat(buffer, "uint16" if buffer.dtype == "bfloat16" else None) for name, buffer in buffers.items()}
            loops.quantize_row(w, arg, row, sizes["m"])
    return builder.get()


PROGRAM = TileProgram(name=NAME, compiler="tvm", build=build, headers=("cpu_launch.c",))
