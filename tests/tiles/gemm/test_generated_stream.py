"""``gemm_stream`` and ``gemm_stream_bulk`` without a GPU: the whole kernel that TileLang generates, on every thread of every block, exact.

From codes to y every piece is the real one: ``gemm_layout`` packs, TileLang lowers the program, the generated CUDA and the device functions
in it are compiled for the host, their PTX included; copies land as late as they may, and what they will overwrite is spoilt when they are
issued. Blocks come in a random order, those of a cluster together.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from lanes import one_of_each
from sample.two_levels import FORMAT as TWO_LEVELS

from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.layouts.formats import PER_CHANNEL, QuantFormat
from tilebit.schedules.gemm import stream as rules
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import needs_host_compiler
from emulation.emulated_program import ORDERS
from emulation.generated_gemm import GeneratedGemm
from gemm_cases import FORMATS, Case, in_turn, label, problem_of

pytestmark = needs_host_compiler
HOPPER = target_from_name("sm_90a")
MXFP4, NVFP4 = map(QuantFormat.parse, ("w4a16_mxfp4", "w4a16_nvfp4"))
PROGRAMS = (rules.ASYNC, rules.BULK)

# block_n, block_m, block_k, stages, warps
SCHEDULES = (
    Schedule("gemm_stream", 64, 8, 64, 3, 4),
    Schedule("gemm_stream", 16, 1, 32, 4, 2, split_k=2),
    Schedule("gemm_stream", 128, 16, 64, 2, 4, split_k=3),
    Schedule("gemm_stream_bulk", 64, 16, 64, 2, 3),
    Schedule("gemm_stream_bulk", 128, 4, 64, 3, 4, split_k=3),
    Schedule("gemm_stream_bulk", 32, 2, 128, 3, 2),
    Schedule("gemm_stream_bulk", 64, 8, 32, 2, 2, split_k=2),
)
# Warps whose rows lie in two packed records, and rows of x that are not there, whose sums would spoil the others'.
BETWEEN_RECORDS = (
    (Workload(11, 320, 512, QuantFormat(4, 128, False), bias=True), Schedule("gemm_stream_bulk", 80, 16, 128, 2, 2)),
    (Workload(5, 300, 500, QuantFormat(4, 32, True), "bfloat16"), Schedule("gemm_stream_bulk", 160, 8, 64, 2, 4, split_k=2)),
    (Workload(13, 190, 384, QuantFormat(8, PER_CHANNEL, False)), Schedule("gemm_stream_bulk", 48, 16, 32, 3, 2)),
    (Workload(1, 192, 512, QuantFormat(4, 64, False)), Schedule("gemm_stream_bulk", 96, 1, 128, 2, 4)),
    (Workload(12, 320, 256, QuantFormat(4, 128, True)), Schedule("gemm_stream", 80, 16, 64, 2, 2)),
    (Workload(16, 448, 512, QuantFormat(4, 128, False)), Schedule("gemm_stream_bulk", 112, 16, 128, 2, 2)),  # rows in three records
    (Workload(16, 256, 768, QuantFormat(4, 128, False)), Schedule("gemm_stream_bulk", 256, 16, 128, 2, 8)),  # warps apart by a step
    # Seven and three warps bring 14 and 6 rows of x at once: of the last few rows only some of them.
    (Workload(16, 448, 512, QuantFormat(4, 128, False)), Schedule("gemm_stream_bulk", 448, 16, 128, 2, 7)),
    (Workload(15, 448, 384, QuantFormat(4, 128, True)), Schedule("gemm_stream_bulk", 448, 16, 128, 2, 14)),
    (Workload(8, 192, 384, QuantFormat(4, 64, True)), Schedule("gemm_stream", 192, 8, 128, 2, 3)),
    (Workload(16, 320, 256, QuantFormat(4, 128, True), "bfloat16"), Schedule("gemm_stream", 320, 16, 128, 2, 5)),
    (Workload(16, 128, 384, MXFP4, bias=True), Schedule("gemm_stream_bulk", 128, 16, 128, 2, 4)),
    (Workload(3, 320, 500, MXFP4, "bfloat16"), Schedule("gemm_stream_bulk", 80, 4, 64, 2, 4, split_k=2)),
    (Workload(7, 192, 320, MXFP4, "bfloat16"), Schedule("gemm_stream", 96, 8, 64, 2, 4)),
    (Workload(3, 430, 192, QuantFormat(8, 64, True), "bfloat16"), Schedule("gemm_stream", 224, 4, 64, 2, 4)),
    (Workload(3, 192, 257, QuantFormat(8, 32, False), "bfloat16", bias=True), Schedule("gemm_stream", 96, 4, 32, 3, 4, split_k=2)),
)
# The last block's rows overlap those of the one before: of one packed record and of two, alone, by a cluster, by a ticket.
OVERLAPPING = (
    (Workload(11, 320, 384, QuantFormat(4, 128, False), bias=True), Schedule("gemm_stream_bulk", 144, 16, 128, 2, 3)),
    (Workload(5, 300, 500, QuantFormat(4, 32, True), "bfloat16"), Schedule("gemm_stream_bulk", 128, 8, 64, 2, 4, split_k=2)),
    (Workload(3, 250, 384, QuantFormat(8, 64, False), bias=True), Schedule("gemm_stream", 80, 4, 64, 2, 2, split_k=2)),
    (Workload(1, 192, 256, MXFP4, "bfloat16"), Schedule("gemm_stream_bulk", 112, 1, 64, 2, 2)),
)
SHAPES = ((16, 128, 512), (5, 100, 500), (1, 64, 384), (11, 128, 257))
# Two levels of scales, alone and before a bias.
TWICE_SCALED = (
    (Workload(5, 100, 320, TWO_LEVELS), Schedule("gemm_stream", 64, 8, 64, 2, 2)),
    (Workload(11, 128, 320, NVFP4, "bfloat16", bias=True), Schedule("gemm_stream", 128, 16, 64, 2, 4, split_k=2)),
    (Workload(3, 100, 320, NVFP4), Schedule("gemm_stream_bulk", 64, 4, 64, 2, 3)),
    (Workload(16, 128, 384, TWO_LEVELS, bias=True), Schedule("gemm_stream_bulk", 128, 16, 64, 2, 4, split_k=2)),
)
STREAM_FORMATS = tuple(f for f in FORMATS if f.group_size != 64)
CASES = (*in_turn(SCHEDULES, SHAPES, STREAM_FORMATS, dict.fromkeys(PROGRAMS, HOPPER)), *BETWEEN_RECORDS, *OVERLAPPING, *TWICE_SCALED)
SHARED = tuple(case for case in CASES if case[1].split_k > 1)


def kind(case: Case) -> tuple[str, bool, bool]:
    """What the code of a kernel depends on most."""
    return case[1].program, case[1].split_k > 1, case in OVERLAPPING


def test_the_cases_cover_everything():
    assert {(w.dtype, w.format) for w, _ in CASES} >= set(product(("float16", "bfloat16"), STREAM_FORMATS))
    assert {s for _, s in CASES} >= set(SCHEDULES)
    assert {(w.m, w.n, w.k) for w, _ in CASES} >= set(SHAPES)
    assert any(w.n % s.block_n and w.m % s.block_m and w.k % s.block_k for w, s in CASES)
    assert {s.program for w, s in SHARED if -(-w.k // s.block_k) % s.split_k} == set(PROGRAMS), "no case has shares of unequal length"
    for workload, schedule in (*BETWEEN_RECORDS, *OVERLAPPING, *TWICE_SCALED):
        assert legal(workload, schedule, HOPPER) == []


@pytest.mark.parametrize("case", one_of_each(CASES, kind), ids=label)
def test_exact(case: Case):
    problem, reference = problem_of(case[0], seed=CASES.index(case))
    assert reference.abs().max() < 1 << 24
    output = guarded_output((case[0].m, case[0].n), problem.x.dtype)
    gemm = GeneratedGemm(*case, HOPPER)
    gemm(problem, output.y)
    assert check_guards(output) == []
    assert check_exact(output.y, reference) == []
    assert not gemm.tickets_left


@pytest.mark.parametrize("case", one_of_each(SHARED[::3], kind), ids=label)
def test_the_order_of_blocks_does_not_show(case: Case):
    """On random floats, blocks that come in any order give the same bits, launch after launch on the same tickets."""
    problem, results = random_problem(case[0], 3, "sm_90a"), []
    for seed, order in enumerate(ORDERS):
        gemm = GeneratedGemm(*case, HOPPER, order=order, seed=seed)
        for _ in range(2):
            output = guarded_output((case[0].m, case[0].n), problem.x.dtype)
            gemm(problem, output.y)
            results.append(output.y)
            assert not gemm.tickets_left
    assert results[0].isfinite().all()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("case", one_of_each(CASES[::4], kind), ids=label)
def test_the_tuner_s_gate_accepts(case: Case):
    """The verdict that a tuner would give on a GPU, worst tile on random floats included."""
    gate = Gate(exact_problem(case[0], 1, "sm_90a"), random_problem(case[0], 2, "sm_90a"))
    verdict = gate.verify(GeneratedGemm(*case, HOPPER))
    assert verdict.ok, verdict.reasons
