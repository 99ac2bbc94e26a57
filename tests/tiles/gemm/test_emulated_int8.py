"""``gemm_wgmma`` and ``gemm_mma`` on int8 x without a GPU: as ``test_emulated_gemm.py``, with int32 sums."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
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
from lanes import one_of_each

pytestmark = needs_host_compiler
HOPPER = replace(target_from_name("sm_90a"), units=5)  # as in test_emulated_gemm.py
TARGET = {"gemm_wgmma": HOPPER, "gemm_mma": target_from_name("sm_80")}
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
    # clusters of two that meet in a workspace
    (Workload(70, 190, 1100, LQQ64, bias=True), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=4)),
)
# stored through shared memory and directly; steps of a part of a group, of one and of two; a last group that is shorter; shared tiles
MMA_CASES = (
    (Workload(13, 192, 448, LQQ64), Schedule("gemm_mma", 64, 8, 64, 3, 4)),
    (Workload(40, 100, 500, LQQ128, "bfloat16", bias=True), Schedule("gemm_mma", 128, 32, 128, 3, 8)),
    (Workload(33, 250, 1000, LQQ64, bias=True), Schedule("gemm_mma", 256, 48, 128, 2, 16)),
    (Workload(9, 64, 300, W8A8), Schedule("gemm_mma", 64, 16, 32, 4, 4)),
    (Workload(40, 190, 1000, W8A8, "bfloat16", bias=True), Schedule("gemm_mma", 64, 32, 128, 2, 4)),
    (Workload(70, 505, 576, LQQ128), Schedule("gemm_mma", 128, 64, 64, 4, 8, raster=2)),
    (Workload(20, 100, 896, LQQ64, bias=True), Schedule("gemm_mma", 128, 16, 128, 2, 8, split_k=7)),
    (Workload(35, 190, 576, LQQ128, "bfloat16"), Schedule("gemm_mma", 64, 32, 64, 2, 4, split_k=3)),
    (Workload(5, 250, 1056, W8A8, bias=True), Schedule("gemm_mma", 256, 8, 32, 3, 16, split_k=11)),
    (Workload(150, 64, 512, W8A8, "bfloat16"), Schedule("gemm_mma", 64, 128, 64, 2, 4, split_k=2)),
    (Workload(20, 190, 576, ASYM, bias=True), Schedule("gemm_mma", 64, 16, 64, 3, 4)),
    (Workload(40, 250, 1000, ASYM, "bfloat16"), Schedule("gemm_mma", 256, 32, 128, 2, 16, split_k=2)),
)
ALL = (*CASES, *MMA_CASES)


def emulated(case: Case, order: str = "shuffled", seed: int = 0, edits: Edits | None = None) -> EmulatedGemm:
    workload, schedule = case
    return EmulatedGemm(
        workload, schedule, edits, together=ALL if edits is None else (), target=TARGET[schedule.program], order=order, seed=seed
    )


@pytest.mark.parametrize("case", one_of_each(ALL, lambda case: case[1].program), ids=label)
def test_exact(case: Case):
    assert legal(case[0], case[1], TARGET[case[1].program]) == []
    problem = exact_problem(case[0], ALL.index(case), "sm_90a")
    reference, output = problem.reference(), guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
    assert reference.to(output.y.dtype).isfinite().all()
    emulated(case)(problem, output.y)
    assert check_guards(output) == []
    assert check_exact(output.y, reference) == []


@pytest.mark.parametrize("case", [CASES[8], CASES[9], CASES[15], MMA_CASES[7]], ids=label)
def test_the_order_of_blocks_does_not_show(case: Case):
    """int32 sums have no order; fp32 ones after them have one."""
    problem, results = random_problem(case[0], 3, "sm_90a"), []
    for seed, order in enumerate(ORDERS):
        output = guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
        emulated(case, order, seed)(problem, output.y)
        results.append(output.y)
    assert results[0].isfinite().all() and all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    "case",
    one_of_each([CASES[2], CASES[4], CASES[9], CASES[13], *MMA_CASES[2:5:2], MMA_CASES[10]], lambda case: case[1].program),
    ids=label,
)
def test_the_tuner_s_gate_accepts(case: Case):
    gate = Gate(exact_problem(case[0], 1, "sm_90a"), random_problem(case[0], 2, "sm_90a"))
    verdict = gate.verify(emulated(case))
    assert verdict.ok, verdict.reasons


LONG = Workload(16, 64, 8192, LQQ128, "bfloat16")
SPLITS = (Schedule("gemm_wgmma", 64, 16, 128, 2, 4, split_k=3), Schedule("gemm_mma", 64, 16, 128, 2, 4, split_k=4))
FP32_PARTS = (("as_bits(int v) { return __int_as_float(v); }", "as_bits(int v) { return __int2float_rn(v); }"),
              ("of_bits(float bits, int& v) { v = __float_as_int(bits); }", "of_bits(float bits, int& v) { v = int(bits); }"))  # fmt: skip


def large_parts(schedule: Schedule, edits: Edits | None = None) -> torch.Tensor:
    """y of sums whose parts, odd ones over 2^24, cancel but for -127."""
    problem = random_problem(LONG, 1, "sm_90a")
    problem.x[:, : LONG.k // 2] = 127
    problem.x[:, LONG.k // 2 :] = -127
    problem.x[:, 0] = 126
    problem.operands["weight"].fill_(-1)  # codes of 15
    problem.operands["scales"].fill_(1)
    problem.operands["zeros"].fill_(240)  # 127 in all
    problem.operands["row_scales"].fill_(1.0)
    problem.operands["token_scales"].fill_(1.0)
    assert LONG.k // schedule.split_k * 127 * 127 - 127 > 1 << 24
    y = torch.empty(LONG.m, LONG.n, dtype=torch.bfloat16)
    emulated((LONG, schedule), edits=edits)(problem, y)
    return y


@pytest.mark.parametrize("schedule", SPLITS, ids=lambda s: s.program)
def test_parts_are_added_as_integers(schedule: Schedule):
    """Where fp32 would round them: shown by a kernel that lets it."""
    y = large_parts(schedule)
    assert torch.equal(y, torch.full_like(y, -127))
    rounded = large_parts(schedule, {"device": swap(*FP32_PARTS)})
    assert not torch.equal(rounded, y)


@pytest.mark.parametrize("schedule", [replace(s, split_k=1) for s in SPLITS], ids=lambda s: s.program)
def test_the_largest_sum_is_rounded_once(schedule: Schedule):
    """Every product at its largest: 8,192 x 127 x 127 > 2^24, and odd."""
    problem = random_problem(LONG, 1, "sm_90a")
    problem.x.fill_(127)
    problem.x[:, 0] = 126
    for name, value in (("weight", -1), ("scales", 1), ("zeros", 240), ("row_scales", 1.0), ("token_scales", 2.0**-30)):
        problem.operands[name].fill_(value)
    total = 127 * 127 * 8192 - 127
    y = torch.empty(LONG.m, LONG.n, dtype=torch.bfloat16)
    emulated((LONG, schedule))(problem, y)
    assert torch.equal(y, torch.full_like(y, float(torch.tensor(total * 2.0**-30).bfloat16())))


SHARED = next(case for case in CASES if case[1].split_k == 2)  # by a cluster
TILE_BY_TILE = next(case for case in CASES if case[1].tail > 1)
TWO_SLABS = next(case for case in CASES if case[1].block_n == 256)


LQQ_CASE, W8A8_CASE, SHARED_CASE, ASYM_CASE = CASES[1], CASES[4], CASES[8], CASES[13]
MMA_LQQ, MMA_W8A8, MMA_SHARED, MMA_ASYM = MMA_CASES[1], MMA_CASES[4], MMA_CASES[6], MMA_CASES[11]
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
    "places of zero points that TMA cannot write to": (CASES[14], "wgmma.py", "p.stage_groups, rows), p.zero", "1, rows), p.zero"),
    "a channel's scale is its neighbour's": (
        CASES[3],
        "device",
        "own_first(n0, thread) + own_channel(n0, slab, low, thread, ADDS<P>)",
        "own_first(n0, thread) + (1 ^ own_channel(n0, slab, low, thread, ADDS<P>))",
    ),
    "a channel's scale is that of another slab": (
        TWO_SLABS,
        "device",
        "joined(n0) ? row + low * JOINED_APART + (added ? 0 : 8) : row + slab * 64 + low * 8;",
        "joined(n0) ? row + low * JOINED_APART + (added ? 0 : 8) : row + low * 8;",
    ),
    "scales of rows of x are not awaited": (TILE_BY_TILE, "device", "mbarrier_arrive_after_copies(barrier);", "mbarrier_arrive(barrier);"),
    "what an end needs is not awaited": (TILE_BY_TILE, "wgmma.py", "await_full(ready[0], end)", "await_full(ready[0], 1)"),
    "what the next end needs is brought too early": (
        TILE_BY_TILE,
        "wgmma_numbers.py",
        "T.address_of(free[0]), turn ^ 1",
        "T.address_of(free[0]), 1",
    ),
    "scales of the rows of another chunk": (SHARED, "device", "+ chunk * (COLUMNS / 2) + (thread & 3)", "+ (thread & 3)"),
    "scales of the tile above": (TILE_BY_TILE, "device", "(there ? m0 + row : 0)", "(there ? row : 0)"),
    "a tile's end is that of the first": (
        TILE_BY_TILE,
        "wgmma_numbers.py",
        "m, block, i, T.address_of(ready",
        "m, block, 0, T.address_of(ready",
    ),
    "the group before": (CASES[2], "device", "* STEPS + step) / GROUP_STEPS * STRIDE", "* STEPS + step - 1) / GROUP_STEPS * STRIDE"),
    "the middle of bytes stays": (W8A8_CASE, "device", "a[i] = words[i] ^ 0x80808080u", "a[i] = words[i]"),
    "parts are added as floats": (
        SHARED_CASE,
        "device",
        "of_bits(float bits, int& v) { v = __float_as_int(bits); }",
        "of_bits(float bits, int& v) { v = int(bits); }",
    ),
    "places that TMA cannot write to": (CASES[5], "wgmma.py", "p.stage_groups, rows", "p.step_groups, rows"),
    "sums are floats already": (
        LQQ_CASE,
        "device",
        "sum_of(int v) { return __int2float_rn(v); }",
        "sum_of(int v) { return __int_as_float(v); }",
    ),
    "mma.sync: the exclusive or is missing": (MMA_LQQ, "device", "(codes * scale + offsets) ^ 0x80808080u", "(codes * scale + offsets)"),
    "mma.sync: the zero point is that of row r": (MMA_ASYM, "device", "SHIFTED ? offsets[g + 8]", "SHIFTED ? offsets[g]"),
    "mma.sync: registers of rows r and r + 8 are exchanged": (MMA_W8A8, "device", "a[i] = words[i] ^", "a[i ^ 1] = words[i] ^"),
    "mma.sync: registers of k and k + 16 are exchanged": (MMA_W8A8, "device", "a[i] = words[i] ^", "a[i ^ 2] = words[i] ^"),
    "mma.sync: nibbles of rows r and r + 8 are exchanged": (
        MMA_LQQ,
        "device",
        "a[2 * i + 1] = high(words[i] >> 4 & 0x0f0f0f0fu);",
        "a[2 * i + 1] = a[2 * i], a[2 * i] = high(words[i] >> 4 & 0x0f0f0f0fu);",
    ),
    "mma.sync: the group is its neighbour": (
        MMA_CASES[5],
        "operands.py",
        "return step * self.schedule.block_k //",
        "return (step + 1) * self.schedule.block_k //",
    ),
    "mma.sync: groups of a step are one": (MMA_CASES[2], "device", "/ GROUP_STEPS * STRIDE", "/ GROUP_STEPS / 2 * STRIDE"),
    "mma.sync: the slab is its neighbour": (MMA_LQQ, "device", "+ group * SLABS + slab) *", "+ (1 - group) * SLABS + slab) *"),
    "mma.sync: offsets are scales": (MMA_LQQ, "mma.py", "p.copied(T, zeros,", "p.copied(T, scales,"),
    "mma.sync: bytes of scales are counted as words": (MMA_CASES[0], "mma.py", "bx * scale_columns], Ss", "bx * bn], Ss"),
    "mma.sync: x of 16 bits a number": (MMA_LQQ, "mma.py", "x[by * bm, step * bk]", "x[by * bm, step * bk // 2]"),
    "mma.sync: a part is lost": (MMA_SHARED, "device", "for (int s = 0; s < splits; ++s)", "for (int s = 1; s < splits; ++s)"),
    "mma.sync: the last part twice": (MMA_SHARED, "device", "accumulators[i] = A(0);", ";"),
    "mma.sync: parts are added as floats": (MMA_SHARED, "operands.py", 'return ", int" if', 'return ", float" if'),
    "mma.sync: sums are floats already": (
        MMA_W8A8,
        "mma.py",
        "T.copy(sums, Y)",
        "Y.place, Y.registers[:] = sums.place, sums.registers.view('float32')",
    ),
    "mma.sync: no scale of a token": (MMA_W8A8, "mma.py", "token_scales=token_scales, bias", "token_scales=row_scales or scales, bias"),
}


@pytest.mark.parametrize("bug", one_of_each(PLANTED, lambda bug: (PLANTED[bug][0][1].program, PLANTED[bug][1])))
def test_planted_bugs_are_caught(bug: str):
    case, file, right, wrong = PLANTED[bug]
    problem = exact_problem(case[0], 1, "sm_90a")
    output = guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
    try:
        emulated(case, edits={file: swap((right, wrong))})(problem, output.y)
    except KernelFault:
        return
    assert check_guards(output) or check_exact(output.y, problem.reference())
