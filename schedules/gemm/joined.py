"""Tiles of bytes in a weight of nibbles: where the rows begin that ``gemm_wgmma`` multiplies as 8-bit
channels, and how many tiles a weight has with them.

A mixed layer's weight (``Workload.nibbles``) holds a byte's nibbles in two rows, r and r + 8 of 16.
As they are they multiply twice for one channel. Joined, a tile of ``block_n`` channels is made of
twice as many rows: the warpgroup's slab s of slabs 2 s and 2 s + 1, whose pairs are rows r and r + 8
of a tensor core's operand. How many rows are pairs is what n and the number of columns leave, but for
their padding, so the tiles begin behind the rows that may be single.

Columns of y that bytes make lie apart, so that a tile of bytes stores each number to a sector of its own. Where
blocks take one tile after another, warps that have nothing else to do store them while the next tile is
multiplied (``tiles/gemm/wgmma_scatter.py``).
"""

from __future__ import annotations

from ..schedule import Schedule
from .parts import GATE_ROWS
from .workload import Workload

SLAB_N = 64  # rows of W that four warps hold: one wgmma m64, or four mma.m16
PAIR = 2 * GATE_ROWS  # rows that hold the nibbles of GATE_ROWS channels
MOST_PADDING = (PAIR - 1) + (GATE_ROWS - 1)  # rows of no channel: behind the single ones, and of one nibble behind the pairs


def first_joined(workload: Workload, schedule: Schedule) -> int:
    """The row with which the tiles of bytes begin, a multiple of ``block_n``; all rows of the padded weight
    where there are none."""
    n_pad = -(-workload.n // SLAB_N) * SLAB_N
    if not schedule.joined:
        return n_pad
    # Of n rows and as many columns as ``width``, n - width = 8 pairs + padding.
    pairs = max(0, -(-(workload.n - workload.width - MOST_PADDING) // GATE_ROWS))
    first = workload.n - pairs * PAIR
    return min(n_pad, -(-first // schedule.block_n) * schedule.block_n)


def byte_tiles(workload: Workload, schedule: Schedule) -> int:
    """Tiles of bytes along n."""
    n_pad = -(-workload.n // SLAB_N) * SLAB_N
    return -(-(n_pad - first_joined(workload, schedule)) // (2 * schedule.block_n))


def scatters(schedule: Schedule) -> bool:
    """Whether warps of their own store tiles of bytes, which others come after."""
    return schedule.joined and (schedule.stream_k or schedule.tail > 1)


def n_blocks(workload: Workload, schedule: Schedule) -> int:
    """Tiles along n, those of bytes last."""
    return -(-first_joined(workload, schedule) // schedule.block_n) + byte_tiles(workload, schedule)


def stage_rows(schedule: Schedule) -> int:
    """Rows of the weight that a pipeline stage has room for."""
    return schedule.block_n * (2 if schedule.joined else 1)
