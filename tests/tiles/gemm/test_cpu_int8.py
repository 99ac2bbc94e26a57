"""The CPU GEMM on int8 x: exact int32 sums on every instruction set this machine has, the instructions that make them on all, planted
bugs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from cpu_cases import FEATURES, INTEGER_FEATURES, runs_here, target
from emulation import planted_cpu
from gemm_cases import GROUP_WISE, INT8_FORMATS
from lanes import one_of_each

from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.cpu import cpu_legal
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import detect_target
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

pytestmark = pytest.mark.xdist_group("cpu_int8")
LQQ64, LQQ128, W8A8, ASYM = INT8_FORMATS
W8G, W4G = GROUP_WISE
ISAS = tuple(FEATURES | INTEGER_FEATURES)
Case = tuple[Workload, Schedule]
CASES: tuple[Case, ...] = (
    (Workload(9, 100, 500, LQQ128, "bfloat16", bias=True), Schedule("gemm_cpu", 32, 4, 32, num_warps=2)),
    (Workload(5, 257, 200, LQQ64), Schedule("gemm_cpu", 64, 1, 16, num_warps=2, split_k=2)),
    (Workload(3, 33, 1000, W8A8, bias=True), Schedule("gemm_cpu", 32, 3, 32, num_warps=2)),
    (Workload(6, 100, 300, ASYM, bias=True), Schedule("gemm_cpu", 32, 2, 32, num_warps=2)),
    (Workload(7, 64, 31, W8A8, "bfloat16"), Schedule("gemm_cpu", 64, 1, 8, num_warps=2, split_k=4)),
    (Workload(5, 100, 576, W8G, bias=True), Schedule("gemm_cpu", 32, 2, 32, num_warps=2)),
    (Workload(6, 257, 576, W4G, "bfloat16", bias=True), Schedule("gemm_cpu", 64, 2, 32, num_warps=2, split_k=2)),
    (Workload(7, 33, 300, W4G), Schedule("gemm_cpu", 32, 4, 16, num_warps=2)),
)


@pytest.fixture(scope="module")
def pool():
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


def kernel_of(pool: CompilePool, case: Case, isa: str) -> Kernel:
    (kernel,) = pool.compile([CompileRequest("gemm_cpu", *case, target(isa))])
    assert isinstance(kernel, Kernel), kernel
    return kernel


def label(case: Case) -> str:
    return f"{case[0].served}-{case[1].block_m}x{case[1].block_k}-split{case[1].split_k}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: (case[0].format.bits, case[0].format.x_grouped)), ids=label)
def test_exact(pool: CompilePool, case: Case, isa: str) -> None:
    kernel = kernel_of(pool, case, isa)
    assert cpu_legal(*case, target(isa)) == []
    used, narrow = kernel.resources["instructions"], isa in ("avx512", "avx2")
    wanted = ("vpmaddwd", "vpdpwssd") if case[0].format.bits == 8 else ("vpmaddubsw",) if narrow else ("vpdpbusd",)
    assert sum(used.get(name, 0) for name in wanted) >= 8, used
    if not runs_here(isa):
        pytest.skip(f"this machine has no {isa}; the kernel was compiled")
    for seed, m in enumerate((case[0].m, 1, 33)):
        problem = exact_problem(case[0].with_m(m), seed, "cpu")
        output = guarded_output((m, case[0].n), getattr(torch, case[0].dtype))
        launch(kernel.load(), {}, problem, output.y)
        assert check_guards(output) == [] and check_exact(output.y, problem.reference()) == []


@pytest.mark.parametrize("isa", [isa for isa in ISAS if runs_here(isa)])
def test_sums_are_exact_where_fp32_and_16_bits_would_not_be(pool: CompilePool, isa: str) -> None:
    """Every product at its largest: a tile's fill 16 bits, and sums of 8,192 x 127 x 128 exceed 2^24."""
    workload = Workload(2, 32, 8192, LQQ128, "bfloat16")
    problem = random_problem(workload, 1, "cpu")
    problem.x.fill_(-128)
    problem.operands["weight"].fill_(-1)  # codes of 15
    problem.operands["scales"].fill_(1)
    problem.operands["zeros"].fill_(240)  # 127 in all
    problem.operands["zeros"][:1] = 239  # but for a group
    problem.operands["row_scales"].fill_(2.0**-30)
    problem.operands["token_scales"].fill_(1.0)
    total = -128 * (127 * 8064 + 126 * 128)
    y = torch.empty(2, 32, dtype=torch.bfloat16)
    launch(kernel_of(pool, (workload, Schedule("gemm_cpu", 32, 2, 32, num_warps=1)), isa).load(), {}, problem, y)
    assert total < -(1 << 24) and torch.equal(y, torch.full_like(y, float(torch.tensor(total * 2.0**-30).bfloat16())))


@pytest.mark.parametrize("format", GROUP_WISE, ids=lambda f: f.name)
@pytest.mark.parametrize("isa", [isa for isa in ISAS if runs_here(isa)])
def test_groups_are_exact_at_their_largest(pool: CompilePool, isa: str, format: GemmFormat) -> None:
    """One group counts, whose sum is of the largest magnitude; another whose x has scale 0 does not."""
    workload = Workload(3, 32, 576, format, "float16")
    kernel = kernel_of(pool, (workload, Schedule("gemm_cpu", 32, 2, 32, num_warps=1)), isa).load()
    problem = random_problem(workload, 1, "cpu")
    o, largest = problem.operands, 128 if format.bits == 8 else 15
    problem.x.fill_(-128)
    o["scales"].fill_(1)
    for zero in (128,) if format.symmetric else (0, 15):
        o["weight"].fill_(0 if zero else -1)
        if not format.symmetric:
            o["zeros"].fill_(zero)
        for group, k in enumerate((128, 128, 128, 128, 64)):
            o["token_scales"].zero_()
            o["token_scales"][group] = torch.tensor([2.0**-8, 2.0**-9, -(2.0**-8)])
            total = 128 * largest * k * (1 if zero else -1) * o["token_scales"][group]
            y = torch.empty(3, 32, dtype=torch.float16)
            launch(kernel, {}, problem, y)
            assert torch.equal(y, total.half()[:, None].expand(3, 32))


@cache
def problems(workload: Workload) -> tuple[Problem, Problem]:
    return exact_problem(workload, 1, "cpu"), random_problem(workload, 2, "cpu")


@pytest.mark.parametrize("bug", one_of_each(planted_cpu.INT8_BUGS, lambda bug: planted_cpu.INT8_BUGS[bug][2::2]))
def test_planted_bugs_are_caught(pool: CompilePool, bug: str) -> None:
    here, (_, _, bits, splits, grouped) = detect_target("cpu"), planted_cpu.INT8_BUGS[bug]
    if not here.features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    workload, schedule = next(
        case for case in CASES if (case[0].format.bits, case[1].split_k > 1, case[0].format.x_grouped) == (bits, splits > 1, grouped)
    )
    gate, verdicts = Gate(*problems(workload)), []
    for number in (0, 1 + len(planted_cpu.BUGS) + list(planted_cpu.INT8_BUGS).index(bug)):
        planted = replace(schedule, program=planted_cpu.NAME, raster=number)
        (kernel,) = pool.compile([CompileRequest(planted_cpu.NAME, workload, planted, here)])
        assert isinstance(kernel, Kernel), kernel
        verdicts.append(gate.verify(partial(launch, kernel.load(), {})))
    assert verdicts[0].ok, verdicts[0].reasons
    assert not verdicts[1].ok, f"{bug} passed the gate"
