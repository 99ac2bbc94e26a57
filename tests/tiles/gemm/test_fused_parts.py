"""Products that norm x, add y to a residual or apply a gate, of every program that does, without a GPU: exact, in place too; a gate's
activation is fp32, so that a right y may be the next number."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lanes import one_of_each

from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.autotune.problems.verify import check_exact, check_guards, gate, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import PER_CHANNEL, GemmFormat, QuantFormat
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

HOPPER = replace(target_from_name("sm_90a"), units=5)  # as in test_emulated_gemm.py
TARGET = dict.fromkeys(("gemm_wgmma", "gemm_stream", "gemm_stream_bulk", "gemm_any", "gemm_any_binary", "gemm_any_wgmma"), HOPPER) | {
    "gemm_mma": target_from_name("sm_80")
}
TILED = ("gemm_wgmma", "gemm_mma")
W4, CHANNEL = QuantFormat(4, 64, False), QuantFormat(8, PER_CHANNEL, True)
W4_128, LQQ, NIBBLES = QuantFormat(4, 128, False), GemmFormat.parse("w4a8_lqq_g128"), GemmFormat.parse("w4a8_g128_asym")
ANY = GemmFormat.parse("w3a16_any")

# Slabs of a warpgroup one to four, shared tiles through a workspace and by a cluster, strips; staged and direct; fewer rows than a tile.
RESIDUAL = (
    (Workload(40, 190, 576, W4, "bfloat16", bias=True, residual=True), Schedule("gemm_wgmma", 128, 32, 64, 2, 8)),
    (Workload(60, 190, 640, W4, residual=True), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),
    (Workload(40, 128, 576, CHANNEL, bias=True, residual=True), Schedule("gemm_wgmma", 128, 64, 64, 2, 8, split_k=2)),
    (Workload(100, 190, 512, W4, residual=True), Schedule("gemm_wgmma", 64, 32, 64, 3, 4, tail=2)),
    (Workload(20, 190, 576, W4, "bfloat16", bias=True, residual=True), Schedule("gemm_mma", 64, 8, 64, 2, 4, split_k=3)),
    (Workload(40, 250, 300, NIBBLES, residual=True), Schedule("gemm_mma", 256, 32, 128, 2, 16)),
    (Workload(11, 190, 512, W4_128, bias=True, residual=True), Schedule("gemm_stream_bulk", 64, 16, 64, 2, 2, split_k=2)),
    (Workload(3, 100, 256, LQQ, "bfloat16", residual=True), Schedule("gemm_stream", 64, 4, 64, 2, 2)),
    (Workload(3, 100, 512, ANY, bias=True, residual=True), Schedule("gemm_any", 64, 4, 1, 2, 2, split_k=2)),
    (Workload(2, 350, 512, ANY, bias=True, residual=True), Schedule("gemm_any_binary", 32, 1, 1, 3, 4)),
    (Workload(40, 100, 512, ANY, bias=True, residual=True), Schedule("gemm_any_wgmma", 64, 32, 256, 2, 4, split_k=2)),
    # The last block has rows of the one before, too, which would be added twice.
    (Workload(5, 300, 384, W4_128, "bfloat16", bias=True, residual=True), Schedule("gemm_stream_bulk", 128, 8, 64, 2, 4)),
    (Workload(3, 190, 512, CHANNEL, residual=True), Schedule("gemm_stream", 80, 4, 64, 2, 2, split_k=2)),
)
GATED = (
    (Workload(40, 208, 256, W4, bias=True, gate="gelu"), Schedule("gemm_wgmma", 128, 64, 64, 2, 8, split_k=2)),
    (Workload(20, 240, 256, W4, "bfloat16", bias=True, gate="silu"), Schedule("gemm_wgmma", 64, 16, 64, 3, 4)),
    (Workload(60, 192, 640, CHANNEL, "bfloat16", gate="silu"), Schedule("gemm_wgmma", 128, 16, 64, 2, 4, stream_k=True)),
    (Workload(20, 176, 256, LQQ, gate="silu"), Schedule("gemm_wgmma", 192, 48, 64, 3, 4)),
    (Workload(33, 256, 256, W4, gate="gelu_tanh"), Schedule("gemm_wgmma", 256, 32, 64, 2, 4)),
    (Workload(40, 208, 256, W4, bias=True, gate="gelu_tanh"), Schedule("gemm_mma", 64, 32, 64, 2, 4)),
    (Workload(7, 496, 300, NIBBLES, "bfloat16", gate="silu"), Schedule("gemm_mma", 128, 8, 128, 3, 8, split_k=3)),
    (Workload(5, 192, 512, W4_128, "bfloat16", bias=True, gate="silu"), Schedule("gemm_stream_bulk", 64, 8, 64, 2, 2, split_k=2)),
    (Workload(5, 320, 512, W4_128, "bfloat16", gate="silu"), Schedule("gemm_stream_bulk", 80, 8, 64, 2, 2, split_k=3)),
    (Workload(5, 320, 512, W4_128, gate="silu"), Schedule("gemm_stream_bulk", 112, 8, 64, 2, 2, split_k=2)),  # overlap
    (Workload(11, 208, 256, W4_128, bias=True, gate="gelu"), Schedule("gemm_stream", 64, 16, 64, 2, 2, split_k=2)),
    (Workload(3, 192, 256, LQQ, "bfloat16", bias=True, gate="gelu_tanh"), Schedule("gemm_stream", 64, 4, 64, 2, 2)),
    (Workload(3, 112, 512, ANY, "bfloat16", gate="silu"), Schedule("gemm_any", 64, 4, 1, 2, 2)),
    (Workload(1, 384, 512, ANY, "bfloat16", gate="silu"), Schedule("gemm_any_binary", 48, 1, 1, 2, 3)),
    (Workload(20, 112, 512, ANY, "bfloat16", gate="silu"), Schedule("gemm_any_wgmma", 128, 32, 256, 2, 8)),
)
EPS = {"norm": True, "eps": 1e-5}
HALVES = {"gate": "silu", "gate_halves": True}
# Warps that share x and share k; of 16, 48, 64 and 80 rows, the last across packed records; alone, by a cluster, by a ticket; ups that
# begin inside a packed record; with parts of channels, of rows and of groups, and zero points of channels.
APART = (
    (Workload(5, 640, 512, W4_128, "bfloat16", bias=True, **HALVES), Schedule("gemm_stream_bulk", 160, 8, 64, 2, 4)),
    (Workload(5, 576, 512, W4_128, "bfloat16", **HALVES), Schedule("gemm_stream_bulk", 96, 8, 64, 2, 2, split_k=3)),
    (Workload(16, 256, 768, W4_128, **EPS | HALVES), Schedule("gemm_stream_bulk", 256, 16, 128, 2, 8)),
    (Workload(20, 256, 512, CHANNEL, bias=True, **HALVES), Schedule("gemm_stream_bulk", 128, 16, 64, 2, 4, split_k=2)),
    (Workload(11, 192, 256, W4_128, bias=True, gate="gelu", gate_halves=True), Schedule("gemm_stream", 96, 16, 64, 2, 4, split_k=2)),
    (Workload(3, 256, 256, LQQ, "bfloat16", bias=True, **HALVES), Schedule("gemm_stream", 128, 4, 64, 2, 2)),
    (Workload(3, 128, 256, NIBBLES, gate="gelu_tanh", gate_halves=True), Schedule("gemm_stream", 128, 4, 128, 2, 2)),
)
# Rings that share k, warps that share x, shares of k by a cluster, by a ticket and of unequal length; k that ends inside a step.
NORMED = (
    (Workload(5, 192, 512, W4_128, "bfloat16", bias=True, gate="silu", **EPS), Schedule("gemm_stream_bulk", 64, 8, 64, 2, 2, split_k=2)),
    (Workload(11, 200, 500, W4_128, bias=True, **EPS), Schedule("gemm_stream_bulk", 128, 16, 128, 2, 4)),
    (Workload(16, 256, 768, W4_128, "bfloat16", residual=True, **EPS), Schedule("gemm_stream_bulk", 256, 16, 128, 2, 8)),  # warps apart
    (Workload(1, 192, 448, W4, residual=True, **EPS), Schedule("gemm_stream_bulk", 32, 1, 64, 2, 4, split_k=3)),
    (Workload(3, 200, 384, CHANNEL, bias=True, **EPS), Schedule("gemm_stream", 64, 4, 64, 2, 2, split_k=2)),
    (Workload(20, 112, 257, W4_128, "bfloat16", gate="gelu_tanh", **EPS), Schedule("gemm_stream", 64, 16, 64, 2, 2)),
)
CASES = (*RESIDUAL, *GATED, *NORMED, *APART)
TOGETHER = tuple(case for case in CASES if case[1].program in TILED)
CPU_CASES = (
    (Workload(5, 100, 576, W4, bias=True, residual=True), Schedule("gemm_cpu", 32, 2, 32, num_warps=2)),
    (Workload(6, 208, 300, W4, "bfloat16", bias=True, gate="silu"), Schedule("gemm_cpu", 64, 2, 32, num_warps=2)),
    (Workload(5, 100, 300, W4, "bfloat16", bias=True, residual=True, **EPS), Schedule("gemm_cpu", 32, 2, 32, num_warps=2)),
    (Workload(3, 112, 256, CHANNEL, gate="silu", **EPS), Schedule("gemm_cpu", 32, 1, 32, num_warps=2)),
    (Workload(3, 64, 256, LQQ, gate="gelu"), Schedule("gemm_cpu", 32, 1, 32, num_warps=2)),
    (Workload(5, 192, 300, W4, bias=True, **HALVES), Schedule("gemm_cpu", 64, 2, 32, num_warps=2)),
    (Workload(3, 64, 256, LQQ, "bfloat16", **HALVES), Schedule("gemm_cpu", 32, 1, 32, num_warps=2)),
    (Workload(3, 112, 300, ANY, "bfloat16", gate="gelu_tanh"), Schedule("gemm_any_cpu", 32, 1, 1, num_warps=2)),
)


def label(case: Case) -> str:
    w, s = case
    does = f"{'norm-' * w.norm}{'halves-' * w.gate_halves}{w.gate or 'residual' * w.residual}"
    return f"{s.program}-{s.block_n}x{s.block_m}-{w.format.name}-{does}-{w.dtype}"


def kind(case: Case) -> tuple[str | bool, ...]:
    w, s = case
    return s.program, w.residual, w.norm, w.gate_halves


def emulated(case: Case, edits: Edits | None = None) -> EmulatedGemm | GeneratedGemm:
    workload, schedule = case
    if schedule.program not in TILED:
        return GeneratedGemm(workload, schedule, HOPPER, edits)
    return EmulatedGemm(workload, schedule, edits, together=TOGETHER if edits is None else (), target=TARGET[schedule.program])


def check(run, problem: Problem, inplace: bool = False) -> list[str]:
    w = problem.workload
    output, reference = guarded_output((w.m, w.columns), getattr(torch, w.dtype)), problem.reference()
    if inplace:
        output.y.copy_(problem.operands["residual"])
        problem = replace(problem, operands={**problem.operands, "residual": output.y})
    run(problem, output.y)
    return check_guards(output) + check_exact(output.y, reference, problem.units)


def test_programs_that_do_not_norm_say_so():
    w = Workload(4, 128, 256, W4, **EPS)
    for schedule in (Schedule("gemm_wgmma", 64, 16, 64, 3, 4), Schedule("gemm_mma", 64, 8, 64, 3, 4)):
        assert legal(replace(w, norm=False, eps=0.0), schedule, TARGET[schedule.program]) == []
        (reason,) = legal(w, schedule, TARGET[schedule.program])
        assert "does not norm x; accepted: gemm_cpu, gemm_stream, gemm_stream_bulk" in reason


def test_programs_that_do_not_take_gates_as_a_half_say_so():
    w = Workload(4, 128, 256, W4, **HALVES)
    for schedule in (Schedule("gemm_wgmma", 64, 16, 64, 3, 4), Schedule("gemm_mma", 64, 8, 64, 3, 4)):
        (reason,) = legal(w, schedule, TARGET[schedule.program])
        assert "does not take gates as the weight's first half; accepted: gemm_cpu, gemm_stream, gemm_stream_bulk" in reason
    (reason,) = legal(w, Schedule("gemm_stream_bulk", 64, 4, 64, 2, 2), HOPPER)
    assert "block_n is 64, which 1 warps share; accepted where gates are the first half: an even number of warps" in reason


def test_every_program_has_both():
    for cases in (RESIDUAL, GATED):
        assert {s.program for _, s in cases} == set(TARGET)
    assert {w.gate for w, _ in GATED} == {"silu", "gelu_tanh", "gelu"}
    for case in CASES:
        assert legal(*case, TARGET[case[1].program]) == []


@needs_host_compiler
@pytest.mark.parametrize("case", one_of_each(CASES, kind), ids=label)
def test_exact(case: Case):
    problem = exact_problem(case[0], CASES.index(case), "sm_90a")
    assert check(emulated(case), problem) == []
    if case[0].residual:
        assert check(emulated(case), problem, inplace=True) == []


PLANTED: dict[str, tuple[Case, str, tuple[tuple[str, str], ...]]] = {
    "the residual of the next channel": (
        RESIDUAL[0], "device", (("int64_t(row) * N + min(channel, N - 1))", "int64_t(row) * N + (min(channel, N - 1) ^ 1))"),),
    ),
    "the residual of the first columns": (RESIDUAL[2], "device", (("n0, m0 + own * (S::COUNT * 2), m,", "n0, m0, m,"),)),
    "mma.sync: the residual of the row before": (
        RESIDUAL[5], "operands.py", (('index = (at["m"], at["n"])', 'index = ((at["m"] > 0) * (at["m"] - 1), at["n"])'),),
    ),
    "stream: rows of two blocks stored by both": (RESIDUAL[11], "stream_sums.py", (("T.And(there, row >= bx * bn)", "there"),)),
    "stream: the residual of the first rows": (
        RESIDUAL[7], "stream_sums.py", (("across(p.first_row(T, bx) + element % bn,", "across(element % bn,"),),
    ),
    "gates and ups exchanged": (GATED[1], "device", (("apply(sums[i + e]) * sums[i + 2 + e]", "apply(sums[i + 2 + e]) * sums[i + e]"),)),
    "ups are stored": (GATED[1], "device", (("source = mine + place(column, OF_Y * at)", "source = mine + place(column, OF_Y * at + 1)"),)),
    "columns of y as many as the weight's": (
        GATED[4], "device", (("chunk * COLUMNS + p.column) * Y + p.at", "chunk * COLUMNS + p.column) * N + p.at"),),
    ),
    "threads to spare store, too": (GATED[1], "device", (("!SPARE || (BELOW ? own / STORED : 0) + column < COLUMNS", "true"),)),
    "mma.sync: the gate before the bias": (GATED[5], "mma.py", (("if (staged or gated or placed) and", "if staged and not gated and"),)),
    "mma.sync: rows of a tile in order": (GATED[5], "mma.py", (("Ys[c, gate_of(r)]", "Ys[c, r]"),)),
    "mma.sync, direct: ups are stored": (GATED[6], "mma.py", (("(2 * GATE_ROWS) < GATE_ROWS:", "(2 * GATE_ROWS) >= GATE_ROWS:"),)),
    "stream: quads of a gate in another block": (
        GATED[8], "stream_sums.py", (("rules.quads_of_block(workload, s)", "-(-elements // 4 // splits)"),),
    ),
    "halves: rows of one half alone": (APART[0], "stream_ring.py", (("0, p.n // 2 - half)", "0, 0)"),)),
    "halves: rows of another block": (APART[0], "stream_ring.py", (("return bx * half + row +", "return bx * half * 2 + row +"),)),
    "halves: the next row's sums": (
        APART[1], "stream_sums.py", (("across(element % bn, bn // 2)]", "across(element % bn ^ 1, bn // 2)]"),),
    ),
    "halves: the bias of rows in turn": (APART[0], "stream_sums.py", (("n=channel)", "n=bx * bn + element % bn)"),)),
    "the norm's weight of the next columns": (
        NORMED[1], "device", (("row + r * RECORD_K * 2 + p * 64, w)", "row + r * RECORD_K * 2 + p * 64 + 4, w)"),),
    ),
    "squares of what is multiplied": (
        NORMED[1], "device",
        (("squares = fmaf(low, low, squares), squares = fmaf(high, high, squares);\n  x = multiply_pairs(x, weight, T());",
          "x = multiply_pairs(x, weight, T());\n  squares = fmaf(to_float(pair[0]), to_float(pair[0]), fmaf(high, high, squares));"),),
    ),
    "squares of one lane of four": (NORMED[0], "device", (("sum += __shfl_xor_sync(0xffffffffu, sum, 2);", ""),)),
    "squares of the first ring": (NORMED[1], "stream_sums.py", (("shared[(ring * s.block_m + column)", "shared[(0 * ring + column)"),)),
    "squares of a block alone": (NORMED[0], "stream_sums.py", (("shared[squares + block * quads * 4", "shared[squares + bz * quads * 4"),)),
    "squares of the first row": (NORMED[4], "stream_sums.py", (("share + elements + first(element) // bn", "share + elements"),)),
    "no eps": (NORMED[1], "stream_sums.py", (("T.float32(literal(workload.eps))", "T.float32(1.0)"),)),
}  # fmt: skip


@needs_host_compiler
@pytest.mark.parametrize("bug", one_of_each(PLANTED, lambda bug: (PLANTED[bug][1], PLANTED[bug][0][0].residual, PLANTED[bug][0][0].norm)))
def test_planted_bugs_are_caught(bug: str):
    case, file, edits = PLANTED[bug]
    try:
        found = check(emulated(case, {file: swap(*edits)}), exact_problem(case[0], 1, "sm_90a"), inplace=case[0].residual)
    except KernelFault:
        return
    assert found


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    here = detect_target("cpu")
    if not here.features:
        pytest.skip("this CPU has neither AVX-512 nor AVX2")
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        return pool.compile([CompileRequest(s.program, w, s, here) for w, s in CPU_CASES])  # type: ignore[return-value]


@pytest.mark.parametrize("number", range(len(CPU_CASES)))
def test_the_cpu_programs_are_exact(kernels: list[Kernel], number: int):
    assert isinstance(kernels[number], Kernel), kernels[number]
    kernel, workload = kernels[number].load(), CPU_CASES[number][0]

    def run(problem: Problem, y: torch.Tensor) -> None:
        launch(kernel, {}, problem, y)

    for seed, m in enumerate((workload.m, 1, 33)):
        for inplace in {False, workload.residual}:
            assert check(run, exact_problem(workload.with_m(m), seed), inplace) == []
    assert gate(workload, 1, "cpu", "cpu").verify(run).ok


def test_the_gate_of_the_tuner_sees_a_lost_residual_and_a_lost_gate(kernels: list[Kernel]):
    for number, name in ((0, "residual"), (1, "gate")):
        kernel, workload = kernels[number].load(), CPU_CASES[number][0]

        def spoilt(problem: Problem, y: torch.Tensor, kernel=kernel, name=name) -> None:
            launch(kernel, {}, problem, y)
            y[-1] -= problem.operands[name][-1] if name == "residual" else y[-1] / 64

        assert not gate(workload, 1, "cpu", "cpu").verify(spoilt).ok
