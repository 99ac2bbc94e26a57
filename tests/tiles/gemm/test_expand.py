"""The expansion of a weight of any precision without a GPU: the whole kernel that TileLang generates, on every thread of every block, every
number; compiled for every architecture; from how many rows it serves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lanes import one_of_each
from toolchain import needs_nvcc

from tilebit.autotune.problems.expand import ExpandProblem, gate
from tilebit.layouts.formats import CODEBOOK_BITS, GemmFormat
from tilebit.schedules.gemm.expand import LOOKED_AT, PROGRAM, ExpandWorkload, library_from
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal, params, workload_from_json
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

sys.path.append(str(Path(__file__).parents[1]))
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.generated_kernel import GeneratedKernel
from emulation.planted import Edit, swap

H200, AMPERE = target_from_name("sm_90a"), target_from_name("sm_80")
SHAPES = ((100, 1000), (33, 900), (64, 1536), (16, 31))


class Generated(GeneratedKernel):
    guarded = ("y",)

    def __call__(self, problem: ExpandProblem, y: torch.Tensor) -> None:
        self.launch(problem.named(y))


def schedule(warps: int) -> Schedule:
    return Schedule(PROGRAM, 1, 1, 1, num_warps=warps)


CASES = [
    (ExpandWorkload(*SHAPES[bits % len(SHAPES)], bits, ("float16", "bfloat16")[bits % 2]), schedule((2, 4, 8, 16)[bits % 4]))
    for bits in CODEBOOK_BITS
]


@needs_host_compiler
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case[0].bits in (3, 8)), ids=lambda case: case[0].served.replace(" ", "-"))
def test_every_number(case: tuple[ExpandWorkload, Schedule]) -> None:
    workload, how = case
    verdict = gate(workload, 1, AMPERE.arch, "cpu").verify(Generated(workload, how, AMPERE))
    assert verdict.ok, verdict.reasons


BUGS: dict[str, tuple[int, str, Edit]] = {
    "planes in the wrong order": (3, "device", swap(("load_alone(from + p * stride", "load_alone(from + (PLANES - 1 - p) * stride"))),
    "neighbour's codebook": (6, "device", swap(("kept, operand, g, tile, lane)", "kept, operand, g, tile ^ 1, lane)"))),
    "neighbour's codebook, in registers": (3, "device", swap(("thread / 32 % TILES * (ROWS", "(thread / 32 + 1) % TILES * (ROWS"))),
    "numbers of a pair exchanged": (6, "device", swap(("Product::joined(first, second)", "Product::joined(second, first)"))),
    "pairs in the lanes' order": (3, "device", swap(("          gather_pairs(numbers, lane);\n", ""))),
    "rows past the last": (6, "device", swap(("if (row < rows && column", "if (column"))),
    "words of a row exchanged": (6, "device", swap(("(stored, words, u, lane)", "(stored, words, 1 - u, lane)"))),
    "columns of the first step": (6, "expand_any.py", swap(("step * CUDA_TILE_K]), w.columns", "0]), w.columns"))),
    "barrier": (6, "expand_any.py", swap(("            T.sync_threads()\n", ""))),
}  # fmt: skip


@needs_host_compiler
@pytest.mark.parametrize("bug", one_of_each(tuple(BUGS), lambda name: BUGS[name][1]))
def test_planted_bugs_are_caught(bug: str) -> None:
    bits, file, edit = BUGS[bug]
    workload = ExpandWorkload(60, 700, bits)
    try:
        verdict = gate(workload, 1, AMPERE.arch, "cpu").verify(Generated(workload, schedule(2), AMPERE, {file: edit}))
    except KernelFault:
        return
    assert not verdict.ok


COMPILED = (("sm_90a", ExpandWorkload(4096, 4096, 3)), ("sm_80", ExpandWorkload(505, 1001, 8, "bfloat16")))


@needs_nvcc
@pytest.mark.parametrize(("arch", "workload"), COMPILED)
def test_compiles_as_promised(arch: str, workload: ExpandWorkload) -> None:
    target = target_from_name(arch)
    how = (candidates(workload, target) or [])[0]
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        (kernel,) = pool.compile([CompileRequest(PROGRAM, workload, how, target)])
    assert isinstance(kernel, Kernel), kernel
    assert kernel.manifest["lint"] == [] and kernel.params == params(workload, how, target) == ("weight", "scales", "y")
    assert kernel.manifest["prelude"] == "tilebit"
    assert kernel.resources["spills"] == kernel.resources["stack"] == 0


def test_it_serves_many_rows_where_the_weight_is_read_often() -> None:
    """Fewer rows the wider the codes are; 2 bits have no program for many rows, and 3 and 4 need none beside theirs here."""
    first = {bits: library_from(Workload(1, 4096, 4096, GemmFormat.parse(f"w{bits}a16_any")), H200) for bits in CODEBOOK_BITS}
    assert first[3] is first[4] is None and first[2] is not None and first[2] < 257
    wider = [first[bits] or 1 << 30 for bits in CODEBOOK_BITS if bits > 4]
    assert wider == sorted(wider, reverse=True) and wider[0] <= LOOKED_AT[-1] and wider[-1] > 257
    assert library_from(Workload(1, 4096, 4096, GemmFormat.parse("w4a16_g128")), H200) is None
    assert library_from(Workload(1, 4096, 4096, GemmFormat.parse("w4a16_any")), target_from_name("cpu")) is None


def test_workloads() -> None:
    workload = ExpandWorkload(100, 1001, 5, "bfloat16")
    assert workload_from_json(workload.to_json()) == workload and workload.columns == 1008
    assert legal(workload, schedule(3), H200) == ["num_warps is 3; accepted: 16, 8, 4, 2."]
    with pytest.raises(ValueError, match="w9a16_any"):
        ExpandWorkload(4, 4, 9)
