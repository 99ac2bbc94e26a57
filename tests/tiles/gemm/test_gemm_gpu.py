"""Every CUDA program on a GPU: the exact oracle over at least 200 seeds a format, the worst tile, poisoned outputs, ragged and extreme
shapes, rare races, dependent launches.

Programs that are generated for sm_80, sm_86 and sm_89 run on a newer GPU from the same source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tilebit.ops.gemm  # registers the op  # noqa: F401
from tilebit.autotune.problems.gemm import Problem, split_workspace
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import BITS, FORMATS, GROUP_SIZES, GemmFormat, QuantFormat
from tilebit.schedules.gemm import rules as rules
from tilebit.schedules.gemm.codecs import codec_of
from tilebit.schedules.gemm.workload import DTYPES, Workload
from tilebit.schedules.operations import legal, programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, detect_target, target_from_name
from tilebit.tiles.compiler.kernel import Kernel

pytestmark = pytest.mark.timeout(600)

SEEDS = 200
ROWS = (1, 2, 7, 16, 33, 64, 130, 257)


def _schedules(bits: int) -> list[tuple[tuple[int, int, bool], Schedule]]:
    """((n, k, bias), schedule) that between them use every form of every program: ragged n and k, one to four computing warpgroups, several
    slabs a warpgroup, split k through a cluster and through a workspace, shares of different length, several blocks an SM."""
    k = 64 if bits == 4 else 32
    return [
        ((320, 1056, True), Schedule("gemm_wgmma", 64, 16, k, 3, 4)),
        ((505, 1001, True), Schedule("gemm_wgmma", 128, 128, k, 3, 8, raster=4)),
        ((512, 1024, False), Schedule("gemm_wgmma", 256, 64, k, 3, 16)),
        ((256, 2112, False), Schedule("gemm_wgmma", 128, 16, 64, 4, 4, split_k=2)),
        ((512, 1024, True), Schedule("gemm_wgmma", 256, 32, 2 * k, 3, 8, split_k=3)),
        ((505, 1001, True), Schedule("gemm_wgmma", 128, 64, k, 3, 8, stream_k=True)),  # fewer tiles than blocks: shares only
        ((1280, 512, False), Schedule("gemm_wgmma", 64, 16, 2 * k, 4, 4, stream_k=True)),  # at m = 257 on 132 SMs a wave of whole tiles too
        ((512, 1024, True), Schedule("gemm_wgmma", 128, 32, k, 4, 8, min_blocks=2, cluster=2)),
        ((1280, 512, True), Schedule("gemm_wgmma", 64, 16, k, 4, 4, raster=3, stream_k=True, cluster=2)),
        ((505, 1001, True), Schedule("gemm_wgmma", 128, 64, k, 3, 8, tail=4)),  # of every m so few tiles that all are cut into strips
        ((1280, 512, False), Schedule("gemm_wgmma", 64, 32, 2 * k, 3, 4, raster=2, cluster=2, tail=2)),  # at m = 257 after a whole wave
        ((320, 1056, True), Schedule("gemm_mma", 64, 16, k, 3, 4)),
        ((512, 1024, False), Schedule("gemm_mma", 128, 32, 64, 3, 8, split_k=2)),
        ((505, 1001, True), Schedule("gemm_mma", 256, 32, k, 2, 16)),  # by 64 columns zero points of channels in fp16 spill
        ((256, 2048, False), Schedule("gemm_mma", 64, 8, 64, 4, 4, split_k=4, min_blocks=2)),
        ((505, 1001, True), Schedule("gemm_stream", 64, 8, k, 3, 8)),
        ((512, 2112, False), Schedule("gemm_stream", 32, 2, 64, 4, 4, split_k=2)),
        ((320, 1056, True), Schedule("gemm_stream", 80, 16, k, 2, 8)),
        ((384, 1024, False), Schedule("gemm_stream", 96, 4, 2 * k, 2, 8)),
        ((320, 1024, True), Schedule("gemm_stream_bulk", 16, 1, 2 * k, 2, 16)),
        ((505, 1001, True), Schedule("gemm_stream_bulk", 32, 2, k, 4, 8, split_k=2)),
        ((512, 2112, False), Schedule("gemm_stream_bulk", 64, 4, 64, 3, 4, split_k=4, min_blocks=2)),
        ((256, 1001, True), Schedule("gemm_stream_bulk", 128, 8, k, 8, 4, split_k=3)),
        ((320, 1056, False), Schedule("gemm_stream_bulk", 80, 16, k, 2, 8)),
        ((384, 2048, True), Schedule("gemm_stream_bulk", 48, 8, 2 * k, 3, 8, split_k=2)),
        ((448, 1056, True), Schedule("gemm_stream_bulk", 448, 1, k, 3, 14)),
        ((448, 2112, False), Schedule("gemm_stream_bulk", 448, 16, k, 2, 7, split_k=2)),
        ((256, 1001, True), Schedule("gemm_stream_bulk", 256, 16, k, 3, 8)),
        ((448, 1056, True), Schedule("gemm_stream_bulk", 112, 16, k, 2, 8)),
        ((448, 1024, False), Schedule("gemm_stream", 224, 8, k, 2, 4)),
    ]


# Of int8 x: short and long steps, places of scales that are no whole 128 bytes, and every way in which blocks share a tile.
INT8_SCHEDULES = [
    ((505, 1001, True), Schedule("gemm_wgmma", 128, 128, 256, 2, 8, raster=4)),
    ((320, 1024, True), Schedule("gemm_wgmma", 64, 16, 128, 3, 4)),
    ((505, 1001, False), Schedule("gemm_wgmma", 192, 32, 64, 5, 12)),
    ((256, 2112, False), Schedule("gemm_wgmma", 128, 16, 64, 8, 4, split_k=2)),
    ((512, 1024, True), Schedule("gemm_wgmma", 256, 32, 128, 3, 8, split_k=3)),
    ((505, 1001, True), Schedule("gemm_wgmma", 128, 64, 128, 3, 8, stream_k=True)),
    ((1280, 512, True), Schedule("gemm_wgmma", 64, 16, 64, 4, 4, raster=3, stream_k=True, cluster=2)),
    ((1280, 512, False), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, raster=2, cluster=2, tail=2)),
    ((505, 1001, True), Schedule("gemm_mma", 64, 8, 64, 3, 4)),
    ((320, 576, False), Schedule("gemm_mma", 64, 32, 64, 3, 4, split_k=3)),
    ((512, 1024, True), Schedule("gemm_mma", 256, 64, 128, 2, 16)),
    ((256, 2048, False), Schedule("gemm_mma", 128, 16, 128, 3, 8, split_k=4, min_blocks=2)),
    ((505, 1001, True), Schedule("gemm_stream", 64, 8, 64, 3, 8)),
    ((512, 2112, False), Schedule("gemm_stream", 32, 2, 64, 4, 4, split_k=2)),
    ((320, 1024, True), Schedule("gemm_stream_bulk", 16, 1, 128, 2, 16)),
    ((505, 1001, False), Schedule("gemm_stream_bulk", 32, 2, 64, 4, 8, split_k=2)),
    ((256, 1001, True), Schedule("gemm_stream_bulk", 256, 16, 64, 2, 8)),
    ((384, 1024, False), Schedule("gemm_stream", 96, 4, 128, 2, 8)),
    ((256, 1001, False), Schedule("gemm_stream_bulk", 128, 8, 64, 4, 4, split_k=3)),
    ((448, 1088, True), Schedule("gemm_stream_bulk", 112, 16, 64, 2, 8)),
]

# Of sums that are scaled step by step, which is 128 k long but in the programs of few rows: k that ends within a group, a group less than
# a step, and every way in which blocks share a tile. None in the programs of few rows of formats that these do not take.
GROUP_SCHEDULES = [
    ((505, 1001, True), Schedule("gemm_wgmma", 128, 128, 128, 4, 8, raster=4)),
    ((320, 1024, False), Schedule("gemm_wgmma", 64, 16, 128, 3, 4)),
    ((256, 2112, True), Schedule("gemm_wgmma", 128, 64, 128, 3, 8, split_k=2)),
    ((512, 1024, False), Schedule("gemm_wgmma", 256, 32, 128, 2, 8, split_k=3)),
    ((505, 1001, True), Schedule("gemm_wgmma", 192, 80, 128, 4, 12, stream_k=True)),
    ((1280, 512, False), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, raster=2, cluster=2, tail=2)),
    ((505, 1001, False), Schedule("gemm_mma", 64, 8, 128, 3, 4)),
    ((512, 1024, True), Schedule("gemm_mma", 128, 64, 128, 2, 8, split_k=2)),
    ((505, 1001, True), Schedule("gemm_stream_bulk", 32, 2, 128, 4, 8, split_k=2)),
    ((448, 1088, False), Schedule("gemm_stream_bulk", 112, 16, 64, 2, 8)),
    ((505, 1001, False), Schedule("gemm_stream", 64, 8, 64, 3, 8)),
    ((384, 1024, True), Schedule("gemm_stream", 96, 4, 128, 2, 8)),
]
# Mixed layers, (n, k, bias, width): rows of 4-bit codes that an index adds up by twos; a byte's nibbles among them are multiplied as they
# are, or put together first (joined).
MIXED_SCHEDULES = [
    ((496, 1024, True, 400), Schedule("gemm_wgmma", 128, 64, 128, 3, 8, joined=True)),
    ((496, 1024, True, 400), Schedule("gemm_wgmma", 128, 64, 128, 3, 8)),
    ((640, 512, False, 400), Schedule("gemm_wgmma", 64, 16, 128, 4, 4, stream_k=True, joined=True)),
    ((336, 1024, True, 200), Schedule("gemm_mma", 64, 32, 128, 3, 4)),
    ((640, 512, False, 400), Schedule("gemm_wgmma", 64, 16, 128, 4, 4, split_k=2)),
    ((336, 1024, True, 200), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, split_k=3, joined=True)),
    ((496, 1024, False, 400), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 8, split_k=2)),
    ((496, 1024, True, 400), Schedule("gemm_stream", 64, 8, 128, 2, 8)),
]


def _cases(format: GemmFormat, dtype: str) -> list[tuple[Workload, Schedule]]:
    """Every second schedule: between the two dtypes each schedule meets each format, and between the formats each dtype."""
    turn = (*GROUP_SIZES, 16).index(format.group_size) + format.symmetric + DTYPES.index(dtype)
    schedules = GROUP_SCHEDULES if format.step_sums else INT8_SCHEDULES if format.x else _schedules(format.bits)
    taken = [(shape, s) for shape, s in schedules if s.program in codec_of(format).programs]
    return [(Workload(1, *shape[:2], format, dtype, shape[2]), s) for shape, s in taken[turn % 2 :: 2]]


def _mixed_cases(format: GemmFormat, dtype: str) -> list[tuple[Workload, Schedule]]:
    """As ``_cases``; that rows are nibbles of bytes is said beforehand (``nibbles``), or by an index alone."""
    turn = MIXED.index(format) + DTYPES.index(dtype)
    said = [(i // 2 + turn // 2) % 2 == 0 for i in range(len(MIXED_SCHEDULES))]
    return [
        (Workload(1, n, k, format, dtype, bias, width=width, nibbles=s.joined or nibbles), s)
        for nibbles, ((n, k, bias, width), s) in zip(said, MIXED_SCHEDULES, strict=True)
    ][turn % 2 :: 2]


W4 = QuantFormat(4, 128, False)
RACES = [
    # (m, n, k), schedule, launches. Earlier forms of gemm_wgmma had two of these races:
    # a warp read another stage's weights in 45 of 150 launches while buffers were released right after dequantize,
    ((4096, 14336, 4096), Schedule("gemm_wgmma", 64, 128, 128, 2, 4, min_blocks=2), 500),
    ((4096, 14336, 4096), Schedule("gemm_wgmma", 128, 256, 128, 3, 8, raster=8, stream_k=True, cluster=2), 500),
    ((200, 8192, 4096), Schedule("gemm_wgmma", 128, 64, 64, 4, 8, stream_k=True, cluster=2), 5000),
    ((512, 28672, 4096), Schedule("gemm_wgmma", 128, 256, 128, 3, 8, cluster=2, tail=2), 2000),
    # and it hung within 20,000 launches while all four producer warps waited on the barriers.
    ((1, 8192, 28672), Schedule("gemm_wgmma", 64, 16, 128, 4, 4, split_k=8, min_blocks=4), 20000),
    ((64, 4096, 4096), Schedule("gemm_wgmma", 128, 64, 128, 4, 8, split_k=2), 5000),
    ((1, 4096, 14336), Schedule("gemm_stream_bulk", 64, 1, 128, 4, 8, split_k=2), 20000),
    ((16, 10240, 8192), Schedule("gemm_stream_bulk", 160, 16, 128, 2, 12, split_k=2), 5000),
    ((4, 4096, 4096), Schedule("gemm_stream", 32, 4, 128, 4, 8, split_k=2), 5000),
]
# Layers that read what the one before wrote, in two buffers: n and k are equal. With stream_k they share tickets and sums as well.
CHAINS = [
    ((64, 4096, 4096), Schedule("gemm_wgmma", 128, 64, 128, 4, 8)),
    ((300, 4096, 4096), Schedule("gemm_wgmma", 128, 64, 64, 4, 8, stream_k=True, cluster=2)),
    ((64, 4096, 4096), Schedule("gemm_wgmma", 128, 64, 128, 4, 8, split_k=3)),
    ((1, 4096, 4096), Schedule("gemm_stream_bulk", 32, 1, 128, 2, 16)),
    ((16, 4096, 4096), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 8, split_k=2)),
]
LAYERS, CHAIN_LAUNCHES = 8, 8000
ON_GPUS = [f for f in FORMATS.values() if codec_of(f).programs > {"gemm_cpu"}]
MIXED = [f for f in FORMATS.values() if f.bits == 4 and f.integer_sums]  # of 4-bit rows, whose 8-bit channels are two of them


def _of_shape(shape: tuple[int, int, int], schedule: Schedule) -> list[tuple[Workload, Schedule]]:
    return [(Workload(1, *shape[1:], W4), schedule)]


def group_wise_cases() -> list[tuple[Workload, Schedule]]:
    """Of all formats whose sums are scaled step by step."""
    return [case for format in ON_GPUS if format.step_sums for dtype in DTYPES for case in _cases(format, dtype)]


def mixed_layer_cases() -> list[tuple[Workload, Schedule]]:
    return [case for format in MIXED for dtype in DTYPES for case in _mixed_cases(format, dtype)]


def _every_case() -> list[tuple[Workload, Schedule]]:
    cases = [case for format in ON_GPUS for dtype in DTYPES for case in _cases(format, dtype)] + mixed_layer_cases()
    return cases + [case for shape, s, *_ in (*RACES, *CHAINS) for case in _of_shape(shape, s)]


def test_the_schedules_are_legal_and_use_every_form() -> None:
    """Needs no GPU: a case that the rules no longer accept shows where the suite is edited."""
    target = target_from_name("sm_90a")
    for workload, schedule in _every_case():
        assert not legal(workload, schedule, target), (workload, schedule, legal(workload, schedule, target))
    for bits in BITS:
        schedules = [s for _, s in _schedules(bits)]
        bulk = [s for s in schedules if s.program == "gemm_stream_bulk"]
        assert {s.program for s in schedules} == set(programs("gemm", "sm_90a")) - {
            "gemm_any",
            "gemm_any_binary",
            "gemm_any_wgmma",
        }  # of codebooks: test_any_modules
        assert {s.block_m for s in bulk} == {1, 2, 4, 8, 16} and {s.block_n for s in bulk} >= {16, 32, 64, 80, 112, 128, 448}
    for schedule in (s for bits in BITS for _, s in _schedules(bits)):
        met = [w for w, s in _every_case() if s == schedule]
        assert {w.dtype for w in met} == set(DTYPES) and {w.format.group_size for w in met} >= set(GROUP_SIZES)
        assert {w.format.symmetric for w in met} == {True, False}


def test_every_shipped_format_is_met() -> None:
    """Formats of codebooks are multiplied by programs of their own, which test_any_modules tests on a GPU."""
    assert {*ON_GPUS} == {f for f in FORMATS.values() if not f.codebook}
    assert {f.name for f in MIXED} == {"w4a8_g128_asym", "w4a8_lqq_g64", "w4a8_lqq_g128", "w4a8_channel_asym"}
    for format in ON_GPUS:
        served = {name for name in programs("gemm", "sm_90a") if not codec_of(format).unserved(format, name, "sm_90a")}
        for dtype in DTYPES:
            cases = _cases(format, dtype)
            assert len(cases) >= 3 and {s.program for _, s in cases} == served, (format.name, dtype)
            assert len(cases) * _launches(cases) >= SEEDS // 2
    mixed = mixed_layer_cases()
    for format in MIXED:
        assert {(w.nibbles, s.joined) for w, s in mixed if w.format == format} == {(True, True), (True, False), (False, False)}
    for schedule in (s for _, s in MIXED_SCHEDULES):
        met = [w for w, s in mixed if s == schedule]
        assert {w.dtype for w in met} == set(DTYPES) and {w.nibbles for w in met} == {True, schedule.joined}


@cache
def _target() -> Target:
    return detect_target()


def _kernel(kernels: dict, workload: Workload, schedule: Schedule) -> Kernel:
    found = kernels.get((workload.with_m(1), schedule))
    if found is None:
        pytest.skip(f"{schedule.program} does not run on {_target().arch}")
    assert isinstance(found, Kernel), found
    return found


def _run(kernel: Kernel, schedule: Schedule, problem: Problem, y: Tensor) -> None:
    workspace = split_workspace(problem.workload.with_m(y.shape[0]), schedule, _target(), "cuda")
    assert ("workspace" in kernel.params) == bool(workspace)
    launch(kernel.load(), workspace, problem, y)
    _check_tickets(workspace)


def _check_tickets(workspace: dict[str, Tensor]) -> None:
    assert all(not words[: rules.TICKETS].any() for words in workspace.values()), "tickets must be left zero"


@pytest.mark.gpu
@pytest.mark.kernels(of=_cases)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ON_GPUS, ids=lambda f: f.name)
def test_exact_over_seeds(kernels: dict, format: GemmFormat, dtype: str) -> None:
    """At least 200 seeds a format (100 a dtype) shared by its schedules, every one bit for bit what fp64 says, whatever m."""
    _check_seeds(kernels, _cases(format, dtype))


@pytest.mark.gpu
@pytest.mark.kernels(of=_mixed_cases)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", MIXED, ids=lambda f: f.name)
def test_mixed_layers_are_exact_over_seeds(kernels: dict, format: GemmFormat, dtype: str) -> None:
    """As many, of layers with channels of 4 and of 8 bits; columns of y that no row makes are left as they are."""
    _check_seeds(kernels, _mixed_cases(format, dtype))


def _launches(cases: list[tuple[Workload, Schedule]]) -> int:
    """Seeds of each case of a format and a dtype."""
    return max(len(ROWS), -(-SEEDS // 2 // len(cases)))


def _check_seeds(kernels: dict, cases: list[tuple[Workload, Schedule]]) -> None:
    mine = [case for case in cases if case in kernels]
    assert len(mine) >= 3
    for workload, schedule in mine:
        kernel = _kernel(kernels, workload, schedule)
        for seed in range(_launches(mine)):
            m = ROWS[seed % len(ROWS)]
            problem = exact_problem(workload.with_m(m), seed, _target().arch, "cuda")
            output = guarded_output((m, workload.columns), getattr(torch, workload.dtype), "cuda")
            _run(kernel, schedule, problem, output.y)
            torch.cuda.synchronize()
            reasons = check_guards(output) + check_exact(output.y, problem.reference())
            assert not reasons, (workload, schedule, m, seed, reasons)


@pytest.mark.gpu
@pytest.mark.kernels(of=_cases)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ON_GPUS, ids=lambda f: f.name)
def test_worst_tile_on_random_floats(kernels: dict, format: GemmFormat, dtype: str) -> None:
    """The whole gate of the tuner (twice the same bits, the worst tile within twice torch's error) for each kernel."""
    _check_worst_tile(kernels, _cases(format, dtype))


@pytest.mark.gpu
@pytest.mark.kernels(of=_mixed_cases)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", MIXED, ids=lambda f: f.name)
def test_worst_tile_of_mixed_layers(kernels: dict, format: GemmFormat, dtype: str) -> None:
    _check_worst_tile(kernels, _mixed_cases(format, dtype))


def _check_worst_tile(kernels: dict, cases: list[tuple[Workload, Schedule]]) -> None:
    for workload, schedule in cases:
        if (workload, schedule) in kernels:
            asked = workload.with_m(200)
            exact, random = exact_problem(asked, 5, _target().arch, "cuda"), random_problem(asked, 6, _target().arch, "cuda")
            gate = Gate(exact, random, sums_error=random.sums_error)
            verdict = gate.verify(partial(_run, _kernel(kernels, workload, schedule), schedule))
            assert verdict.ok, (workload, schedule, verdict)


@pytest.mark.gpu
@pytest.mark.kernels(of=_of_shape)
@pytest.mark.parametrize(("shape", "schedule", "launches"), RACES)
def test_rare_races_stay_away(kernels: dict, shape: tuple[int, int, int], schedule: Schedule, launches: int) -> None:
    """Pipelines under load: many blocks, many launches, every result compared on the device."""
    workload = Workload(*shape, W4)
    kernel = _kernel(kernels, workload, schedule).load()
    problem = exact_problem(workload, 1, _target().arch, "cuda")
    expected = problem.reference().to(torch.float16)
    y = torch.empty_like(expected)
    workspace = split_workspace(workload, schedule, _target(), "cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(launches):
        y.fill_(float("nan"))  # a tile that nobody stores must not keep the right values of the launch before
        launch(kernel, workspace, problem, y)
        wrong += (y != expected).any()
    assert int(wrong) == 0
    _check_tickets(workspace)


@pytest.mark.gpu
@pytest.mark.kernels(of=_of_shape)
@pytest.mark.parametrize(("shape", "schedule"), CHAINS)
def test_dependent_launches_back_to_back(kernels: dict, shape: tuple[int, int, int], schedule: Schedule) -> None:
    """Layers that start before the one before has ended give the bits of layers that wait for one another: each reads x, and writes the
    buffer that the one before reads, only after its own wait."""
    workload = Workload(*shape, W4)
    kernel = _kernel(kernels, workload, schedule).load()
    assert kernel.run_dependent is not None
    layers = [random_problem(workload, seed, _target().arch, "cuda") for seed in (1, 2)]
    buffers = [torch.empty_like(layers[0].x) for _ in range(2)]
    workspace = split_workspace(workload, schedule, _target(), "cuda")
    named: list[dict[str, Any]] = [{**layers[i].operands, **workspace, "x": buffers[i], "y": buffers[1 - i]} for i in range(2)]
    calls = [[tensors[name] for name in kernel.params] for tensors in named]

    def chain(run: Callable[..., None]) -> Tensor:
        buffers[0].copy_(layers[0].x)
        buffers[1].fill_(float("nan"))
        for layer in range(LAYERS):
            run(*calls[layer % 2])
        return buffers[LAYERS % 2]

    expected = chain(kernel.run).clone()
    assert expected.isfinite().all() and expected.any()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(CHAIN_LAUNCHES // LAYERS):
        wrong += (chain(kernel.run_dependent) != expected).any()
    assert int(wrong) == 0
    _check_tickets(workspace)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "m"), [(1, 1, 1), (1, 8, 5), (3, 17, 2), (4304, 1152, 31), (5120, 27648, 1), (152064, 256, 3), (128, 4096, 5000)]
)
def test_any_shape_through_the_op(n: int, k: int, m: int) -> None:
    """Shapes that are no multiple of anything, through ``torch.ops.tilebit.gemm`` with the schedule that ``select`` gives."""
    format = QuantFormat(4, 128, False)
    problem = exact_problem(Workload(m, n, k, format, "float16", True), 3, detect_target().arch, "cuda")
    o = problem.operands

    rest = (o["weight"], o["scales"], o["zeros"], None, o["bias"], n, "w4a16_g128_asym")
    assert not check_exact(torch.ops.tilebit.gemm(problem.x, *rest), problem.reference())
    assert torch.ops.tilebit.gemm(problem.x[:0], *rest).shape == (0, n)
