"""Bit planes: codes of any number of bits, each bit of all codes in a packed layout of its own.

Plane 0 holds the highest bit of every code. Codes of b bits that are the highest of wider ones are
then the first b planes of these, as they lie: a view of fewer bits is a prefix, without a copy, and
reading it costs b bits a weight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from .packing import CUDA_ARCHES, WORD_BITS, PackedLayout

CHUNK = 256  # neighbouring k of a row that lie together on CPUs: a vector register of bits
_BYTES = CHUNK // 8
CUDA_TILE_N, CUDA_TILE_K = 64, 256  # 2,048 bytes, as the tiles of the other formats; 512 of them are what a warp loads at once
ROTATED = "planes_mma"


@cache
def plane_layout(arch: str) -> PackedLayout:
    """Where the bits of plane 0 lie, each an element of one bit; ``layout_of`` has the others.

    On "cpu" tiles are 256 k of one row, 32 bytes: bit j of byte c is k = 32 j + c. So bits j of all
    bytes are 32 neighbouring k, and exchanging bits between the planes' bytes, which moves no byte,
    makes the planes vectors of 32 codes.

    On NVIDIA tiles are 64 x 256, induced from the A operand of mma.m16n8k16: lane l of a warp owns
    16 bytes of each 16 rows, two words u of row l / 4 and of row l / 4 + 8 each, words u together, so
    that a plane is read in whole lines of 512 bytes. Byte q of the word u of a row holds what the
    lane has in the operands of two k16 steps, from k = 32 (4 u + q) on: bits j and j + 4 are pair j of
    these, k = 8 j + 2 (l % 4) and the next, which a register of the operand has. So x is read in the
    order of k. Raises ``ValueError`` for another arch.
    """
    if arch == "cpu":
        word, slot = np.arange(CHUNK // WORD_BITS)[:, None], np.arange(WORD_BITS)
        return PackedLayout("planes_cpu", 1, 1, CHUNK, _BYTES * (slot % 8) + 4 * word + slot // 8)
    if arch in CUDA_ARCHES:
        slab, lane, word, half = (axis[..., None] for axis in np.indices((CUDA_TILE_N // 16, 32, 2, 2)))
        bit = np.arange(WORD_BITS)
        row = 16 * slab + 8 * half + lane // 4
        column = 32 * (4 * word + bit // 8) + 8 * (bit % 4) + 2 * (lane % 4) + bit % 8 // 4
        return PackedLayout(ROTATED, 1, CUDA_TILE_N, CUDA_TILE_K, (row * CUDA_TILE_K + column).reshape(-1, WORD_BITS))
    raise ValueError(f"unknown arch {arch!r}; accepted: {', '.join(CUDA_ARCHES)}, cpu")


@cache
def layout_of(layout: PackedLayout, plane: int) -> PackedLayout:
    """Where the bits of plane ``plane`` lie, ``layout`` being that of plane 0.

    On CPUs the same. On NVIDIA each word is rotated by ``plane`` bits to the right: then the bits of a
    code lie side by side, the highest where plane 0 has it, and selecting bits of the planes' words
    makes codes, without a shift.
    """
    if layout.name != ROTATED or plane == 0:
        return layout
    return replace(layout, name=f"{layout.name}_{plane}", order=np.roll(layout.order, -plane, axis=1))


def pack_planes(codes: np.ndarray, bits: int, layout: PackedLayout) -> np.ndarray:
    """Integer [n, k] codes -> uint32 [bits, *layout.storage_shape(n, k)], ``layout`` being that of
    plane 0; padding holds 0. Raises
    ``ValueError`` for codes of more than ``bits`` bits."""
    if codes.size and (codes.min() < 0 or int(codes.max()) >> bits):
        raise ValueError(f"codes reach from {codes.min()} to {codes.max()}; {bits} bits hold 0 to {(1 << bits) - 1}")
    return np.stack([layout_of(layout, plane).pack(codes >> (bits - 1 - plane) & 1) for plane in range(bits)])


def unpack_planes(planes: np.ndarray, layout: PackedLayout, n: int, k: int) -> np.ndarray:
    """The inverse of ``pack_planes``, or of the first planes of what it gave: uint8 [n, k]."""
    codes = np.zeros((n, k), dtype=np.uint8)
    for number, plane in enumerate(planes):
        codes = codes << 1 | layout_of(layout, number).unpack(plane, n, k)
    return codes
