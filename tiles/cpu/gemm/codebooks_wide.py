"""Codes to numbers with AVX-512, on vectors of 32: a code is the index of a permutation of 16-bit
words (vpermw, of two registers vpermi2w), whose table is 32 or 64 numbers of the row's codebook as
they are. Importing this imports tvm.

Codebooks of 128 and 256 numbers take two and four of these, and the highest bits choose between
what they gave. 32 numbers of bf16 are pairs as vdpbf16ps multiplies them, where the machine has it
and x is bf16: nothing is joined, and x keeps its order. Else they become fp32.
"""

from __future__ import annotations

from typing import Any

from .. import vectors as v
from ..vectors import T, tirx
from .lane_sums import permute

WORDS = 32  # of a vector register
LANES = 16  # of fp32
PAIR_BITS = 6  # of the index of vpermi2w


def columns(dtype: str) -> list[list[int]]:
    """Which of a vector's 32 weights are in the lanes of both vectors of ``numbers``, where these are fp32."""
    return [list(range(WORDS))[odd::2] for odd in (0, 1)] if dtype == "bfloat16" else [list(range(LANES)), list(range(LANES, WORDS))]


def tables(codebooks: Any, first: Any, bits: int) -> Any:
    """Vectors of 32 numbers' bits: the codebook from element ``first`` of ``codebooks`` (uint16) on. A shorter one repeats."""
    entries = min(WORDS, 1 << bits)
    found = v.local((1 << bits) // entries, f"int16x{WORDS}")
    for table in range((1 << bits) // entries):
        some = v.held(T.reinterpret(f"int16x{entries}", v.load(codebooks, first + table * entries, entries)))
        T.buffer_store(found, tirx.Shuffle([some] * (WORDS // entries), list(range(WORDS))), [table])
    return found


def numbers(table: Any, codes: Any, bits: int, dtype: str, pairs: bool) -> list[Any]:
    """The numbers of 32 ``codes``, a byte each (uint32x8): with ``pairs`` an int32x16 of two bf16 a lane,
    else two fp32x16 in the order of ``columns``."""
    index = v.held(T.reinterpret(f"uint8x{WORDS}", codes).astype(f"int16x{WORDS}"))
    if bits < PAIR_BITS:
        found = [v.permute16(table[0], index)]
    else:
        found = [v.permute_pair16(table[one], index, table[one + 1]) for one in range(0, 1 << (bits - PAIR_BITS + 1), 2)]
    for bit in range(PAIR_BITS, bits):
        high = (index & v.splat(1 << bit, "int16", WORDS)) != v.splat(0, "int16", WORDS)
        found = [tirx.Select(high, v.held(b), v.held(a)) for a, b in zip(found[::2], found[1::2], strict=True)]
    (words,) = map(v.held, found)
    if dtype == "float16":
        halves = T.reinterpret(f"float16x{WORDS}", words)
        return [permute(halves, range(first, first + LANES)).astype(f"float32x{LANES}") for first in (0, LANES)]
    if pairs:
        return [T.reinterpret(f"int32x{LANES}", words)]
    pair = T.reinterpret(f"uint32x{LANES}", words)
    both = pair << v.splat(16, "uint32", LANES), pair & v.splat(0xFFFF0000, "uint32", LANES)
    return [T.reinterpret(f"float32x{LANES}", one) for one in both]
