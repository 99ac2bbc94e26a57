"""``attention_append_cpu``: new keys and values join a low-bit KV cache, on x86-64 CPUs, from TensorIR.

    scale = fp16((max - min) / (2^bits - 1)), or 1 where that is 0;   zero = fp16(min)
    code = clamp(rint((x - zero) * (1 / scale)), 0, 2^bits - 1)

all in fp32, IEEE, nothing fused: bit for bit ``layouts/kv_quantize.py``. A task has one kv head of one sequence: groups of 128 tokens that
are complete now, of rows that waited in the window and of new ones (rotated on the way, if asked), are quantized and packed, granule by
granule, in the words that decoding will read; the rest goes to the window in 16 bits. The arithmetic does not depend on where a row came
from, so appending token by token gives the bits that appending all at once gives.
"""

from __future__ import annotations

from typing import Any

from ....layouts.kv import window_words
from ....schedules.attention.rules import legal
from ....schedules.attention.workload import AttentionWorkload
from ....schedules.gemm.cpu import isa
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import LOCAL_ARRAYS, THREADS

NAME = "attention_append_cpu"


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc over the tensors of ``params``; all sizes but heads and channels are symbolic.

    Raises ``ValueError`` on a target without AVX2.
    """
    if isa(target) is None:
        raise ValueError(f"target features are {target.features}; the CPU program needs 'avx2' or 'avx512'")
    from tvm.script.ir_builder import IRBuilder

    from .. import vectors as v
    from ..vectors import T, tirx
    from . import append_loops as loops

    w, dtype = workload, workload.dtype
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({THREADS: schedule.num_warps, LOCAL_ARRAYS: True})
        tokens, offsets, batch, max_pages, num_pages, num_slots, positions = (
            tirx.SizeVar(name, "int32") for name in ("tokens", "offsets", "batch", "max_pages", "num_pages", "num_slots", "positions")
        )
        tensors = {
            "k": ((tokens, w.heads_kv, w.head_dim), dtype),
            "v": ((tokens, w.heads_kv, w.head_dim), dtype),
            "cu_seqlens": ((offsets,), "int32"),
            "lengths": ((batch,), "int32"),
            "block_tables": ((batch, max_pages), "int32"),
            "slots": ((batch,), "int32"),
            "pages": ((num_pages, w.heads_kv, w.layout.page_words), "int32"),
            "windows": ((num_slots, w.heads_kv, window_words(w.head_dim)), "int32"),
            "head_scales": ((2, w.heads_kv), "float32"),
            "cos_sin": ((positions, w.head_dim), "float32"),
        }
        buffers = {name: T.match_buffer(T.arg(name, T.handle()), *tensors[name]) for name in params(w, schedule)}
        with T.parallel(batch * w.heads_kv) as task:
            arg = {name: v.flat(buffer, "uint16" if buffer.dtype == "bfloat16" else None) for name, buffer in buffers.items()}
            arg["halves"] = v.flat(buffers["pages"], "float16")
            arg["rows"] = v.flat(buffers["windows"], "uint16" if dtype == "bfloat16" else dtype)
            loops.append_rows(w, arg, T.bind(task // w.heads_kv), T.bind(task % w.heads_kv), max_pages)
    return builder.get()


def params(workload: AttentionWorkload, schedule: Schedule) -> tuple[str, ...]:
    """The kernel's tensors in call order."""
    del schedule  # every schedule takes the same ones
    names = ["k", "v", "cu_seqlens", "lengths", "block_tables", "slots", "pages", "windows"]
    names += ["head_scales"] if workload.format.has_head_scales else []
    return (*names, "cos_sin") if workload.rotary else tuple(names)


PROGRAM = TileProgram(
    name=NAME, compiler="tvm", arches=("cpu",), legal=legal, build=build, params=params, headers=("cpu_launch.c",)
)  # fmt: skip
