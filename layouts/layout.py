"""Layouts: functions from coordinates to offsets, written shape:stride, and their algebra.

After CuTe ("CuTe Layout Representation and Algebra", NVIDIA CUTLASS). A layout's coordinates are
ordered colexicographically (the first mode runs fastest), so it is also a function from the indices
0, 1, ... size - 1. That function *is* the layout: composition and inverses are decided on its table
of offsets, so a result is right or there is a ``ValueError`` that names both operands and the
reason. Tables cost ``size`` numbers: meant for tiles, not for whole tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"
Mode: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """``Layout((4, (2, 8)), (2, (1, 8)))``: nested shape (positive) and strides (not negative) of
    the same profile.

    Calling it with one coordinate per mode (``layout(3, 1)``), or with a single index, gives the
    offset; indices may be numpy arrays. Raises ``ValueError`` for any other shape or stride, and
    for coordinates outside of the shape.
    """

    shape: IntTuple
    stride: IntTuple

    def __post_init__(self) -> None:
        if not _congruent(self.shape, self.stride):
            raise ValueError(
                f"layout {_text(self.shape)}:{_text(self.stride)}: accepted are a shape of integers >= 1 and strides >= 0, "
                f"nested alike in tuples that are not empty"
            )

    @classmethod
    def compact(cls, shape: IntTuple) -> Layout:
        """The layout that maps each index to itself, with this shape."""
        return _substitute(shape, iter(_identity(shape)))

    def __str__(self) -> str:
        return f"{_text(self.shape)}:{_text(self.stride)}"

    def __call__(self, *coord: IntTuple | np.ndarray) -> Any:
        return _offset(coord[0] if len(coord) == 1 else coord, self.shape, self.stride, self)

    @property
    def modes(self) -> list[Mode]:
        """(shape, stride) of every leaf, fastest first."""
        return list(zip(_leaves(self.shape), _leaves(self.stride), strict=True))

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return _product(self.shape)

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        return 1 + sum((s - 1) * d for s, d in self.modes)

    def offsets(self) -> np.ndarray:
        """int64 [size]: the offset of every index."""
        return np.asarray(self(np.arange(self.size, dtype=np.int64)))


def join(*layouts: Layout) -> Layout:
    """The layout whose modes are ``layouts``: join(a, b)(i, j) = a(i) + b(j)."""
    return Layout(tuple(part.shape for part in layouts), tuple(part.stride for part in layouts))


def coalesce(layout: Layout) -> Layout:
    """The flat layout of fewest modes that is the same function of the index: unique, so two
    layouts are the same function iff these are equal."""
    modes: list[Mode] = []
    for s, d in layout.modes:
        if modes and modes[-1][0] * modes[-1][1] == d and s > 1:
            modes[-1] = (modes[-1][0] * s, modes[-1][1])
        elif s > 1:
            modes.append((s, d))
    return _flat(modes)


def compose(outer: Layout, inner: Layout) -> Layout:
    """``compose(a, b)(c) == a(b(c))`` for every coordinate c of b. Each mode of b becomes a mode
    (nested where it needs more than one stride) of the result.

    Raises ``ValueError`` if b reaches beyond a's indices, if along a mode of b the offsets of a do
    not advance by strides, or if they do not add up over the modes of b: then no layout of b's
    modes is that function.
    """
    if inner.cosize > outer.size:
        reach = inner.cosize - 1
        raise ValueError(f"cannot compose {outer} with {inner}: offsets of the second reach {reach}, the first has {outer.size} indices")
    table = np.asarray(outer(inner.offsets()))
    leaves: list[Layout] = []
    for size, index_stride in _identity(inner.shape):
        modes = _fit(table[np.arange(size) * index_stride])
        if modes is None:
            stride = inner.modes[len(leaves)][1]
            raise ValueError(
                f"cannot compose {outer} with {inner}: along mode {size}:{stride} of the second, the first's offsets have no strides"
            )
        leaves.append(_flat(modes))
    parts = iter(leaves)
    result = _substitute(inner.shape, parts)
    if not np.array_equal(result.offsets(), table):
        raise ValueError(f"cannot compose {outer} with {inner}: the first's offsets do not add up over the second's modes")
    return result


def right_inverse(layout: Layout) -> Layout:
    """The longest layout r such that r(i) is the first index that ``layout`` maps to i:
    ``layout(r(i)) == i`` for every i < r.size."""
    offset, first = np.unique(layout.offsets(), return_index=True)
    gaps = np.flatnonzero(offset != np.arange(offset.size))
    return _flat(_longest(first[: gaps[0] if gaps.size else offset.size]))


def left_inverse(layout: Layout) -> Layout:
    """A layout l of at least ``layout.cosize`` indices with ``l(layout(i)) == i`` for every i: the
    inverse of ``layout`` joined with its complement.

    Raises ``ValueError`` if two coordinates share an offset, or if the layout has no complement.
    """
    extent = max([s * d for s, d in layout.modes if s > 1], default=1)  # the least interval that the layout and a complement can fill
    return inverse(join(layout, complement(layout, extent)))


def inverse(layout: Layout) -> Layout:
    """The layout r with ``layout(r(i)) == i`` and ``r(layout(i)) == i``. Raises ``ValueError``
    unless ``layout`` is a permutation of 0 .. size - 1."""
    result = right_inverse(layout)
    if result.size != layout.size:
        raise ValueError(f"cannot invert {layout}: its offsets are not a permutation of 0 .. {layout.size - 1}, inverse in a layout")
    return result


def complement(layout: Layout, extent: int) -> Layout:
    """The layout c, strides ascending, for which ``join(layout, c)`` takes every offset 0 .. extent
    - 1 exactly once: what ``layout`` leaves out.

    Raises ``ValueError`` if there is none: offsets shared or beyond ``extent``, strides that do not
    nest, or ``extent`` not a multiple.
    """
    modes: list[Mode] = []
    filled = 1  # offsets below this are taken once by the modes seen so far
    for s, d in sorted((mode for mode in layout.modes if mode[0] > 1), key=lambda mode: mode[1]):
        if d < filled or d % filled:
            raise ValueError(
                f"{layout} has no complement in 0 .. {extent - 1}: stride {d} is not a multiple of {filled}, which the smaller strides fill"
            )
        modes.append((d // filled, filled))
        filled = s * d
    if extent < 1 or extent % filled:
        raise ValueError(f"{layout} has no complement in 0 .. {extent - 1}: {extent} is not a positive multiple of {filled}")
    return coalesce(_flat([*modes, (extent // filled, filled)]))


def divide(layout: Layout, tiler: Layout) -> Layout:
    """``layout`` cut into tiles: mode 0 runs inside a tile (the elements that ``tiler`` selects),
    mode 1 over the tiles.

    ``compose(layout, join(tiler, complement(tiler, layout.size)))``. Raises ``ValueError`` if the
    tiler has no complement in the layout or the composition is no layout.
    """
    try:
        return compose(layout, join(tiler, complement(tiler, layout.size)))
    except ValueError as reason:
        raise ValueError(f"cannot divide {layout} by {tiler}: {reason}") from reason


def product(tile: Layout, tiler: Layout) -> Layout:
    """``tile`` repeated as ``tiler`` says: mode 0 is the tile, mode 1 the tiles, which do not
    overlap.

    ``join(tile, compose(complement(tile, tile.size * tiler.cosize), tiler))``. Raises
    ``ValueError`` if the tile has no such complement or the composition is no layout.
    """
    try:
        return join(tile, compose(complement(tile, tile.size * tiler.cosize), tiler))
    except ValueError as reason:
        raise ValueError(f"cannot repeat {tile} by {tiler}: {reason}") from reason


def _fit(table: np.ndarray) -> list[Mode] | None:
    """Modes of the coalesced layout with this table of offsets, or None if there is none."""
    modes = _longest(table)
    return modes if _product(tuple(s for s, _ in modes) or 1) == table.size else None


def _longest(table: np.ndarray) -> list[Mode]:
    """Modes of the coalesced layout with the longest prefix of this table (which starts at 0). The
    first mode of a coalesced layout ends where the first stride breaks, so each step is forced and
    the result is the longest there is."""
    modes: list[Mode] = []
    while table.size > 1:
        stride = table[1]
        breaks = np.flatnonzero(table != np.arange(table.size) * stride)
        run = int(breaks[0]) if breaks.size else table.size
        blocks = table[: table.size // run * run].reshape(-1, run)
        wrong = np.flatnonzero((blocks != blocks[:, :1] + np.arange(run) * stride).any(axis=1))
        modes.append((run, int(stride)))
        table = blocks[: wrong[0] if wrong.size else len(blocks), 0]
    return modes


def _flat(modes: list[Mode]) -> Layout:
    if len(modes) < 2:
        return Layout(*(modes[0] if modes else (1, 0)))
    return Layout(tuple(s for s, _ in modes), tuple(d for _, d in modes))


def _identity(shape: IntTuple) -> list[Mode]:
    """(size, index stride) of every leaf."""
    modes, stride = [], 1
    for size in _leaves(shape):
        modes.append((size, stride))
        stride *= size
    return modes


def _substitute(shape: IntTuple, parts) -> Layout:
    """``shape`` with each leaf replaced by the next of ``parts`` (layouts or modes)."""
    if isinstance(shape, tuple):
        return join(*[_substitute(part, parts) for part in shape])
    part = next(parts)
    return part if isinstance(part, Layout) else Layout(*part)


def _offset(coord, shape: IntTuple, stride: IntTuple, layout: Layout):
    if isinstance(coord, tuple):
        if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(coord) != len(shape):
            raise ValueError(
                f"coordinate {coord} does not match {_text(shape)} in layout {layout}; give one coordinate per mode, or one index"
            )
        return sum(_offset(c, s, d, layout) for c, s, d in zip(coord, shape, stride, strict=True))
    size = _product(shape)
    if np.any(np.less(coord, 0) | np.greater_equal(coord, size)):
        raise ValueError(f"coordinate {coord} is outside of 0 .. {size - 1}, mode {_text(shape)} of layout {layout}")
    offset = coord * 0
    for s, d in zip(_leaves(shape), _leaves(stride), strict=True):
        offset, coord = offset + coord % s * d, coord // s
    return offset


def _leaves(tree: IntTuple) -> list[int]:
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, tuple) else [tree]


def _product(shape: IntTuple) -> int:
    result = 1
    for size in _leaves(shape):
        result *= size
    return result


def _congruent(shape: IntTuple, stride: IntTuple) -> bool:
    if isinstance(shape, tuple) and isinstance(stride, tuple):
        return len(shape) == len(stride) > 0 and all(_congruent(s, d) for s, d in zip(shape, stride, strict=True))
    return isinstance(shape, int) and isinstance(stride, int) and shape >= 1 and stride >= 0


def _text(tree: IntTuple) -> str:
    return str(tree).replace(" ", "")
