"""``torch.ops.tilebit.gemm_mixed``: the product of int8 codes of x with a weight whose output channels
are in two formats, each channel's result stored in its place of one y."""

from __future__ import annotations

import threading
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from ..layouts.formats import GemmFormat
from . import dispatch
from .check import CHECKED
from .direct import inference_only
from .gemm_int8 import as_read, check_x, launch, ready, reject_x
from .workspace import managed_by_inductor

Launches = Literal["in_turn", "dependent", "parallel"]
LAUNCHES: tuple[Launches, ...] = get_args(Launches)
_PART = ("weight", "scales", "zeros?", "row_scales?", "bias?", "channels")

_library = torch.library.Library("tilebit", "FRAGMENT")
_parts = [f"Tensor{'?' * name.endswith('?')} {part}_{name.rstrip('?')}" for part in ("low", "high") for name in _PART]
_library.define(
    f"gemm_mixed(Tensor x, Tensor token_scales, {', '.join(_parts)}, int n, int k, str low_format, str high_format, ScalarType dtype, "
    'str launches="in_turn") -> Tensor'
)
_own = threading.local()  # a thread's further stream for each device: another thread may be capturing with its own


def _gemm_mixed(
    x: Tensor,
    token_scales: Tensor,
    low_weight: Tensor,
    low_scales: Tensor,
    low_zeros: Tensor | None,
    low_row_scales: Tensor | None,
    low_bias: Tensor | None,
    low_channels: Tensor,
    high_weight: Tensor,
    high_scales: Tensor,
    high_zeros: Tensor | None,
    high_row_scales: Tensor | None,
    high_bias: Tensor | None,
    high_channels: Tensor,
    n: int,
    k: int,
    low_format: str,
    high_format: str,
    dtype: torch.dtype,
    launches: str = "in_turn",
) -> Tensor:
    """y[..., n] in ``dtype`` (fp16 or bf16): y[..., low_channels] and y[..., high_channels] are the
    products ``torch.ops.tilebit.gemm_int8`` of the low part, of ``low_format``, and of the high part;
    weights, scales, zeros, row scales and bias are of so many rows as the part has channels.

    ``x`` and ``token_scales`` are as there; both formats take the same. ``low_channels`` and
    ``high_channels`` int32 hold together each of 0 to n - 1 once (``TILEBIT_CHECK`` compares; else
    other channels are garbage, never other memory). ``launches``: the high part's kernel follows the
    low part's ("in_turn"), starts while that one ends ("dependent", where the kernel has dependent
    launch), or runs on a stream of its own ("parallel", on CUDA). Results are the same. Raises
    ``ValueError`` for what does not fit and ``KernelUnavailable``, before a launch.
    """
    check_x(x, dtype, low_weight.device)
    _check_words(launches, low_format, high_format)
    low = dispatch.plan_for(x.device, low_channels.numel(), k, low_format, dtype, low_bias is not None, False, n)
    high = dispatch.plan_for(
        x.device, high_channels.numel(), k, high_format, dtype, high_bias is not None, launches == "dependent", n
    )  # fmt: skip
    *leading, columns = x.shape
    if columns not in (k, low.kx):
        reject_x(x, low_weight.device, k)
    if CHECKED or low.workload.n + high.workload.n != n:
        check_channels(low_channels, high_channels, n)
    y = torch.empty((*leading, n), dtype=dtype, device=x.device)
    m = x.numel() // columns
    if not m:
        return y
    rows, scales_of_rows = as_read(low, x, token_scales, m)
    out = y.view(m, n)
    first = (rows, low_weight, low_scales, low_zeros, low_row_scales, scales_of_rows, low_bias, low_channels, out)
    second = (rows, high_weight, high_scales, high_zeros, high_row_scales, scales_of_rows, high_bias, high_channels, out)
    ready(low, m, first)
    ready(high, m, second)
    if launches != "parallel" or not x.is_cuda or managed_by_inductor(x.device.index, torch.cuda.current_stream(x.device).cuda_stream):
        launch(low, m, first)
        launch(high, m, second)
        return y
    current, other = torch.cuda.current_stream(x.device), _further_stream(x.device)
    other.wait_stream(current)
    try:
        with torch.cuda.stream(other):
            launch(high, m, second)
        launch(low, m, first)
    finally:
        current.wait_stream(other)
    return y


def check_channels(low: Tensor, high: Tensor, n: int) -> None:
    """Raise ``ValueError`` unless the two hold together each of 0 to n - 1 once; waits for the device."""
    held = torch.cat([low, high])
    if held.numel() != n or not torch.equal(held.sort().values.long(), torch.arange(n, device=held.device)):
        raise ValueError(
            f"low_channels and high_channels are of {low.numel()} and {high.numel()} channels and do not hold each of 0 to {n - 1} once; "
            f"accepted: int32, together all {n} channels of y, in any order"
        )


@cache
def _check_words(launches: str, low_format: str, high_format: str) -> None:
    if launches not in LAUNCHES:
        raise ValueError(f"launches is {launches!r}; accepted: {', '.join(map(repr, LAUNCHES))}")
    check_pair(GemmFormat.parse(low_format), GemmFormat.parse(high_format))


def check_pair(low: GemmFormat, high: GemmFormat) -> None:
    """Raise ``ValueError`` unless one quantized x serves products of both formats."""
    if not low.integer_sums or not high.integer_sums or low.x_group != high.x_group:
        raise ValueError(
            f"the formats are {low.name} and {high.name}; accepted: two with the same int8 x: 'w4a8_g128_asym' with 'w8a8_g128', or "
            f"'w4a8_lqq_g64', 'w4a8_lqq_g128' or 'w4a8_channel_asym' with 'w8a8_channel'"
        )


def _further_stream(device: torch.device) -> torch.cuda.Stream:
    held = _own.__dict__.setdefault("streams", {})
    if device.index not in held:
        held[device.index] = torch.cuda.Stream(device)
    return held[device.index]


def _fake(x: Tensor, token_scales: Tensor, low_weight: Tensor, *rest: object) -> Tensor:
    n, _, low_format, high_format, dtype, *launches = rest[11:]
    assert isinstance(n, int | torch.SymInt) and isinstance(dtype, torch.dtype)
    check_x(x, dtype, low_weight.device)
    _check_words(str(launches[0]) if launches else "in_turn", str(low_format), str(high_format))
    return x.new_empty((*x.shape[:-1], n), dtype=dtype)


gemm_mixed, _derived = inference_only(torch.ops.tilebit.gemm_mixed.default, _gemm_mixed)
for _key in ("CPU", "CUDA"):
    _library.impl("gemm_mixed", _gemm_mixed, _key)
_library.impl("gemm_mixed", _derived, "Autograd", with_keyset=True)
torch.library.register_fake("tilebit::gemm_mixed", _fake, lib=_library)
