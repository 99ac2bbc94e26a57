"""The CPU GEMM on bit planes and codebooks: exact at every width, on ragged shapes and every number of rows; planted bugs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cpu_cases import FEATURES, runs_here, target
from emulation import planted_any

from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import check_exact, check_guards, check_worst_tile, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import CODEBOOK_BITS, GemmFormat
from tilebit.layouts.planes import unpack_planes
from tilebit.schedules.gemm.cpu_any import PROGRAM, any_candidates, any_legal
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

pytestmark = pytest.mark.xdist_group("cpu_any")
DTYPES = ("float16", "bfloat16")
SHAPES = ((100, 500), (33, 256), (64, 31), (257, 576), (32, 1000))
ROWS = (*range(1, 18), 64, 257)
BLOCKS = ((1, 4), (2, 2), (4, 1), (8, 1), (3, 2), (1, 1))
needs_avx2 = pytest.mark.skipif(not runs_here("avx2"), reason="this machine has no avx2")


def form(bits: int) -> GemmFormat:
    return GemmFormat.parse(f"w{bits}a16_any")


def case_of(number: int, bits: int, dtype: str) -> tuple[Workload, Schedule]:
    """Shapes and blocks in turn: every one of each with some width."""
    n, k = SHAPES[number % len(SHAPES)]
    block_m, splits = BLOCKS[number % len(BLOCKS)]
    workload = Workload(5, n, k, form(bits), dtype, bias=bool(number % 2))
    return workload, Schedule(PROGRAM, 64 if number % 3 else 32, block_m, 1, num_warps=2, split_k=splits)


CASES = [("avx2", *case_of(number, *case)) for number, case in enumerate(product(CODEBOOK_BITS, DTYPES))]
CASES += [("avx512_bf16", *case_of(number, *case)) for number, case in enumerate(product(CODEBOOK_BITS, DTYPES), 1)]
CASES += [("avx512", *case_of(number, bits, "bfloat16")) for number, bits in enumerate((3, 5, 8))]


@pytest.fixture(scope="module")
def pool():
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


def kernel_of(pool: CompilePool, workload: Workload, schedule: Schedule, isa: str = "avx2") -> Kernel:
    if not runs_here(isa):
        pytest.skip(f"this machine has no {isa}")
    (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target(isa))])
    assert isinstance(kernel, Kernel), kernel
    return kernel


@pytest.mark.parametrize(("isa", "workload", "schedule"), CASES, ids=[f"{i}-{w.served}-{s.block_m}x{s.split_k}" for i, w, s in CASES])
def test_exact(pool: CompilePool, isa: str, workload: Workload, schedule: Schedule) -> None:
    kernel = kernel_of(pool, workload, schedule, isa)
    assert any_legal(workload, schedule, target(isa)) == []
    run = kernel.load()
    for m in ROWS:
        problem = exact_problem(workload.with_m(m), m, "cpu")
        output = guarded_output((m, workload.n), getattr(torch, workload.dtype))
        launch(run, {}, problem, output.y)
        assert check_guards(output) == [] and check_exact(output.y, problem.reference()) == [], m
    problem = random_problem(workload.with_m(9), 0, "cpu")
    output = guarded_output((9, workload.n), getattr(torch, workload.dtype))
    launch(run, {}, problem, output.y)
    assert check_worst_tile(output.y, problem.reference(), problem.torch_result()) == []


@needs_avx2
@pytest.mark.parametrize("bits", CODEBOOK_BITS)
def test_a_view_is_the_first_planes_of_the_store(pool: CompilePool, bits: int) -> None:
    """A kernel of b bits reads a prefix of the eight planes, and nothing behind it."""
    parent = exact_problem(Workload(3, 33, 500, form(8)), bits, "cpu")
    workload = Workload(3, 33, 500, form(bits))
    codebook = torch.arange(1 << bits, dtype=torch.float16) - (1 << (bits - 1))
    view = parent.operands["weight"][:bits]
    assert view.data_ptr() == parent.operands["weight"].data_ptr() and view.is_contiguous()
    y = torch.full((3, 33), torch.nan, dtype=torch.float16)
    kernel_of(pool, workload, Schedule(PROGRAM, 32, 1, 1, num_warps=2, split_k=2))(parent.x, view, codebook.repeat(33, 1), y)
    codes = torch.from_numpy(unpack_planes(parent.operands["weight"].numpy(), parent.layout, 33, 500)) >> (8 - bits)
    weight = codebook.double()[codes.long()]
    assert torch.equal(y, (parent.x.double() @ weight.T).half())


@pytest.mark.parametrize("name", planted_any.BUGS)
def test_planted_bugs_are_caught(pool: CompilePool, name: str) -> None:
    _, _, bits = planted_any.BUGS[name]
    number = 1 + list(planted_any.BUGS).index(name)
    schedule = Schedule(planted_any.NAME, 32, 2, 1, num_warps=2, split_k=2)
    for bug, wrong in ((0, False), (number, True)):
        workload = Workload(5, 40, 600, form(bits), "bfloat16", bias=True)
        isa = "avx512_bf16" if name in planted_any.WIDE else "avx2"
        kernel = kernel_of(pool, workload, Schedule(**{**schedule.to_json(), "raster": bug}), isa)
        problem = exact_problem(workload, 1, "cpu")
        output = guarded_output((5, 40), torch.bfloat16)
        launch(kernel.load(), {}, problem, output.y)
        assert bool(check_guards(output) + check_exact(output.y, problem.reference())) == wrong


def test_candidates_are_legal_and_illegal_schedules_say_why() -> None:
    for isa, m, bits in product(FEATURES, (1, 3, 17, 512), CODEBOOK_BITS):
        workload = Workload(m, 4096, 4096, form(bits))
        found = any_candidates(workload, target(isa))
        assert len(found) >= 3 and len(set(found)) == len(found) and all(s.block_m <= m for s in found)
        assert all(legal(workload, schedule, target(isa)) == [] for schedule in found)
    good, workload = Schedule(PROGRAM, 32, 1, 1, num_warps=2), Workload(1, 64, 64, form(3))
    wrong = {
        "block_n is 48": Schedule(PROGRAM, 48, 1, 1, num_warps=2),
        "split_k is 3": Schedule(PROGRAM, 32, 1, 1, num_warps=2, split_k=3),
        "block_m 8 x split_k 2": Schedule(PROGRAM, 32, 8, 1, num_warps=2, split_k=2),
        "num_warps is 0": Schedule(PROGRAM, 32, 1, 1, num_warps=0),
        "block_k is 32": Schedule(PROGRAM, 32, 1, 32, num_warps=2),
    }
    for words, schedule in wrong.items():
        (sentence,) = legal(workload, schedule, target("avx2"))
        assert words in sentence
    (sentence,) = legal(Workload(1, 1 << 17, 1 << 15, form(3)), good, target("avx2"))
    assert "2^31" in sentence
    (sentence,) = legal(Workload(1, 64, 64, GemmFormat.parse("w4a16_g128")), good, target("avx2"))
    assert sentence == "format is w4a16_g128; gemm_any_cpu has no codec for it."
