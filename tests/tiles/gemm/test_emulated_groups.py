"""``gemm_wgmma`` and ``gemm_mma`` on int8 x whose groups have scales, without a GPU: as ``test_emulated_int8.py``, sums scaled by group."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from results.measure.ablation.sums_variants import magic_add, magic_start
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate, check_exact, check_guards, guarded_output
from tilebit.layouts.formats import INT8
from tilebit.schedules.gemm.codecs import CODECS, CONVERSIONS, GROUPED_BYTES
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.emulated_gemm import ORDERS, Case, Edits, EmulatedGemm
from emulation.planted import swap
from gemm_cases import GROUP_WISE, label
from lanes import one_of_each

pytestmark = needs_host_compiler
HOPPER = replace(target_from_name("sm_90a"), units=5)  # as in test_emulated_gemm.py
TARGET = {"gemm_wgmma": HOPPER, "gemm_mma": target_from_name("sm_80")}
BYTES, NIBBLES = GROUP_WISE

# Ragged m, n and k: k = 576 ends in half a group, 300 and 1000 in the middle of one, 64 is less than one.
CASES = (
    (Workload(40, 190, 576, NIBBLES, "bfloat16", bias=True), Schedule("gemm_wgmma", 128, 32, 128, 3, 8)),
    (Workload(13, 100, 300, BYTES), Schedule("gemm_wgmma", 64, 16, 128, 4, 4)),
    (Workload(33, 250, 1000, BYTES, bias=True), Schedule("gemm_wgmma", 256, 32, 128, 2, 8)),
    (Workload(7, 505, 64, NIBBLES), Schedule("gemm_wgmma", 64, 16, 128, 2, 4)),
    (Workload(20, 190, 448, NIBBLES), Schedule("gemm_wgmma", 192, 48, 128, 3, 12)),
    # shared tiles: by a cluster, through a workspace, in shares that cross their borders
    (Workload(40, 128, 576, BYTES, bias=True), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=2)),
    (Workload(20, 100, 896, NIBBLES, "bfloat16"), Schedule("gemm_wgmma", 64, 16, 128, 2, 4, split_k=3)),
    (Workload(60, 190, 1472, BYTES, "bfloat16"), Schedule("gemm_wgmma", 64, 16, 128, 2, 4, stream_k=True)),
    (Workload(40, 120, 1100, BYTES, "bfloat16", bias=True), Schedule("gemm_wgmma", 64, 32, 128, 2, 4, split_k=4)),
    # blocks that share x; strips of a last wave
    (Workload(70, 256, 1150, NIBBLES, bias=True), Schedule("gemm_wgmma", 128, 32, 128, 3, 4, raster=2, stream_k=True, cluster=2)),
    (Workload(100, 190, 512, BYTES), Schedule("gemm_wgmma", 64, 32, 128, 3, 4, tail=2)),
    (Workload(150, 384, 576, NIBBLES), Schedule("gemm_wgmma", 64, 64, 128, 4, 4, cluster=2, tail=4)),
)
# Stored directly and through shared memory; shared tiles.
MMA_CASES = (
    (Workload(20, 190, 576, NIBBLES, "bfloat16", bias=True), Schedule("gemm_mma", 64, 16, 128, 3, 4)),
    (Workload(40, 250, 1000, BYTES), Schedule("gemm_mma", 256, 32, 128, 2, 16)),
    (Workload(7, 505, 300, BYTES, "bfloat16"), Schedule("gemm_mma", 128, 8, 128, 3, 8, split_k=3)),
    (Workload(70, 100, 64, NIBBLES, bias=True), Schedule("gemm_mma", 128, 64, 128, 2, 8)),
    (Workload(35, 190, 896, NIBBLES), Schedule("gemm_mma", 64, 32, 128, 2, 4, split_k=7)),
)
ALL = (*CASES, *MMA_CASES)


def emulated(case: Case, order: str = "shuffled", seed: int = 0, edits: Edits | None = None) -> EmulatedGemm:
    workload, schedule = case
    return EmulatedGemm(
        workload, schedule, edits, together=ALL if edits is None else (), target=TARGET[schedule.program], order=order, seed=seed
    )


@pytest.mark.parametrize("case", one_of_each(ALL, lambda case: (case[1].program, case[0].format)), ids=label)
def test_exact(case: Case):
    assert legal(*case, TARGET[case[1].program]) == []
    problem = exact_problem(case[0], ALL.index(case), "sm_90a")
    reference, output = problem.reference(), guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
    assert reference.to(output.y.dtype).isfinite().all()
    emulated(case)(problem, output.y)
    assert check_guards(output) == []
    assert check_exact(output.y, reference) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", (*CASES[6:8], MMA_CASES[2]), ids=label)
def test_the_order_of_blocks_does_not_show(case: Case):
    problem, results = random_problem(case[0], 3, "sm_90a"), []
    for seed, order in enumerate(ORDERS):
        output = guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
        emulated(case, order, seed)(problem, output.y)
        results.append(output.y)
    assert results[0].isfinite().all() and all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize("case", (*CASES[1:3], MMA_CASES[0]), ids=label)
def test_the_tuner_s_gate_accepts(case: Case):
    gate = Gate(exact_problem(case[0], 1, "sm_90a"), random_problem(case[0], 2, "sm_90a"))
    verdict = gate.verify(emulated(case))
    assert verdict.ok, verdict.reasons


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("case", (CASES[1], pytest.param(MMA_CASES[2], marks=pytest.mark.slow)), ids=label)
def test_the_largest_sum_of_a_group_is_exact(case: Case, conversion: str, monkeypatch: pytest.MonkeyPatch):
    """Sums of 2^21 - 255 and 2^21 - 384, negative and positive, of which no bit may be lost: their sum and a bias leave 1 and -1."""
    monkeypatch.setitem(CODECS, ("uint", INT8, 128), replace(GROUPED_BYTES, conversion=conversion))
    w, schedule = replace(case[0], dtype="float16", k=256, bias=True), replace(case[1], split_k=1)
    problem = random_problem(w, 1, "sm_90a")
    codes = np.zeros((w.n, w.k), np.uint8)  # -128
    codes[:, 0] = 255
    problem.operands["weight"] = torch.from_numpy(problem.layout.pack(codes).view(np.int32))
    problem.operands["scales"].fill_(1.0)
    problem.operands["token_scales"].fill_(1.0)
    problem.operands["bias"].fill_(-16128.0)
    problem.x[:, :128], problem.x[:, 128:], problem.x[:, 0] = -128, 127, 127
    problem.x[1, :128], problem.x[1, 0], problem.x[1, 128:131], problem.x[1, 131:] = 127, -127, -127, -128
    output = torch.empty(w.m, w.n, dtype=torch.float16)
    EmulatedGemm(w, schedule, target=TARGET[schedule.program])(problem, output)
    expected = torch.ones_like(output)
    expected[1] = -1
    assert torch.equal(output, expected)


@pytest.mark.parametrize("variant", (magic_add, magic_start), ids=("magic_add", "magic_start"))
@pytest.mark.parametrize(
    "case", one_of_each((*CASES[:1], *CASES[6:7], *CASES[10:], *MMA_CASES[:1], *MMA_CASES[4:]), lambda case: case[1].program), ids=label
)
def test_conversions_of_sums_are_exact(case: Case, variant: ModuleType):
    """Tiles, tiles in parts, strips: each group's sums start anew."""
    posed = (replace(case[0], format=variant.FORMAT), case[1])
    problem = exact_problem(posed[0], ALL.index(case), "sm_90a")
    output = guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
    EmulatedGemm(*posed, target=TARGET[case[1].program])(problem, output.y)
    assert check_guards(output) == []
    assert check_exact(output.y, problem.reference()) == []


ADDED, STARTED = ((replace(CASES[0][0], format=variant.FORMAT), CASES[0][1]) for variant in (magic_add, magic_start))
STARTED_MMA = (replace(MMA_CASES[0][0], format=magic_start.FORMAT), MMA_CASES[0][1])
END_OF_STEP = "            release(empty[stage * parts], thread, 1)\n\n        return multiply\n\n    @T.macro\n    def add_group"
RELEASE = "release(empty[last * parts + 1], thread, "
WAIT = "T.wait_wgmma(0)\n        "
FENCE = 'T.call_extern("handle", "tilebit::fence_before_bulk_copies")\n                    '
ADD, ADD_LAST = "add_group(kind, products, Y, Ss, As, thread, last, joined, j > 0)", "thread, last, joined, True)"
PLANTED: dict[str, tuple[Case, str, tuple[tuple[str, str], ...]]] = {
    "the scale of the neighbour group": (CASES[2], "operands.py", (("return step * self.sch", "return (step ^ 1) * self.sch"),)),
    "token scales of the neighbour group": (CASES[2], "wgmma_load.py", (("step, top, m, T.addr", "step ^ 1, top, m, T.addr"),)),
    "token scales of the tile above": (CASES[0], "device", (("(inside ? top + column : 0)", "(inside ? column : 0)"),)),
    "token scales past the last row": (CASES[1], "device", (("const bool inside = top + column < m;", "const bool inside = true;"),)),
    "token scales are not waited for": (CASES[0], "device", (("arrive_after_copies(barrier);\n}\n\n}", "arrive(barrier);\n}\n\n}"),)),
    "the scales of the stage to come": (CASES[0], "wgmma.py", ((ADD, ADD.replace("last", "stage")),)),
    "a row's scale is that of the row 8 above": (CASES[1], "device", (("rows[slab][i >> 1]", "rows[slab][0]"),)),
    "a column's scale is its neighbour's": (CASES[1], "device", (("i & 1 ? columns.y : columns.x", "columns.x"),)),
    "a slab's scales are another's": (CASES[0], "device", (("(thread >> 7) * (SLABS * 64)", "0"),)),
    "a stale group accumulator": (CASES[1], "wgmma.py", (("clear_accum=not p.magic_start", "clear_accum=j == 0"),)),
    "stale sums of the tile before": (CASES[7], "device", (("sums[i] = 0.0f;", ";"),)),
    "the last group is left out": (CASES[1], "wgmma.py", ((ADD_LAST, ADD_LAST.replace("True", "False")),)),
    "no group but the last": (CASES[1], "wgmma.py", ((ADD, ADD.replace("j > 0", "False")),)),
    "a group before the first": (CASES[1], "wgmma.py", ((ADD, ADD.replace("j > 0", "True")),)),
    "the magic number's bias stays": (ADDED, "device", ((": v) - MAGIC", ": v)"),)),
    "bits are taken for a number": (ADDED, "device", (("MAGIC_ADD ? v + MAGIC_BITS", "MAGIC_ADD ? v"),)),
    "sums start at nothing": (STARTED, "device", (("sums[i] = MAGIC_BITS", "sums[i] = 0"),)),
    "sums start once": (STARTED, "wgmma.py", (("if p.magic_start:", "if p.magic_start and kind > 0:"),)),
    "sums start and are cleared": (STARTED, "wgmma.py", (("clear_accum=not p.magic_start", "clear_accum=True"),)),
    "mma.sync: sums start and are cleared": (STARTED_MMA, "mma.py", (("stepped and not p.magic_start", "stepped"),)),
    "zero points are added": (CASES[0], "device", (("(128u - z) * 0x01010101u", "(128u + z) * 0x01010101u"),)),
    "the exclusive or of zero points is missing": (CASES[0], "device", (("(codes + offsets) ^ 0x80808080u", "codes + offsets"),)),
    "added before the product is there": (CASES[0], "wgmma.py", ((WAIT + "T.call_extern(", "T.call_extern("),)),
    "mma.sync: the scale of the neighbour group": (
        MMA_CASES[1],
        "operands.py",
        (("return step * self.sch", "return (step ^ 1) * self.sch"),),
    ),
    "mma.sync: token scales of the neighbour group": (MMA_CASES[1], "mma.py", (("token_scales[step, by", "token_scales[step ^ 1, by"),)),
    "mma.sync: token scales of the tile above": (MMA_CASES[0], "mma.py", (("token_scales[step, by * bm]", "token_scales[step, 0]"),)),
    "mma.sync: a stale group accumulator": (MMA_CASES[0], "mma.py", (("clear_accum=stepped", "clear_accum=False"),)),
    "mma.sync: a group's sums leave the block": (MMA_CASES[2], "mma.py", (("(Y if stepped else sums).access", "sums.access"),)),
    "mma.sync: the last group alone": (MMA_CASES[0], "mma.py", (("if integer and not stepped:", "if integer:"),)),
    "the stage is released before its scales are read": (
        CASES[2],
        "wgmma.py",
        (
            (END_OF_STEP, f"            T.wait_wgmma(0)\n            release(empty[stage * parts + 1], thread, 1)\n{END_OF_STEP}"),
            (f"{RELEASE}j)\n            if p", f"{RELEASE}0)\n            if p"),
            (f"{FENCE}{RELEASE}1)", f"{FENCE}{RELEASE}0)"),
        ),
    ),
}


@pytest.mark.parametrize("bug", one_of_each(PLANTED, lambda bug: PLANTED[bug][1]))
def test_planted_bugs_are_caught(bug: str):
    case, file, edits = PLANTED[bug]
    problem = exact_problem(case[0], 1, "sm_90a")
    output = guarded_output((case[0].m, case[0].n), getattr(torch, case[0].dtype))
    try:
        emulated(case, edits={file: swap(*edits)})(problem, output.y)
    except KernelFault:
        return
    assert check_guards(output) or check_exact(output.y, problem.reference())
