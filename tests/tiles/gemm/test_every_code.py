"""Sums of LiquidGEMM's weights, every code under every scale and offset that a weight may have: a row of x that is one at a single k, or
minus one, makes a sum that is a weight, so that whole products show each. Of every program, with and without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_cases import target as cpu_target

from tilebit.autotune.problems.gemm import Problem, split_workspace
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.autotune.problems.verify import check_exact, check_guards, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal, programs
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import detect_target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import needs_host_compiler
from emulation.emulated_gemm import TARGETS, EmulatedGemm
from emulation.generated_gemm import GeneratedGemm
from emulation.planted import swap
from gemm_cases import INT8_FORMATS, LQQ_PAIRS

K = 128  # and a row of x for each, behind them one of all ones
LQQ = INT8_FORMATS[:2]
# Steps of one part, of two, and of less than a group.
SCHEDULES = {
    "gemm_wgmma": Schedule("gemm_wgmma", 64, 144, 128, 2, 4),
    "gemm_mma": Schedule("gemm_mma", 64, 64, 64, 2, 4),
    "gemm_stream": Schedule("gemm_stream", 64, 16, 64, 2, 2),
    "gemm_stream_bulk": Schedule("gemm_stream_bulk", 64, 16, 128, 2, 2),
    "gemm_cpu": Schedule("gemm_cpu", 32, 4, 32, num_warps=2),
}


def work(format: GemmFormat) -> Workload:
    """Each group of each row has a pair of its own."""
    return Workload(K + 1, -(-len(LQQ_PAIRS) // format.groups(K)), K, format)


def every_code(format: GemmFormat, arch: str, device: str = "cpu") -> tuple[Problem, torch.Tensor]:
    """The product, and its y [K + 1, n]."""
    workload = work(format)
    problem, n, groups = exact_problem(workload, 0, arch, device), workload.n, format.groups(K)
    codes = ((np.arange(K) + 5 * np.arange(n)[:, None]) % 16).astype(np.uint8)
    scales, offsets = LQQ_PAIRS[np.arange(n * groups) % len(LQQ_PAIRS)].reshape(n, groups, 2).transpose(2, 0, 1)
    group = np.arange(K) // format.group_size
    met = {*zip(codes.ravel().tolist(), scales[:, group].ravel().tolist(), offsets[:, group].ravel().tolist(), strict=True)}
    assert len(met) == 16 * len(LQQ_PAIRS)
    weight = codes.astype(int) * scales[:, group] + offsets[:, group] - 128
    assert weight.min() == -128 and weight.max() == 127
    x = np.vstack([np.diag(1 - 2 * (np.arange(K) % 2)), np.ones((1, K), int)])

    def padded(values: np.ndarray) -> torch.Tensor:
        spare = problem.operands["scales"].shape[1] - n
        return torch.from_numpy(np.pad(values.T.astype(np.uint8), ((0, 0), (0, spare)))).contiguous().to(device)

    problem.operands["weight"] = torch.from_numpy(problem.layout.pack(codes).view(np.int32)).to(device)
    problem.operands["scales"], problem.operands["zeros"] = padded(scales), padded(offsets)
    problem.operands["row_scales"].fill_(1.0)
    problem.operands["token_scales"].fill_(1.0)
    problem.x.copy_(torch.from_numpy(x))
    return problem, torch.from_numpy(x @ weight.T).to(torch.float64).to(device)


def wrong(gemm, format: GemmFormat, arch: str, device: str = "cpu") -> list[str]:
    problem, expected = every_code(format, arch, device)
    output = guarded_output((K + 1, problem.workload.n), torch.float16, device)
    gemm(problem, output.y)
    return [*check_guards(output), *check_exact(output.y, expected)]


def emulated(program: str, format: GemmFormat, edits: dict | None = None) -> EmulatedGemm | GeneratedGemm:
    made = EmulatedGemm if program in ("gemm_wgmma", "gemm_mma") else GeneratedGemm
    return made(work(format), SCHEDULES[program], edits=edits, target=TARGETS.get(program, target_from_name("sm_90a")))


def test_every_program_of_these_formats_is_here():
    assert {*SCHEDULES} >= {name for arch in ("sm_90a", "cpu") for name in programs("gemm", arch) if "any" not in name} - {"gemm_dense"}
    for format in LQQ:
        for program, schedule in SCHEDULES.items():
            target = cpu_target("avx2") if program == "gemm_cpu" else TARGETS.get(program, target_from_name("sm_90a"))
            assert legal(work(format), schedule, target) == []


@needs_host_compiler
@pytest.mark.parametrize(
    ("program", "format"),
    [
        pytest.param(name, format, marks=[pytest.mark.slow] if "stream" in name or format != LQQ[0] else [], id=f"{name}-{format.name}")
        for name in SCHEDULES
        if name != "gemm_cpu"
        for format in LQQ
    ],
)
def test_every_sum_without_a_gpu(program: str, format: GemmFormat):
    assert wrong(emulated(program, format), format, "sm_90a") == []


@pytest.mark.parametrize("format", LQQ, ids=lambda f: f.name)
def test_every_sum_on_a_cpu(format: GemmFormat):
    """With the instructions that this machine has."""
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        (kernel,) = pool.compile([CompileRequest("gemm_cpu", work(format), SCHEDULES["gemm_cpu"], detect_target("cpu"))])
    assert isinstance(kernel, Kernel), kernel
    assert wrong(lambda problem, y: launch(kernel.load(), {}, problem, y), format, "cpu") == []


@needs_host_compiler
@pytest.mark.parametrize(
    "mistake",
    [
        ("codes * scale + offsets) ^", "codes * (scale & 15u) + offsets) ^"),  # scales of 16 and 17
        ("o * 0x01010101u)", "(o & 254u) * 0x01010101u)"),
        ("codes * scale + offsets) ^ 0x80808080u", "codes * scale + offsets - 0x80808080u)"),  # borrows from the next byte
    ],
    ids=["large scales", "odd offsets", "a borrow"],
)
def test_a_mistake_in_a_few_pairs_is_seen(mistake: tuple[str, str]):
    assert wrong(emulated("gemm_wgmma", LQQ[1], {"device": swap(mistake)}), LQQ[1], "sm_90a")


def _cases(format: GemmFormat) -> list[tuple[Workload, Schedule]]:
    return [(work(format).with_m(1), s) for s in SCHEDULES.values() if s.program != "gemm_cpu"]


@pytest.mark.gpu
@pytest.mark.kernels(of=_cases)
@pytest.mark.parametrize("format", LQQ, ids=lambda f: f.name)
def test_every_sum_on_a_gpu(kernels: dict, format: GemmFormat):
    target, run = detect_target(), 0
    for workload, schedule in _cases(format):
        if (workload, schedule) in kernels:
            kernel, run = kernels[workload, schedule], run + 1
            assert isinstance(kernel, Kernel), kernel
            workspace = split_workspace(work(format), schedule, target, "cuda")

            def gemm(problem: Problem, y: torch.Tensor, kernel: Kernel = kernel, workspace: dict = workspace) -> None:
                launch(kernel.load(), workspace, problem, y)

            assert wrong(gemm, format, target.arch, "cuda") == [], schedule
    assert run >= 2
