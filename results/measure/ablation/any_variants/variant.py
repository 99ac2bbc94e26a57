"""``gemm_any`` (``tiles/gemm/any.py``) without some of its ideas: the same program with the CUDA
functions of ``steps.cuh``.

What a variant has is said by its ``Ideas``. Its name is its module's path; it is no program of the
library, but it goes through the library's compile pool, gate and clock. Codes of 3 bits and more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.problems.gemm import Problem, unpack_tiles
from tilebit.layouts.planes import CUDA_TILE_N, layout_of
from tilebit.schedules.gemm import any as rules
from tilebit.schedules.gemm.rules import workspace_words
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import Rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.compiler.headers import device_source
from tilebit.tiles.gemm.any import HEADERS, PASS_CONFIGS, Leaves, build_with, place, product_arguments, request_of
from tilebit.tiles.program import TileProgram

SOURCES = (*HEADERS, "codecs/bit_matrix.cuh", str(Path(__file__).with_name("steps.cuh")))
WORD, TILE_WORDS = 32, 512


class Ideas(IntEnum):
    """As of ``steps.cuh``: each includes those before it."""

    PLAIN = 0
    PERMUTED = 1
    TURNED = 2
    SELECTED = 3
    APART = 4
    MERGED = 5


@dataclass(frozen=True, slots=True)
class Variant:
    """A program of the study, by its module, and how many of the ideas it has."""

    name: str
    ideas: Ideas

    def table(self, bits: int) -> int:
        """Bytes of the tables of 16 rows."""
        if self.ideas == Ideas.MERGED:
            return rules.table_bytes(bits)
        return (1 << bits) * (rules.ENTRY if self.ideas == Ideas.APART else 32)

    def legal(self, workload: Workload, schedule: Schedule, target: Target) -> list[str]:
        """Why this program cannot serve ``workload`` with ``schedule``; empty: it can."""
        f = workload.format
        if not f.codebook or f.bits < 3 or (self.ideas == Ideas.MERGED and f.bits > rules.PAIRED_BITS):
            most = rules.PAIRED_BITS if self.ideas == Ideas.MERGED else 8
            return [f"the format is {f.name}; accepted: bit planes of 3 to {most} bits."]
        return rules.any_legal(workload, schedule, target, self.table(f.bits))

    def candidates(self, workload: Workload, target: Target) -> list[Schedule]:
        """The schedules of ``gemm_any`` that this program's tables leave room for."""
        found = rules.any_candidates(workload, target, self.table(workload.format.bits))
        return [replace(s, program=self.name) for s in found]

    def build(self, workload: Workload, schedule: Schedule, target: Target) -> Any:
        """The PrimFunc of ``tiles/gemm/any.py`` with other functions; planes as ``FORMS`` has them."""
        w, s = workload, schedule
        k_tiles = rules.steps(w)
        plain = self.ideas == Ideas.PLAIN
        request = f"tilebit::request_plain<{w.format.bits}, {s.block_n // 16}, {k_tiles * 8}>" if plain else request_of(w, s)
        product = f"tilebit::AnyStep<tilebit::Ideas::{self.ideas.name}, {product_arguments(w, s)}>"
        where = partial(_place_of_rows, k_tiles) if plain else place
        return build_with(Leaves(device_source(SOURCES), product, request, self.table(w.format.bits), False, where), w, s, target)


def variant(name: str, ideas: Ideas) -> tuple[Rule, TileProgram]:
    """The rule and the program of the module ``name``."""
    v = Variant(name, ideas)
    reads = frozenset({"block_n", "block_m", "num_stages", "num_warps", "split_k", "min_blocks"})
    rule = Rule(
        name, name, arches=rules.ARCHES, reads=reads, legal=v.legal, candidates=v.candidates, workspace_words=workspace_words,
    )  # fmt: skip
    return rule, TileProgram(name=name, compiler="tilelang", build=v.build, headers=SOURCES, pass_configs=PASS_CONFIGS)


def _place_of_rows(k_tiles: int, row: Any, step: Any) -> tuple[Any, Any, Any]:
    """``Leaves.place`` of plain planes, which are declared as those in tiles are."""
    word = (row % CUDA_TILE_N * k_tiles + step) * 8
    return row // CUDA_TILE_N, word // TILE_WORDS, word % TILE_WORDS


def unrotated_operands(problem: Problem) -> dict[str, Tensor]:
    """Each plane's words as plane 0 has them, bit for bit of the same weights (same device)."""
    planes = problem.operands["weight"].clone()
    for p in range(1, len(planes)):
        planes[p] = planes[p] << p | planes[p] >> (WORD - p) & ((1 << p) - 1)
    return {**problem.operands, "weight": planes}


def plain_operands(problem: Problem) -> dict[str, Tensor]:
    """Each plane as rows of bits in the order of k, the lowest bit of a word first (same device)."""
    planes = problem.operands["weight"]
    rows = torch.zeros_like(planes)
    for p, plane in enumerate(planes):
        bits = unpack_tiles(plane, layout_of(problem.layout, p))
        words = rows[p].view(len(bits), -1)
        for bit in range(WORD):
            words |= bits[:, bit::WORD].int() << bit
    return {**problem.operands, "weight": rows}


# How the programs that do not read the library's operands read a problem's.
FORMS = {
    f"{__package__}.plain": plain_operands,
    f"{__package__}.permuted": unrotated_operands,
    f"{__package__}.turned": unrotated_operands,
}
