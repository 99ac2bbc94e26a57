"""The names of what layers of any precision hold: ``w3-8a16_any``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..layouts.formats import CODEBOOK_BITS

SET = "@"  # before the width that a layer is set to
_NAME = re.compile(rf"w(\d+)(?:-(\d+))?a16_any(?:{SET}(\d+))?")
_LEAST, _MOST = CODEBOOK_BITS[0], CODEBOOK_BITS[-1]


@dataclass(frozen=True, slots=True)
class AnyKind:
    """A weight in every width from ``seed_bits`` to ``max_bits``, of a layer that is set to ``bits``. Raises
    ``ValueError`` for widths outside 2 to 8, or that are not in this order."""

    seed_bits: int
    max_bits: int
    bits: int

    def __post_init__(self) -> None:
        if not _LEAST <= self.seed_bits <= self.bits <= self.max_bits <= _MOST:
            raise ValueError(
                f"the widths are {self.seed_bits} to {self.max_bits} bits, set to {self.bits}; accepted: from {_LEAST} up to {_MOST}, set "
                f"to one of them: 'w3-8a16_any', or 'w3-8a16_any{SET}4' to compute in 4 bits"
            )

    @classmethod
    def of(cls, widths: range, bits: int | None = None) -> AnyKind:
        """Of a weight's ``widths``, set to ``bits`` (None: the widest)."""
        return cls(widths[0], widths[-1], widths[-1] if bits is None else bits)

    @classmethod
    def parse(cls, name: str) -> AnyKind | None:
        """The inverse of ``name``; None for the name of another kind. Raises ``ValueError`` as the class."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        least, most, bits = found.groups()
        most = most or least
        return cls(int(least), int(most), int(bits or most))

    @property
    def widths(self) -> range:
        return range(self.seed_bits, self.max_bits + 1)

    @property
    def store(self) -> str:
        """What is stored, whatever the layer is set to: ``w3-8a16_any``, of one width ``w4a16_any``."""
        return f"w{self.seed_bits}{f'-{self.max_bits}' * (self.max_bits > self.seed_bits)}a16_any"

    @property
    def name(self) -> str:
        """``store``, and the width that is set where it is not the widest: ``w3-8a16_any@4``."""
        return self.store + f"{SET}{self.bits}" * (self.bits < self.max_bits)
