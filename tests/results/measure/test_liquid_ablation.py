"""The ablation of LiquidGEMM: variants compute what the whole does, compile, and each is tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulation.emulated_gemm import EmulatedGemm
from emulation.planted import swap
from toolchain import needs_nvcc

from results.measure.ablation import by_lanes, coarse, plain_nibbles
from results.measure.ablation.liquid import LQQ, STEPS, TRIED, WORKLOADS, drawn
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

HOPPER = target_from_name("sm_90a")
SMALL = Workload(40, 192, 384, LQQ, "float16")
TILE = Schedule("gemm_wgmma", 128, 32, 128, 2, 8)


@pytest.mark.parametrize("format", [by_lanes.FORMAT, plain_nibbles.FORMAT], ids=["by lanes", "row by row"])
def test_variants_are_exact(format: GemmFormat):
    workload = replace(SMALL, format=format)
    problem, y = exact_problem(workload, 3, "sm_90a"), torch.empty(SMALL.m, SMALL.n, dtype=torch.float16)
    EmulatedGemm(workload, TILE)(problem, y)
    assert torch.equal(y, problem.reference().half())


def test_a_wrong_sign_of_the_lanes_is_seen():
    """As for the programs of the library: the same text with a mistake in it is wrong."""
    workload = replace(SMALL, format=by_lanes.FORMAT)
    problem, y = exact_problem(workload, 3, "sm_90a"), torch.empty(SMALL.m, SMALL.n, dtype=torch.float16)
    EmulatedGemm(workload, TILE, {"device": swap(("^ (products & SIGNS) ^ signs", "^ signs"))})(problem, y)
    assert not torch.equal(y, problem.reference().half())


def test_programs_without_a_place_for_it_are_not_given_a_function_that_unpacks():
    """A codec's own would be left out there without a word."""
    with pytest.raises(ValueError, match="which gemm_cpu, gemm_stream would not call; accepted: programs gemm_mma, gemm_wgmma"):
        replace(plain_nibbles.CODEC, programs=frozenset({"gemm_wgmma", "gemm_stream", "gemm_cpu"}))


@needs_nvcc
def test_every_step_has_kernels():
    workload = Workload(96, 256, 512, LQQ, "float16")
    requests = [CompileRequest(p.program, replace(workload, format=step.format), p, HOPPER) for step, p in _firsts(workload)]
    with CompilePool(cache=ArtifactCache(), keep=True) as pool:
        found = pool.compile(requests)
    assert [str(f) for f in found if not isinstance(f, Kernel)] == [] and len(found) == len(STEPS)


def _firsts(workload: Workload):
    return [(step, schedules[0]) for step, schedules in drawn(workload, HOPPER).items()]


def test_steps_try_the_same_schedules():
    for workload in WORKLOADS:
        offered = drawn(workload, HOPPER)
        assert [*offered] == [*STEPS] and all(offered.values())
        of_wgmma = [schedules for step, schedules in offered.items() if step.program != coarse.NAME]
        assert len(of_wgmma) == 3 and of_wgmma[0] == of_wgmma[1] == of_wgmma[2] and 1 <= len(of_wgmma[0]) <= TRIED
        for step, schedules in offered.items():
            posed = replace(workload, format=step.format)
            assert not [reason for s in schedules for reason in legal(posed, s, HOPPER)]


@pytest.mark.parametrize(
    ("workload", "schedule", "reason"),
    [
        (replace(SMALL, n=256), Schedule(coarse.NAME, 128, 256, 128, 3, 8), "is no tile of"),
        (replace(SMALL, n=256), Schedule(coarse.NAME, 64, 256, 128, 8, 4), "bytes of shared memory"),
        (replace(SMALL, n=256), Schedule(coarse.NAME, 64, 256, 128, 3, 4, stream_k=True), "sets more than"),
        (SMALL, Schedule(coarse.NAME, 64, 256, 128, 3, 4), "multiples of 128"),
    ],
)
def test_the_coarse_pipeline_says_what_it_takes(workload: Workload, schedule: Schedule, reason: str):
    assert reason in " ".join(legal(workload, schedule, HOPPER))
