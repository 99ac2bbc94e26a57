"""The program of ``toy.scaled_add`` on CPUs, from TensorIR: one fused multiply-add a value, in fp32, rounded once."""

from __future__ import annotations

from typing import Any

from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.cpu.outline import THREADS
from tilebit.tiles.program import TileProgram

from .scaled_add import NAME, ScaledAdd


def build(workload: ScaledAdd, schedule: Schedule, target: Target, *, one_scale: bool = False) -> Any:
    """The PrimFunc over the workload's operands. ``one_scale``: a bug for tests, every row takes the first row's factor."""
    from tvm.script.ir_builder import IRBuilder

    from tilebit.tiles.cpu import vectors as v
    from tilebit.tiles.cpu.buffers import bind_operands

    T, lanes = v.T, schedule.block_n
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("scaled_add")
        T.func_attr({THREADS: schedule.num_warps})
        buffers, sizes = bind_operands(workload.operands(target.arch))
        with T.parallel(sizes["m"]) as row:
            flat = {name: v.flat(buffer, "uint16" if buffer.dtype == "bfloat16" else None) for name, buffer in buffers.items()}
            scale = v.splat(flat["scale"][0 if one_scale else row], "float32", lanes)
            with T.serial(workload.n // lanes) as step:
                at = T.bind(row.astype("int64") * workload.n + step * lanes)
                x, residual = (v.to_float(v.load(flat[name], at, lanes), lanes) for name in ("x", "residual"))
                v.store(flat["y"], at, v.from_float(v.fma(x, scale, residual), workload.dtype, lanes), lanes)
    return builder.get()


PROGRAM = TileProgram(NAME, "tvm", build, headers=("cpu_launch.c",))
