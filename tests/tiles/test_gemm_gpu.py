"""Every CUDA program on a GPU: the exact oracle over at least 200 seeds a format, the worst tile, poisoned outputs, ragged and extreme
shapes.

The sm_80, sm_86 and sm_89 program runs on a newer GPU from the same generated source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tilebit.autotune.problem import Problem, exact_problem, random_problem, split_workspace
from tilebit.autotune.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import BITS, GROUP_SIZES, QuantFormat
from tilebit.schedules.rules import gemm as rules
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import detect_target
from tilebit.schedules.workload import DTYPES, Workload
from tilebit.tiles.cache import ArtifactCache
from tilebit.tiles.compile import CompileRequest
from tilebit.tiles.pool import CompilePool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SEEDS = 200
FORMATS = [QuantFormat(bits, group, symmetric) for bits in BITS for group in GROUP_SIZES for symmetric in (True, False)]


def _schedules(bits: int) -> list[tuple[tuple[int, int, bool], Schedule]]:
    """((n, k, bias), schedule) that between them use every tile form of both programs: ragged n and k, one and two consumers, several
    slabs a warpgroup, uneven split-k (wgmma), several blocks an SM, direct and staged epilogues."""
    k = 64 if bits == 4 else 32
    return [
        ((320, 1056, True), Schedule("gemm_wgmma", 64, 16, k, 3, 4)),
        ((512, 1024, False), Schedule("gemm_wgmma", 256, 32, 2 * k, 3, 8, split_k=3)),
        ((256, 2048, False), Schedule("gemm_wgmma", 128, 8, 64, 4, 4, split_k=2, min_blocks=2)),
        ((505, 1001, True), Schedule("gemm_wgmma", 128, 128, k, 3, 8, raster=4)),
        ((64, 1056, False), Schedule("gemm_wgmma", 64, 8, k, 4, 4)),
        ((320, 1056, True), Schedule("gemm_mma", 64, 16, k, 3, 4)),
        ((512, 1024, False), Schedule("gemm_mma", 128, 32, 64, 3, 8, split_k=2)),
        ((505, 1001, True), Schedule("gemm_mma", 256, 64, k, 2, 16)),
        ((256, 2048, False), Schedule("gemm_mma", 64, 8, 64, 4, 4, split_k=4, min_blocks=2)),
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """Every kernel of this file, compiled at once in parallel: {(workload with m 1, schedule): Kernel}."""
    target = detect_target()
    requests = []
    for format in FORMATS:
        for dtype in DTYPES:
            for (n, k, bias), schedule in _schedules(format.bits):
                workload = Workload(1, n, k, format, dtype, bias)
                if not rules.legal(workload, schedule, target):
                    requests.append(CompileRequest(schedule.program, workload, schedule, target))
    with CompilePool(os.cpu_count() or 1, cache=ArtifactCache(tmp_path_factory.mktemp("cache"))) as pool:
        results = pool.compile(requests)
    yield {(r.workload, r.schedule): kernel for r, kernel in zip(requests, results, strict=True)}


def _run(kernel: Any, schedule: Schedule, problem: Problem, y: Tensor) -> None:
    workload = problem.workload.with_m(y.shape[0])
    workspace = split_workspace(workload, schedule, "cuda") if schedule.split_k > 1 else {}
    for scratch in workspace.values():
        if scratch.is_floating_point():
            scratch.fill_(float("nan"))
    launch(kernel.load(), workspace, problem, y)
    assert all(not t.any() for name, t in workspace.items() if name == "tickets"), "tickets must be left zero"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_exact_over_seeds(kernels: dict, format: QuantFormat, dtype: str) -> None:
    """At least 200 seeds a format (100 a dtype) shared by its schedules, every one bit for bit what fp64 says, whatever m."""
    mine = [(w, s, kernel) for (w, s), kernel in kernels.items() if w.format == format and w.dtype == dtype]
    assert len(mine) >= 5
    rounds = -(-SEEDS // 2 // len(mine)) + 1
    for workload, schedule, kernel in mine:
        assert not isinstance(kernel, Exception), kernel
        for seed in range(rounds):
            m = (1, 2, 7, 16, 33, 64, 130, 257)[seed % 8]
            problem = exact_problem(workload.with_m(m), seed, "sm_90a", "cuda")
            output = guarded_output((m, workload.n), problem.x.dtype, "cuda")
            _run(kernel, schedule, problem, output.y)
            torch.cuda.synchronize()
            reasons = check_guards(output) + check_exact(output.y, problem.reference())
            assert not reasons, (workload, schedule, m, seed, reasons)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_worst_tile_on_random_floats(kernels: dict, format: QuantFormat, dtype: str) -> None:
    """The whole gate of the tuner (twice the same bits, the worst tile within twice torch's error) for each kernel."""
    for (workload, schedule), kernel in kernels.items():
        if workload.format == format and workload.dtype == dtype:
            asked = workload.with_m(200)
            gate = Gate(exact_problem(asked, 5, "sm_90a", "cuda"), random_problem(asked, 6, "sm_90a", "cuda"))
            verdict = gate.verify(partial(_run, kernel, schedule))
            assert verdict.ok, (workload, schedule, verdict)


RACES = [
    # a warp read another stage's weights in 45 of 150 launches while buffers were released right after dequantize
    ((4096, 14336, 4096), Schedule("gemm_wgmma", 64, 128, 128, 3, 4, min_blocks=2), 150),
    ((4096, 4096, 4096), Schedule("gemm_wgmma", 128, 256, 128, 3, 8), 150),
    # hung within 20,000 launches while all four producer warps waited on the barriers
    ((1, 8192, 28672), Schedule("gemm_wgmma", 64, 8, 128, 6, 4, split_k=8, min_blocks=4), 20000),
    ((1, 4096, 4096), Schedule("gemm_wgmma", 64, 8, 128, 4, 4, split_k=8, min_blocks=4), 20000),
]


@pytest.mark.parametrize(("shape", "schedule", "launches"), RACES)
def test_rare_races_stay_away(shape: tuple[int, int, int], schedule: Schedule, launches: int) -> None:
    """Pipelines under load: many blocks, many launches, every result compared on the device."""
    workload, target = Workload(*shape, QuantFormat(4, 128, False)), detect_target()
    with CompilePool(1, cache=ArtifactCache()) as pool:
        (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target)])
    assert not isinstance(kernel, Exception), kernel
    problem = exact_problem(workload, 1, target.arch, "cuda")
    expected = problem.reference().to(torch.float16)
    y = torch.empty_like(expected)
    workspace = split_workspace(workload, schedule, "cuda") if schedule.split_k > 1 else {}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    loaded = kernel.load()
    for _ in range(launches):
        launch(loaded, workspace, problem, y)
        wrong += (y != expected).any()
    assert int(wrong) == 0


@pytest.mark.parametrize(
    ("n", "k", "m"), [(1, 1, 1), (1, 8, 5), (3, 17, 2), (4304, 1152, 31), (5120, 27648, 1), (152064, 256, 3), (128, 4096, 5000)]
)
def test_any_shape_through_the_op(n: int, k: int, m: int) -> None:
    """Shapes that are no multiple of anything, through ``torch.ops.tilebit.gemm`` with the schedule that ``select`` gives."""
    format = QuantFormat(4, 128, False)
    problem = exact_problem(Workload(m, n, k, format, "float16", True), 3, detect_target().arch, "cuda")
    o = problem.operands
    import tilebit.ops  # noqa: F401  registers torch.ops.tilebit

    y = torch.ops.tilebit.gemm(problem.x, o["weight"], o["scales"], o["zeros"], o["bias"], n, 4, 128)
    assert not check_exact(y, problem.reference())
    assert torch.ops.tilebit.gemm(problem.x[:0], o["weight"], o["scales"], o["zeros"], o["bias"], n, 4, 128).shape == (0, n)
