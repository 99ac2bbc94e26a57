"""``torch.ops.tilebit.gemm_mixed``: the product of int8 codes of x with a weight whose output channels
are in 8 and 4 bits: rows of one 4-bit format, of which two make an 8-bit channel, stored by an
index."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..layouts.formats import GemmFormat
from ..schedules.gemm.parts import ADDED, GATE_ROWS, NOWHERE
from . import dispatch
from .check import CHECKED
from .direct import inference_only
from .gemm_int8 import as_read, check_x, launch, reject_x

_library = torch.library.Library("tilebit", "FRAGMENT")
_library.define(
    "gemm_mixed(Tensor x, Tensor token_scales, Tensor weight, Tensor scales, Tensor? zeros, Tensor? row_scales, Tensor? bias, "
    "Tensor channels, int n, int k, str format, ScalarType dtype, bool nibbles=False) -> Tensor"
)


def _gemm_mixed(
    x: Tensor,
    token_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    bias: Tensor | None,
    channels: Tensor,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    nibbles: bool = False,
) -> Tensor:
    """y[..., n] in ``dtype`` (fp16 or bf16): of the product ``torch.ops.tilebit.gemm_int8`` with a
    weight [rows, k] of ``format``, column j goes to y[..., channels[j]]. Where ``channels[j]`` is -1 it
    is added, in fp32, to column j - 8 instead; where it is -2 it goes nowhere.

    ``x`` and ``token_scales`` are as there; weight, scales, zeros and row scales those of a
    ``PackedWeight`` of so many rows as the int32 ``channels`` are; ``bias`` [rows] counts for each row, so
    that it is 0 where ``channels`` are negative. ``channels`` hold each of 0 to n - 1 once, in any
    order, and -1 only in the last 8 of 16 rows, 8 behind a channel (``TILEBIT_CHECK`` compares; else
    other channels are garbage, never other memory). With ``nibbles`` rows are as ``split_nibbles`` gives
    them, and kernels may multiply bytes (else such y are garbage): from some hundred rows of x on that
    takes less time. One kernel, one launch. Raises ``ValueError`` for
    what does not fit and ``KernelUnavailable``, before a launch.
    """
    check_x(x, dtype, weight.device)
    _check_format(format)
    if CHECKED or not 0 < n <= channels.numel():
        check_channels(channels, n)
    plan = dispatch.plan_for(x.device, channels.numel(), k, format, dtype, bias is not None, False, n, nibbles=nibbles)
    *leading, columns = x.shape
    if columns not in (k, plan.kx):
        reject_x(x, weight.device, k)
    y = torch.empty((*leading, n), dtype=dtype, device=x.device)
    m = x.numel() // columns
    if not m:
        return y
    rows, scales_of_rows = as_read(plan, x, token_scales, m)
    launch(plan, m, (rows, weight, scales, zeros, row_scales, scales_of_rows, bias, channels, y.view(m, n)))
    return y


def check_channels(channels: Tensor, n: int) -> None:
    """Raise ``ValueError`` unless ``channels`` hold each of 0 to n - 1 once, and beside them -1 only 8
    rows behind one, in the last 8 of 16 rows, and -2; waits for the device."""
    stored = channels[channels >= 0]
    if n < 1 or stored.numel() != n or not torch.equal(stored.sort().values.long(), torch.arange(n, device=channels.device)):
        raise ValueError(
            f"channels are {channels.numel()} numbers and do not hold each of 0 to {n - 1} once; accepted: int32, all {n} channels of y, "
            "in any order"
        )
    if int(channels.min()) < min(ADDED, NOWHERE):
        raise ValueError(
            f"channels reach {int(channels.min())}; accepted: channels of y, {ADDED} of a row that is added to the one {GATE_ROWS} before "
            f"it, and {NOWHERE} of padding"
        )
    added = (channels == ADDED).nonzero().flatten()
    lost = added[(added % (2 * GATE_ROWS) < GATE_ROWS) | (channels[added - GATE_ROWS] < 0)]
    if lost.numel():
        raise ValueError(
            f"channels are {ADDED} at row {int(lost[0])}; accepted: in the last {GATE_ROWS} of {2 * GATE_ROWS} rows alone, and {GATE_ROWS} "
            "behind a channel of y, to which the row is added"
        )


@cache
def _check_format(format: str) -> None:
    parsed = GemmFormat.parse(format)
    if parsed.bits != 4 or not parsed.integer_sums:
        raise ValueError(
            f"format is {format}; accepted: one of 4 bits with int8 x: 'w4a8_g128_asym', 'w4a8_channel_asym', 'w4a8_lqq_g64' or "
            "'w4a8_lqq_g128'"
        )


def _fake(
    x: Tensor,
    token_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    row_scales: Tensor | None,
    bias: Tensor | None,
    channels: Tensor,
    n: int,
    k: int,
    format: str,
    dtype: torch.dtype,
    nibbles: bool = False,
) -> Tensor:
    check_x(x, dtype, weight.device)
    _check_format(format)
    return x.new_empty((*x.shape[:-1], n), dtype=dtype)


gemm_mixed, _derived = inference_only(torch.ops.tilebit.gemm_mixed.default, _gemm_mixed)
for _key in ("CPU", "CUDA"):
    _library.impl("gemm_mixed", _gemm_mixed, _key)
_library.impl("gemm_mixed", _derived, "Autograd", with_keyset=True)
torch.library.register_fake("tilebit::gemm_mixed", _fake, lib=_library)
