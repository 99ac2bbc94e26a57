"""What enters and leaves attention: scaled queries, and outputs from the results of parts.
Importing this imports tvm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....schedules.attention.workload import AttentionWorkload
from .. import vectors as v
from ..numbers import LN_2, LOG2_E, exp2, splat
from ..vectors import T, tirx
from .attend import NOTHING, RowBlock
from .granules import LANES


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A row's result over some tokens: the largest score and the sum of weights, in all lanes, and
    the weighted sum of values, head_dim fp32 numbers from ``start`` of ``values``."""

    top: Any
    total: Any
    values: Any
    start: Any


def softmax_factors(workload: AttentionWorkload) -> tuple[float, float]:
    """(what queries are multiplied by, the soft cap): so that scores, after the cap c: c log2(e)
    tanh, are in units of log 2."""
    if workload.soft_cap:
        return workload.softmax_scale / workload.soft_cap, workload.soft_cap * LOG2_E
    return workload.softmax_scale * LOG2_E, 0.0


def load_row(buffer: Any, start: Any, state: RowBlock, r: Any, factor: float) -> None:
    """Row ``r`` of the queries from 16-bit numbers at ``start``, times ``factor``."""
    with T.serial(state.head_dim // LANES) as i:
        value = v.to_float(v.load(buffer, start + i * LANES, LANES), LANES)
        v.store(state.q, r * state.head_dim + i * LANES, value * splat(factor), LANES)


def write_row(w: AttentionWorkload, arg: dict[str, Any], partials: list[Partial], q_head: Any, target: Any) -> None:
    """Row ``target`` of ``out``, and of ``lse``, of query head ``q_head``: the parts, in order, and
    the learned sink."""
    tops = [v.held(partial.top) for partial in partials]
    sink = v.held(splat(arg["sinks"][q_head]) * splat(LOG2_E)) if w.sinks else None
    top = tops[0] if sink is None else v.held(T.max(sink, tops[0]))
    for other in tops[1:]:
        top = v.held(T.max(other, top))
    base = v.held(T.max(top, splat(NOTHING)))
    weights = [exp2(one - base) for one in tops]
    total = splat(0.0) if sink is None else exp2(sink - base)
    for weight, partial in zip(weights, partials, strict=True):
        total = v.held(v.fma(weight, partial.total, total))
    inverse = v.held(tirx.Select(total == splat(0.0), splat(0.0), splat(1.0) / total))
    with T.serial(w.head_dim // LANES) as i:
        value = splat(0.0)
        for weight, partial in zip(weights, partials, strict=True):
            value = v.fma(weight, v.load(partial.values, partial.start + i * LANES, LANES), value)
        v.store(arg["out"], target * w.head_dim + i * LANES, v.from_float(value * inverse, w.dtype, LANES), LANES)
    if w.lse:
        natural = base * splat(LN_2)
        T.buffer_store(arg["lse"], tirx.Shuffle([natural], [0]) + T.log(tirx.Shuffle([total], [0])), [target])
