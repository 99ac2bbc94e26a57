"""The ablation of LiquidGEMM: variants compute what the whole does, compile, and each is tried."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulation.emulated_gemm import EmulatedGemm
from emulation.planted import swap
from toolchain import machine_code, needs_nvcc

from results.measure.ablation import by_lanes, coarse, plain_nibbles
from results.measure.ablation.liquid import LQQ, STEPS, WORKLOADS, drawn
from results.measure.ablation.variants import TRIED
from results.report.liquid_variants import VARIANTS
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.cuda import find_nvcc
from tilebit.tiles.compiler.headers import device_source
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


NEEDED = ("ptx/instructions.cuh", "codecs/dequant.cuh", "codecs/int8.cuh")
KERNEL = """
extern "C" __global__ void kernel(uint32_t* to) {{
  extern __shared__ uint4 memory[];
  {registers}
  tilebit::{leaf}({a}, memory, memory + 4096, memory + 4160, threadIdx.x);
  {store}
}}
"""
REGISTERS = {
    "registers": "uint32_t a[16 * {slabs}];",
    "a": "a",
    "store": "for (int i = 0; i < 16 * {slabs}; ++i) to[i * 128 + threadIdx.x] = a[i];",
}
SHARED = {"registers": "", "a": "memory + 2048", "store": ""}
LEAVES = {  # by step: the function, its headers, and where it puts operands
    0: ("dequantize_to_shared<tilebit::Lqq, {slabs}, 2, 4, 256>", (coarse.LEAVES,), SHARED),
    1: ("dequantize_bytes<tilebit::LqqByLanes, {slabs}, 0, 2, 4, 256>", by_lanes.CODEC.headers[-1:], REGISTERS),
    2: ("dequantize_row_by_row<tilebit::LqqRowByRow, {slabs}, 0, 2, 4, 256>", plain_nibbles.CODEC.headers[-1:], REGISTERS),
    3: ("dequantize_bytes<tilebit::Lqq, {slabs}, 0, 2, 4, 256>", (), REGISTERS),
}


@needs_nvcc
@pytest.mark.parametrize("step", VARIANTS)
def test_the_model_counts_the_instructions_of_the_machine_code(tmp_path: Path, step: int):
    """What two slabs more (64 weights a thread each, of one group) add to a variant's function, its stores to memory apart."""
    few, many = (instructions(tmp_path, step, slabs) for slabs in (2, 4))
    assert (many - few) / (2 * 64) == pytest.approx(VARIANTS[step].alpha, abs=0.02)


def instructions(folder: Path, step: int, slabs: int) -> int:
    leaf, headers, where = LEAVES[step]
    source, cubin = folder / f"{slabs}.cu", folder / f"{slabs}.cubin"
    body = KERNEL.format(leaf=leaf.format(slabs=slabs), **{name: text.format(slabs=slabs) for name, text in where.items()})
    source.write_text(device_source((*NEEDED, *headers)) + body)
    subprocess.run([find_nvcc(), "-arch=sm_90a", "-cubin", "-o", str(cubin), str(source)], check=True, capture_output=True)
    listing = machine_code(cubin).partition("EXIT")[0]
    return sum(not name.startswith("STG") for name in re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)", listing))


def test_the_model_knows_every_step():
    assert {step.number for step in STEPS} == set(VARIANTS)
    assert all(VARIANTS[step.number].apart == (step.program == coarse.NAME) for step in STEPS)


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
