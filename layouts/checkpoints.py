"""The packings of weight checkpoints as ``PackedLayout``s, so that importing one is composing two
layouts.

Facts, as the tools that write them have it (storage int32, row-major, shapes of a weight [n, k]
with ``groups`` scale groups and p = 32 // bits codes a word):

| storage              | weight                        | zero points                                       | stored zero                |
|----------------------|-------------------------------|---------------------------------------------------|----------------------------|
| "awq" (gemm, 4 bits) | qweight [k, n/8], interleaved | qzeros [groups, n/8], interleaved too             | zero                       |
| "gptq" (v1)          | qweight [k/p, n]              | qzeros [groups, n/p]                              | (zero - 1) mod 2**bits     |
| "gptq_v2"            | qweight [k/p, n]              | qzeros [groups, n/p]                              | zero                       |
| "compressed-tensors" | weight_packed [n, ceil(k/p)]  | weight_zero_point [ceil(n/p), groups], asymmetric | signed zero + 2**(bits-1)  |

Zero points are packed like a weight of shape [n, groups]. AutoAWQ's interleave 0,2,4,6,1,3,5,7 says
which of eight neighbouring output channels each nibble holds, lowest nibble first.
compressed-tensors codes are signed integers stored with an offset of 2**(bits-1): unsigned codes
here.

QServe keeps 4-bit codes in the order of its kernel's loads (``qserve_layout``), compressed-tensors'
int-quantized weights and their scales as they are.

4-bit floats store two codes a byte along k, that of the lower k in the low bits, whatever tool
writes them: compressed-tensors weight_packed uint8 [n, k/2], gpt-oss *_blocks uint8 [n, groups,
16]. Four such bytes are a word of "compressed-tensors".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .packing import WORD_BITS, PackedLayout

STORAGES = ("awq", "gptq", "gptq_v2", "compressed-tensors")
_AWQ_INTERLEAVE = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """How a checkpoint stores one weight: ``weight`` is the layout over (n, k), ``zeros`` that over
    (n, groups), and a zero point is stored minus ``zero_offset``, modulo 2**bits.
    """

    storage: str
    bits: int
    weight: PackedLayout
    zeros: PackedLayout
    zero_offset: int = 0


@cache
def checkpoint_layout(storage: str, bits: int) -> CheckpointLayout:
    """The layouts of ``storage`` (one of ``STORAGES``) at 4 or 8 bits ("awq": 4); raises
    ``ValueError`` otherwise."""
    if storage not in STORAGES:
        raise ValueError(f"unknown checkpoint storage {storage!r}; accepted: {', '.join(STORAGES)}")
    accepted = (4,) if storage == "awq" else (4, 8)
    if bits not in accepted:
        raise ValueError(f"{storage} checkpoints of {bits!r} bits are not supported; accepted: {', '.join(map(str, accepted))}")
    if storage == "awq":
        return CheckpointLayout(
            storage,
            bits,
            _along_n("awq.qweight", bits, "k_major", _AWQ_INTERLEAVE),
            _along_n("awq.qzeros", bits, "k_major", _AWQ_INTERLEAVE),
        )
    if storage == "compressed-tensors":
        return CheckpointLayout(
            storage,
            bits,
            _along_k("compressed-tensors.weight_packed", bits, "n_major"),
            _along_n("compressed-tensors.weight_zero_point", bits, "n_major"),
        )
    offset = 1 if storage == "gptq" else 0
    return CheckpointLayout(storage, bits, _along_k("gptq.qweight", bits, "k_major"), _along_n("gptq.qzeros", bits, "k_major"), offset)


@cache
def qserve_layout() -> PackedLayout:
    """QServe's qweight, int8 [n, k/2]: of tiles of 32 x 32 codes, one row of tiles after another. A
    word's bytes are four neighbouring k, whose low nibbles are of row r and whose high ones of row r
    + 16; words follow each other by r + 8, then by k + 16, then by the next four of 16 k, then by r +
    1 of eight."""
    row, quad, half, eight, byte, high = np.indices((8, 4, 2, 2, 4, 2))
    order = (16 * high + 8 * eight + row) * 32 + 16 * half + 4 * quad + byte
    return PackedLayout("qserve.qweight", 4, 32, 32, order.reshape(-1, 8))


def _along_k(name: str, bits: int, outer: str) -> PackedLayout:
    """Words of consecutive k, lowest bits first."""
    slots = WORD_BITS // bits
    return PackedLayout(f"{name}.b{bits}", bits, 1, slots, np.arange(slots)[None, :], outer)


def _along_n(name: str, bits: int, outer: str, interleave: tuple[int, ...] | None = None) -> PackedLayout:
    """Words of neighbouring n; slot i holds channel ``interleave[i]`` of its word (default: i)."""
    slots = WORD_BITS // bits
    return PackedLayout(f"{name}.b{bits}", bits, slots, 1, np.array(interleave or range(slots))[None, :], outer)
