"""What a stored number means: the number formats of weight-only GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PER_CHANNEL = -1
GROUP_SIZES = (32, 64, 128, PER_CHANNEL)
BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """A weight format: unsigned codes ``q`` of ``bits`` bits and, per output channel and group of ``group_size`` values of k,

        w = (q - zero_point) * scale

    ``symmetric`` formats store no zero point: it is ``2 ** (bits - 1)`` everywhere. ``group_size`` is 32, 64, 128 or -1
    (one group per output channel). Raises ``ValueError`` for anything else.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits!r}; accepted: {BITS}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size is {self.group_size!r}; accepted: {GROUP_SIZES} (-1: one group per output channel)")

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point that a symmetric format implies."""
        return 1 << (self.bits - 1)

    def groups(self, k: int) -> int:
        """Number of scale groups along ``k`` values (the last group may be shorter)."""
        return 1 if self.group_size == PER_CHANNEL else -(-k // self.group_size)

    @property
    def name(self) -> str:
        """compressed-tensors' words: ``w4a16_g128``, ``w8a16_channel_asym``."""
        group = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        return f"w{self.bits}a16_{group}" + ("" if self.symmetric else "_asym")

    @classmethod
    def parse(cls, name: str) -> QuantFormat:
        """The inverse of ``name``; raises ``ValueError`` with an example for anything else."""
        for bits in BITS:
            for group in GROUP_SIZES:
                for symmetric in (True, False):
                    candidate = cls(bits, group, symmetric)
                    if candidate.name == name:
                        return candidate
        raise ValueError(f"unknown format {name!r}; accepted are names such as 'w4a16_g128', 'w4a16_g64_asym', 'w8a16_channel'")

    def to_json(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size, "symmetric": self.symmetric}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> QuantFormat:
        return cls(bits=data["bits"], group_size=data["group_size"], symmetric=data["symmetric"])
