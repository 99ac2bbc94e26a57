"""The CPU GEMM on e4m3 x: compiled for every instruction set, exact on those of this machine, and gated on random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpu_cases import FEATURES, runs_here, target
from gemm_cases import FP8_FORMATS
from lanes import one_of_each

from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.schedules.gemm.cpu import cpu_legal
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

pytestmark = pytest.mark.xdist_group("cpu_fp8")
CHANNELS, BLOCKS, NIBBLES = FP8_FORMATS
ISAS = [isa for isa in FEATURES if runs_here(isa)]
Case = tuple[Workload, Schedule]
CASES: tuple[Case, ...] = (
    (Workload(9, 100, 500, CHANNELS, bias=True), Schedule("gemm_cpu", 32, 4, 32, num_warps=2)),
    (Workload(5, 257, 300, BLOCKS, "bfloat16"), Schedule("gemm_cpu", 64, 2, 16, num_warps=2, split_k=2)),
    (Workload(6, 100, 576, NIBBLES, bias=True), Schedule("gemm_cpu", 32, 2, 32, num_warps=2)),
    (Workload(7, 33, 31, CHANNELS, "bfloat16", width=90), Schedule("gemm_cpu", 32, 1, 8, num_warps=2, split_k=4)),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


def kernel_of(pool: CompilePool, case: Case, isa: str) -> Kernel:
    assert cpu_legal(*case, target(isa)) == []
    (kernel,) = pool.compile([CompileRequest("gemm_cpu", *case, target(isa))])
    assert isinstance(kernel, Kernel), kernel
    return kernel


def label(case: Case) -> str:
    return f"{case[0].served}-{case[1].block_m}x{case[1].block_k}-split{case[1].split_k}"


@pytest.mark.parametrize("isa", FEATURES)
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[0].format), ids=label)
def test_exact(pool: CompilePool, case: Case, isa: str) -> None:
    compiled = kernel_of(pool, case, isa)
    assert isa != "avx512_bf16" or compiled.resources["loop"].get("vdpbf16ps", 0) >= 8
    if not runs_here(isa):
        pytest.skip(f"this machine has no {isa}; the kernel was compiled")
    kernel = compiled.load()
    for seed, m in enumerate((case[0].m, 1, 33)):
        problem = exact_problem(case[0].with_m(m), seed, "cpu")
        output = guarded_output((m, case[0].columns), getattr(torch, case[0].dtype))
        launch(kernel, {}, problem, output.y)
        assert check_guards(output) == [] and check_exact(output.y, problem.reference()) == []


@pytest.mark.parametrize("case", CASES[:3], ids=label)
def test_the_tuner_s_gate_accepts(pool: CompilePool, case: Case) -> None:
    """Every finite code."""
    gate, kernel = Gate(exact_problem(case[0], 1, "cpu"), random_problem(case[0], 2, "cpu")), kernel_of(pool, case, ISAS[0]).load()
    verdict = gate.verify(lambda problem, y: launch(kernel, {}, problem, y))
    assert verdict.ok, verdict.reasons


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_a_number_is_none(pool: CompilePool, isa: str) -> None:
    case = CASES[0]
    problem = exact_problem(case[0], 1, "cpu")
    problem.x.view(torch.uint8)[1, 7], problem.x.view(torch.uint8)[3, 499] = 0x7F, 0xFF
    y = torch.empty(case[0].m, case[0].n, dtype=torch.float16)
    launch(kernel_of(pool, case, isa).load(), {}, problem, y)
    assert y.isnan().all(1).nonzero().flatten().tolist() == [1, 3] and not y[[0, 2, *range(4, 9)]].isnan().any()
