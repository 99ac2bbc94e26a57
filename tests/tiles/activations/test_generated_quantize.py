"""The CUDA program of quantized activations without a GPU: the whole kernel that TileLang generates, on every thread of every block,
through the tuner's gate: every code and scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from emulation import planted_quantize
from emulation.device_code import DeviceCode, KernelFault, needs_host_compiler
from emulation.generated_quantize import GeneratedQuantize
from lanes import one_of_each

from tilebit.autotune.problems import gate_of
from tilebit.autotune.problems.activations import QuantizeGate, edge_problem, random_problem
from tilebit.schedules.activations.operation import chunks, row_threads
from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.headers import device_source

pytestmark = needs_host_compiler
TARGET = replace(target_from_name("sm_90a"), units=3)  # blocks that go through all rows are few, and do
HALF, BFLOAT = "float16", "bfloat16"


def rows(block_m: int, warps: int) -> Schedule:
    return Schedule("quantize_rows", 1, block_m, 1, num_warps=warps)


def through(block_m: int, warps: int, blocks: int) -> Schedule:
    """Blocks that go through all rows."""
    return replace(rows(block_m, warps), num_stages=2, min_blocks=blocks)


CASES = (
    (QuantizeWorkload(5, 2048, HALF), rows(1, 2)),  # two chunks a thread
    (QuantizeWorkload(9, 300, BFLOAT, "e4m3", 128, norm=True, smooth=True), rows(2, 4)),
    (QuantizeWorkload(7, 200, BFLOAT, "int8", 128), rows(4, 4)),
    (QuantizeWorkload(6, 1000, HALF, "e4m3", norm=True, eps=1e-5), rows(1, 4)),
    (QuantizeWorkload(5, 1, HALF), rows(4, 4)),
    (QuantizeWorkload(3, 8200, BFLOAT, "e4m3", smooth=True), rows(1, 8)),  # three chunks, the last mostly empty
    (QuantizeWorkload(4, 127, HALF, "int8", 128, smooth=True), rows(1, 1)),
    (QuantizeWorkload(37, 72, BFLOAT, "int8", norm=True), rows(16, 16)),
    (QuantizeWorkload(2, 16384, HALF, "int8", 128, norm=True), rows(1, 8)),  # four chunks
    (QuantizeWorkload(1, 4096, BFLOAT, "e4m3", 128), rows(1, 8)),
    (QuantizeWorkload(3, 640, HALF, "e4m3", 128), rows(2, 8)),
    (QuantizeWorkload(1, 65536, HALF), rows(1, 32)),
    (QuantizeWorkload(10, 1000, BFLOAT, norm=True, smooth=True), through(1, 2, 1)),
    (QuantizeWorkload(23, 300, HALF, "e4m3", 128, norm=True, smooth=True), through(2, 4, 1)),
    (QuantizeWorkload(9, 1025, HALF), through(1, 4, 2)),
    (QuantizeWorkload(2, 72, BFLOAT, "int8", 128, smooth=True), through(4, 4, 1)),
    (QuantizeWorkload(13, 1000, HALF, "int8", 128, norm=True, smooth=True), through(1, 1, 1)),  # two chunks
    (QuantizeWorkload(5, 1001, HALF, norm=True, eps=1e-5, residual=True, offset=1.0), rows(1, 2)),  # the last chunk is mostly empty
    (QuantizeWorkload(7, 300, BFLOAT, "e4m3", 128, smooth=True, residual=True), rows(2, 4)),
    (QuantizeWorkload(13, 1000, BFLOAT, norm=True, smooth=True, residual=True), through(1, 2, 1)),
    (QuantizeWorkload(7, 300, HALF, gate="silu"), rows(2, 4)),
    (QuantizeWorkload(3, 1032, BFLOAT, "int8", 128, smooth=True, gate="gelu_tanh"), rows(1, 2)),
    (QuantizeWorkload(13, 1000, HALF, "e4m3", smooth=True, gate="silu"), through(1, 2, 1)),
)


def label(case: tuple[QuantizeWorkload, Schedule]) -> str:
    w, s = case
    return f"{w.served.replace(' ', '-')}-{s.block_m}x{s.num_warps}w{s.num_stages}"


def test_the_cases_cover_everything():
    assert all(legal(w, s, TARGET) == [] for w, s in CASES)
    assert {(w.dtype, w.out, w.group) for w, _ in CASES} == {(d, o, g) for d in (HALF, BFLOAT) for o in ("int8", "e4m3") for g in (-1, 128)}
    assert {(w.norm, w.smooth) for w, _ in CASES} == {(n, s) for n in (True, False) for s in (True, False)}
    assert {(w.gate, w.residual, w.offset) for w, _ in CASES} >= {("silu", False, 0), ("gelu_tanh", False, 0), ("", True, 0), ("", True, 1)}
    assert {(bool(w.gate), w.residual) for w, s in CASES if s.num_stages == 2} == {(False, False), (False, True), (True, False)}
    assert {chunks(w, s) for w, s in CASES} == {1, 2, 3, 4} and {row_threads(s) > 32 for _, s in CASES} == {True, False}
    assert {s.num_stages for _, s in CASES} == {1, 2}
    assert max(w.m / (s.block_m * s.min_blocks * TARGET.units) for w, s in CASES if s.num_stages == 2) > 3, "three rows a block and more"
    assert {w.k % 16 for w, _ in CASES} >= {0, 1, 8, 15} and any(w.m % s.block_m for w, s in CASES)


def sort_of(case: tuple[QuantizeWorkload, Schedule]) -> tuple[int, bool, bool, bool, int]:
    w, s = case
    return w.group, w.norm, w.residual, bool(w.gate), s.num_stages


@pytest.mark.parametrize("case", one_of_each(CASES, sort_of), ids=label)
def test_every_code_and_scale(case: tuple[QuantizeWorkload, Schedule]):
    verdict = gate_of(case[0], 1, TARGET.arch, "cpu").verify(GeneratedQuantize(*case, TARGET, seed=1))
    assert verdict.ok, verdict.reasons


@pytest.mark.parametrize("bug", one_of_each(planted_quantize.BUGS, lambda bug: bug.file), ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bugs_are_caught(bug: planted_quantize.Bug):
    assert legal(bug.workload, bug.schedule, TARGET) == []
    gate = QuantizeGate(*(make(bug.workload, seed, TARGET.arch) for seed, make in enumerate((edge_problem, random_problem))))
    try:
        verdict = gate.verify(GeneratedQuantize(bug.workload, bug.schedule, TARGET, bug.edits))
    except KernelFault:
        return
    assert not verdict.ok


PAIRS = """
void e4m3_pairs(const float* x, uint16_t* codes, int count) {
  for (int i = threadIdx.x; i < count; i += 32) codes[i] = tilebit::to_e4m3_pair(x[2 * i], x[2 * i + 1]);
}
"""


@pytest.mark.parametrize("arch", [800, 900])
def test_e4m3_codes_are_those_of_torch(arch: int):
    """By bits and by the instruction: every number of 16 bits, and neighbours of every border between two codes."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    borders = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat((borders, borders.nextafter(torch.tensor(0.0)), borders.nextafter(torch.tensor(1e9))))
    x = torch.cat((halves[halves.abs() <= 448], near, -near))
    x = x[: len(x) // 2 * 2]
    found = np.empty(len(x), np.uint8)
    code = DeviceCode(device_source(("codecs/e4m3.cuh",)) + PAIRS, arch, ["e4m3_pairs"])
    code.call("e4m3_pairs", [(x.data_ptr(), 0), (found.ctypes.data, 0), (len(x) // 2, 0)], 32)
    assert torch.equal(torch.from_numpy(found), x.to(torch.float8_e4m3fn).view(torch.uint8))
