"""Swizzles: permutations that undo themselves, and layouts seen through them."""

from itertools import product

import numpy as np
import pytest

from tilebit.layouts.banks import shared_access
from tilebit.layouts.layout import Layout
from tilebit.layouts.swizzle import Swizzle, SwizzledLayout


def test_every_small_swizzle_is_an_involution_of_its_span():
    for b, m, s in product(range(4), range(4), range(-4, 5)):
        if abs(s) < b:
            with pytest.raises(ValueError, match="accepted"):
                Swizzle(b, m, s)
            continue
        swizzle = Swizzle(b, m, s)
        offsets = np.arange(2 * swizzle.span)
        swizzled = swizzle(offsets)
        assert sorted(swizzled[: swizzle.span]) == list(range(swizzle.span))
        assert (swizzle.inverse()(swizzled) == offsets).all()
        assert (swizzled[swizzle.span :] == swizzled[: swizzle.span] + swizzle.span).all()
        target, source = (m, m + s) if s >= 0 else (m - s, m)
        for offset in offsets.tolist():
            flips = sum((offset >> (source + bit) & 1) << (target + bit) for bit in range(b))
            assert swizzle(offset) == offset ^ flips


def test_the_128_byte_swizzle_permutes_chunks_by_row():
    swizzle = Swizzle(3, 4, 3)
    for row, chunk, byte in product(range(16), range(8), (0, 15)):
        assert swizzle(row * 128 + chunk * 16 + byte) == row * 128 + (chunk ^ row % 8) * 16 + byte


def test_swizzled_layout_composes_and_inverts():
    tile = SwizzledLayout(Swizzle(3, 4, 3), Layout((8, 128), (128, 1)))
    part = tile.compose(Layout((2, 4), (1, 16)))
    assert [part(i) for i in range(8)] == [tile(i % 2 + i // 2 * 16) for i in range(8)]
    assert (tile.index(tile.offsets()) == np.arange(tile.size)).all()
    assert (tile.size, tile.cosize, tile.shape) == (1024, 1024, (8, 128))
    assert tile(3, 17) == Swizzle(3, 4, 3)(3 * 128 + 17)
    with pytest.raises(ValueError, match="cannot compose"):
        tile.compose(Layout(2, 1024))
    with pytest.raises(ValueError, match="cannot invert"):
        SwizzledLayout(Swizzle(1, 0, 1), Layout(4, 2)).index(0)


def test_the_swizzle_removes_ldmatrix_conflicts():
    tile = Layout((64, 128), (128, 1))  # 64 rows of 128 bytes, in bytes
    swizzled = SwizzledLayout(Swizzle(3, 4, 3), tile)
    row = np.arange(32)
    for chunk in range(8):
        address = row * 128 + chunk * 16
        assert shared_access(address, 16).conflicts == 4 * 7  # all eight rows of a matrix in the same banks
        assert shared_access(swizzled.swizzle(address), 16).conflicts == 0
