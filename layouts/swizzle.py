"""XOR swizzles of offsets, and layouts seen through one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layout import Layout, compose, inverse


@dataclass(frozen=True, slots=True)
class Swizzle:
    """CuTe's ``Swizzle<b, m, s>``: the ``b`` bits at ``m`` are XORed with the ``b`` bits at ``m +
    s`` (of an offset in elements or in bytes: ``m`` says which).

    ``Swizzle(3, 4, 3)`` on byte offsets is the 128-byte swizzle of TMA and wgmma: 16-byte chunks permuted by the row, modulo 8. A negative
    ``s`` XORs the high bits with the low ones. Raises ``ValueError`` unless b >= 0, m >= 0 and \\|s\\| >= b (else the two fields overlap).
    """

    b: int
    m: int
    s: int

    def __post_init__(self) -> None:
        if self.b < 0 or self.m < 0 or abs(self.s) < self.b:
            raise ValueError(f"{self}: accepted are b >= 0, m >= 0 and |s| >= b")

    @property
    def span(self) -> int:
        """The swizzle permutes every aligned block of this many offsets."""
        return 1 << (self.m + self.b + abs(self.s)) if self.b else 1

    def __call__(self, offset):
        """The swizzled offset; integers or integer arrays."""
        field = (1 << self.b) - 1
        if self.s >= 0:
            return offset ^ (offset >> self.s & field << self.m)
        return offset ^ (offset << -self.s & field << (self.m - self.s))

    def inverse(self) -> Swizzle:
        """Itself: the source bits are not changed."""
        return self


@dataclass(frozen=True, slots=True)
class SwizzledLayout:
    """``swizzle(layout(c))`` for every coordinate c of ``layout``."""

    swizzle: Swizzle
    layout: Layout

    def __str__(self) -> str:
        return f"{self.swizzle} o {self.layout}"

    def __call__(self, *coord):
        return self.swizzle(self.layout(*coord))

    @property
    def shape(self):
        return self.layout.shape

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        return int(self.offsets().max()) + 1

    def offsets(self) -> np.ndarray:
        """int64 [size]: the offset of every index."""
        return self.swizzle(self.layout.offsets())

    def compose(self, inner: Layout) -> SwizzledLayout:
        """``result(c) == self(inner(c))``; raises ``ValueError`` as ``layout.compose`` does."""
        return SwizzledLayout(self.swizzle, compose(self.layout, inner))

    def index(self, offset):
        """The inverse: the index that is at ``offset`` (integers or arrays). Raises ``ValueError``
        unless ``layout`` is invertible and ``offset`` within it."""
        return inverse(self.layout)(self.swizzle.inverse()(offset))
