"""Bit planes: codes of any number of bits, each bit of all codes in a packed layout of its own.

Plane 0 holds the highest bit of every code. Codes of b bits that are the highest of wider ones are
then the first b planes of these, as they lie: a view of fewer bits is a prefix, without a copy, and
reading it costs b bits a weight.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .packing import CUDA_ARCHES, WORD_BITS, PackedLayout

CHUNK = 256  # neighbouring k of a row that lie together on CPUs: a vector register of bits
_BYTES = CHUNK // 8


@cache
def plane_layout(arch: str) -> PackedLayout:
    """Where a plane's bits lie, each an element of one bit.

    On "cpu" tiles are 256 k of one row, 32 bytes: bit j of byte c is k = 32 j + c. So bits j of all
    bytes are 32 neighbouring k, and exchanging bits between the planes' bytes, which moves no byte,
    makes the planes vectors of 32 codes. On NVIDIA tiles are 64 x 64, a word 32 neighbouring k of
    one row: a plain order, which no program reads yet. Raises ``ValueError`` for another arch.
    """
    if arch == "cpu":
        word, slot = np.arange(CHUNK // WORD_BITS)[:, None], np.arange(WORD_BITS)
        return PackedLayout("planes_cpu", 1, 1, CHUNK, _BYTES * (slot % 8) + 4 * word + slot // 8)
    if arch in CUDA_ARCHES:
        return PackedLayout("planes_cuda", 1, 64, 64, np.arange(64 * 64).reshape(-1, WORD_BITS))
    raise ValueError(f"unknown arch {arch!r}; accepted: {', '.join(CUDA_ARCHES)}, cpu")


def pack_planes(codes: np.ndarray, bits: int, layout: PackedLayout) -> np.ndarray:
    """Integer [n, k] codes -> uint32 [bits, *layout.storage_shape(n, k)]; padding holds 0. Raises
    ``ValueError`` for codes of more than ``bits`` bits."""
    if codes.size and (codes.min() < 0 or int(codes.max()) >> bits):
        raise ValueError(f"codes reach from {codes.min()} to {codes.max()}; {bits} bits hold 0 to {(1 << bits) - 1}")
    return np.stack([layout.pack(codes >> shift & 1) for shift in range(bits - 1, -1, -1)])


def unpack_planes(planes: np.ndarray, layout: PackedLayout, n: int, k: int) -> np.ndarray:
    """The inverse of ``pack_planes``, or of the first planes of what it gave: uint8 [n, k]."""
    codes = np.zeros((n, k), dtype=np.uint8)
    for plane in planes:
        codes = codes << 1 | layout.unpack(plane, n, k)
    return codes
