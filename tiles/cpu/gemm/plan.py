"""The numbers of one CPU GEMM: tiles, groups, scratch sizes and how its vectors multiply. Pure
Python."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ....layouts.formats import FP8
from ....schedules.gemm.cpu import TILE, Isa, isa, vectors_per_pass
from ....schedules.gemm.workload import Workload
from ....schedules.schedule import Schedule
from ....schedules.target import Target


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that ``prepare`` and ``tile`` are built from.

    ``dot`` is "pairs" (vdpbf16ps: x as bf16, two neighbouring k a lane) or "float" (fused
    multiply-add: x as fp32); of int8 x "bytes" or "shorts" (``integers.py``).
    """

    workload: Workload
    schedule: Schedule
    isa: Isa

    @classmethod
    def of(cls, workload: Workload, schedule: Schedule, target: Target) -> Plan:
        """Raises ``ValueError`` on a target without vector instructions the program knows."""
        vectors = isa(target)
        if vectors is None:
            raise ValueError(f"target features are {target.features}; the CPU program needs 'avx2' or 'avx512'")
        return cls(workload, schedule, vectors)

    @property
    def bits(self) -> int:
        return self.workload.format.bits

    @property
    def block_m(self) -> int:
        return self.schedule.block_m

    @property
    def vectors(self) -> int:
        """Vectors of fp32 sums in a tile's 32 rows."""
        return TILE // self.isa.lanes

    @property
    def row_passes(self) -> tuple[tuple[int, ...], ...]:
        """The tile's vectors of rows, in the passes over a group in which their sums are kept in
        registers."""
        together = vectors_per_pass(self.schedule, self.isa)
        passes = self.vectors // together
        return tuple(tuple(range(first, self.vectors, passes)) for first in range(passes))

    @property
    def n_tiles(self) -> int:
        return -(-self.workload.n // TILE)

    @property
    def written_tiles(self) -> int:
        """Tiles that are written by themselves: where gates are the weight's first half its tiles, each with that
        of what it gates."""
        return self.n_tiles // 2 if self.workload.gate_halves else self.n_tiles

    @property
    def k_tiles(self) -> int:
        return -(-self.workload.k // TILE)

    @property
    def tile_words(self) -> int:
        """32-bit words of one packed tile."""
        return TILE * TILE * self.bits // 32

    @property
    def groups(self) -> int:
        return self.workload.format.groups(self.workload.k)

    @property
    def group_k(self) -> int:
        """k of a whole group, rounded up to tiles where it is longer than one."""
        size = self.workload.format.group_size
        return self.k_tiles * TILE if size < 0 else size

    @property
    def group_runs(self) -> tuple[tuple[int, int, int], ...]:
        """(number of groups, first of them, k in each): the whole groups and, if k ends inside one
        of several tiles, the last."""
        if self.group_k < TILE:
            return ((self.groups, 0, self.group_k),)
        whole, rest = divmod(self.k_tiles * TILE, self.group_k)
        return tuple(run for run in ((whole, 0, self.group_k), (1, whole, rest)) if run[0] and run[2])

    @property
    def sum_runs(self) -> tuple[tuple[int, int, int], ...]:
        """``group_runs`` where x is summed over groups, else one of all k."""
        return self.group_runs if self.needs_sums else ((1, 0, self.k_tiles * TILE),)

    @property
    def integers(self) -> bool:
        """Sums are int32, as x and weights are integers."""
        return self.workload.format.integer_sums

    @property
    def sums_dtype(self) -> str:
        return "int32" if self.integers else "float32"

    @property
    def total_dtype(self) -> str:
        """Of sums over groups."""
        return "float32" if self.workload.format.x_grouped else self.sums_dtype

    @property
    def dot(self) -> str:
        if self.integers:
            return "bytes" if self.bits == 4 else "shorts"
        exact = all(struct.pack("<f", value)[:2] == b"\0\0" for value in self.values)
        return "pairs" if self.isa.bf16_dot and exact and (self.bits == 4 or self.x_is_bf16) else "float"

    @property
    def x_is_bf16(self) -> bool:
        """Every number of x is one of bf16's."""
        return self.workload.x_dtype != "float16"

    @property
    def x_is_e4m3(self) -> bool:
        """x is e4m3 codes, which bf16 holds."""
        return self.workload.x_dtype == FP8

    @property
    def planes(self) -> int:
        """bf16 numbers that x is split into for vdpbf16ps: fp16 has 11 significant bits, bf16 has
        8."""
        return 2 if self.dot == "pairs" and not self.x_is_bf16 else 1

    @property
    def table(self) -> bool:
        """Permutes look codes up. Of integers 16 lanes do, where one permute is enough and
        ``center`` costs nothing."""
        return self.bits == 4 and (self.isa.lanes == 16 or not self.workload.format.integer)

    @property
    def center(self) -> int:
        """What decoding subtracts from each code."""
        return 8 if self.table and self.workload.format.integer else 0

    @property
    def values(self) -> tuple[float, ...]:
        """What decoding makes of each code."""
        return tuple(value - self.center for value in self.workload.format.weight.values)

    @property
    def needs_sums(self) -> bool:
        """Whether zero points differ from ``center``, or offsets are added, so that the sum of x over
        each group is needed."""
        return (
            not self.workload.format.symmetric
            if self.integers
            else not (self.workload.format.symmetric and self.workload.format.symmetric_zero_point == self.center)
        )

    @property
    def masks_in_place(self) -> bool:
        """Nibbles are converted where they stand in their word, so x is scaled down to match."""
        return self.bits == 4 and not self.table

    @property
    def row_words(self) -> int:
        """32-bit words of one row of x in a tile's 32 k."""
        return {"float": TILE, "pairs": TILE // 2, "shorts": TILE // 2, "bytes": TILE // 4}[self.dot]

    @property
    def row_block_words(self) -> int:
        """32-bit words of rearranged x for ``block_m`` rows."""
        return self.k_tiles * self.planes * self.block_m * self.row_words

    @property
    def n_tasks(self) -> int:
        """Blocks of ``block_n`` rows of the weight, or of gates where these are its first half."""
        return -(-self.written_tiles * TILE // self.schedule.block_n)
