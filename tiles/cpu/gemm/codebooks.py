"""From bit planes to numbers, on vectors of 32 bytes: bits of 256 weights of one row become codes,
codes are looked up in the row's codebook (with AVX-512 by ``codebooks_wide.py``). Importing this
imports tvm.

A code's lowest four bits are the index of a byte shuffle, whose table is 16 bytes: a codebook is
tables of the low and of the high bytes of 16 numbers each. The planes of the higher bits choose
between what tables gave, as masks of blends, where only the highest bit of a byte is read: such a
plane is shifted, and nothing else is done to it.

A vector of 32 weights costs, by bits b: 3 to 5 instructions for the codes, b - 4 shifts, and with T
= max(1, 2^(b - 4)) tables of either kind 2 T shuffles, 2 (T - 1) blends and 6 (fp16: 12) to join
bytes and make fp32 of them; then 4 multiplications for each row of x. At 8 bits that is more than
the two loads a weight of scalar code, which looks a byte up in a table of fp32 in memory.
"""

from __future__ import annotations

from typing import Any

from ....layouts.planes import CHUNK
from .. import vectors as v
from ..vectors import T, tirx
from .lane_sums import permute

BYTES = 32  # of a vector register
INDEX_BITS = 4  # of a byte shuffle
ENTRIES = 1 << INDEX_BITS
STEPS = CHUNK // BYTES  # vectors of codes in the planes' registers
SCALAR_BITS = 8  # here 16 tables cost more than a load for each weight
LANES = 8  # of fp32
# unpcklbw, unpckhbw: bytes of two vectors in turn, from the low and the high halves of both 16-byte lanes
_LOW, _HIGH = (
    [BYTES * which + lane + byte for lane in (0, 16) for byte in range(first, first + 8) for which in (0, 1)] for first in (0, 8)
)


def columns(dtype: str, bits: int) -> list[list[int]]:
    """Which of a vector's 32 weights are in the lanes of each of the four vectors of ``numbers``:
    unpacking leaves halves of 16-byte lanes, and bf16 becomes fp32 where it stands in its pair.
    ``looked_up`` leaves their own order."""
    if bits >= SCALAR_BITS:
        return [list(range(first, first + LANES)) for first in range(0, BYTES, LANES)]
    halves = [[lane + byte for lane in (0, 16) for byte in range(first, first + 8)] for first in (0, 8)]
    if dtype == "bfloat16":
        return [half[odd::2] for half in halves for odd in (0, 1)]
    return [part for half in halves for part in (half[:8], half[8:])]


def tables(codebooks: Any, first: Any, bits: int) -> Any:
    """Vectors of bytes, of 16 numbers each the low and then the high ones, twice over: the codebook
    from element ``first`` of ``codebooks`` (uint16) on. Shorter ones repeat, so that no bit above a
    code matters."""
    entries = min(ENTRIES, 1 << bits)
    count = (1 << bits) // entries
    found = v.local(2 * count, f"int8x{BYTES}")
    for table in range(count):
        numbers = T.bind(v.load(codebooks, first + table * entries, entries))
        for which in (0, 1):
            part = (numbers >> v.splat(8 * which, "uint16", entries)).astype(f"int8x{entries}")
            repeated = tirx.Shuffle([v.held(part)] * (BYTES // entries), list(range(BYTES)))
            T.buffer_store(found, repeated, [2 * table + which])
    return found


def nibbles(planes: list[Any]) -> list[Any]:
    """Of up to four ``planes`` (uint32x8), the highest bit of a code first: four vectors, in whose
    bytes vector j % 4 has step j's codes, in the low half for j < 4, else in the high one."""
    low = planes[::-1]
    even, odd = _exchanged(low[0], low[1] if len(low) > 1 else None, 1, 0x55555555)
    upper = _exchanged(low[2], low[3] if len(low) > 3 else None, 1, 0x55555555) if len(low) > 2 else (None, None)
    (first, third), (second, fourth) = (_exchanged(a, b, 2, 0x33333333) for a, b in ((even, upper[0]), (odd, upper[1])))
    return [first, second, third, fourth]


def _exchanged(a: Any, b: Any, shift: int, mask: int) -> tuple[Any, Any]:
    """Fields of ``mask`` of ``a`` with those of ``b`` above them; and the fields above the mask's,
    likewise. ``b`` None: zeros."""
    where, by = v.splat(mask, "uint32", LANES), v.splat(shift, "uint32", LANES)
    if b is None:
        return v.held(a & where), v.held(a >> by & where)
    moved = v.held((a >> by ^ b) & where)
    return v.held(a ^ moved << by), v.held(b ^ moved)


def numbers(table: Any, words: list[Any], upper: list[Any], step: int, dtype: str) -> list[Any]:
    """Four fp32x8: the numbers of step ``step``'s 32 codes, in the order of ``columns``. ``words``
    are ``nibbles``, ``upper`` the planes above them, the highest first."""
    word = words[step % 4] if step < 4 else words[step % 4] >> v.splat(4, "uint32", LANES)
    index = v.held(_bytes(word & v.splat(0x0F0F0F0F, "uint32", LANES)))
    masks = [v.held(_bytes(plane << v.splat(7 - step, "uint32", LANES))) for plane in upper[::-1]]
    low, high = (_chosen([v.shuffle_bytes(table[2 * one + which], index) for one in range(1 << len(upper))], masks) for which in (0, 1))
    found = []
    for order in (_LOW, _HIGH):
        pairs = v.held(tirx.Shuffle([low, high], order))
        if dtype == "bfloat16":
            pair = T.reinterpret(f"uint32x{LANES}", pairs)
            both = pair << v.splat(16, "uint32", LANES), pair & v.splat(0xFFFF0000, "uint32", LANES)
            found += [T.reinterpret(f"float32x{LANES}", one) for one in both]
        else:
            halves = v.held(T.reinterpret(f"float16x{2 * LANES}", pairs))
            found += [permute(halves, range(first, first + LANES)).astype(f"float32x{LANES}") for first in (0, LANES)]
    return found


def _chosen(found: list[Any], masks: list[Any]) -> Any:
    """Of what the tables gave, what the masks choose, their lowest bit first."""
    for mask in masks:
        found = [v.held(v.blend_bytes(*pair, mask)) for pair in zip(found[::2], found[1::2], strict=True)]
    return v.held(found[0])


def whole_table(codebooks: Any, first: Any, bits: int, dtype: str) -> Any:
    """The codebook from element ``first`` of ``codebooks`` (uint16) on as fp32, in memory."""
    found = v.local(1 << bits, "float32")
    for start in range(0, 1 << bits, LANES):
        half = v.load(codebooks, first + start, LANES)
        v.store(found, start, v.to_float(half if dtype == "bfloat16" else T.reinterpret(f"float16x{LANES}", half), LANES), LANES)
    return found


def whole_codes(planes: list[Any]) -> list[Any]:
    """Of any number of ``planes``: the steps' vectors of codes, a byte each, in the order of k."""
    upper = max(0, len(planes) - INDEX_BITS)
    above = nibbles(planes[:upper]) if upper else [None] * 4
    halves = [_exchanged(*pair, INDEX_BITS, 0x0F0F0F0F) for pair in zip(nibbles(planes[upper:]), above, strict=True)]
    return [pair[half] for half in (0, 1) for pair in halves]


def bytes_of(planes: list[Any]) -> Any:
    """Of eight ``planes``: 256 codes in memory, a byte each, in the order of k."""
    stage = v.local(CHUNK, "uint8")
    for step, codes in enumerate(whole_codes(planes)):
        v.store(stage, step * BYTES, T.reinterpret(f"uint8x{BYTES}", codes), BYTES)
    return stage


def looked_up(table: Any, codes: Any, step: Any) -> list[Any]:
    """Four fp32x8: the numbers of step ``step``'s 32 codes, a load each. A step that is no constant
    keeps the codes in memory: out of registers each would take two instructions."""
    found = []
    for first in range(0, BYTES, LANES):
        indices = [tirx.Cast("int32", codes[step * BYTES + first + lane]) for lane in range(LANES)]
        found.append(tirx.Shuffle([table[index] for index in indices], list(range(LANES))))
    return found


def _bytes(words: Any) -> Any:
    return T.reinterpret(f"int8x{BYTES}", words)
