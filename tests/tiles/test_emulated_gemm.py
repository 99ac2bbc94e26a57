"""The CUDA GEMM programs without a GPU: their own text, their own headers, exact.

From codes to y every piece is the real one: ``gemm_layout`` packs, ``packed.build``'s body runs (on a stand-in for TileLang) with the real
``Operands``, the device headers are compiled for the host and run on every thread. TileLang's lowering is left to the GPU tests.
"""

from __future__ import annotations

import sys
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
import torch

from tilebit.autotune.problem import Problem, exact_problem, random_problem
from tilebit.autotune.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.layouts.formats import GROUP_SIZES, QuantFormat
from tilebit.layouts.packing import gemm_layout
from tilebit.schedules.rules.gemm import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.schedules.workload import Workload
from tilebit.tiles.gemm.reference import gemm_reference

sys.path.append(str(Path(__file__).parent))
from emulation.device_code import needs_host_compiler
from emulation.emulated_gemm import EmulatedGemm, device_calls

pytestmark = needs_host_compiler
TARGET = {"gemm_wgmma": target_from_name("sm_90a"), "gemm_mma": target_from_name("sm_80")}

# block_n, block_m, block_k, stages, warps, split_k, min_blocks, raster
SCHEDULES = (
    Schedule("gemm_wgmma", 64, 8, 64, 4, 4),
    Schedule("gemm_wgmma", 128, 16, 64, 4, 8, split_k=3),
    Schedule("gemm_wgmma", 128, 32, 64, 2, 4, split_k=2),
    Schedule("gemm_wgmma", 256, 32, 128, 3, 8),
    Schedule("gemm_wgmma", 256, 8, 64, 4, 4, split_k=4, min_blocks=2),
    Schedule("gemm_wgmma", 64, 64, 128, 2, 4, raster=4),
    Schedule("gemm_wgmma", 128, 8, 32, 6, 8, split_k=5),
    Schedule("gemm_mma", 64, 16, 64, 3, 4),
    Schedule("gemm_mma", 128, 32, 64, 3, 8, split_k=2),
    Schedule("gemm_mma", 256, 48, 128, 2, 16),
    Schedule("gemm_mma", 128, 8, 32, 4, 8),
)
SHAPES = ((13, 192, 448), (40, 100, 500), (1, 250, 1000), (33, 64, 380), (9, 320, 64), (17, 256, 257))
FORMATS = tuple(QuantFormat(*f) for f in product((4, 8), GROUP_SIZES, (True, False)))


def cases() -> list[tuple[Workload, Schedule]]:
    """Every format in both dtypes; schedules, shapes and bias take turns, the next legal schedule each time; then unused schedules."""
    found, turn, shapes = [], 0, cycle(SHAPES)
    for i, (dtype, format) in enumerate(product(("float16", "bfloat16"), FORMATS)):
        workload = Workload(*next(shapes), format, dtype, bias=i % 3 == 0)
        for _ in SCHEDULES:
            schedule = SCHEDULES[turn % len(SCHEDULES)]
            turn += 1
            if not legal(workload, schedule, TARGET[schedule.program]):
                found.append((workload, schedule))
                break
        else:
            raise AssertionError(f"no schedule is legal for {workload}")
    unused = [s for s in SCHEDULES if s not in {s for _, s in found}]
    for schedule, (shape, format) in product(unused, product(SHAPES, FORMATS)):
        workload = Workload(*shape, format, bias=True)
        if not legal(workload, schedule, TARGET[schedule.program]) and schedule not in {s for _, s in found}:
            found.append((workload, schedule))
    return found


CASES = cases()
CALLS = device_calls(CASES)


def label(case: tuple[Workload, Schedule]) -> str:
    w, s = case
    return f"{w.format.name}-{w.dtype}-{w.m}x{w.n}x{w.k}{'-bias' * w.bias}-{s.program}-{s.block_n}x{s.block_m}x{s.block_k}-split{s.split_k}"


def problem_of(workload: Workload, seed: int) -> tuple[Problem, torch.Tensor]:
    """An exact problem that starts from codes, and its reference [m, n] in fp64. x: small integers; codes and zero points: any; scales:
    powers of two."""
    w, f = workload, workload.format
    rng = np.random.default_rng(seed)
    layout = gemm_layout("sm_90a", f.bits)
    largest = 4 if f.bits == 4 else 1  # so that most sums stay finite in fp16
    x = rng.integers(-largest, largest + 1, (w.m, w.k))
    codes = rng.integers(0, f.max_code + 1, (w.n, w.k)).astype(np.uint8)
    scales = rng.choice([1.0, 2.0, 4.0] if f.bits == 4 else [1.0], (w.n, f.groups(w.k)))
    scales[:, ::2] *= 0.5
    zeros = None if f.symmetric else rng.integers(0, f.max_code + 1, scales.shape)
    bias = rng.integers(-64, 65, w.n) if w.bias else None
    reference = torch.from_numpy(gemm_reference(x, codes, scales, zeros, bias, f))

    dtype = getattr(torch, w.dtype)

    def padded(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.pad(values.T.astype(np.float32), ((0, 0), (0, -w.n % 64)))).to(dtype)

    operands = {"weight": torch.from_numpy(layout.pack(codes).view(np.int32)), "scales": padded(scales)}
    if zeros is not None:
        operands["zeros"] = padded(zeros)
    if bias is not None:
        operands["bias"] = torch.from_numpy(bias).to(dtype)
    return Problem(w, layout, torch.from_numpy(x).to(dtype), operands), reference


def test_the_cases_cover_everything():
    workloads, schedules = zip(*CASES, strict=True)
    assert {(w.dtype, w.format) for w in workloads} == set(product(("float16", "bfloat16"), FORMATS))
    assert set(schedules) == set(SCHEDULES)
    assert {(w.m, w.n, w.k) for w in workloads} == set(SHAPES)
    uneven = [(w, s) for w, s in CASES if -(-w.k // s.block_k) % s.split_k]
    assert uneven, "no case has splits of unequal length"
    assert any(w.n % s.block_n and w.m % s.block_m and w.k % s.block_k for w, s in CASES)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_exact(case: tuple[Workload, Schedule]):
    workload, schedule = case
    problem, reference = problem_of(workload, seed=CASES.index(case))
    assert reference.abs().max() < 1 << 24
    assert reference.isfinite().all() and reference.to(getattr(torch, workload.dtype)).isfinite().float().mean() > 0.9
    output = guarded_output((workload.m, workload.n), problem.x.dtype)
    EmulatedGemm(workload, schedule, calls=CALLS)(problem, output.y)
    assert check_guards(output) == []
    assert check_exact(output.y, reference) == []


@pytest.mark.parametrize("case", [c for c in CASES if c[1].split_k > 1][:3], ids=label)
def test_split_k_is_deterministic_and_replayable(case: tuple[Workload, Schedule]):
    """On random floats, blocks that arrive in any order give the same bits, launch after launch on the same tickets."""
    workload, schedule = case
    problem, results = random_problem(workload, 3, "sm_90a"), []
    for order in range(3):
        gemm = EmulatedGemm(workload, schedule, calls=CALLS, order=order)
        for _ in range(2):
            output = guarded_output((workload.m, workload.n), problem.x.dtype)
            gemm(problem, output.y)
            results.append(output.y)
        assert not gemm.tickets[workload.m].any()
    assert results[0].isfinite().all()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("case", CASES[::9], ids=label)
def test_the_tuner_s_gate_accepts(case: tuple[Workload, Schedule]):
    """The verdict that a tuner would give on a GPU, worst tile on random floats included."""
    workload, schedule = case
    gate = Gate(exact_problem(workload, 1, "sm_90a"), random_problem(workload, 2, "sm_90a"))
    verdict = gate.verify(EmulatedGemm(workload, schedule, calls=CALLS))
    assert verdict.ok, verdict.reasons


def test_the_emulator_replaces_no_compiler_for_good():
    """Standing in for TileLang leaves no trace: nothing that a later test could import by mistake."""
    workload, schedule = CASES[0]
    problem, _ = problem_of(workload, 0)
    output = guarded_output((workload.m, workload.n), problem.x.dtype)
    before = sys.modules.get("tilelang")
    EmulatedGemm(workload, schedule, calls=CALLS)(problem, output.y)
    assert sys.modules.get("tilelang") is before
