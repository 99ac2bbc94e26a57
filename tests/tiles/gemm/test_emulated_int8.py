"""``gemm_wgmma`` on int8 x without a GPU: as ``test_emulated_gemm.py``, with int32 sums."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilebit.autotune.problems.gemm import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.emulated_gemm import ORDERS, Case, Edits, EmulatedGemm
from emulation.planted import swap
from gemm_cases import INT8_FORMATS, label

pytestmark = needs_host_compiler
HOPPER = replace(target_from_name("sm_90a"), units=5)  # as in test_emulated_gemm.py
LQQ64, LQQ128, W8A8, ASYM = INT8_FORMATS

CASES = (
    (Workload(13, 192, 448, LQQ64), Schedule("gemm_wgmma", 64, 16, 64, 4, 4)),
    (Workload(40, 100, 500, LQQ128, "bfloat16", bias=True), Schedule("gemm_wgmma", 128, 32, 128, 3, 8)),
    (Workload(33, 250, 1000, LQQ64, bias=True), Schedule("gemm_wgmma", 256, 32, 256, 2, 8)),
    (Workload(9, 64, 300, W8A8), Schedule("gemm_wgmma", 64, 16, 32, 4, 4)),
    (Workload(40, 190, 1000, W8A8, "bfloat16", bias=True), Schedule("gemm_wgmma", 128, 32, 256, 2, 8)),
    (Workload(13, 505, 500, LQQ128), Schedule("gemm_wgmma", 64, 16, 128, 3, 4)),  # a stage's bytes of scales are no whole 128
    (Workload(20, 190, 300, LQQ64), Schedule("gemm_wgmma", 192, 16, 64, 3, 12)),
    # shared tiles: by a cluster, through a workspace, in shares that cross their borders
    (Workload(40, 128, 512, LQQ128, bias=True), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=2)),
    (Workload(20, 100, 896, LQQ64), Schedule("gemm_wgmma", 192, 16, 64, 2, 4, split_k=3)),
    (Workload(60, 190, 1472, LQQ64, "bfloat16"), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),
    (Workload(70, 256, 1150, W8A8, bias=True), Schedule("gemm_wgmma", 128, 32, 64, 3, 4, raster=2, stream_k=True, cluster=2)),
    # strips of a last wave; blocks that share x
    (Workload(100, 190, 512, LQQ128, bias=True), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, tail=2)),
    (Workload(150, 384, 1150, W8A8), Schedule("gemm_wgmma", 64, 64, 32, 4, 4, cluster=2, tail=4)),
    # zero points of channels: places of whole 128 bytes and of half as many, blocks that share a tile
    (Workload(40, 250, 1000, ASYM, "bfloat16", bias=True), Schedule("gemm_wgmma", 256, 32, 256, 2, 8)),
    (Workload(13, 505, 448, ASYM), Schedule("gemm_wgmma", 64, 16, 64, 4, 4)),
    (Workload(20, 190, 896, ASYM, bias=True), Schedule("gemm_wgmma", 192, 16, 128, 3, 12, split_k=3)),
    (Workload(40, 128, 512, ASYM, "bfloat16"), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=2)),
    (Workload(60, 256, 1472, ASYM), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True, cluster=2)),
)


def emulated(case: Case, order: str = "shuffled", seed: int = 0, edits: Edits | None = None) -> EmulatedGemm:
    workload, schedule = case
    return EmulatedGemm(workload, schedule, edits, together=CASES if edits is None else (), target=HOPPER, order=order, seed=seed)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_exact(case: Case):
    assert legal(case[0], case[1], HOPPER) == []
    problem = exact_problem(case[0], CASES.index(case), "sm_90a")
    reference, output = problem.reference(), guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
    assert reference.to(output.y.dtype).isfinite().all()
    emulated(case)(problem, output.y)
    assert check_guards(output) == []
    assert check_exact(output.y, reference) == []


@pytest.mark.parametrize("case", [CASES[8], CASES[9], CASES[15]], ids=label)
def test_the_order_of_blocks_does_not_show(case: Case):
    """int32 sums have no order; fp32 ones after them have one."""
    problem, results = random_problem(case[0], 3, "sm_90a"), []
    for seed, order in enumerate(ORDERS):
        output = guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
        emulated(case, order, seed)(problem, output.y)
        results.append(output.y)
    assert results[0].isfinite().all() and all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[9], CASES[13]], ids=label)
def test_the_tuner_s_gate_accepts(case: Case):
    gate = Gate(exact_problem(case[0], 1, "sm_90a"), random_problem(case[0], 2, "sm_90a"))
    verdict = gate.verify(emulated(case))
    assert verdict.ok, verdict.reasons


def test_sums_are_exact_where_fp32_would_round():
    """Every product at its largest: sums of 8,192 x 127 x 128 > 2^24, whose parts two blocks add up."""
    workload = Workload(16, 64, 8192, LQQ128, "bfloat16")
    schedule = Schedule("gemm_wgmma", 64, 16, 128, 2, 4, split_k=3)
    problem = random_problem(workload, 1, "sm_90a")
    problem.x.fill_(127)
    problem.operands["weight"].fill_(-1)  # codes of 15
    problem.operands["scales"].fill_(1)
    problem.operands["zeros"].fill_(240)  # 127 in all
    problem.operands["zeros"][:1] = 239  # but for a group, so that the sum is odd
    problem.operands["row_scales"].fill_(2.0**-30)
    problem.operands["token_scales"].fill_(1.0)
    total = 127 * 127 * 8064 + 127 * 126 * 128
    assert total > 1 << 24
    y = torch.empty(16, 64, dtype=torch.bfloat16)
    emulated((workload, schedule))(problem, y)
    assert torch.equal(y, torch.full_like(y, float(torch.tensor(total * 2.0**-30).bfloat16())))


LQQ_CASE, W8A8_CASE, SHARED_CASE, ASYM_CASE = CASES[1], CASES[4], CASES[8], CASES[13]
PLANTED = {
    "the exclusive or is missing": (LQQ_CASE, "device", "(codes * scale + offsets) ^ 0x80808080u", "(codes * scale + offsets)"),
    "nibbles are exchanged": (
        LQQ_CASE,
        "device",
        "a[2 * i] = low(words[i] & 0x0f0f0f0fu);",
        "a[2 * i] = low(words[i] >> 4 & 0x0f0f0f0fu);",
    ),
    "the row's scale is its neighbour's": (LQQ_CASE, "device", "SCALED ? scales[g + 8]", "SCALED ? scales[g + 7]"),
    "the offset is another row's": (LQQ_CASE, "device", "SHIFTED ? offsets[g] :", "SHIFTED ? offsets[g + 8] :"),
    "the exclusive or of zero points is missing": (ASYM_CASE, "device", "(codes + offsets) ^ 0x80808080u", "codes + offsets"),
    "the zero point is its neighbour's": (ASYM_CASE, "device", "SHIFTED ? offsets[g + 8]", "SHIFTED ? offsets[g + 7]"),
    "the zero point is that of an earlier slab": (CASES[15], "device", "GROUP_STEPS * STRIDE + r;", "GROUP_STEPS * STRIDE + row;"),
    "zero points are added": (ASYM_CASE, "device", "(128u - z) * 0x01010101u", "(128u + z) * 0x01010101u"),
    "a zero point reaches one weight of four": (ASYM_CASE, "device", "(128u - z) * 0x01010101u", "0x80808080u - z"),
    "zero points of the step's group": (CASES[13], "operands.py", "return 0\n        return step", "return step\n        return step"),
    "places of zero points that TMA cannot write to": (CASES[14], "wgmma.py", "p.stage_groups, bn), p.zero", "1, bn), p.zero"),
    "a channel's scale is its neighbour's": (
        CASES[3],
        "device",
        "? 0.0f : number_of<Parts>(operands, row))",
        "? 0.0f : number_of<Parts>(operands, row ^ 1))",
    ),
    "the group before": (CASES[2], "device", "* STEPS + step) / GROUP_STEPS * STRIDE", "* STEPS + step - 1) / GROUP_STEPS * STRIDE"),
    "the middle of bytes stays": (W8A8_CASE, "device", "a[i] = words[i] ^ 0x80808080u", "a[i] = words[i]"),
    "parts are added as floats": (
        SHARED_CASE,
        "device",
        "of_bits(float bits, int& v) { v = __float_as_int(bits); }",
        "of_bits(float bits, int& v) { v = int(bits); }",
    ),
    "places that TMA cannot write to": (CASES[5], "wgmma.py", "p.stage_groups, bn", "p.step_groups, bn"),
    "sums are floats already": (
        LQQ_CASE,
        "device",
        "sum_of(int v) { return __int2float_rn(v); }",
        "sum_of(int v) { return __int_as_float(v); }",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str):
    case, file, right, wrong = PLANTED[bug]
    problem = exact_problem(case[0], 1, "sm_90a")
    output = guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
    try:
        emulated(case, edits={file: swap((right, wrong))})(problem, output.y)
    except KernelFault:
        return
    assert check_guards(output) or check_exact(output.y, problem.reference())
