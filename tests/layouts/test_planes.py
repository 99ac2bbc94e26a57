"""Bit planes: every bit stored once and found again, prefixes are views, and the order is the one that the docstring says."""

from __future__ import annotations

import numpy as np
import pytest

from tilebit.layouts.packing import CUDA_ARCHES
from tilebit.layouts.planes import CHUNK, pack_planes, plane_layout, unpack_planes

ARCHES = ("cpu", *CUDA_ARCHES)
SHAPES = ((1, 1), (3, 255), (5, 257), (70, 130))


def _codes(n: int, k: int, bits: int) -> np.ndarray:
    return np.random.default_rng(n * k + bits).integers(0, 1 << bits, (n, k), dtype=np.uint8)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_come_back_and_fewer_planes_are_the_highest_bits(arch: str, bits: int) -> None:
    layout = plane_layout(arch)
    for n, k in SHAPES:
        codes = _codes(n, k, bits)
        planes = pack_planes(codes, bits, layout)
        assert planes.shape == (bits, *layout.storage_shape(n, k))
        for kept in range(1, bits + 1):
            assert np.array_equal(unpack_planes(planes[:kept], layout, n, k), codes >> (bits - kept))


@pytest.mark.parametrize("arch", ARCHES)
def test_each_bit_is_where_position_says(arch: str) -> None:
    layout, (n, k) = plane_layout(arch), (5, 300)
    codes = _codes(n, k, 1)
    words = layout.pack(codes).ravel()
    i, j = np.indices((n, k))
    word, bit = layout.position(i, j, n, k)
    assert np.array_equal(words[word] >> bit.astype(np.uint32) & 1, codes)
    assert len({*zip(word.ravel().tolist(), bit.ravel().tolist(), strict=True)}) == n * k
    assert layout.words % 4 == 0, "planes start at whole 16 bytes"


def test_on_cpus_bit_j_of_all_bytes_is_32_neighbours_in_k() -> None:
    codes = _codes(2, CHUNK, 1)
    rows = plane_layout("cpu").pack(codes).view(np.uint8).reshape(2, CHUNK // 8)
    for j in range(8):
        assert np.array_equal(rows >> j & 1, codes[:, 32 * j : 32 * j + 32])


def test_what_planes_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="reach from 0 to 8; 3 bits hold 0 to 7"):
        pack_planes(np.array([[0, 8]]), 3, plane_layout("cpu"))
    with pytest.raises(ValueError, match=r"unknown arch 'tpu'; accepted: .*cpu"):
        plane_layout("tpu")
