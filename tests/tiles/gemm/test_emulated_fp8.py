"""``gemm_wgmma`` and ``gemm_mma`` on e4m3 x, without a GPU: as ``test_emulated_groups.py``, whose machinery they share. Products are summed
with the 14 bits that tensor cores keep of e4m3 (``tile_language.e4m3_product``)."""

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
from emulation.emulated_gemm import Case, Edits, EmulatedGemm
from emulation.planted import swap
from gemm_cases import FP8_FORMATS, label, one_large_step
from lanes import one_of_each

pytestmark = needs_host_compiler
HOPPER = replace(target_from_name("sm_90a"), units=5)  # as in test_emulated_gemm.py
TARGET = {"gemm_wgmma": HOPPER, "gemm_mma": target_from_name("sm_89")}
CHANNELS, BLOCKS, NIBBLES = FP8_FORMATS

# Ragged m, n and k: of those whose sums leave the tensor cores step by step 300 and 1000 end in the middle of one, 576 in half of one.
CASES = (
    (Workload(40, 190, 576, CHANNELS, "bfloat16", bias=True), Schedule("gemm_wgmma", 128, 32, 64, 3, 8)),
    (Workload(13, 100, 300, BLOCKS), Schedule("gemm_wgmma", 64, 16, 128, 4, 4)),
    (Workload(20, 190, 1000, NIBBLES, bias=True), Schedule("gemm_wgmma", 192, 48, 128, 3, 12)),
    (Workload(7, 250, 64, CHANNELS), Schedule("gemm_wgmma", 256, 16, 64, 2, 8)),
    # shared tiles: by a cluster, through a workspace, in shares that cross their borders; blocks that share x; strips of a last wave
    (Workload(40, 128, 576, NIBBLES, bias=True), Schedule("gemm_wgmma", 128, 64, 128, 2, 8, split_k=2)),
    (Workload(20, 100, 896, CHANNELS, "bfloat16"), Schedule("gemm_wgmma", 64, 16, 128, 2, 4, split_k=3)),
    (Workload(60, 190, 1472, CHANNELS), Schedule("gemm_wgmma", 64, 16, 64, 2, 4, stream_k=True)),
    (Workload(70, 256, 1150, BLOCKS, "bfloat16"), Schedule("gemm_wgmma", 128, 32, 128, 3, 4, raster=2, stream_k=True, cluster=2)),
    (Workload(150, 384, 576, NIBBLES), Schedule("gemm_wgmma", 64, 64, 128, 4, 4, cluster=2, tail=4)),
    # channels by an index
    (Workload(20, 100, 300, CHANNELS, width=190), Schedule("gemm_wgmma", 64, 16, 64, 2, 4)),
)
# Stored directly and through shared memory; shared tiles.
MMA_CASES = (
    (Workload(20, 190, 576, CHANNELS, "bfloat16", bias=True), Schedule("gemm_mma", 64, 16, 64, 3, 4)),
    (Workload(40, 250, 1000, BLOCKS), Schedule("gemm_mma", 256, 32, 128, 2, 16)),
    (Workload(7, 505, 300, NIBBLES, "bfloat16"), Schedule("gemm_mma", 128, 8, 128, 3, 8, split_k=3)),
    (Workload(35, 190, 896, CHANNELS), Schedule("gemm_mma", 64, 32, 128, 2, 4, split_k=7)),
)
ALL = (*CASES, *MMA_CASES)


def emulated(case: Case, edits: Edits | None = None) -> EmulatedGemm:
    return EmulatedGemm(*case, edits, together=ALL if edits is None else (), target=TARGET[case[1].program])


def wrong(case: Case, edits: Edits | None = None) -> list[str]:
    """What the exact oracle says of the kernel, or of one with ``edits``."""
    problem = exact_problem(case[0], ALL.index(case), "sm_90a")
    reference, output = problem.reference(), guarded_output((case[0].m, case[0].columns), getattr(torch, case[0].dtype))
    assert case[0].width or reference.to(output.y.dtype).isfinite().all()
    emulated(case, edits)(problem, output.y)
    return check_guards(output) + check_exact(output.y, reference)


@pytest.mark.parametrize("case", one_of_each(ALL, lambda case: (case[1].program, case[0].format)), ids=label)
def test_exact(case: Case):
    assert legal(*case, TARGET[case[1].program]) == []
    assert wrong(case) == []


@pytest.mark.parametrize("case", one_of_each((*CASES[:3], MMA_CASES[0]), lambda case: case[0].format), ids=label)
def test_the_tuner_s_gate_accepts(case: Case):
    """Random numbers: every finite code, and sums of 14 bits."""
    random = random_problem(case[0], 2, "sm_90a")
    verdict = Gate(exact_problem(case[0], 1, "sm_90a"), random, sums_error=random.sums_error).verify(emulated(case))
    assert verdict.ok, verdict.reasons


@pytest.mark.parametrize("program", ["gemm_wgmma", "gemm_mma"])
def test_long_sums_of_groups_keep_their_bits(program: str):
    problem, expected = one_large_step(BLOCKS)
    y = torch.empty_like(expected)
    emulated((problem.workload, Schedule(program, 64, 16, 128, 2, 4)))(problem, y)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("program", ["gemm_wgmma", "gemm_mma"])
def test_long_sums_of_whole_rows_keep_fourteen_bits(program: str):
    """They stay on tensor cores: what is less than 2^-13 of them is lost."""
    problem, expected = one_large_step(CHANNELS)
    y = torch.empty_like(expected)
    emulated((problem.workload, Schedule(program, 64, 16, 128, 2, 4)))(problem, y)
    assert torch.equal(y, torch.full_like(y, 65536 / 64)) and not torch.equal(y, expected)


ADD, ADD_LAST = "add_group(kind, products, Y, Ss, As, thread, last, joined, j > 0)", "thread, last, joined, True)"
PLANTED: dict[str, tuple[Case, str, tuple[tuple[str, str], ...]]] = {
    "registers of rows r and r + 8 are exchanged": (CASES[0], "device", (("a[i] = words[i];", "a[i ^ 1] = words[i];"),)),
    "a nibble's sign is left out": (CASES[2], "device", (("below * 0x81u", "below"),)),
    "8 - q is one too small": (CASES[2], "device", (("below * 0x81u", "below * 0x80u"),)),
    "nibbles stay 2^9 too small": (CASES[2], "device", (("low * 8]) * UNIT;", "low * 8]);"),)),
    "the scale of the neighbour group": (CASES[2], "operands.py", (("return step * self.sch", "return (step ^ 1) * self.sch"),)),
    "token scales of the neighbour group": (CASES[7], "wgmma_load.py", (("step, top, m, T.addr", "step ^ 1, top, m, T.addr"),)),
    "the scales of the stage to come": (CASES[2], "wgmma.py", ((ADD, ADD.replace("last", "stage")),)),
    "a stale step": (CASES[2], "wgmma.py", (("clear_accum=not p.magic_start", "clear_accum=j == 0"),)),
    "the last step is left out": (CASES[2], "wgmma.py", ((ADD_LAST, ADD_LAST.replace("True", "False")),)),
    "a step before the first": (CASES[2], "wgmma.py", ((ADD, ADD.replace("j > 0", "True")),)),
    "mma.sync: a stale step": (MMA_CASES[1], "mma.py", (("clear_accum=stepped", "clear_accum=False"),)),
    "mma.sync: a step's sums leave the block": (MMA_CASES[2], "mma.py", (("(Y if stepped else sums).access", "sums.access"),)),
    "mma.sync: token scales of the tile above": (MMA_CASES[1], "mma.py", (("token_scales[step, by * bm]", "token_scales[step, 0]"),)),
}


@pytest.mark.parametrize("bug", one_of_each(PLANTED, lambda bug: PLANTED[bug][1]))
def test_planted_bugs_are_caught(bug: str):
    case, file, edits = PLANTED[bug]
    try:
        assert wrong(case, {file: swap(*edits)})
    except KernelFault:
        return
