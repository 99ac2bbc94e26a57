"""``torch.ops.toy.scaled_add``: what torch sees of the operation. Its schema and its checks come from the operands."""

from __future__ import annotations

import torch
from torch import Tensor

from tilebit.ops.dispatch import DTYPE_NAMES
from tilebit.ops.operands import describe, schema
from tilebit.ops.plans import Key, bucket, launcher

from .scaled_add import NAME, ScaledAdd


def _workload(key: Key) -> ScaledAdd:
    _, m, n, dtype, _ = key
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"x is of {dtype}; accepted: torch.float16 and torch.bfloat16; convert it with x.to(...)")
    return ScaledAdd(m, n, DTYPE_NAMES[dtype])


_launch = launcher(_workload, lambda workload: workload.served)


def _scaled_add(x: Tensor, scale: Tensor, residual: Tensor) -> Tensor:
    if x.ndim != 2:
        raise ValueError(f"x is {describe(x)}; accepted: [m, n]")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel():
        _launch((NAME, bucket(x.shape[0]), x.shape[1], x.dtype, x.device), (x, scale, residual, y))
    return y


_library = torch.library.Library("toy", "DEF")
_library.define(f"scaled_add({', '.join(schema(ScaledAdd(1, 8).operands('cpu')))}) -> Tensor")
_library.impl("scaled_add", _scaled_add, "CPU")
torch.library.register_fake("toy::scaled_add", lambda x, scale, residual: torch.empty_like(x), lib=_library)
