"""The CUDA programs for bit planes without a GPU: the whole kernels that TileLang generates, on every thread of every block, exact from
bit planes to y; every width, ragged sizes, shares of k."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from lanes import one_of_each

from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.autotune.problems.verify import check_exact, check_guards, guarded_output
from tilebit.layouts.formats import CODEBOOK_BITS, GemmFormat
from tilebit.schedules.gemm import any_binary, any_wgmma
from tilebit.schedules.gemm.any import PROGRAM
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import needs_host_compiler
from emulation.generated_gemm import GeneratedGemm
from gemm_cases import Case, label

pytestmark = needs_host_compiler
AMPERE, HOPPER = target_from_name("sm_80"), target_from_name("sm_90a")
SMALL, FEW_SMS = replace(AMPERE, units=3), replace(HOPPER, units=3)  # so few that a block of a persistent grid takes several tiles


def form(bits: int) -> GemmFormat:
    return GemmFormat.parse(f"w{bits}a16_any")


def schedule(block_n: int, block_m: int, stages: int, warps: int, split_k: int = 1) -> Schedule:
    return Schedule(PROGRAM, block_n, block_m, 1, stages, warps, split_k)


SCHEDULES = (
    schedule(32, 1, 2, 2), schedule(16, 8, 2, 3), schedule(16, 2, 3, 2, split_k=2), schedule(32, 16, 2, 2, split_k=3),
    schedule(32, 4, 2, 4), schedule(16, 1, 1, 2),
)  # fmt: skip
SHAPES = ((5, 100, 1000), (1, 64, 1536), (17, 33, 900), (16, 48, 768), (3, 16, 31))


def cases() -> list[Case]:
    """Every width in both types; shapes, schedules, bias and scales of rows take turns."""
    found = []
    for i, (bits, dtype) in enumerate(product(CODEBOOK_BITS, ("float16", "bfloat16"))):
        workload = Workload(*SHAPES[i % len(SHAPES)], form(bits), dtype, bias=i % 2 == 1, token_scales=i % 3 == 1)
        legals = [s for s in SCHEDULES[i % len(SCHEDULES) :] + SCHEDULES if not legal(workload, s, AMPERE)]
        found.append((workload, legals[0]))
    return found


CASES = cases()


def test_the_cases_cover_everything() -> None:
    assert {(w.m, w.n, w.k) for w, _ in CASES} == set(SHAPES)
    assert {s for _, s in CASES} == set(SCHEDULES)
    assert {(w.format.bits, w.dtype) for w, _ in CASES} == set(product(CODEBOOK_BITS, ("float16", "bfloat16")))


def wide(block_n: int, block_m: int, stages: int, split_k: int = 1, raster: int = 0, stream_k: bool = False, cluster: int = 1) -> Schedule:
    return Schedule(any_wgmma.PROGRAM, block_n, block_m, 256, stages, block_n // 16, split_k, 1, raster, stream_k, cluster)


WIDE = (
    (Workload(33, 100, 1000, form(3)), wide(128, 64, 3)),
    (Workload(40, 64, 1536, form(4), "bfloat16", bias=True), wide(64, 32, 2, split_k=3)),
    (Workload(64, 180, 256, form(5), token_scales=True), wide(192, 96, 2)),
    (Workload(97, 33, 900, form(6), "bfloat16"), wide(64, 128, 3, split_k=2)),
    (Workload(200, 128, 520, form(7), residual=True), wide(64, 192, 2)),
    (Workload(65, 64, 31, form(8), "bfloat16", bias=True), wide(64, 32, 4, raster=2)),
    (Workload(17, 256, 512, form(8), gate="silu"), wide(128, 32, 3)),
    (Workload(161, 64, 800, form(4)), wide(64, 160, 2)),
    (Workload(130, 64, 600, form(5), "bfloat16"), wide(64, 160, 2)),
    (Workload(70, 200, 1100, form(5)), wide(64, 64, 3, stream_k=True)),
    (Workload(31, 250, 700, form(3), "bfloat16", bias=True), wide(256, 32, 4, stream_k=True)),
    (Workload(150, 256, 530, form(7)), wide(128, 64, 2, stream_k=True)),
    (Workload(70, 512, 2100, form(4)), wide(128, 64, 4, stream_k=True)),
    (Workload(100, 250, 1100, form(5)), wide(128, 64, 3, cluster=2)),
    (Workload(40, 500, 530, form(3), "bfloat16", bias=True), wide(128, 32, 2, cluster=2)),
    (Workload(70, 128, 1536, form(4), token_scales=True), wide(128, 32, 4, raster=2, cluster=2)),
    (Workload(190, 250, 800, form(8), residual=True), wide(128, 64, 2, stream_k=True, cluster=2)),
    (Workload(97, 250, 1300, form(7), "bfloat16"), wide(128, 32, 3, stream_k=True, cluster=2)),
    (Workload(60, 256, 520, form(6), gate="silu"), wide(128, 32, 3, cluster=2)),
    (Workload(33, 250, 1100, form(5), token_scales=True), wide(128, 96, 2, split_k=2)),
    (Workload(150, 180, 1300, form(4), "bfloat16", bias=True, residual=True), wide(192, 64, 3, split_k=2)),
    (Workload(170, 128, 800, form(8), gate="silu"), wide(64, 160, 2, split_k=2)),
    (Workload(70, 120, 1500, form(3), residual=True), wide(64, 64, 2, split_k=4)),
    (Workload(33, 250, 2100, form(6), "bfloat16", bias=True), wide(128, 32, 3, split_k=6)),
    (Workload(97, 192, 1100, form(7), token_scales=True), wide(192, 64, 4, split_k=4)),
    (Workload(60, 120, 900, form(4), "bfloat16", bias=True), replace(wide(64, 64, 3, split_k=2), min_blocks=3)),
    (Workload(70, 120, 1100, form(5)), replace(wide(64, 32, 4, stream_k=True), min_blocks=3)),
)


def binary(block_n: int, stages: int, warps: int) -> Schedule:
    return Schedule(any_binary.PROGRAM, block_n, 1, 1, stages, warps)


# Tables of two copies.
CROWDED = (
    (Workload(9, 100, 1000, form(4), bias=True), Schedule(PROGRAM, 32, 8, 1, 1, 2, min_blocks=2)),
    (Workload(3, 130, 700, form(4), "bfloat16"), Schedule(PROGRAM, 64, 4, 1, 2, 3, split_k=2)),
)
# Shares of k of unequal length and of one step; more blocks than tiles, more tiles than blocks; rings that hold several tiles.
SINGLE = (
    (Workload(1, 100, 1000, form(3)), binary(32, 3, 4)),
    (Workload(1, 64, 1536, form(4), "bfloat16", bias=True), binary(16, 2, 3)),
    (Workload(3, 190, 520, form(3), "bfloat16", token_scales=True), binary(64, 4, 4)),
    (Workload(2, 33, 31, form(4)), binary(16, 5, 1)),
    (Workload(1, 768, 800, form(3), residual=True), binary(48, 6, 9)),
    (Workload(2, 250, 1300, form(2), "bfloat16"), binary(32, 4, 6)),
    (Workload(1, 128, 700, form(4), gate="silu"), binary(128, 3, 8)),
    (Workload(1, 500, 2100, form(4)), binary(16, 7, 8)),
)


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[0].format.bits) + list(WIDE + CROWDED + SINGLE), ids=label)
def test_exact(case: Case) -> None:
    workload, schedule = case
    target = {PROGRAM: AMPERE, any_binary.PROGRAM: SMALL}.get(schedule.program, FEW_SMS)
    problem = exact_problem(workload, (*CASES, *WIDE, *CROWDED, *SINGLE).index(case), target.arch)
    output = guarded_output((workload.m, workload.columns), problem.x.dtype)
    assert not legal(workload, schedule, target)
    gemm = GeneratedGemm(*case, target)
    gemm(problem, output.y)
    assert check_guards(output) == [] and check_exact(output.y, problem.reference()) == []
    assert not gemm.tickets_left
