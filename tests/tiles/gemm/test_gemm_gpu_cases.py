"""The kernels of sums that are scaled step by step, and of mixed layers, that ``test_gemm_gpu.py`` runs over many seeds on a GPU, once
without one: an error of theirs need not wait for a machine. Of tiled programs the first of each way to divide the work and of each format
and what follows it; ``test_emulated_groups.py``, ``test_emulated_fp8.py`` and ``test_placed.py`` have more of each."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gemm.test_gemm_gpu import group_wise_cases, mixed_layer_cases
from lanes import one_of_each

from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.autotune.problems.verify import check_exact, check_guards, guarded_output
from tilebit.schedules.gemm.rules import CUDA_RULES
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import needs_host_compiler
from emulation.emulated_gemm import EmulatedGemm
from emulation.generated_gemm import GeneratedGemm
from gemm_cases import Case, label

HOPPER = replace(target_from_name("sm_90a"), units=5)  # as in test_emulated_gemm.py
ROWS = 19  # of x: two tiles of some schedules, one of others
CASES = [(w.with_m(ROWS), s) for w, s in (*group_wise_cases(), *mixed_layer_cases())]
WAYS = {
    way: case
    for w, s in reversed(CASES)
    if s.program in CUDA_RULES and (case := (w, s))
    for way in (
        (s.program, s.split_k > 1, s.stream_k, s.tail > 1, s.joined),
        (s.program, w.format, s.joined),
        (w.format, w.bias, w.width > 0),
    )
}
TILED = [case for case in CASES if case in WAYS.values()]


def wrong(case: Case, gemm: EmulatedGemm | GeneratedGemm) -> list[str]:
    """What the exact oracle says."""
    problem = exact_problem(case[0], 1, "sm_90a")
    output = guarded_output((ROWS, case[0].columns), getattr(torch, case[0].dtype))
    gemm(problem, output.y)
    return [*check_guards(output), *check_exact(output.y, problem.reference())]


@needs_host_compiler
@pytest.mark.parametrize("case", one_of_each(TILED, lambda case: (case[1].program, case[1].joined)), ids=label)
def test_exact(case: Case):
    assert wrong(case, EmulatedGemm(*case, target=HOPPER if case[1].program == "gemm_wgmma" else None)) == []


@needs_host_compiler
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case[1].program not in CUDA_RULES], ids=label)
def test_programs_of_few_rows_are_exact(case: Case):
    """As the CUDA that is generated."""
    assert wrong(case, GeneratedGemm(*case, HOPPER)) == []
