"""``attention_decode_cpu``: attention of the newest tokens over a low-bit KV cache on x86-64 CPUs,
from TensorIR.

    o[b, i, h] = sum_t p_t v_t,   p = softmax over the tokens t that query i sees,   s_t = scale * q[b, i, h] . k_t

The cache is the GPUs' (``layouts/kv.py``): a vector load of 16 of its words holds numbers of tokens
and channels that are known here, so queries and weights are permuted to match, once, and nothing is
unpacked to memory. A scale and zero point by channel is multiplied into the query once per 128
tokens, one by token into scores and weights: inner loops are a shift, a look-up (or mask, convert)
and multiply-adds.

A first parallel loop has a task for each (sequence, kv head, few rows of queries, part of the
tokens), a second one joins the parts. What a task holds depends on the workload and the schedule
alone: the same input gives the same bits. All arithmetic is fp32.
"""

from __future__ import annotations

from typing import Any

from ....schedules.attention.workload import AttentionWorkload
from ....schedules.gemm.cpu import isa
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import LOCAL_ARRAYS, THREADS
from .granules import LANES

NAME = "attention_decode_cpu"
MOST_ROWS = 4  # of queries that share a decoded vector; the sums of more do not stay in registers
MOST_PARTS = 16


def rows_together(group: int) -> int:
    """Rows of queries of one task: heads of a group first, then queries."""
    return next(rows for rows in (1, 2, MOST_ROWS) if rows >= min(group, MOST_ROWS))


def parts(workload: AttentionWorkload, schedule: Schedule) -> int:
    """Tasks that share the tokens of a (sequence, kv head), so that one sequence of few heads keeps
    all threads busy."""
    return min(MOST_PARTS, max(1, -(-schedule.num_warps // workload.heads_kv)))


def build(workload: AttentionWorkload, schedule: Schedule, target: Target) -> Any:
    """The PrimFunc over the workload's operands; batch, q_len and all sizes of the cache are
    symbolic.

    Raises ``ValueError`` on a target without AVX2.
    """
    vectors = isa(target)
    if vectors is None:
        raise ValueError(f"target features are {target.features}; the CPU program needs 'avx2' or 'avx512'")
    from tvm.script.ir_builder import IRBuilder

    from .. import vectors as v
    from ..buffers import bind_operands
    from ..vectors import T
    from . import decode_loops as loops

    w = workload
    rows, cuts = rows_together(w.group), parts(w, schedule)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({THREADS: schedule.num_warps, LOCAL_ARRAYS: True})
        buffers, sizes = bind_operands(w.operands(target.arch))
        batch, q_len, max_pages = (sizes[name] for name in ("batch", "q_len", "max_pages"))
        row_blocks = (q_len * w.group + (rows - 1)) // rows
        segments = batch * w.heads_kv * row_blocks
        buffers["partials"] = T.alloc_buffer((segments, cuts * rows * loops.partial_floats(w.head_dim)), "float32")
        plan = loops.Plan(w, rows, cuts, schedule.block_n, vectors.lanes == LANES, q_len, max_pages, row_blocks)

        def views() -> dict[str, Any]:
            flat = {name: v.flat(buffer, "uint16" if buffer.dtype == "bfloat16" else None) for name, buffer in buffers.items()}
            return {**flat, "halves": v.flat(buffers["pages"], "float16")}

        with T.parallel(segments * cuts) as task:
            loops.attend_part(plan, views(), task)
        with T.parallel(segments) as segment:
            loops.join_parts(plan, views(), segment)
    return builder.get()


PROGRAM = TileProgram(
    name=NAME,
    compiler="tvm",
    build=build,
    headers=("cpu_launch.c",),
)
