"""``gemm_mma`` on int8 x as the CUDA that TileLang generates of it, whole and exact, on every thread: how x is swizzled, which registers
``T.gemm`` takes for whose weights, and what its pipeline keeps waiting for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lanes import one_of_each

from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.autotune.problems.verify import check_exact, check_guards, guarded_output
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import needs_host_compiler
from emulation.emulated_program import Edits
from emulation.generated_gemm import GeneratedGemm
from emulation.planted import swap
from gemm_cases import GROUP_WISE, INT8_FORMATS, Case, label

pytestmark = needs_host_compiler
TARGET = target_from_name("sm_80")
LQQ64, LQQ128, W8A8, ASYM = INT8_FORMATS
CASES = (
    (Workload(13, 100, 500, LQQ64, bias=True), Schedule("gemm_mma", 64, 8, 128, 2, 4)),  # stored directly
    (Workload(35, 190, 576, LQQ128, "bfloat16"), Schedule("gemm_mma", 64, 32, 64, 3, 4, split_k=3)),
    (Workload(40, 128, 300, W8A8, bias=True), Schedule("gemm_mma", 128, 32, 32, 4, 8)),
    (Workload(20, 128, 384, W8A8, "bfloat16"), Schedule("gemm_mma", 64, 16, 128, 2, 4)),
    (Workload(40, 100, 576, GROUP_WISE[1], "bfloat16"), Schedule("gemm_mma", 64, 16, 128, 3, 4)),  # steps past the last record
    (Workload(9, 100, 320, ASYM), Schedule("gemm_mma", 64, 16, 64, 3, 4)),
)


def wrong(case: Case, edits: Edits | None = None) -> list[str]:
    """What the exact oracle says of the kernel, or of one with ``edits``."""
    problem = exact_problem(case[0], CASES.index(case), "sm_80")
    output = guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
    gemm = GeneratedGemm(*case, TARGET, edits)
    gemm(problem, output.y)
    return [*check_guards(output), *check_exact(output.y, problem.reference()), *["tickets are left"] * gemm.tickets_left]


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[0].format.bits), ids=label)
def test_exact(case: Case):
    assert legal(case[0], case[1], TARGET) == []
    assert wrong(case) == []


PLANTED = {
    "registers of rows r and r + 8 are exchanged": (CASES[3], "a[i] = words[i] ^", "a[i ^ 1] = words[i] ^"),
    "x is used before it is there": (CASES[0], "tl::cp_async_wait<2>", "tl::cp_async_wait<3>"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str):
    case, right, other = PLANTED[bug]
    assert wrong(case, {"device": swap((right, other))})
