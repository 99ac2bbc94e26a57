"""Products that store by an index: some columns of a wider y, and two rows of the weight added up for one column. Of every program
that does, without a GPU, in orders that are hard on an index; what lies between is left as it was."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import exact_problem, layer_index
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm import stream
from tilebit.schedules.gemm.parts import ADDED, NOWHERE
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import detect_target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.emulated_gemm import Case, Edits, EmulatedGemm
from emulation.generated_gemm import GeneratedGemm
from emulation.planted import swap
from gemm_cases import GROUP_WISE, label

STREAMS = tuple(stream.ARCHES)
HOPPER = replace(target_from_name("sm_90a"), units=5)  # as in test_emulated_gemm.py
TARGET = dict.fromkeys(("gemm_wgmma", *STREAMS), HOPPER) | {"gemm_mma": target_from_name("sm_80")}
BYTES, NIBBLES = GROUP_WISE
CHANNEL = QuantFormat(8, -1, True)
LQQ, ASYM = map(QuantFormat.parse, ("w4a8_lqq_g64", "w4a8_channel_asym"))

# Of one, two, three and four slabs a warpgroup and ragged; shared tiles through a workspace and by a cluster; strips; parts before it.
CUDA_CASES = (
    (Workload(40, 190, 576, NIBBLES, "bfloat16", bias=True, width=270), Schedule("gemm_wgmma", 128, 32, 128, 3, 8)),
    (Workload(13, 100, 300, BYTES, width=101), Schedule("gemm_wgmma", 64, 16, 128, 4, 4)),
    (Workload(33, 250, 256, BYTES, bias=True, width=170), Schedule("gemm_wgmma", 256, 32, 128, 2, 8)),
    (Workload(20, 190, 256, NIBBLES, width=190), Schedule("gemm_wgmma", 192, 48, 128, 3, 4)),
    (Workload(40, 128, 576, BYTES, bias=True, width=100), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=2)),
    (Workload(60, 190, 640, BYTES, "bfloat16", width=333), Schedule("gemm_wgmma", 64, 16, 128, 2, 4, stream_k=True)),
    (Workload(100, 190, 512, BYTES, width=200), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, tail=2)),
    (Workload(20, 72, 256, CHANNEL, bias=True, token_scales=True, width=144), Schedule("gemm_wgmma", 64, 16, 64, 3, 4)),
    (Workload(20, 190, 576, NIBBLES, "bfloat16", bias=True, width=191), Schedule("gemm_mma", 64, 16, 128, 3, 4)),
    (Workload(40, 250, 300, BYTES, bias=True, width=190), Schedule("gemm_mma", 256, 32, 128, 2, 16)),
    (Workload(7, 505, 300, BYTES, "bfloat16", width=505), Schedule("gemm_mma", 128, 8, 128, 3, 8, split_k=3)),
    (Workload(1, 190, 576, NIBBLES, "bfloat16", bias=True, width=270), Schedule("gemm_stream_bulk", 32, 1, 64, 3, 4)),
    (Workload(13, 250, 640, BYTES, bias=True, width=170), Schedule("gemm_stream_bulk", 64, 16, 64, 2, 4, split_k=2)),
    (Workload(5, 505, 300, NIBBLES, width=600), Schedule("gemm_stream", 128, 8, 64, 2, 4, split_k=2)),
    (Workload(3, 72, 256, CHANNEL, "bfloat16", token_scales=True, width=144), Schedule("gemm_stream", 64, 4, 64, 3, 4)),
    (Workload(20, 176, 512, LQQ, bias=True, width=100), Schedule("gemm_wgmma", 64, 16, 128, 3, 4)),
    (Workload(9, 144, 512, LQQ, "bfloat16", bias=True, width=80), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 4)),
    (Workload(20, 144, 256, ASYM, width=90), Schedule("gemm_wgmma", 128, 16, 128, 3, 8)),
    (Workload(20, 144, 256, ASYM, bias=True, width=90), Schedule("gemm_mma", 64, 16, 64, 3, 4)),
)
TILED_CASES = tuple(case for case in CUDA_CASES if case[1].program not in STREAMS)
CPU_CASES = (
    (Workload(5, 100, 576, BYTES, bias=True, width=130), Schedule("gemm_cpu", 32, 2, 32, num_warps=2)),
    (Workload(6, 257, 300, NIBBLES, "bfloat16", width=257), Schedule("gemm_cpu", 64, 2, 32, num_warps=2, split_k=2)),
    (Workload(3, 64, 64, QuantFormat(4, 64, False), bias=True, width=1000), Schedule("gemm_cpu", 32, 1, 32, num_warps=2)),
)
ORDERS = ("drawn", "ascending", "reversed", "pairs", "alternating", "the last ones", "layer")


def ordered(problem: Problem, order: str) -> Problem:
    """``problem`` with its rows stored elsewhere; "drawn" adds rows up here and there, "layer" does as a mixed layer, "pairs" wherever
    it can, the others nowhere."""
    w = problem.workload
    rows = torch.arange(w.n, dtype=torch.int32)
    pairs = torch.where(rows % 16 < 8, rows // 16 * 8 + rows % 8, ADDED)
    generator = torch.Generator().manual_seed(w.n)
    found = {
        "drawn": problem.operands["channels"],
        "layer": layer_index(w, generator),
        "pairs": pairs,
        "ascending": rows,
        "reversed": w.width - 1 - rows,
        "alternating": torch.cat([torch.arange(0, w.width, 2), torch.arange(1, w.width, 2)])[: w.n].to(torch.int32),
        "the last ones": rows + (w.width - w.n),
    }[order]
    return Problem(w, problem.layout, problem.x, {**problem.operands, "channels": found})


def emulated(case: Case, edits: Edits | None = None) -> EmulatedGemm | GeneratedGemm:
    workload, schedule = case
    if schedule.program in STREAMS:
        return GeneratedGemm(workload, schedule, HOPPER, edits)
    return EmulatedGemm(workload, schedule, edits, together=TILED_CASES if edits is None else (), target=TARGET[schedule.program])


def check(run, problem: Problem) -> list[str]:
    w = problem.workload
    output, reference = guarded_output((w.m, w.width), getattr(torch, w.dtype)), problem.reference()
    run(problem, output.y)
    stored = int((problem.operands["channels"] >= 0).sum())
    assert int(reference.isnan().all(0).sum()) == w.width - stored and bool((reference.isnan().any(0) == reference.isnan().all(0)).all())
    return check_guards(output) + check_exact(output.y, reference)


@needs_host_compiler
@pytest.mark.parametrize("case", CUDA_CASES, ids=label)
def test_cuda_programs_are_exact(case: Case):
    assert legal(*case, TARGET[case[1].program]) == []
    number = CUDA_CASES.index(case)
    problem = exact_problem(case[0], number, "sm_90a")
    orders = [order for order in ORDERS if case[0].n <= case[0].width or order in ("drawn", "pairs", "layer")]
    run = emulated(case)
    for order in dict.fromkeys(("drawn", orders[number % len(orders)], "layer" if number % 2 else "pairs")):
        assert check(run, ordered(problem, order)) == [], order


def test_programs_without_an_index_say_so():
    w, s = Workload(4, 128, 256, QuantFormat.parse("w3a16_any")), Schedule("gemm_any", 64, 4, 1, 2, 2)
    assert legal(w, s, HOPPER) == []
    (reason,) = legal(replace(w, width=200), s, HOPPER)
    assert "by an index; accepted: gemm_cpu, gemm_mma, gemm_stream, gemm_stream_bulk, gemm_wgmma" in reason


PLANTED: dict[str, tuple[Case, str, tuple[tuple[str, str], ...]]] = {
    "the index of the next channel": (CUDA_CASES[1], "device", (("channels[N - rows + row]", "channels[(N - rows + row + 1) % N]"),)),
    "the index of the neighbour tile": (CUDA_CASES[0], "device", (("channels[N - rows + row]", "channels[(N - rows + row) ^ 64]"),)),
    "the index of the first warpgroup": (CUDA_CASES[0], "device", (("channels[N - rows + row]", "channels[row]"),)),
    "no index": (CUDA_CASES[1], "device", (("= channels[N - rows + row]", "= N - rows + row"),)),
    "the last channel is left out": (CUDA_CASES[3], "device", (("row < min(OWN_ROWS, rows)", "row < min(OWN_ROWS, rows - 1)"),)),
    "rows of x past the last": (CUDA_CASES[1], "device", (("if (chunk * COLUMNS + column < columns) y[", "y["),)),
    "rows of the product's own n": (CUDA_CASES[2], "device", (("+ column) * WIDTH + to]", "+ column) * N + to]"),)),
    "every second row of x": (CUDA_CASES[1], "device", (("int column = TOGETHER > 1 ? own / OWN_ROWS : 0", "int column = 0"),)),
    "mma.sync: the index of the next channel": (
        CUDA_CASES[8], "operands.py", (("tensor[channel] for", "tensor[(channel + 1) % tensor.shape[0]] for"),),
    ),
    "stream: the index of the first tile": (
        CUDA_CASES[12], "stream_sums.py", (("column_of(bx * bn + element % bn, after)", "column_of(element % bn, after)"),),
    ),
    "stream: no index": (CUDA_CASES[13], "stream_sums.py", (("column_of(bx * bn + element % bn, after)", "bx * bn + element % bn"),)),
    "rows are not added": (CUDA_CASES[1], "device", (("if (second != ADDED) return;", "return;"),)),
    "rows are added whatever the index says": (CUDA_CASES[0], "device", (("if (second != ADDED) return;", ""),)),
    "the row before is told to be added": (CUDA_CASES[3], "device", (("+ 8 + ((thread & 31) >> 2)", "+ 7 + ((thread & 31) >> 2)"),)),
    "the index of the first row for its second": (CUDA_CASES[0], "device", (("channels.bits[channels.WORDS - 1]", "channels.bits[0]"),)),
    "a row behind the last is added": (CUDA_CASES[0], "device", (("second_row<SLABS>(n0, thread) < N ?", "true ?"),)),
    "mma.sync: rows of the first tile are added": (
        CUDA_CASES[8], "device", (("second_row<SLABS>(n0, thread) + slab", "second_row<SLABS>(0, thread) + slab"),),
    ),
    "stream: rows are not added": (CUDA_CASES[12], "stream_sums.py", (("after) == ADDED:", "after) == 12345:"),)),
    "stream: a row is added to itself": (
        CUDA_CASES[11], "stream_sums.py",
        (("total = total + finished(after, bx, by, element + GATE_ROWS, second, factor)", "total = total + total"),),
    ),
    "mma.sync: staged, no index": (CUDA_CASES[9], "operands.py", ((' if part.does == "place"), channel)', " if False), channel)"),)),
}  # fmt: skip


@needs_host_compiler
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str):
    case, file, edits = PLANTED[bug]
    try:
        run, problem = emulated(case, {file: swap(*edits)}), exact_problem(case[0], 1, "sm_90a")
        found = check(run, problem) or check(run, ordered(problem, "pairs"))
    except KernelFault:
        return
    assert found


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    here = detect_target("cpu")
    if not here.features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        return pool.compile([CompileRequest("gemm_cpu", *case, here) for case in CPU_CASES])  # type: ignore[return-value]


@pytest.mark.parametrize("number", range(len(CPU_CASES)))
def test_the_cpu_program_is_exact_in_every_order(kernels: list[Kernel], number: int):
    kernel, workload = kernels[number].load(), CPU_CASES[number][0]
    assert kernel.params[-2:] == ("channels", "y")

    def run(problem: Problem, y: torch.Tensor) -> None:
        launch(kernel, {}, problem, y)

    for seed, order in enumerate(ORDERS):
        for m in (workload.m, 1, 33):
            assert check(run, ordered(exact_problem(workload.with_m(m), seed), order)) == []


@needs_host_compiler
@pytest.mark.parametrize("case", [CUDA_CASES[i] for i in (1, 11, 13)], ids=label)
def test_an_index_outside_of_y_writes_no_other_memory_from_cuda_programs(case: Case):
    w, problem = case[0], exact_problem(case[0], 1, "sm_90a")
    problem = ordered(problem, "ascending")
    problem.operands["channels"][3], problem.operands["channels"][70] = NOWHERE, w.width
    output = guarded_output((w.m, w.width), getattr(torch, w.dtype))
    emulated(case)(problem, output.y)
    assert check_guards(output) == []
    assert int(output.y.isnan().all(0).sum()) == w.width - w.n + 2


def test_an_index_outside_of_y_writes_no_other_memory(kernels: list[Kernel]):
    problem = ordered(exact_problem(CPU_CASES[0][0], 1), "ascending")
    channels = problem.operands["channels"]
    channels[3], channels[70] = NOWHERE, CPU_CASES[0][0].width
    output = guarded_output((5, CPU_CASES[0][0].width), torch.float16)
    launch(kernels[0].load(), {}, problem, output.y)
    assert check_guards(output) == []
    assert int(output.y.isnan().all(0).sum()) == CPU_CASES[0][0].width - CPU_CASES[0][0].n + 2


def test_the_gate_of_the_tuner_sees_what_is_written_between(kernels: list[Kernel]):
    kernel, workload = kernels[2].load(), CPU_CASES[2][0]
    gate = Gate(*(exact_problem(workload, seed) for seed in (1, 2)))
    assert gate.verify(lambda problem, y: launch(kernel, {}, problem, y)).ok

    def strays(problem: Problem, y: torch.Tensor) -> None:
        launch(kernel, {}, problem, y)
        y[-1, (y[0].isnan()).nonzero()[0]] = 0

    assert not gate.verify(strays).ok
