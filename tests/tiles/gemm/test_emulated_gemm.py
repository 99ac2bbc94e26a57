"""The tiled CUDA GEMM programs without a GPU: their own text, their own headers, exact.

From codes to y every piece is the real one: ``gemm_layout`` packs, each program's ``build`` runs (on a stand-in for TileLang) with the real
``Operands``, the device headers are compiled for the host and run on every thread, their PTX included. Loading and computing warps take
turns in a random order. TileLang's lowering is left to the GPU tests.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from lanes import one_of_each
from sample.two_levels import FORMAT as TWO_LEVELS

from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.layouts.formats import PER_CHANNEL, QuantFormat
from tilebit.schedules.gemm.rules import TICKETS
from tilebit.schedules.gemm.waves import cut_places, shared_places
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import needs_host_compiler
from emulation.emulated_gemm import ORDERS, EmulatedGemm
from gemm_cases import FORMATS, Case, in_turn, label, problem_of

pytestmark = needs_host_compiler
HOPPER = replace(target_from_name("sm_90a"), units=5)  # so few that a small grid of stream_k has waves and shares
TARGET = {"gemm_wgmma": HOPPER, "gemm_mma": target_from_name("sm_80")}

# block_n, block_m, block_k, stages, warps, split_k, min_blocks, raster
SCHEDULES = (
    Schedule("gemm_wgmma", 64, 16, 64, 4, 4),
    Schedule("gemm_wgmma", 128, 16, 64, 4, 8, split_k=3),
    Schedule("gemm_wgmma", 128, 32, 64, 4, 4, split_k=2),
    Schedule("gemm_wgmma", 256, 32, 128, 3, 8),
    Schedule("gemm_wgmma", 64, 32, 32, 5, 4, cluster=2),
    Schedule("gemm_wgmma", 64, 64, 128, 2, 4, raster=4),
    Schedule("gemm_wgmma", 128, 16, 32, 6, 8, stream_k=True),
    Schedule("gemm_wgmma", 64, 16, 64, 2, 4, raster=2, stream_k=True),
    Schedule("gemm_mma", 64, 16, 64, 3, 4),
    Schedule("gemm_mma", 128, 32, 64, 3, 8, split_k=2),
    Schedule("gemm_mma", 256, 48, 128, 2, 16),
    Schedule("gemm_mma", 128, 8, 32, 4, 8),
)
SHAPES = ((13, 192, 448), (40, 100, 500), (1, 250, 1000), (33, 64, 380), (9, 320, 64), (17, 256, 257))
# Whole waves of tiles and shares that cross their borders; two blocks that share x.
MXFP4, NVFP4 = map(QuantFormat.parse, ("w4a16_mxfp4", "w4a16_nvfp4"))
PERSISTENT = (
    (Workload(100, 190, 1024, QuantFormat(4, 64, False), bias=True), Schedule("gemm_wgmma", 64, 16, 64, 3, 4, stream_k=True)),
    (Workload(60, 190, 1472, QuantFormat(4, 128, True)), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),
    (Workload(75, 128, 1600, QuantFormat(4, 32, True), "bfloat16"), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True, cluster=2)),
    (
        Workload(70, 256, 1150, QuantFormat(8, PER_CHANNEL, False), bias=True),
        Schedule("gemm_wgmma", 128, 32, 64, 3, 4, raster=2, stream_k=True, cluster=2),
    ),
    (Workload(60, 384, 2688, QuantFormat(4, 128, False), bias=True), Schedule("gemm_wgmma", 192, 16, 128, 2, 12, stream_k=True)),
    (Workload(14, 190, 1920, QuantFormat(4, 128, True)), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),  # tiles of three parts
    (Workload(60, 190, 320, QuantFormat(4, 64, True)), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),
    (Workload(228, 64, 192, QuantFormat(4, 64, False)), Schedule("gemm_wgmma", 64, 128, 64, 2, 4)),  # a tile whose x comes in boxes
    (Workload(150, 128, 128, QuantFormat(4, 64, True)), Schedule("gemm_wgmma", 64, 128, 64, 2, 4, cluster=2)),  # fewer rows than a box
    (Workload(170, 128, 128, QuantFormat(4, 128, True)), Schedule("gemm_wgmma", 64, 112, 64, 2, 4)),  # a box and some of the rows after it
    (Workload(100, 64, 192, QuantFormat(4, 64, False)), Schedule("gemm_wgmma", 64, 48, 64, 2, 4, stream_k=True)),
    (Workload(150, 128, 256, QuantFormat(4, 128, True)), Schedule("gemm_wgmma", 128, 96, 64, 2, 8, split_k=2)),
    (Workload(310, 128, 192, QuantFormat(4, 128, False)), Schedule("gemm_wgmma", 128, 160, 64, 2, 8, tail=2)),
    (Workload(9, 60, 128, QuantFormat(4, 128, True)), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),  # fewer steps than blocks
    (Workload(30, 128, 256, QuantFormat(8, 128, True)), Schedule("gemm_wgmma", 64, 32, 128, 2, 4, raster=2, cluster=2)),
    # a last wave of strips: some without rows; two rounds of them, without whole tiles before; in pairs of blocks; too many tiles for it
    (Workload(100, 190, 512, QuantFormat(4, 64, False), bias=True), Schedule("gemm_wgmma", 64, 32, 64, 3, 4, tail=2)),
    (Workload(40, 128, 384, QuantFormat(4, 128, True), "bfloat16"), Schedule("gemm_wgmma", 64, 64, 128, 2, 4, tail=4)),
    (Workload(150, 384, 1150, QuantFormat(8, PER_CHANNEL, False), bias=True), Schedule("gemm_wgmma", 64, 64, 32, 4, 4, cluster=2, tail=4)),
    (Workload(300, 256, 128, QuantFormat(4, 32, False)), Schedule("gemm_wgmma", 128, 128, 64, 2, 8, raster=2, cluster=2, tail=2)),
    (Workload(30, 256, 192, QuantFormat(4, 64, True)), Schedule("gemm_wgmma", 64, 32, 64, 2, 4, tail=2)),
    # the last tile has a slab less than others, and warpgroups without any; shared tiles among them
    (Workload(20, 250, 256, QuantFormat(4, 128, False), bias=True), Schedule("gemm_wgmma", 192, 16, 128, 2, 12)),
    (Workload(60, 320, 1664, QuantFormat(8, PER_CHANNEL, False), "bfloat16"), Schedule("gemm_wgmma", 128, 16, 64, 2, 8, stream_k=True)),
    (Workload(20, 100, 896, QuantFormat(4, 64, True)), Schedule("gemm_wgmma", 192, 16, 64, 2, 4, split_k=3)),
    (Workload(100, 250, 384, QuantFormat(4, 128, False)), Schedule("gemm_wgmma", 192, 32, 128, 2, 12, tail=2)),  # strips among them
    # clusters of two that meet in a workspace: two, and three with shares of unequal length; a bias, a slab less, more tiles of rows
    (Workload(40, 120, 1100, QuantFormat(4, 64, False), "bfloat16", bias=True), Schedule("gemm_wgmma", 64, 32, 64, 2, 4, split_k=4)),
    (Workload(140, 250, 1000, QuantFormat(8, PER_CHANNEL, True)), Schedule("gemm_wgmma", 192, 64, 64, 3, 12, split_k=6)),
    # 4-bit floats: groups shorter than a part of a step, shared tiles, two slabs
    (Workload(60, 190, 1472, MXFP4), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),
    (Workload(40, 250, 500, MXFP4, "bfloat16", bias=True), Schedule("gemm_wgmma", 128, 32, 128, 2, 4)),
    # a warpgroup with three slabs, with four
    (Workload(20, 190, 128, QuantFormat(4, 128, False)), Schedule("gemm_wgmma", 192, 16, 64, 2, 4)),
    (Workload(40, 500, 128, QuantFormat(4, 64, True), bias=True), Schedule("gemm_wgmma", 256, 32, 64, 2, 4)),
)
# Two levels of scales, alone and before a bias: through shared memory and directly, shared tiles, halves of one, strips.
TWICE_SCALED = (
    (Workload(13, 100, 320, TWO_LEVELS, bias=True), Schedule("gemm_mma", 64, 32, 64, 2, 4)),
    (Workload(5, 250, 384, NVFP4, "bfloat16"), Schedule("gemm_mma", 128, 8, 64, 3, 8, split_k=2)),
    (Workload(40, 190, 320, TWO_LEVELS), Schedule("gemm_wgmma", 128, 32, 64, 2, 4)),
    (Workload(60, 190, 1472, NVFP4, bias=True), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),
    (Workload(20, 100, 512, TWO_LEVELS, "bfloat16", bias=True), Schedule("gemm_wgmma", 64, 32, 64, 2, 4, split_k=2)),
    (Workload(100, 190, 256, TWO_LEVELS, bias=True), Schedule("gemm_wgmma", 64, 32, 64, 3, 4, tail=2)),
)


CASES = (*in_turn(SCHEDULES, SHAPES, FORMATS, TARGET), *PERSISTENT, *TWICE_SCALED)
SHARED = tuple(c for c in CASES if c[1].split_k > 1 or c[1].stream_k)


def emulated(case: Case, order: str = "shuffled", seed: int = 0) -> EmulatedGemm:
    workload, schedule = case
    return EmulatedGemm(workload, schedule, together=CASES, target=TARGET[schedule.program], order=order, seed=seed)


def test_the_cases_cover_everything():
    found = [(w, s) for w, s in CASES if s in SCHEDULES]
    assert {(w.dtype, w.format) for w, _ in found} >= set(product(("float16", "bfloat16"), FORMATS))
    assert {s for _, s in found} == set(SCHEDULES)
    assert {(w.m, w.n, w.k) for w, _ in found} >= set(SHAPES)
    assert any(w.n % s.block_n and w.m % s.block_m and w.k % s.block_k for w, s in found)
    assert all(legal(w, s, TARGET[s.program]) == [] for w, s in TWICE_SCALED)
    assert any(s.program == "gemm_wgmma" and -(-w.k // s.block_k) % s.split_k for w, s in CASES), "no case has shares of unequal length"


def test_persistent_cases_have_waves_and_shares():
    """Of whole tiles, of parts that begin in the middle of one, and of both; a last wave that is left short: ``Order`` in
    device/order/tiles.cuh."""
    found, strips = set(), set()
    for workload, schedule in PERSISTENT:
        assert legal(workload, schedule, HOPPER) == []
        teams = HOPPER.units // schedule.cluster
        places = -(-workload.n // (schedule.block_n * schedule.cluster)) * -(-workload.m // schedule.block_m)
        if schedule.stream_k:
            shared = shared_places(places, teams, -(-workload.k // schedule.block_k))
            rest = places - shared
            found.add((shared and shared // teams + 1, -(-rest // teams), rest % teams != 0))
        if schedule.tail > 1:
            cut = cut_places(places, teams, schedule.tail)
            strips.add(((places - cut) // teams, -(-cut * schedule.tail // teams)))
    # waves that are shared in part (0: none), whole waves, whether the last of them is short
    assert found >= {(2, 3, False), (2, 1, False), (1, 0, False), (0, 3, True)}, found
    assert strips >= {(0, 0), (0, 2), (1, 1), (2, 1), (4, 2)}, strips  # whole waves, rounds of strips after them


@cache
def exact(case: Case) -> tuple[Problem, torch.Tensor]:
    problem, reference = problem_of(case[0], seed=CASES.index(case))
    assert reference.abs().max() < 1 << 24
    assert reference.isfinite().all() and reference.to(getattr(torch, case[0].dtype)).isfinite().float().mean() > 0.9
    return problem, reference


def kind(case: Case) -> tuple[object, ...]:
    """What the code of a kernel depends on most."""
    workload, schedule = case
    return schedule.program, schedule.split_k, schedule.stream_k, schedule.tail > 1, workload.format.bits, workload.format.row_scaled


@pytest.mark.parametrize("case", one_of_each(CASES, kind), ids=label)
def test_exact(case: Case):
    problem, reference = exact(case)
    output = guarded_output((case[0].m, case[0].n), problem.x.dtype)
    emulated(case)(problem, output.y)
    assert check_guards(output) == []
    assert check_exact(output.y, reference) == []


@pytest.mark.parametrize("case", one_of_each(dict.fromkeys((*SHARED[::4], *PERSISTENT[:4])), lambda case: case[1].program), ids=label)
def test_the_order_of_blocks_does_not_show(case: Case):
    """On random floats, blocks that come in any order give the same bits, launch after launch on the same tickets."""
    workload, results = case[0], []
    problem = random_problem(workload, 3, "sm_90a")
    for seed, order in enumerate(ORDERS):
        gemm = emulated(case, order, seed)
        for _ in range(2):
            output = guarded_output((workload.m, workload.n), problem.x.dtype)
            gemm(problem, output.y)
            results.append(output.y)
        assert not any(workspace[:TICKETS].any() for workspace in gemm.workspaces.values())
    assert results[0].isfinite().all()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES[::11], PERSISTENT[0]], ids=label)
def test_the_tuner_s_gate_accepts(case: Case):
    """The verdict that a tuner would give on a GPU, worst tile on random floats included."""
    gate = Gate(exact_problem(case[0], 1, "sm_90a"), random_problem(case[0], 2, "sm_90a"))
    verdict = gate.verify(emulated(case))
    assert verdict.ok, verdict.reasons


def test_the_emulator_replaces_no_compiler_for_good():
    """Standing in for TileLang leaves no trace: nothing that a later test could import by mistake."""
    problem, _ = exact(CASES[0])
    output = guarded_output((CASES[0][0].m, CASES[0][0].n), problem.x.dtype)
    before = sys.modules.get("tilelang")
    emulated(CASES[0])(problem, output.y)
    assert sys.modules.get("tilelang") is before
