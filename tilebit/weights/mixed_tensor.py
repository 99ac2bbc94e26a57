"""``MixedTensor``: a quantized weight whose output channels are in two formats, as ``MixedLinear``
takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accepted import expect, expect_tensors
from ..ops.gemm_mixed import check_channels
from ..ops.operands import describe
from .quantize import QuantizedTensor


@dataclass(frozen=True, slots=True, eq=False)
class MixedTensor:
    """A weight [n, k]: ``low`` and ``high`` hold its output channels in either format (None where a
    format has none), and ``channels`` int64 [n] says which channel each of their rows is, those of
    ``low`` first. Raises ``TypeError`` and ``ValueError`` for parts of another k or device, and for
    channels that are not each of 0 to n - 1 once, and for parts with factors of x (``smooth``)
    that are not the same: one x serves both."""

    low: QuantizedTensor | None
    high: QuantizedTensor | None
    channels: Tensor

    def __post_init__(self) -> None:
        for name, part in (("low", self.low), ("high", self.high)):
            expect(name, part, QuantizedTensor | None, "a QuantizedTensor, or None")
        expect_tensors(channels=self.channels)
        if not self.parts:
            raise ValueError("low and high are None; accepted: at least one QuantizedTensor")
        if len({(part.k, part.device) for part in self.parts}) > 1 or self.channels.device != self.parts[0].device:
            said = " and ".join(f"[{part.n}, {part.k}] on {part.device}" for part in self.parts)
            raise ValueError(f"low and high are {said}, channels on {self.channels.device}; accepted: one k and one device")
        factors = [part.smooth for part in self.parts]
        if not same_numbers(factors):
            raise ValueError("low and high have different factors of x (smooth); accepted: the same, since one x serves both, or none")
        if self.channels.ndim != 1 or self.channels.dtype is not torch.int64:
            raise ValueError(f"channels are {describe(self.channels)}; accepted: int64 [{self.n}]")
        check_channels(self.channels, self.n)

    @property
    def parts(self) -> list[QuantizedTensor]:
        """Those that there are, the low one first."""
        return [part for part in (self.low, self.high) if part is not None]

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)

    @property
    def k(self) -> int:
        return self.parts[0].k

    def to(self, device: torch.device | str) -> MixedTensor:
        """The same weight on ``device``."""
        low, high = (None if part is None else part.to(device) for part in (self.low, self.high))
        return MixedTensor(low, high, self.channels.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [n, k], rows in the order of its channels; as exact as its parts'."""
        rows = torch.cat([part.dequantize(dtype) for part in self.parts])
        return torch.empty_like(rows).index_copy_(0, self.channels, rows)


def same_numbers(held: Sequence[Tensor | None]) -> bool:
    """Whether all are None, or all hold the same; on meta, where nothing is held, whether they are one tensor."""
    first = held[0]
    if first is None:
        return all(other is None for other in held)
    return all(other is first or (other is not None and not other.is_meta and torch.equal(other, first)) for other in held)


def split_channels(channels: Tensor, n: int) -> tuple[Tensor, int]:
    """(int64 [n]: all channels but ``channels``, then these, both ascending; how many come before them). In
    this order neighbours share sectors of y (results/notes/mixed-order.md).
    Raises ``ValueError`` for channels that are not some of 0 to n - 1, each at most once."""
    expect_tensors(channels=channels)
    if channels.ndim != 1 or channels.is_floating_point() or channels.is_complex() or channels.dtype is torch.bool:
        raise ValueError(f"channels are {describe(channels)}; accepted: whole numbers, some of 0 to {n - 1}")
    channels = channels.to(torch.int64)
    if channels.numel() and (int(channels.min()) < 0 or int(channels.max()) >= n or channels.unique().numel() != channels.numel()):
        raise ValueError(f"channels are {channels.numel()} numbers; accepted: some of 0 to {n - 1}, each at most once")
    rest = torch.ones(n, dtype=torch.bool, device=channels.device)
    rest[channels] = False
    before = rest.nonzero().flatten()
    return torch.cat([before, channels.sort().values]), len(before)
