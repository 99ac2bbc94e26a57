"""Bugs planted in the GEMM programs are caught by the gate that the tuner and the GPU tests use; the same kernel without the bug passes it.

The CUDA programs run emulated, the CPU program as compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from lanes import one_of_each
from sample.two_levels import FORMAT as TWO_LEVELS

from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate, check_worst_tile, guarded_output
from tilebit.autotune.worker_process import launch
from tilebit.schedules.gemm import stream
from tilebit.schedules.gemm.cpu import cpu_legal, isa
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import detect_target, target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

sys.path.append(str(Path(__file__).parents[1]))
from emulation import planted, planted_any_binary, planted_any_cuda, planted_any_wgmma, planted_cpu, planted_loops, planted_stream
from emulation.device_code import KernelFault, needs_host_compiler
from emulation.emulated_gemm import Edits, EmulatedGemm
from emulation.generated_gemm import GeneratedGemm
from emulation.planted import SPLIT, W4, W8, Bug, swap, work

BUGS = (
    *planted.BUGS, *planted_loops.BUGS, *planted_stream.BUGS, *planted_any_cuda.BUGS, *planted_any_binary.BUGS, *planted_any_wgmma.BUGS,
)  # fmt: skip
HOPPER = replace(target_from_name("sm_90a"), units=5)  # so few that a small grid of stream_k has waves and shares
TARGET = {
    "gemm_wgmma": HOPPER, "gemm_mma": target_from_name("sm_80"), "gemm_stream": HOPPER, "gemm_stream_bulk": HOPPER, "gemm_any": HOPPER,
    "gemm_any_binary": HOPPER, "gemm_any_wgmma": HOPPER,
}  # fmt: skip
GENERATED = (*stream.ARCHES, "gemm_any", "gemm_any_binary", "gemm_any_wgmma")


@cache
def sound_problems(workload: Workload):
    return exact_problem(workload, 1, "sm_90a"), random_problem(workload, 2, "sm_90a")


def emulated(workload: Workload, schedule: Schedule, edits: Edits | None = None) -> EmulatedGemm | GeneratedGemm:
    """Tiled programs run on a stand-in for TileLang, the others as what TileLang generates."""
    if schedule.program in GENERATED:
        return GeneratedGemm(workload, schedule, TARGET[schedule.program], edits)
    cases = [(bug.workload, bug.schedule) for bug in BUGS if bug.schedule.program not in GENERATED]
    return EmulatedGemm(workload, schedule, edits, together=cases, target=TARGET[schedule.program])


@cache
def sound_gate(workload: Workload) -> Gate:
    return Gate(*sound_problems(workload))


@cache
def sound_verdict(workload: Workload, schedule: Schedule):
    """What the gate says of the kernel as it is."""
    return sound_gate(workload).verify(emulated(workload, schedule))


def test_there_are_enough_of_them():
    assert len(BUGS) >= 15
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@needs_host_compiler
@pytest.mark.parametrize("bug", one_of_each(BUGS, lambda bug: bug.schedule.program), ids=lambda bug: bug.name.replace(" ", "-"))
def test_caught(bug: Bug):
    assert legal(bug.workload, bug.schedule, TARGET[bug.schedule.program]) == []
    sound = sound_verdict(bug.workload, bug.schedule)
    assert sound.ok, sound.reasons
    gate = Gate(*map(bug.packed, sound_problems(bug.workload))) if bug.order else sound_gate(bug.workload)
    try:
        reasons = gate.verify(emulated(bug.workload, bug.schedule, bug.edits)).reasons
    except KernelFault as fault:
        reasons = (str(fault),)
    assert reasons, f"{bug.name} passed the gate"
    assert any(bug.sign in reason for reason in reasons), reasons


@needs_host_compiler
def test_a_sum_in_order_of_arrival_is_caught():
    """The first two splits cancel, so that the order of the three shows in fp16."""
    workload, schedule = work(W4, k=576), SPLIT
    _, random = sound_problems(workload)
    x = random.x * torch.where(torch.arange(576) < 384, 1024, 1)
    x[:, 192:384] = -x[:, :192]
    operands = {name: tensor.clone() for name, tensor in random.operands.items()}
    operands["weight"][:, 3:6] = operands["weight"][:, :3]
    operands["scales"][3:6] = operands["scales"][:3]
    problem = replace(random, x=x, operands=operands)

    def launched(order: str, edits: Edits | None = None) -> torch.Tensor:
        output = guarded_output((workload.m, workload.n), torch.float16)
        EmulatedGemm(workload, schedule, edits, order=order)(problem, output.y)
        return output.y

    bug = {"device": swap(("(int64_t(tile) * splits + s)", "(int64_t(tile) * splits + (s + split) % splits)"))}
    assert torch.equal(launched("ascending"), launched("descending"))
    assert not torch.equal(launched("ascending", bug), launched("descending", bug))


@needs_host_compiler
def test_a_missing_barrier_is_seen():
    """Threads that do not wait for thread 0's ticket read an old one: the emulated block does not run them in step."""
    workload = work(W4, k=576)
    unguarded = swap(("sync_group<BARRIER, THREADS>(0);\n  return arrived;", "return arrived;"))
    with pytest.raises(AssertionError, match="threads of a block disagree"):
        EmulatedGemm(workload, SPLIT, {"device": unguarded})(sound_problems(workload)[0], guarded_output((13, 128), torch.float16).y)


def global_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float((y.double() - reference).norm() / reference.norm())


@needs_host_compiler
def test_a_bug_that_a_global_norm_lets_pass():
    """One 64 x 8 tile of the output loses its last k stage: under 2 % of the whole, and far more than its block of 128 x 128 may lose."""
    workload, schedule = work(W8, m=128, n=256, k=2048), Schedule("gemm_mma", 64, 8, 32, 4, 4)
    problem = random_problem(workload, 2, "sm_90a")
    reference, torch_result = problem.reference(), problem.torch_result()
    trips = "T.min(steps, p.steps - bz * steps)"
    edits = {"mma.py": swap((trips, f"{trips} - (bx == 3 and by == 5)"))}
    output = guarded_output((workload.m, workload.n), problem.x.dtype)
    EmulatedGemm(workload, schedule, edits)(problem, output.y)
    assert global_error(output.y, reference) < 0.02
    assert check_worst_tile(output.y, reference, torch_result)
    output.y[5 * 8 : 6 * 8, 3 * 64 : 4 * 64] = reference[5 * 8 : 6 * 8, 3 * 64 : 4 * 64].half()
    assert check_worst_tile(output.y, reference, torch_result) == []  # all else is right


def test_a_lost_tile_that_a_global_norm_lets_pass():
    """At the size of a model's layer a whole tile of zeros is less than 1 % of the norm."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 32, generator=generator) for rows in (2048, 4096))
    reference = x.double() @ w.double().t()
    y = reference.half()
    torch_result = x.half() @ w.half().t()
    y[512:520, 1024:1088] = 0
    assert global_error(y, reference) < 0.01
    assert check_worst_tile(y, reference, torch_result)


# The CPU program

CPU_WORKLOAD = work(TWO_LEVELS, bias=True, m=5, n=100, k=448)
CPU_SCHEDULE = Schedule("gemm_cpu", 32, 2, 32, num_warps=1, split_k=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    if isa(detect_target("cpu")) is None:
        pytest.skip("needs a processor with AVX2 or AVX-512")
    if find_spec("tvm") is None:
        pytest.skip("apache-tvm is not installed (pip install tilebit[compile])")
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as one:
        yield one


@cache
def cpu_gate() -> Gate:
    return Gate(exact_problem(CPU_WORKLOAD, 1, "cpu"), random_problem(CPU_WORKLOAD, 2, "cpu"))


@pytest.mark.parametrize("name", one_of_each(planted_cpu.BUGS, lambda name: "any"), ids=lambda name: name.replace(" ", "-"))
def test_caught_on_the_cpu(pool: CompilePool, name: str):
    target = detect_target("cpu")
    assert cpu_legal(CPU_WORKLOAD, CPU_SCHEDULE, target) == []
    verdicts = []
    for number in (0, 1 + list(planted_cpu.BUGS).index(name)):
        schedule = replace(CPU_SCHEDULE, program=planted_cpu.NAME, raster=number)
        (kernel,) = pool.compile([CompileRequest(planted_cpu.NAME, CPU_WORKLOAD, schedule, target)])
        assert isinstance(kernel, Kernel), kernel
        verdicts.append(cpu_gate().verify(partial(launch, kernel.load(), {})))
    sound, bugged = verdicts
    assert sound.ok, sound.reasons
    assert not bugged.ok, f"{name} passed the gate"
    assert any(planted_cpu.BUGS[name][2] in reason for reason in bugged.reasons), bugged.reasons


@needs_host_compiler
def test_a_bug_that_no_longer_applies_is_an_error():
    """Else a renamed variable would turn a planted bug into a second baseline."""
    with pytest.raises(LookupError, match="plant it elsewhere"):
        gemm = EmulatedGemm(work(W4), BUGS[0].schedule, {"device": swap(("not in any header", ""))})
        gemm(exact_problem(work(W4), 1, "sm_90a"), guarded_output((13, 128), torch.float16).y)
