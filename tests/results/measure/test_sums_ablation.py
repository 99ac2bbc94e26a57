"""The ablation of group-wise sums: every conversion compiles, does what it is named after, and tries what the others try."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from emulation.device_code import needs_host_compiler
from emulation.generated_gemm import GeneratedGemm
from toolchain import machine_code, needs_nvcc

from results.measure.ablation.sums import STEPS, WORKLOADS, drawn
from results.measure.ablation.sums_variants import magic_add, magic_start
from results.measure.ablation.sums_variants.variant import GROUP_WISE
from results.measure.ablation.variants import TRIED
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.layouts.formats import FORMATS
from tilebit.schedules.gemm.codecs import BYTES, CONVERSIONS, FLOATS, GROUPED_FLOATS, Codec, codec_of
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

HOPPER = target_from_name("sm_90a")
SMALL = Workload(96, 256, 512, GROUP_WISE, "float16")


def test_the_steps_are_all_conversions_of_one_format():
    assert {codec_of(step.format).conversion for step in STEPS} == set(CONVERSIONS)
    assert STEPS[-1].format == GROUP_WISE and codec_of(GROUP_WISE).conversion == "INSTRUCTION"
    assert all(codec_of(format).conversion == "INSTRUCTION" for format in FORMATS.values())


def test_steps_try_the_same_schedules():
    for workload in WORKLOADS:
        offered = drawn(workload, HOPPER)
        assert [*offered] == [*STEPS] and all(schedules == offered[STEPS[0]] for schedules in offered.values())
        assert 1 <= len(offered[STEPS[0]]) <= TRIED
        for step, schedules in offered.items():
            assert not [reason for s in schedules for reason in legal(replace(workload, format=step.format), s, HOPPER)]


@pytest.mark.parametrize("codec", (BYTES, FLOATS, GROUPED_FLOATS), ids=("int8 per channel", "e4m3 per channel", "groups of e4m3"))
@pytest.mark.parametrize("conversion", CONVERSIONS[1:])
def test_other_sums_have_no_such_conversion(codec: Codec, conversion: str):
    """Sums over all of k may be larger than 2^22, and floats are none."""
    with pytest.raises(ValueError, match=f"conversion is '{conversion}'; accepted for x '{codec.x}' with scales of .* k: INSTRUCTION"):
        replace(codec, conversion=conversion)


def test_a_conversion_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"conversion is 'MAGIC'; accepted for .* INSTRUCTION, MAGIC_ADD, MAGIC_START"):
        replace(codec_of(GROUP_WISE), conversion="MAGIC")


@needs_host_compiler
@pytest.mark.parametrize("variant", (magic_add, pytest.param(magic_start, marks=pytest.mark.slow)), ids=("magic_add", "magic_start"))
@pytest.mark.parametrize(
    ("program", "n", "block"),
    [("gemm_stream_bulk", 192, 64), pytest.param("gemm_stream", 130, 64, marks=pytest.mark.slow)],
)
def test_programs_of_few_rows_are_exact(variant: ModuleType, program: str, n: int, block: int):
    """Steps of half a group, each of which is converted by itself; as the CUDA that is generated."""
    workload = Workload(13, n, 576, variant.FORMAT, "float16", bias=True)
    problem, y = exact_problem(workload, 3, "sm_90a"), torch.empty(13, n, dtype=torch.float16)
    GeneratedGemm(workload, Schedule(program, 64, 16, block, 2, 3), HOPPER)(problem, y)
    assert torch.equal(y, problem.reference().half())


# Instructions of a step's sums in machine code: to fp32, less the number, and the bits wherever they are named.
INTEGER_TO_FLOAT, LESS_MAGIC, MAGIC_BITS = r"\bI2FP?\b", r"\bFADD\b[^;]*-12582912\b", r"\b0x4b400000\b"


@needs_nvcc
@pytest.mark.slow
def test_what_a_sum_costs_in_machine_code():
    """Sums are added in two places, in a tile's loop and behind it. There I2FP is in place of one FADD a sum; bits are added to each sum,
    or where it starts are its value, in the loop alone."""
    schedule = Schedule("gemm_wgmma", 128, 32, 128, 3, 8)
    requests = [CompileRequest(schedule.program, replace(SMALL, format=step.format), schedule, HOPPER) for step in STEPS]
    with CompilePool(cache=ArtifactCache(), keep=True) as pool:
        kernels = pool.compile(requests)
    found = {}
    for step, kernel in zip(STEPS, kernels, strict=True):
        assert isinstance(kernel, Kernel) and kernel.manifest["lint"] == [], kernel
        sass = machine_code(kernel.path / "kernel.cubin")
        counts = [len(re.findall(shape, sass)) for shape in (INTEGER_TO_FLOAT, LESS_MAGIC, MAGIC_BITS)]
        found[codec_of(step.format).conversion] = counts
    sums = schedule.block_n * schedule.block_m // (schedule.num_warps * 32)
    of_addresses = found["MAGIC_ADD"][0]
    assert found == {
        "INSTRUCTION": [of_addresses + 2 * sums, 0, 0],
        "MAGIC_ADD": [of_addresses, 2 * sums, 2 * sums],
        "MAGIC_START": [of_addresses, 2 * sums, sums],
    }
