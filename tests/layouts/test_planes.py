"""Bit planes: every bit stored once and found again, prefixes are views, and the order is the one that the docstring says."""

from __future__ import annotations

import numpy as np
import pytest

from tilebit.layouts.packing import CUDA_ARCHES
from tilebit.layouts.planes import CHUNK, layout_of, pack_planes, plane_layout, unpack_planes

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


@pytest.mark.parametrize("plane", range(8))
def test_on_gpus_a_lane_finds_its_operand_s_weights_in_its_own_16_bytes(plane: int) -> None:
    """Of m16n8k16 lane l has rows l / 4 and l / 4 + 8; a warp's load is 512 bytes in one piece, all of the same 16 rows and 256 k."""
    layout = layout_of(plane_layout("sm_90a"), plane)
    row, k = np.divmod(layout.order.reshape(4, 32, 2, 2, 32), layout.tile_k)  # [slab, lane, word, half, bit]
    slab, lane, half = (axis[:, :, None, :, None] for axis in np.indices((4, 32, 2)))
    assert np.array_equal(row, np.broadcast_to(16 * slab + lane // 4 + 8 * half, row.shape))
    assert np.array_equal(k % 8 // 2, np.broadcast_to(lane % 4, k.shape)), "of each 8 k the lane's pair, as in the operand"


def test_on_gpus_the_bits_of_a_code_lie_side_by_side() -> None:
    """Bit w - p of plane p is weight w; of a byte of plane 0, the weights of bits j and j + 4 are neighbours in k: a register's pair."""
    first = plane_layout("sm_80")
    for plane in range(8):
        order = layout_of(first, plane).order
        assert np.array_equal(np.roll(order, plane, axis=1), first.order)
    pairs = first.order.reshape(-1, 4, 2, 4)  # [word, byte, nibble, bit]
    assert np.array_equal(pairs[:, :, 0] + 1, pairs[:, :, 1]) and (pairs[:, :, 0] % 2 == 0).all()
    assert np.array_equal(pairs[:, :, 0] % 32 // 8, np.broadcast_to(np.arange(4), pairs[:, :, 0].shape)), "in the order of k16 steps"
    assert layout_of(plane_layout("cpu"), 3) is plane_layout("cpu")


def test_what_planes_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="reach from 0 to 8; 3 bits hold 0 to 7"):
        pack_planes(np.array([[0, 8]]), 3, plane_layout("cpu"))
    with pytest.raises(ValueError, match=r"unknown arch 'tpu'; accepted: .*cpu"):
        plane_layout("tpu")
