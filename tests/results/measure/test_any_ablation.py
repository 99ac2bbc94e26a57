"""The ablation of any precision: every variant computes what it should from the operands in its form, every step tries schedules of its own
program, and the fastest verified kernel of each stands in a row that the results page reads."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulation import device_code
from emulation.device_code import needs_host_compiler
from emulation.generated_gemm import GeneratedGemm
from toolchain import needs_nvcc

from results.measure.ablation import gemm as measure
from results.measure.ablation.any import row, workloads
from results.measure.ablation.any_variants import apart, merged, permuted, plain, selected, turned
from results.measure.ablation.any_variants.variant import FORMS
from results.measure.ablation.compiled import compiled
from results.measure.ablation.gemm import Bench, Contender, climb
from results.measure.ablation.steps_any import STEPS, TRIED, drawn, steps_of
from results.report.ablation import ANY_FIELDS, any_ablation_section
from tilebit.autotune.measure import Timing
from tilebit.autotune.problems.gemm_drawn import exact_problem
from tilebit.autotune.problems.verify import check_exact, check_guards, guarded_output
from tilebit.layouts.formats import GemmFormat, QuantFormat
from tilebit.schedules.gemm import any_binary
from tilebit.schedules.gemm.any import PROGRAM
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal, params
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

HOPPER = target_from_name("sm_90a")
VARIANTS = [module.PROGRAM.name for module in (plain, permuted, turned, selected, apart, merged)]


def form(bits: int) -> GemmFormat:
    return GemmFormat.parse(f"w{bits}a16_any")


CASES = [
    (Workload(m, n, k, form(bits), dtype), Schedule(name, block_n, block_m, 1, stages, warps, split_k))
    for name, (m, n, k, bits, dtype, block_n, block_m, stages, warps, split_k) in product(
        VARIANTS,
        (
            (1, 40, 1000, 3, "float16", 32, 1, 2, 2, 1),
            (3, 48, 768, 4, "bfloat16", 16, 4, 1, 2, 2),
            (9, 33, 520, 8, "float16", 16, 16, 2, 2, 1),
        ),
    )
    if not (name == merged.PROGRAM.name and bits == 8)
]


def emulated(workload: Workload, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> GeneratedGemm:
    monkeypatch.setitem(device_code.CUDA_ARCH, schedule.program, 800)
    return GeneratedGemm(workload, schedule, HOPPER)


@needs_host_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1].program.rpartition('.')[2]}-w{case[0].format.bits}")
def test_every_variant_is_exact(case: tuple[Workload, Schedule], monkeypatch: pytest.MonkeyPatch) -> None:
    workload, schedule = case
    assert legal(workload, schedule, HOPPER) == []
    problem = exact_problem(workload, 1, "sm_90a")
    read = replace(problem, operands=FORMS[schedule.program](problem)) if schedule.program in FORMS else problem
    output = guarded_output((workload.m, workload.n), problem.x.dtype)
    emulated(workload, schedule, monkeypatch)(read, output.y)
    assert check_guards(output) == [] and check_exact(output.y, problem.reference()) == []


@needs_host_compiler
@pytest.mark.parametrize("step", [step for step in STEPS if step.program in FORMS], ids=lambda step: step.idea)
def test_the_bench_gives_each_program_its_operands(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass the gate; those of the library's kernel do not."""
    monkeypatch.setattr(measure, "DEVICE", "cpu")
    workload, schedule = Workload(1, 64, 512, form(4)), Schedule(step.program, 16, 1, 1, 1, 2)
    gemm, names = emulated(workload, schedule, monkeypatch), params(workload, schedule, HOPPER)
    loaded = SimpleNamespace(params=names, run=lambda *tensors: gemm.launch(dict(zip(names, tensors, strict=True))), run_dependent=None)
    kernel: Any = SimpleNamespace(schedule=schedule, load=lambda: loaded)
    target = replace(HOPPER, l2=0)
    for forms, right in ((FORMS, True), ({}, False)):
        bench = measure.Bench(workload, target, forms=forms)
        assert (bench.verified(bench.contender(step, kernel)) is not None) == right


def test_plain_planes_are_rows_of_bits() -> None:
    problem = exact_problem(Workload(1, 70, 300, form(3)), 0, "sm_90a")
    rows = FORMS[plain.PROGRAM.name](problem)["weight"].numpy().view(np.uint32).reshape(3, 128, 16)
    codes = problem.layout.unpack(problem.operands["weight"][0].numpy().view(np.uint32), 70, 300)
    assert all(rows[0, n, k // 32] >> k % 32 & 1 == codes[n, k] for n, k in product((0, 9, 69), range(300)))


def test_unrotated_planes_all_lie_as_the_first() -> None:
    problem = exact_problem(Workload(1, 70, 300, form(8)), 0, "sm_90a")
    planes = FORMS[turned.PROGRAM.name](problem)["weight"].numpy().view(np.uint32)
    rows = FORMS[plain.PROGRAM.name](problem)["weight"].numpy().view(np.uint32).reshape(8, 128, 16)
    for p in range(8):
        bits = problem.layout.unpack(planes[p], 70, 300)
        assert all(rows[p, n, k // 32] >> k % 32 & 1 == bits[n, k] for n, k in product((0, 9, 69), range(300)))


@pytest.mark.parametrize(
    ("name", "workload", "words"),
    [
        (plain.PROGRAM.name, Workload(1, 64, 256, QuantFormat(4, 128, True)), "bit planes of 3 to 8 bits"),
        (plain.PROGRAM.name, Workload(1, 64, 256, form(2)), "w2a16_any; accepted"),
        (merged.PROGRAM.name, Workload(1, 64, 256, form(5)), "3 to 4 bits"),
        (apart.PROGRAM.name, Workload(1, 64, 256, form(8)), "shared memory"),
    ],
)
def test_what_variants_cannot_do(name: str, workload: Workload, words: str) -> None:
    assert words in " ".join(legal(workload, Schedule(name, 64, 1, 1, 2, 4), HOPPER))


@pytest.mark.parametrize(("bits", "numbers"), [(3, (0, 1, 2, 3, 4, 5, 6, 7)), (4, (0, 1, 2, 3, 4, 5, 7)), (8, (0, 1, 2, 3, 4))])
def test_the_last_steps_of_a_width_are_the_library_s_kernels(bits: int, numbers: tuple[int, ...]) -> None:
    steps = steps_of(bits)
    assert [step.number for step in steps] == [*numbers] and [step.idea for step in steps] == [STEPS[i].idea for i in numbers]
    own = [PROGRAM, any_binary.PROGRAM] if 7 in numbers else [PROGRAM]
    assert [step.program for step in steps] == [*VARIANTS[: len(steps) - len(own)], *own]


@pytest.mark.parametrize("workload", workloads(), ids=lambda w: w.title)
def test_every_step_tries_its_own_program(workload: Workload) -> None:
    found = drawn(workload, HOPPER, [])
    assert tuple(found) == steps_of(workload.format.bits)
    for step, schedules in found.items():
        looks_up = step.program != any_binary.PROGRAM
        assert len(schedules) == len(set(schedules)) and {s.program for s in schedules} == {step.program}
        assert len(schedules) == TRIED if looks_up else 2 <= len(schedules) <= TRIED
        assert not any(legal(workload, s, HOPPER) for s in schedules)
        assert not looks_up or len({s.num_warps for s in schedules[:3]}) == 3


def test_schedules_tuned_for_the_library_s_kernel_come_first() -> None:
    workload = workloads("4096x4096", "4")[0]
    fast, slow, slower = (Schedule(PROGRAM, 16, 1, 1, stages, 8) for stages in (2, 1, 3))
    records = [
        TuningRecord(workload, s, HOPPER.name, HOPPER.arch, HOPPER.units, us=us) for s, us in ((slower, 9.0), (slow, 6.0), (fast, 5.0))
    ]
    elsewhere = TuningRecord(workload, replace(fast, num_stages=4), "another", "sm_80", 108, us=1.0)
    counted = Schedule(any_binary.PROGRAM, 32, 1, 1, 3, 8)
    records.append(TuningRecord(workload, counted, HOPPER.name, HOPPER.arch, HOPPER.units, us=4.0))
    for step, schedules in drawn(workload, HOPPER, [*records, elsewhere]).items():
        if step.program == any_binary.PROGRAM:
            assert schedules[0] == counted
        else:
            assert schedules[:2] == [replace(s, program=step.program) for s in (fast, slow)] and len(schedules) == TRIED


class FakeBench:
    """Times by program; every kernel is right."""

    workload = workloads("4096x4096", "8")[0]

    def contender(self, step: Any, kernel: Schedule) -> Contender:
        loaded: Any = SimpleNamespace(run=id, run_dependent=None)
        return Contender(step.number, step.idea, kernel, loaded, {})

    def verified(self, contender: Contender) -> float:
        return 1e-4

    def time(self, contenders: Any) -> list[Timing]:
        return [Timing(us := 50.0 - 10 * c.step + c.schedule.num_stages, us, us, 1, 20) for c in contenders]


def test_steps_give_rows_that_the_page_reads(tmp_path: Path) -> None:
    bench: Any = FakeBench()
    kernels: Any = {step: [Schedule(step.program, 16, 1, 1, stages, 8) for stages in (2, 1)] for step in steps_of(8)}
    found = climb(bench, kernels, row)
    assert [(r["step"], r["us"], r["tried"], r["bits"]) for r in found] == [(i, 51.0 - 10 * i, 2, 8) for i in range(5)]
    assert {r["op"] for r in found} == {"ablation_any"}
    rows = [{"gpu": "a GPU", "run": "r", **r} for r in found]
    assert all(set(ANY_FIELDS) <= set(r) for r in rows) and any_ablation_section(tmp_path) == ""
    (tmp_path / "a-gpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    section = any_ablation_section(tmp_path)
    assert "4096 x 4096, m = 1, 8 bits" in section and "| 4 | a table for each lane | 11.0 (4.64x) |" in section


@pytest.mark.slow
@needs_nvcc
def test_every_variant_compiles() -> None:
    """Without spills, with the parameters that the benchmark passes. Steps of the library's own programs are compiled by its tests."""
    drawings = [(w, drawn(w, HOPPER, [])) for w in workloads("28672x4096")]
    requests = [CompileRequest(s[0].program, w, s[0], HOPPER) for w, steps in drawings for s in steps.values() if s[0].program in VARIANTS]
    assert {request.program for request in requests} == {*VARIANTS}
    with CompilePool(cache=ArtifactCache(), keep=True) as pool:
        for request, kernel in zip(requests, pool.compile(requests), strict=True):
            assert isinstance(kernel, Kernel), kernel
            assert kernel.params == params(request.workload, request.schedule, HOPPER) and kernel.resources["spills"] == 0


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_step_is_right_on_a_gpu() -> None:
    """Whatever the steps would try, at a size that takes no time."""
    from tilebit.schedules.target import detect_target

    target = detect_target()
    wanted = workloads("1024x1024")
    for workload, kernels in zip(wanted, compiled([(w, drawn(w, target)) for w in wanted], target), strict=True):
        bench = Bench(workload, target, forms=FORMS)
        for step, made in kernels.items():
            assert all(bench.verified(bench.contender(step, kernel)) is not None for kernel in made)
        assert len(climb(bench, {step: made[:1] for step, made in kernels.items()}, row)) == len(steps_of(workload.format.bits))
