"""Bank conflicts of a kernel's shared-memory accesses, simulated from their addresses
(``layouts/banks.py``).

The addresses of lines, scales and the output tile follow from the schedule, as
``tiles/device/*.cuh`` computes them (the source must hold the expressions that are simulated);
those of x are taken from the generated source where TileLang chose them: its ldmatrix index
expressions are evaluated for every lane, its wgmma descriptors name the hardware's swizzle. Each
access is a count of wavefronts beyond the unavoidable, summed over the instructions simulated; it
must be 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from tilebit.layouts.banks import shared_access
from tilebit.layouts.swizzle import Swizzle
from tilebit.schedules.gemm import stream as gemm_stream
from tilebit.schedules.schedule import Schedule

LANE = np.arange(32)
LDMATRIX = re.compile(r"ptx_ldmatrix_x([124])\(\(?&\(\(\((half_t|bfloat16_t|signed char|fp8_e4_t)\*\)\w+\)\[([^\]]*)\]")
BYTES = {"half_t": 2, "bfloat16_t": 2, "signed char": 1, "fp8_e4_t": 1}  # of an element of x
BYTE_PRODUCT = "tilebit::ByteProduct<"  # the call of small-m programs whose x is of bytes
DESCRIPTOR = re.compile(r"initialize_wgmma_descriptor<(\d), ")
STAGING = "tilebit::stage_transposed<"  # the call of programs on mma.sync whose output tile goes through shared memory
# What the functions below compute, as the headers write it.
STREAM = (
    "PITCH = STEP_K * 2 + 16",
    "(lane & 7) % COLUMNS * PITCH + (lane >> 3) * 16",
    "from + odd * SCALE_BYTES + (min(i + (lane >> 3), 2 * TILES - 1) ^ odd) * 16",
)
STREAM_BYTES = (
    "PITCH = STEP_K + 16",
    "(lane & 7) % COLUMNS * PITCH + (lane >> 3) * 16",
    "static_cast<const uint8_t*>(parameters) + (lane >> 2)",
)
STMATRIX = (
    "place(int column, int piece) { return column * OWN_ROWS + (piece ^ (column & 7)) * 8; }",
    "place((lane >> 4) * 8 + (lane & 7), warp * 2 + ((lane >> 3) & 1))",
    "column = BELOW ? own / STORED : 0, at = BELOW ? own % STORED : 0",
    "pass * OWN + own, column = index / STORED;",
    "return {column, index % STORED,",
)
SCATTERED = (
    "PITCH = THREADS / 128 * SLABS * 64 + 8;",
    "(c * 16 + (i >> 1) * 8 + (lane & 3) * 2 + e) * PITCH + (piece + (i & 1)) * 8 + (lane >> 2)",
)
SWIZZLE_BITS = {"0": 0, "1": 3, "2": 2, "3": 1}  # of a descriptor's layout type: none, 128, 64 and 32 bytes
LOOP_TRIPS = 8  # values of a loop variable that are tried


def conflicts(schedule: Schedule, source: str) -> dict[str, int]:
    """Extra wavefronts of each kind of access of the kernel whose generated CUDA is ``source``.
    Raises ``ValueError`` when the source has none of the accesses that its program makes."""
    s = schedule
    found = {"packed line": shared_access(16 * LANE, 16).conflicts, "scale": shared_access(2 * (LANE >> 2), 2).conflicts}
    if s.program in gemm_stream.ARCHES and BYTE_PRODUCT in source:
        _check(source, STREAM_BYTES)
        return {**found, "scale": shared_access(LANE >> 2, 1).conflicts, "x": _ldmatrix(_stream_x(s, 1), 4)}
    if s.program in gemm_stream.ARCHES:
        _check(source, STREAM)
        scales = sum(_ldmatrix(_stream_scales(s, odd), 4) for odd in (0 * LANE, LANE & 1))  # without and with zero points
        return {**found, "scale": scales, "x": _ldmatrix(_stream_x(s, 2), 4)}
    if s.program == "gemm_wgmma":
        found["x"] = _descriptors(source, s)
        _check(source, STMATRIX)
        return {**found, "output tile": _stmatrix(s)}
    found["x"] = _generated(source)
    if STAGING in source:
        _check(source, SCATTERED)
        found["output tile"] = _scattered(s)
    return found


def _check(source: str, expressions: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless the source computes the addresses that are simulated here."""
    missing = [e for e in expressions if e not in source]
    if missing:
        raise ValueError(
            f"the source does not compute {missing[0]!r}; accepted: the headers that results/measure/static/conflicts.py was written for"
        )


def _stream_x(s: Schedule, element: int) -> np.ndarray:
    """Byte offsets that the lanes of gemm_stream's ldmatrix supply: rows of block_k elements of so
    many bytes and 16 bytes of padding."""
    return (LANE & 7) % s.block_m * (s.block_k * element + 16) + (LANE >> 3) * 16


def _stream_scales(s: Schedule, odd: np.ndarray) -> np.ndarray:
    """Byte offsets that the lanes of gemm_stream's ldmatrix of scales supply, of 8 rows each: where
    ``odd`` is 1, of zero points, which follow the scales of a step's one group (steps are no deeper
    than the groups of 128 that the reports are about)."""
    rows = gemm_stream.warp_rows(s)
    return odd * rows * 2 + (np.minimum(LANE >> 3, rows // 8 - 1) ^ odd) * 16


def _ldmatrix(addresses: np.ndarray, matrices: int) -> int:
    """One ldmatrix: 8 lanes supply the rows of each 8 x 8 matrix."""
    return shared_access(addresses[: 8 * matrices], 16).conflicts


def _generated(source: str) -> int:
    """Every ldmatrix of the generated source, for several values of its loop variables."""
    found = LDMATRIX.findall(source)
    if not found:
        raise ValueError("the source has no ldmatrix of 16-bit or 8-bit x; accepted: CUDA that TileLang generated for mma.sync")
    return sum(_ldmatrix(BYTES[x] * offsets, int(matrices)) for matrices, x, expression in found for offsets in _evaluated(expression))


def _evaluated(expression: str) -> Iterator[np.ndarray]:
    """Element offsets of all lanes of the first warp, for each value of the expression's loop
    variables (all taking the same)."""
    text = re.sub(r"\(\(int\)threadIdx\.x\)", "LANE", expression).replace("/", "//")
    free = sorted(set(re.findall(r"[A-Za-z_]\w*", text)) - {"LANE"})
    if re.search(r"[^\w\s()+*/%<>&|^-]", text):
        raise ValueError(f"cannot evaluate the index {expression!r}; accepted: integer arithmetic on threadIdx.x and loop variables")
    for trip in range(LOOP_TRIPS if free else 1):
        values = eval(text, {"__builtins__": {}, "LANE": LANE, **dict.fromkeys(free, trip)})
        yield np.broadcast_to(np.asarray(values), LANE.shape)


def _descriptors(source: str, s: Schedule) -> int:
    """How the tensor core reads x through a descriptor: 8 rows of 16 bytes, side by side under the
    hardware's swizzle."""
    kinds = set(DESCRIPTOR.findall(source))
    if not kinds:
        raise ValueError("the source has no wgmma descriptor; accepted: CUDA that TileLang generated for wgmma")
    total = 0
    for kind in kinds:
        row_bytes = min(16 << SWIZZLE_BITS[kind], s.block_k * 2)
        swizzle = Swizzle(SWIZZLE_BITS[kind], 4, 3)
        for chunk in range(row_bytes // 16):
            total += _ldmatrix(swizzle((LANE & 7) * row_bytes + 16 * chunk), 1)
    return total


def _stmatrix(s: Schedule) -> int:
    """A warpgroup's transposed stores of four 8 x 8 matrices into its staged columns, whose pieces
    of 8 rows trade places, and the 128-bit loads that follow them (``Store`` in
    ``store/tile.cuh``)."""
    own_rows = s.block_n // (s.num_warps // 4)
    pieces = own_rows // 8

    def place(column: np.ndarray, piece: np.ndarray) -> np.ndarray:
        return column * own_rows + (piece ^ (column & 7)) * 8

    stores = [place((LANE >> 4) * 8 + (LANE & 7), warp * 2 + ((LANE >> 3) & 1)) for warp in range(4)]
    loads = [place(own // pieces, own % pieces) for own in (32 * warp + LANE for warp in range(4))]
    return sum(_ldmatrix(2 * offsets, 4) for offsets in stores) + sum(shared_access(2 * offsets, 16).conflicts for offsets in loads)


def _scattered(s: Schedule) -> int:
    """The epilogue's two-byte stores where there is no stmatrix: lane l holds columns 2 (l % 4), +
    1 of row l / 4."""
    stride = s.block_n + 8
    return sum(shared_access(2 * (((LANE & 3) * 2 + column) * stride + (LANE >> 2)), 2).conflicts for column in (0, 1))
