"""The operator ``torch.ops.tilebit.linear`` and the function in front of it: a product with a weight of
16 bits as a model holds it, of layers that are not quantized.

Where few rows of x meet a weight that was tuned, and its kernel was faster than the library's is known to
be, that kernel runs; else torch's product.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import packs
from ..accepted import expect_tensors
from ..schedules.gemm.dense import MAX_M, NAME, RULE, DenseWorkload
from ..schedules.gemm.workload import X_COLUMNS
from ..schedules.select import choose
from ..schedules.target import Target
from .direct import inference_only
from .dispatch import DTYPE_NAMES, device_target
from .operands import describe
from .plans import Key, launcher

# The least that cuBLAS was seen to take (32000 x 4096 to 128256 x 8192, 1 to 64 rows, H200): a launch and
# its fill, then bytes at this share of memory's rate, and so much more for each row of x.
LIBRARY_US, LIBRARY_RATE, LIBRARY_ROW = 6.5, 0.93, 0.0007


def linear(x: Tensor, weight: Tensor, dependent: bool = False) -> Tensor:
    """y [..., n] = x [..., k] @ weight [n, k]^T, fp16 or bf16, as ``torch.nn.functional.linear`` without a
    bias; sums are fp32 and rounded once where tilebit's own kernel runs.

    It runs on sm_90a for up to 64 rows of x, k a multiple of 8 and a contiguous weight, where a record
    of the user's or of the package says that it takes less time than the library's (``tilebit workload
    tune '{"op": "dense", "m": 16, "n": 128256, "k": 4096, "dtype": "bfloat16"}'`` makes one), or where
    a loaded pack has it. ``dependent`` (programmatic dependent launch): it may start while the preceding
    kernel of the stream still runs, which may write x and nothing else that it reads. It traces under
    torch.compile and may be captured in a CUDA graph after a first call; inference only.

    Raises ``TypeError`` and ``ValueError`` for what does not fit, and ``KernelUnavailable`` when a kernel
    that should run is not at hand, all before a launch.
    """
    expect_tensors(x=x, weight=weight)
    return LINEAR(x, weight, dependent)


def served(workload: DenseWorkload, target: Target) -> bool:
    """Whether tilebit's own kernel runs, and not torch's product."""
    if target.arch not in RULE.arches or not 0 < workload.m <= MAX_M:
        return False
    if packs.entries(workload, target):
        return True
    asked = workload.bucketed()
    choice = choose(asked, target)
    return choice.source == "tuned" and choice.record is not None and (choice.record.us or inf) < library_us(asked, target)


def library_us(workload: DenseWorkload, target: Target) -> float:
    """What torch's product is known to take at least."""
    return LIBRARY_US + workload.bytes * (1 + LIBRARY_ROW * workload.m) / (LIBRARY_RATE * target.read_gbps * 1e3)


def _workload(key: Key) -> DenseWorkload:
    """What calls with ``key`` ask for. Raises ``ValueError`` for what no kernel supports."""
    _, m, n, k, dtype, _ = key
    return DenseWorkload(m, n, k, DTYPE_NAMES[dtype])


_launch = launcher(_workload, lambda workload: workload.served)


def _linear(x: Tensor, weight: Tensor, dependent: bool = False) -> Tensor:
    _expect(x, weight)
    n, k = weight.shape
    m = x.numel() // k
    if k % X_COLUMNS == 0 and 0 < m <= MAX_M and weight.is_contiguous():
        workload = DenseWorkload(m, n, k, DTYPE_NAMES[x.dtype])
        if served(workload, device_target(x.device)):
            rows, y = x.reshape(m, k).contiguous(), x.new_empty((*x.shape[:-1], n))
            key = (NAME, workload.bucketed().m, n, k, x.dtype, x.device)
            _launch(key, (rows, weight, y.view(m, n)), dependent and rows.data_ptr() == x.data_ptr())
            return y
    return functional.linear(x, weight)


def _expect(x: Tensor, weight: Tensor) -> None:
    """Raise ``ValueError`` for operands that do not fit."""
    if x.ndim < 1 or x.shape[-1] < 1 or x.dtype not in DTYPE_NAMES:
        raise ValueError(f"x is {describe(x)}; accepted: float16 or bfloat16 [..., k] with k >= 1; convert it with x.to(...)")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1] or weight.dtype is not x.dtype or weight.device != x.device:
        dtype = str(x.dtype).removeprefix("torch.")
        raise ValueError(
            f"weight is {describe(weight)}; accepted with x of {describe(x)}: {dtype} [n, {x.shape[-1]}] on {x.device}; "
            "convert it with .to(...)"
        )


def _like(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """A new y. Raises ``ValueError`` for operands that do not fit."""
    _expect(x, weight)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library = torch.library.Library("tilebit", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, bool dependent=False) -> Tensor")
for _key in ("CPU", "CUDA"):
    _library.impl("linear", _linear, _key)
torch.library.register_fake("tilebit::linear", _like, lib=_library)
LINEAR, _derived = inference_only(torch.ops.tilebit.linear.default, _linear)
_library.impl("linear", _derived, "Autograd", with_keyset=True)
