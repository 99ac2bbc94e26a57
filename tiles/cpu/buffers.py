"""The operands of a workload as the buffers of a TVM function."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ...schedules.operands import Operand, present
from .vectors import T, tirx


def bind_operands(operands: Sequence[Operand]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(buffers by operand, variables by the name of a size): parameters of the function that is
    being built, in call order. "batch + 1" has a variable of its own, "batch_1", which is not
    compared with "batch": an operation's checks do that. So has the stride of rows that lie apart,
    ``Operand.pitch``."""
    sizes: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for o in present(operands):
        for dim in o.shape:
            if isinstance(dim, str) and dim not in sizes:
                sizes[dim] = tirx.SizeVar(dim.replace(" + ", "_"), "int32")
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in o.shape)
        strides = None
        if o.apart:
            sizes[o.pitch] = tirx.SizeVar(o.pitch, "int32")
            strides = [sizes[o.pitch], *(prod(o.shape[axis + 1 :]) for axis in range(1, len(o.shape)))]
        buffers[o.name] = T.match_buffer(T.arg(o.name, T.handle()), shape, o.dtype, strides=strides)
    return buffers, sizes
