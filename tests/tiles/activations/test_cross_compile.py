"""The quantization of activations compiled for every architecture, without a GPU: no spills, no warnings, wide loads and stores, and an
early start where the device has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from lanes import one_of_each
from toolchain import needs_nvcc

from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.operations import legal, params
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

Case = tuple[str, QuantizeWorkload, Schedule]


def rows(block_m: int, warps: int) -> Schedule:
    return Schedule("quantize_rows", 1, block_m, 1, num_warps=warps)


def through(block_m: int, warps: int, blocks: int) -> Schedule:
    return replace(rows(block_m, warps), num_stages=2, min_blocks=blocks)


CASES: tuple[Case, ...] = (
    ("sm_90a", QuantizeWorkload(4096, 8192), rows(1, 8)),
    ("sm_80", QuantizeWorkload(16, 4096, "bfloat16", "e4m3", 128, norm=True), rows(1, 8)),
    ("sm_86", QuantizeWorkload(16, 300, "float16", "int8", 128, norm=True, smooth=True), rows(4, 4)),
    ("sm_89", QuantizeWorkload(16, 5120, "bfloat16", "e4m3", smooth=True), rows(2, 16)),
    ("sm_90a", QuantizeWorkload(4096, 8192, "bfloat16", "e4m3", 128, norm=True, smooth=True), rows(1, 8)),
    ("sm_90a", QuantizeWorkload(4096, 8192, "bfloat16", "int8", 128, norm=True, smooth=True), through(1, 16, 1)),
    ("sm_90a", QuantizeWorkload(4096, 4096, "float16", "e4m3", norm=True, smooth=True), through(2, 16, 1)),
    ("sm_80", QuantizeWorkload(4096, 8192, "float16", norm=True), through(1, 16, 2)),
    ("sm_90a", QuantizeWorkload(1, 65536, "float16", "int8", norm=True, smooth=True), rows(1, 32)),
    ("sm_90a", QuantizeWorkload(64, 4096, "bfloat16", "int8", norm=True, residual=True, offset=1.0), rows(1, 8)),
    ("sm_90a", QuantizeWorkload(1, 14336, "bfloat16", "int8", 128, gate="silu"), rows(1, 32)),
    ("sm_86", QuantizeWorkload(4096, 8192, "float16", "int8", norm=True, residual=True), through(1, 16, 1)),
    ("sm_80", QuantizeWorkload(1, 32768, "float16", "e4m3", smooth=True, gate="gelu_tanh"), rows(1, 32)),
    ("sm_80", QuantizeWorkload(1, 65536, "bfloat16", "e4m3", 128, norm=True, smooth=True), rows(1, 32)),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


@needs_nvcc
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: "any"), ids=lambda case: f"{case[0]}-{case[1].served}")
def test_compiles_as_promised(pool: CompilePool, case: Case):
    arch, workload, schedule = case
    target = target_from_name(arch)
    assert legal(workload, schedule, target) == []
    (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target)])
    assert isinstance(kernel, Kernel), kernel
    assert kernel.manifest["lint"] == []
    assert kernel.manifest["prelude"] == "tilebit"
    resources, code = kernel.resources, kernel.resources["instructions"]
    assert resources["spills"] == resources["stack"] == code["float_atomics"] == 0
    assert resources["threads"] == schedule.num_warps * 32 and resources["registers"] * resources["threads"] <= 65536
    if not (workload.norm or workload.smooth):
        assert resources["registers"] <= 40, "six blocks of 256 threads an SM have enough loads in flight"
    assert bool(code["dependent_waits"]) == (arch == "sm_90a")
    assert kernel.params == params(workload, schedule, target)
