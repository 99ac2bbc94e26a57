"""``attention_prefill_cpu``: causal attention over rows of 16-bit keys and values of a ragged
batch, on x86-64 CPUs, from TensorIR.

    o[i, h] = sum_t p_t v_t,   p = softmax over the tokens t that query i sees,   s_t = scale * q[i, h] . k_t

The queries of a sequence are its newest tokens. A task holds a few rows, (query, head of a group)
pairs of one kv head, and goes over the tokens they see by blocks with an online softmax
(``attend.py``, as decode does). All arithmetic is fp32; same input, same bits.
"""

from __future__ import annotations

from typing import Any

from ....layouts.kv import GRANULE, RESIDUAL
from ....schedules.attention.workload import AttentionWorkload
from ....schedules.gemm.cpu import isa
from ....schedules.schedule import Schedule
from ....schedules.target import Target
from ...program import TileProgram
from ..outline import LOCAL_ARRAYS, THREADS
from .granules import LANES

NAME = "attention_prefill_cpu"
ROWS = 4  # (query, head) pairs that share a converted vector of keys or values; the sums of more do not stay in registers


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

    w = workload
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(NAME)
        T.func_attr({THREADS: schedule.num_warps, LOCAL_ARRAYS: True})
        buffers, sizes = bind_operands(w.operands(target.arch))
        tokens, offsets = sizes["tokens"], sizes["batch + 1"]
        # a sequence's last task may hold fewer rows
        with T.parallel((tokens * w.group // ROWS + offsets) * w.heads_kv) as task:
            arg = {name: v.flat(buffer, "uint16" if buffer.dtype == "bfloat16" else None) for name, buffer in buffers.items()}
            _attend_rows(w, schedule.block_n, arg, task, offsets - 1)
    return builder.get()


def _attend_rows(w: AttentionWorkload, step: int, arg: dict[str, Any], task: Any, batch: Any) -> None:
    """Task ``task`` of kv head task % heads_kv: up to ``ROWS`` rows of one sequence."""
    from .. import vectors as v
    from ..gemm.lane_sums import sum_everywhere
    from ..vectors import T
    from .attend import RowBlock, Visible
    from .sequence_tasks import find_sequence
    from .softmax_rows import Partial, load_row, softmax_factors, write_row
    from .token_sources import RowTokens

    head = T.bind(task % w.heads_kv)

    def rows_of(b: Any) -> Any:
        return (arg["cu_q"][b + 1] - arg["cu_q"][b]) * w.group

    b, block = find_sequence(T.bind(task // w.heads_kv), batch, lambda b: (rows_of(b) + (ROWS - 1)) // ROWS)
    with T.If(b >= 0), T.Then():
        rows, length = T.bind(rows_of(b)), T.bind(arg["cu_kv"][b + 1] - arg["cu_kv"][b])
        first_row = T.bind(block * ROWS)
        factor, cap = softmax_factors(w)
        state = RowBlock.new(ROWS, w.head_dim, Visible(w.window, w.sink_tokens), cap)

        def target(row: Any) -> tuple[Any, Any]:
            """(query head, row of out) of a row of the sequence."""
            q_head = T.bind(head * w.group + row % w.group)
            return q_head, T.bind((arg["cu_q"][b] + row // w.group).astype("int64") * w.heads_q + q_head)

        with T.serial(ROWS) as r:
            row = T.bind(T.min(first_row + r, rows - 1))
            T.buffer_store(state.position, length - rows // w.group + row // w.group, [r])
            load_row(arg["q"], target(row)[1] * w.head_dim, state, r, factor)
        source = RowTokens(state, w.dtype, arg["k"], arg["v"], arg["cu_kv"][b], length, head, w.heads_kv)
        seen = T.bind(T.max(state.position[ROWS - 1] + 1, 0))  # the last row sees the most
        blocks = T.bind((seen + (RESIDUAL - 1)) // RESIDUAL)
        near, sinks = state.visible.blocks(state.position[0], blocks)
        with T.serial(sinks + blocks - near) as i:
            first = T.bind(T.if_then_else(i < sinks, i, i - sinks + near) * RESIDUAL)
            source.open(first)
            granules = T.bind(T.min((seen - first + (GRANULE - 1)) // GRANULE, RESIDUAL // GRANULE))
            with T.serial((granules * GRANULE + (step - 1)) // step) as part:
                begin = T.bind(part * (step // GRANULE))
                state.attend(source, begin, T.bind(T.min(granules - begin, step // GRANULE)))
        state.collect(source, 1.0, decay=False)
        with T.serial(T.min(ROWS, rows - first_row)) as r:
            sum_of_weights = sum_everywhere(v.load(state.total, r * LANES, LANES))
            result = Partial(v.load(state.top, r * LANES, LANES), sum_of_weights, state.out, T.bind(r * w.head_dim))
            write_row(w, arg, [result], *target(T.bind(first_row + r)))


PROGRAM = TileProgram(
    name=NAME,
    compiler="tvm",
    build=build,
    headers=("cpu_launch.c",),
)
