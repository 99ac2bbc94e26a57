"""A format of another package with device functions of its own (``toy.plus_one``): the CUDA programs take it without a line of it in
tilebit. Their kernels are emulated; those of a GPU are compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from emulation.device_code import needs_host_compiler
from emulation.emulated_gemm import EmulatedGemm
from gemm_cases import problem_of
from processes import environment, python
from toolchain import needs_nvcc
from toy.plus_one import CODEC, FORMAT

from tilebit.autotune.problems.verify import check_exact, check_guards, guarded_output
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, target_from_name
from tilebit.tiles.compiler.request import CompileRequest

HOPPER, AMPERE = target_from_name("sm_90a"), target_from_name("sm_80")
WGMMA, MMA = Schedule("gemm_wgmma", 64, 16, 128, 2, 4), Schedule("gemm_mma", 64, 16, 64, 2, 4)
W = Workload(13, 100, 384, FORMAT, bias=True)


@needs_host_compiler
@pytest.mark.parametrize(("schedule", "target"), [(WGMMA, HOPPER), (MMA, AMPERE)], ids=["gemm_wgmma", "gemm_mma"])
def test_exact(schedule: Schedule, target: Target):
    assert legal(W, schedule, target) == []
    problem, reference = problem_of(W, 3)
    output = guarded_output((W.m, W.n), problem.x.dtype)
    EmulatedGemm(W, schedule, target=target)(problem, output.y)
    assert check_guards(output) == [] and check_exact(output.y, reference) == []


def test_programs_without_its_functions_say_so():
    (sentence,) = legal(W, Schedule("gemm_stream_bulk", 64, 16, 64, 2, 4), HOPPER)
    assert sentence == "format is toy.plus_one; gemm_stream_bulk has no codec for it."


def test_the_key_of_a_kernel_knows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = CompileRequest("gemm_wgmma", W, WGMMA, HOPPER).key
    edited = tmp_path / "plus_one.cuh"
    edited.write_text(Path(CODEC.headers[0]).read_text() + "// edited\n")
    monkeypatch.setattr("toy.plus_one.CODEC", replace(CODEC, headers=(str(edited),)))
    assert CompileRequest("gemm_wgmma", W, WGMMA, HOPPER).key != before


@needs_nvcc
@pytest.mark.slow
def test_compiles_for_a_gpu(tmp_path: Path):
    """From the command line, in processes that know the format by its module alone."""
    asked: str = "-m tilebit compile --n 128 --k 256 --m 64 --format toy.plus_one --target sm_90a"
    done = python(list[str](asked.split()), environment(tmp_path), tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
