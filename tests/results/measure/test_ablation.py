"""The ablation: the naive program computes what it should, every step tries what its idea allows, and the fastest verified kernel wins."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from toolchain import needs_nvcc

from results.measure.ablation import gemm as measure
from results.measure.ablation import naive
from results.measure.ablation.gemm import WORKLOADS, climb
from results.measure.ablation.steps import DEPENDENT, SHALLOW, STEPS, TRIED, drawn
from results.report.ablation import ABLATION_FIELDS
from tilebit.autotune.measure import Timing
from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

FORMAT = QuantFormat(4, 128, False)
HOPPER = target_from_name("sm_90a")
SMALL = Workload(40, 128, 512, FORMAT)
NAIVE = Schedule(naive.NAME, 64, 32, 64, 2, 4)


class Tensor:
    """A tensor of the stand-in language: plain indices are a place to copy from or to, index arrays read."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __getitem__(self, at: tuple[Any, ...]) -> Any:
        return (self.data, at) if all(isinstance(i, int) for i in at) else self.data[at]


class Language:
    """As much of ``tilelang.language`` as the naive program uses: tiles are arrays, a parallel loop is one turn on index arrays."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.block: tuple[int, ...] = (0, 0)
        self.grid: tuple[int, ...] = ()

    def dynamic(self, _: str) -> int:
        return len(self.tensors["x"])

    def Tensor(self, shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], str]:
        return shape, dtype

    def prim_func(self, function: Any) -> Any:
        for name, (shape, dtype) in function.__annotations__.items():
            assert (self.tensors[name].shape, self.tensors[name].dtype) == (shape, np.dtype(dtype)), name
        return function

    def ceildiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def Kernel(self, *grid: int, threads: int) -> Any:
        self.grid = grid
        return nullcontext(self.block)

    def alloc_shared(self, shape: tuple[int, int], dtype: str) -> np.ndarray:
        return np.full(shape, 99, dtype)

    alloc_fragment = alloc_shared

    def clear(self, tile: np.ndarray) -> None:
        tile[:] = 0

    def Pipelined(self, count: int, num_stages: int) -> range:
        return range(count)

    def Parallel(self, *extents: int) -> Iterator[Any]:
        yield np.indices(extents)

    def copy(self, source: Any, target: Any) -> None:
        if isinstance(target, tuple):  # a tile into a tensor, cut at its end
            data, (i, j) = target
            cut = data[i : i + source.shape[0], j : j + source.shape[1]]
            cut[:] = source[: cut.shape[0], : cut.shape[1]]
        else:  # a tensor into a tile, zeros past its end
            data, (i, j) = source
            found = data[i : i + target.shape[0], j : j + target.shape[1]]
            target[:] = 0
            target[: found.shape[0], : found.shape[1]] = found

    def gemm(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, transpose_B: bool) -> None:
        assert transpose_B
        c += a.astype(np.float32) @ b.astype(np.float32).T


def emulate(workload: Workload, schedule: Schedule, problem: Problem, y: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the naive kernel writes into y [rows, n], computed from the program's own text."""
    operands = {name: t.numpy() for name, t in naive.plain_operands(problem).items()}
    language = Language({"x": problem.x[: y.shape[0]].numpy(), **operands, "y": y.numpy()})
    package = types.ModuleType("tilelang")
    package.language = language  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tilelang", package)
        patch.setitem(sys.modules, "tilelang.language", language)
        main = naive.build(workload, schedule, HOPPER)
        tensors = {name: Tensor(data) for name, data in language.tensors.items()}
        main(**tensors)
        for block in product(*map(range, language.grid)):
            language.block = block
            main(**tensors)


@pytest.mark.parametrize("schedule", [NAIVE, Schedule(naive.NAME, 128, 16, 128, 3, 4), Schedule(naive.NAME, 64, 64, 32, 2, 4)])
def test_the_naive_program_passes_the_gate(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 rows are a ragged tile for each; the problems are packed for the library's own programs and repacked."""
    assert naive.legal(SMALL, schedule, HOPPER) == []
    gate = Gate(exact_problem(SMALL, 1, "sm_90a"), random_problem(SMALL, 2, "sm_90a"))
    verdict = gate.verify(lambda problem, y: emulate(SMALL, schedule, problem, y, monkeypatch))
    assert verdict.ok, verdict.reasons


def test_plain_nibbles() -> None:
    workload = Workload(1, 64, 128, FORMAT)
    problem = exact_problem(workload, 0, "sm_90a")
    codes = problem.layout.unpack(problem.operands["weight"].numpy(), 64, 128)
    words = naive.plain_operands(problem)["weight"].numpy().view(np.uint32)
    assert words.shape == (64, 16)
    assert all(words[i, j // 8] >> 4 * (j % 8) & 15 == codes[i, j] for i, j in product((0, 1, 17, 63), range(128)))


@pytest.mark.parametrize(
    ("workload", "schedule", "words"),
    [
        (Workload(1, 128, 512, QuantFormat(4, 128, True)), NAIVE, "zero points"),
        (Workload(1, 128, 512, QuantFormat(8, 128, False)), NAIVE, "4 bits"),
        (Workload(1, 100, 512, FORMAT), NAIVE, "not multiples"),
        (SMALL, Schedule(naive.NAME, 64, 8, 64, 2, 4), "block_m is 8"),
        (SMALL, Schedule(naive.NAME, 64, 32, 64, 9, 4), "num_stages is 9"),
        (SMALL, Schedule(naive.NAME, 64, 32, 64, 2, 4, split_k=2), "nothing else"),
        (SMALL, Schedule(naive.NAME, 128, 128, 128, 4, 8), "shared memory"),
    ],
)
def test_what_the_naive_program_cannot_do(workload: Workload, schedule: Schedule, words: str) -> None:
    assert words in " ".join(naive.legal(workload, schedule, target_from_name("sm_86")))


@pytest.mark.slow
@needs_nvcc
def test_the_naive_program_compiles() -> None:
    """On both kinds of tensor cores, with the parameters that the benchmark passes."""
    requests = [
        CompileRequest(naive.NAME, Workload(64, 256, 512, FORMAT), Schedule(naive.NAME, 64, 64, 64, 2, 4), target_from_name(arch))
        for arch in ("sm_80", "sm_90a")
    ]
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        for kernel in pool.compile(requests):
            assert isinstance(kernel, Kernel), kernel
            assert kernel.params == ("x", "weight", "scales", "zeros", "y") and kernel.resources["spills"] == 0
            assert kernel.resources["smem"] == naive.shared_memory(kernel.schedule, target_from_name(kernel.manifest["target"]["arch"]))
            assert kernel.resources["instructions"]["wgmma"] + kernel.resources["instructions"]["mma"] > 0


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_the_naive_program_on_a_gpu() -> None:
    from tilebit.schedules.target import detect_target

    target, workload = detect_target(), Workload(100, 512, 1024, FORMAT)
    exact, random = (make(workload, 3, target.arch, "cuda") for make in (exact_problem, random_problem))
    gate = Gate(exact, random)
    plain = {id(p): naive.plain_operands(p) for p in (exact, random)}
    schedules = naive.candidates(workload, target)
    with CompilePool() as pool:
        kernels = pool.compile([CompileRequest(naive.NAME, workload, s, target) for s in schedules])
    for kernel in kernels:
        assert isinstance(kernel, Kernel), kernel

        def run(problem: Problem, y: torch.Tensor, kernel: Kernel = kernel) -> None:
            kernel(problem.x[: len(y)], *(plain[id(problem)][name] for name in ("weight", "scales", "zeros")), y)

        verdict = gate.verify(run)
        assert verdict.ok, (kernel.schedule, verdict.reasons)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: f"{w.n}x{w.k}-m{w.m}")
def test_every_step_tries_its_own_idea(workload: Workload) -> None:
    found = drawn(workload, HOPPER, [])
    assert {step.number for step in found} >= {0, 1, 2}
    for step, schedules in found.items():
        assert 0 < len(schedules) <= 2 * TRIED and len(set(schedules)) == len(schedules)
        for s in schedules:
            assert [other for other in STEPS if other.uses(s)] == [step]  # one idea each
            assert not (naive.legal if step.number == 0 else legal)(workload, s, HOPPER)
        if step.number > 0:
            assert len(schedules) <= TRIED
    assert all(s.num_stages == SHALLOW and s.split_k == 1 for s in found[STEPS[1]])
    offered = candidates(workload, HOPPER) or []
    for step in STEPS[2:]:
        assert step in found or not any(step.uses(s) for s in offered)


def test_tuned_schedules_come_first_and_leave_room() -> None:
    workload = WORKLOADS[3]
    split = [s for s in (candidates(workload, HOPPER) or []) if STEPS[2].uses(s)]
    assert len(split) > 2
    slow = drawn(workload, HOPPER, [])[STEPS[2]][-1]
    fast = next(s for s in reversed(split) if s != slow)
    records = [TuningRecord(workload, s, HOPPER.name, HOPPER.arch, HOPPER.units, us=us) for s, us in ((slow, 20.0), (fast, 10.0))]
    elsewhere = TuningRecord(workload, split[0], "another", HOPPER.arch, HOPPER.units, us=1.0)
    found = drawn(workload, HOPPER, [*records, elsewhere])[STEPS[2]]
    assert found[:2] == [fast, slow] and len(found) <= TRIED


class FakeBench:
    """Times and verdicts out of tables, by (schedule, dependent)."""

    workload = WORKLOADS[0]

    def __init__(self, us: dict[tuple[Schedule, bool], float], wrong: set[Schedule], dependent: set[Schedule]) -> None:
        self.us, self.wrong, self.dependent = us, wrong, dependent

    def contender(self, step: Any, kernel: Schedule) -> measure.Contender:
        loaded: Any = SimpleNamespace(run=id, run_dependent=id if kernel in self.dependent else None)
        return measure.Contender(step.number, step.idea, kernel, loaded, {})

    def verified(self, contender: measure.Contender) -> float | None:
        return None if contender.schedule in self.wrong else 1e-4

    def time(self, contenders: Any) -> list[Timing]:
        return [Timing(us := self.us[c.schedule, c.dependent], us, us, 1, 20) for c in contenders]


def test_the_fastest_right_kernel_of_each_step_wins() -> None:
    plain = NAIVE
    quick, right, lone = (Schedule("gemm_wgmma", 64, 8, 128, stages, 4) for stages in (2, 3, 4))
    bad = Schedule("gemm_stream", 64, 8, 128, 4, 4)
    us = {(plain, False): 50.0, (quick, False): 1.0, (right, False): 20.0, (lone, False): 30.0, (bad, False): 2.0, (right, True): 18.0}
    bench: Any = FakeBench(us, wrong={quick, bad}, dependent={right, lone})
    kernels: Any = {STEPS[0]: [plain], STEPS[2]: [quick, lone, right], STEPS[4]: [bad]}
    rows = climb(bench, kernels)
    assert [(r["step"], r["us"], r["tried"], r["dependent"]) for r in rows] == [
        (0, 50.0, 1, False),
        (2, 20.0, 2, False),
        (DEPENDENT.number, 18.0, 1, True),
    ]
    assert all(set(ABLATION_FIELDS) <= set(r) for r in rows)
    assert json.loads(json.dumps(rows))[1]["schedule"]["num_stages"] == 3


def test_nothing_right_gives_no_rows() -> None:
    bench: Any = FakeBench({}, wrong={NAIVE}, dependent=set())
    kernels: Any = {STEPS[0]: [NAIVE]}
    assert climb(bench, kernels) == []
