"""The CPU's quantization of activations, from compiled TensorIR, through the whole gate: every code and scale."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from cpu_attention import ISA
from cpu_cases import runs_here, target
from emulation import planted_quantize
from lanes import one_of_each

from tilebit.autotune.problems import gate_of
from tilebit.autotune.problems.activations import QuantizeGate, edge_problem, random_problem
from tilebit.autotune.worker_process import launch
from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

pytestmark = pytest.mark.xdist_group("cpu_quantize")
HALF, BFLOAT = "float16", "bfloat16"
CASES = (
    QuantizeWorkload(33, 300, HALF),
    QuantizeWorkload(7, 1, BFLOAT, "e4m3"),
    QuantizeWorkload(5, 15, HALF, "e4m3", 128, norm=True, eps=1e-5),
    QuantizeWorkload(3, 4096, BFLOAT, "int8", 128),
    QuantizeWorkload(12, 257, BFLOAT, "e4m3", 128, smooth=True),
    QuantizeWorkload(9, 1000, BFLOAT, "int8", norm=True, smooth=True),
    QuantizeWorkload(2, 8192, HALF, "e4m3", norm=True),
    QuantizeWorkload(4, 127, HALF, "int8", 128, norm=True, smooth=True),
    QuantizeWorkload(1, 70001, HALF, "int8", smooth=True),
    QuantizeWorkload(9, 1003, HALF, norm=True, eps=1e-5, residual=True, offset=1.0),
    QuantizeWorkload(7, 300, BFLOAT, "e4m3", 128, smooth=True, residual=True),
    QuantizeWorkload(9, 300, HALF, "int8", 128, gate="silu"),
    QuantizeWorkload(5, 333, BFLOAT, "e4m3", smooth=True, gate="gelu_tanh"),
    QuantizeWorkload(5, 333, HALF, gate="gelu"),
)
ISAS = [isa for isa in ("avx512", "avx2") if runs_here(isa) and isa != ISA]


def kind(w: QuantizeWorkload) -> tuple[str, bool, bool, bool]:
    return w.out, w.norm, w.residual, bool(w.gate)


@pytest.fixture(scope="module")
def pool():
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


def kernel_of(
    pool: CompilePool, w: QuantizeWorkload, program: str = "quantize_cpu", isa: str = ISA, threads: int = 2, bug: int = 0
) -> Kernel:
    schedule = Schedule(program, 1, 1, 1, num_warps=threads, raster=bug)
    (kernel,) = pool.compile([CompileRequest(program, w, schedule, target(isa))])
    assert isinstance(kernel, Kernel), kernel
    return kernel


@pytest.mark.parametrize("w", one_of_each(CASES, kind), ids=lambda w: w.served)
def test_every_code_and_scale(pool: CompilePool, w: QuantizeWorkload):
    kernel = kernel_of(pool, w)
    assert kernel.manifest["lint"] == []
    verdict = gate_of(w, 1, "cpu", "cpu").verify(partial(launch, kernel.load(), {}))
    assert verdict.ok, verdict.reasons


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("w", CASES[4:6], ids=lambda w: w.served)
def test_other_instruction_sets(pool: CompilePool, w: QuantizeWorkload, isa: str):
    verdict = gate_of(w, 1, "cpu", "cpu").verify(partial(launch, kernel_of(pool, w, isa=isa, threads=1).load(), {}))
    assert verdict.ok, verdict.reasons


BUGS = one_of_each(planted_quantize.CPU_BUGS, lambda name: ("eps" in name, name[:3] in ("sum", "gat")))


@pytest.mark.parametrize("name", BUGS, ids=lambda n: n.replace(" ", "-"))
def test_planted_bugs_are_caught(pool: CompilePool, name: str):
    w = QuantizeWorkload(9, 300, HALF, "int8", 128, norm="norm" in name or "eps" in name, smooth="factor" in name)
    if name.startswith(("sum", "offset", "gate")):
        w = replace(w, norm=name[0] == "o", offset=float(name[0] == "o"), residual=name[0] != "g", gate="silu" * (name[0] == "g"))
    gate = QuantizeGate(edge_problem(w, 5), random_problem(w, 6))
    kernel = kernel_of(pool, w, planted_quantize.NAME, bug=1 + list(planted_quantize.CPU_BUGS).index(name))
    assert not gate.verify(partial(launch, kernel.load(), {})).ok
