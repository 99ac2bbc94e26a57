"""What stands between products without a GPU: the whole kernels that TileLang generates, on every thread of every block, through the
tuner's gate; compiled for every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.generated_glue import GeneratedGlue
from emulation.planted import Edit, swap
from lanes import one_of_each
from toolchain import needs_nvcc

from tilebit.autotune.problems.glue import gate
from tilebit.schedules.activations.glue import GlueWorkload, chunks
from tilebit.schedules.operations import legal, params
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

TARGET = target_from_name("sm_90a")
HALF, BFLOAT = "float16", "bfloat16"
Case = tuple[GlueWorkload, int]  # and warps

CASES: tuple[Case, ...] = (
    (GlueWorkload("norm", 5, 512, HALF), 2),
    (GlueWorkload("norm", 3, 1032, BFLOAT, residual=True, eps=1e-5), 2),  # three chunks a thread, the last mostly empty
    (GlueWorkload("norm", 7, 72, HALF, residual=True, offset=1.0), 1),
    (GlueWorkload("norm", 1, 4096, BFLOAT, offset=1.0), 16),
    (GlueWorkload("norm", 2, 4096, HALF, residual=True), 4),  # four chunks
    (GlueWorkload("gated", 5, 1000, HALF), 4),  # a block has parts of two rows
    (GlueWorkload("gated", 3, 264, BFLOAT, activation="gelu_tanh"), 1),
    (GlueWorkload("gated", 1, 2048, BFLOAT), 2),
    (GlueWorkload("gated", 2, 72, HALF, activation="gelu"), 1),
)


def schedule_of(case: Case) -> Schedule:
    return Schedule(case[0].op + "_rows", 1, 1, 1, num_warps=case[1])


def label(case: Case) -> str:
    return f"{case[0].served.replace(' ', '-')}-{case[1]}w"


def test_the_cases_cover_everything():
    assert all(legal(case[0], schedule_of(case), TARGET) == [] for case in CASES)
    norms = [case for case in CASES if case[0].op == "norm"]
    assert {(w.residual, w.offset) for w, _ in norms} == {(r, o) for r in (False, True) for o in (0.0, 1.0)}
    assert {chunks(w, schedule_of((w, warps))) for w, warps in norms} >= {1, 3, 4}
    assert {w.activation for w, _ in CASES if w.op == "gated"} == {"silu", "gelu_tanh", "gelu"}


@needs_host_compiler
@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: (case[0].op, case[0].residual)), ids=label)
def test_every_number(case: Case):
    verdict = gate(case[0], 1, TARGET.arch, "cpu").verify(GeneratedGlue(case[0], schedule_of(case), TARGET, seed=1))
    assert verdict.ok, verdict.reasons


NORM, GATED = (GlueWorkload("norm", 3, 1032, HALF, residual=True), 2), (GlueWorkload("gated", 3, 264, HALF), 1)
BUGS: dict[str, tuple[Case, str, Edit]] = {
    "residual kept": (NORM, "device", swap(("*reinterpret_cast<uint4*>(kept) = ", "(void)kept; (void)"))),
    "sum not rounded to the residual": (NORM, "device", swap(("low_of(words[i], T()) + low_of(held[i], T())", "low_of(words[i], T())"))),
    "offset on x": (NORM, "device", swap(("+ R::OFFSET),", "+ 1.0f),"))),
    "last chunk": (NORM, "device", swap(("return column < R::K;", "return column < R::K - 8;"))),
    "one warp's sum": (NORM, "norm_rows.py", swap(("total = total + sums[i]", "total = sums[i]"))),
    "mean of a chunk": (NORM, "device", swap(("float(R::K), R::EPS)", "8.0f, R::EPS)"))),
    "eps forgotten": ((replace(NORM[0], eps=1e-2), 2), "device", swap((", R::EPS)", ", 0.0f)"))),
    "barrier": (NORM, "norm_rows.py", swap(("                T.sync_threads()\n", ""))),
    "gate and what it gates": (GATED, "device", swap(("load_written(from + R::K, ups);", "load_written(from, ups);"))),
    "neighbour's row": (GATED, "device", swap(("row * (2 * R::K) + column", "row * R::K + column"))),
    "last block": (GATED, "gated_rows.py", swap(("T.ceildiv(m * (w.k // CHUNK), threads)", "m * (w.k // CHUNK) // threads"))),
    "upper half": (GATED, "device", swap(("activated(high_of(gates[i], T()))", "activated(low_of(gates[i], T()))"))),
}  # fmt: skip


@needs_host_compiler
@pytest.mark.parametrize("bug", one_of_each(tuple(BUGS), lambda name: BUGS[name][1]))
def test_planted_bugs_are_caught(bug: str):
    case, file, edit = BUGS[bug]
    try:
        verdict = gate(case[0], 1, TARGET.arch, "cpu").verify(GeneratedGlue(case[0], schedule_of(case), TARGET, {file: edit}))
    except KernelFault:
        return
    assert not verdict.ok


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


COMPILED: tuple[tuple[str, Case], ...] = (
    ("sm_90a", (GlueWorkload("norm", 1, 4096, HALF, residual=True), 16)),
    ("sm_80", (GlueWorkload("norm", 1, 32768, BFLOAT, residual=True, offset=1.0), 32)),
    ("sm_86", (GlueWorkload("gated", 1, 14336, BFLOAT, activation="gelu_tanh"), 4)),
    ("sm_89", (GlueWorkload("norm", 16, 4096, BFLOAT), 4)),
    ("sm_90a", (GlueWorkload("gated", 64, 14336, HALF), 8)),
)


@needs_nvcc
@pytest.mark.parametrize("compiled", one_of_each(COMPILED, lambda compiled: compiled[1][0].op), ids=lambda c: f"{c[0]}-{label(c[1])}")
def test_compiles_as_promised(pool: CompilePool, compiled: tuple[str, Case]):
    arch, case = compiled
    target, schedule = target_from_name(arch), schedule_of(case)
    (kernel,) = pool.compile([CompileRequest(schedule.program, case[0], schedule, target)])
    assert isinstance(kernel, Kernel), kernel
    resources, code = kernel.resources, kernel.resources["instructions"]
    assert resources["spills"] == resources["stack"] == code["float_atomics"] == 0
    assert resources["registers"] * resources["threads"] <= 65536
    assert bool(code["dependent_waits"]) == (arch == "sm_90a")
    assert kernel.params == params(case[0], schedule, target)
