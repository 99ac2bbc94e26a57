"""Attention's ablation: the row-major program computes what it should, every step tries what its idea allows, and the fastest verified
kernel of each stands in a row that the results page reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from defined_kernels import DefinedKernels
from emulation import device_code
from emulation.device_code import needs_host_compiler
from emulation.generated_attention import GeneratedAttention
from toolchain import needs_nvcc

from results.measure.ablation import attention as measure_attention
from results.measure.ablation import row_major
from results.measure.ablation.attention import WORKLOADS, Bench, climb
from results.measure.ablation.steps_attention import (
    APART,
    DEPENDENT,
    ROWS_APART,
    SHALLOW,
    STEPS,
    TRIED,
    apart,
    drawn,
    gathered,
    legal_here,
    together,
)  # fmt: skip
from results.report.ablation import ATTENTION_FIELDS, attention_ablation_section
from tilebit.autotune.measure import Call, Timing
from tilebit.autotune.problems.attention import attention_problem, edge_attention, exact_attention, random_attention
from tilebit.autotune.problems.attention_verify import AttentionGate
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules.attention.decode import ASYNC, BULK
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.operations import params
from tilebit.schedules.records import TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import cpu_target, target_from_name
from tilebit.tiles.attention.decode import HEADERS
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.headers import device_source
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

HOPPER = target_from_name("sm_90a")
SMALL = AttentionWorkload("decode", 2, 1, 256, 4, 2, 64, KVFormat.from_name("kv4_channel"))


def emulated(workload: AttentionWorkload, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> GeneratedAttention:
    monkeypatch.setitem(device_code.CUDA_ARCH, row_major.NAME, 800)
    return GeneratedAttention(workload, schedule, replace(HOPPER, units=3))


@pytest.mark.slow
@needs_host_compiler
@pytest.mark.parametrize(
    ("format", "head_dim", "page_size", "group", "block_n", "warps"),
    [
        ("kv4_channel", 128, 128, 1, 128, 1), ("kv8_channel", 128, 128, 1, 32, 1), ("kv2_channel", 128, 128, 1, 64, 1),
        ("kv2_token", 64, 16, 2, 64, 1), ("k8_channel_v4", 64, 256, 4, 16, 3),
    ],
)  # fmt: skip
def test_the_row_major_program_passes_the_gate(
    format: str, head_dim: int, page_size: int, group: int, block_n: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = AttentionWorkload("decode", 3, 1, 300, 2 * group, 2, head_dim, KVFormat.from_name(format), page_size=page_size)
    schedule = Schedule(row_major.NAME, block_n, 8, head_dim, SHALLOW, warps)
    assert row_major.legal(workload, schedule, HOPPER) == []
    gate = AttentionGate(edge_attention(workload, 1), random_attention(workload, 2))
    kernel = emulated(workload, schedule, monkeypatch)
    verdict = gate.verify(lambda problem, outputs: kernel(row_major.repacked(problem).named(outputs)))
    assert verdict.ok, verdict.reasons
    assert not gate.verify(lambda problem, outputs: kernel(problem.named(outputs))).ok  # granules are no rows


@pytest.mark.parametrize("format", ["kv8_channel", "kv4_token", "kv2_channel", "k4_channel_v2"])
def test_repacked_pages_hold_the_codes_row_by_row(format: str) -> None:
    layout = replace(SMALL, format=KVFormat.from_name(format)).layout
    problem = attention_problem(replace(SMALL, format=layout.format), [256], [1], 0)
    before, after = problem.operands["pages"], row_major.repacked(problem).operands["pages"]
    parameters = slice(layout.key_parameter_offset // 4, None)
    assert after.shape == before.shape and torch.equal(after[..., parameters], before[..., parameters])
    for page, head, token, channel in ((0, 0, 0, 0), (1, 1, 127, 63), (1, 0, 37, 21), (0, 1, 90, 40)):
        for bits, begin, position in (
            (layout.format.key_bits, 0, layout.key_position),
            (layout.format.value_bits, layout.value_offset * 8, layout.value_position),
        ):
            word, bit = position(token, channel)
            at = begin + (token * layout.head_dim + channel) * bits
            mask = (1 << bits) - 1
            assert int(after[page, head, at // 32]) >> at % 32 & mask == int(before[page, head, int(word)]) >> int(bit) & mask


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (replace(SMALL, format=KVFormat.from_name("kv16")), "integers of 2, 4, 8 bits"),
        (replace(SMALL, format=KVFormat.from_name("kvfp8")), "kvfp8"),
        (replace(SMALL, sinks=True), "sinks is True"),
        (replace(SMALL, op="gather"), "the workload is gather"),
    ],
)
def test_what_the_row_major_program_cannot_do(workload: AttentionWorkload, words: str) -> None:
    assert words in " ".join(row_major.legal(workload, Schedule(row_major.NAME, 32, 8, 64, 2, 1), HOPPER))


def test_the_row_major_program_says_when_its_source_has_moved() -> None:
    text = device_source(HEADERS)
    assert "RowMajorKeys<S::KEY, S::HEAD_DIM>" in row_major.source(text)
    for old, _ in row_major.EDITS:
        with pytest.raises(LookupError, match="0 times; accepted: once"):
            row_major.source(text.replace(old, ""))


@pytest.mark.slow
@needs_nvcc
def test_the_row_major_program_compiles() -> None:
    """For both kinds of asynchronous copies, without spills, with the parameters that the benchmark passes."""
    workload = STEPS[1].form.workload(WORKLOADS[0])
    schedules = [Schedule(row_major.NAME, 128, 8, 128, SHALLOW, 1, min_blocks=8), Schedule(row_major.NAME, 32, 8, 128, SHALLOW, 1)]
    targets = map(target_from_name, ("sm_90a", "sm_80"))
    requests = [CompileRequest(row_major.NAME, workload, s, target) for s, target in zip(schedules, targets, strict=True)]
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        for kernel, target in zip(pool.compile(requests), map(target_from_name, ("sm_90a", "sm_80")), strict=True):
            assert isinstance(kernel, Kernel), kernel
            assert kernel.params == params(workload, kernel.schedule, target) and kernel.resources["spills"] == 0
            assert kernel.resources["instructions"]["mma"] > 0 and kernel.resources["instructions"]["cp_async"] > 0


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_step_is_right_on_a_gpu() -> None:
    """Whatever the steps would try for a case, at a size that takes no time."""
    from tilebit.schedules.target import detect_target

    target = detect_target()
    workload = replace(WORKLOADS[0], batch=2, kv_len=1024)
    (kernels,) = measure_attention.compiled([(workload, drawn(workload, target))], target, measure_attention.posed)
    bench = Bench(workload, target)
    for step, made in kernels.items():
        assert all(bench.verified(bench.contender(step, kernel)) is not None for kernel in made)
    assert {r["step"] for r in climb(bench, {step: made[:1] for step, made in kernels.items()})} >= set(range(6))


@pytest.mark.parametrize("q_len", [1, 3])
def test_heads_apart_are_the_same_attention(q_len: int) -> None:
    problem = attention_problem(replace(SMALL, q_len=q_len, heads_q=8), [300, 129], [q_len] * 2, 0)
    expected, _ = problem.attended(exact_attention)
    split = apart(problem)
    assert split.workload.group == 1 and split.operands["pages"] is problem.operands["pages"]
    assert tuple(split.operands["q"].shape) == split.written["out"][0] == (8, q_len, 2, 64)
    got, _ = split.attended(exact_attention)
    assert torch.equal(together(got, problem.workload), expected)


def test_gathered_rows_are_the_whole_cache() -> None:
    problem = attention_problem(SMALL, [300, 129], [1, 1], 0)
    formed = gathered(problem)
    assert formed.operands["cu_kv"].tolist() == [0, 300, 429] and formed.operands["cu_kv"].dtype == torch.int32
    assert formed.written["out_k"] == ((429, 2, 64), torch.float16) and formed.workload.op == "gather"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.title)
def test_every_step_tries_its_own_idea(workload: AttentionWorkload) -> None:
    found = drawn(workload, HOPPER, [])
    assert list(found) == list(STEPS)
    asked: set[tuple[AttentionWorkload, Schedule]] = set()
    for step, schedules in found.items():
        assert 0 < len(schedules) <= TRIED
        for s in schedules:
            w = step.form.workload(workload)
            assert not legal_here(w, s, HOPPER)
            assert (w, s) not in asked and [other for other in STEPS if other.form is step.form and other.uses(s)] == [step]
            asked.add((w, s))
        if step.number > 0:
            assert len({s.block_n for s in schedules}) > 2
    assert {s.program for s in found[STEPS[1]]} == {row_major.NAME} and {s.program for s in found[STEPS[5]]} == {BULK}
    assert {step.form.workload(workload).group for step in found if step.form in (APART, ROWS_APART)} == {1}
    assert {s.num_warps for s in found[STEPS[3]]} == {1} and min(s.num_warps for s in found[STEPS[4]]) > 1


def test_an_older_gpu_has_every_step_too() -> None:
    found = drawn(WORKLOADS[0], target_from_name("sm_80"), [])
    assert list(found) == list(STEPS) and {s.program for s in found[STEPS[5]]} == {ASYNC}
    assert all(s.num_stages > SHALLOW for s in found[STEPS[5]])


def test_tuned_schedules_come_first_and_what_is_left_of_them_without_an_idea() -> None:
    workload = WORKLOADS[2]
    fast, slow = Schedule(BULK, 32, 8, 128, 4, 4, min_blocks=2), Schedule(BULK, 64, 8, 128, 3, 6)
    records = [TuningRecord(workload, s, HOPPER.name, HOPPER.arch, HOPPER.units, us=us) for s, us in ((slow, 20.0), (fast, 10.0))]
    elsewhere = TuningRecord(workload, replace(fast, num_stages=5), "another", HOPPER.arch, HOPPER.units, us=1.0)
    found = drawn(workload, HOPPER, [*records, elsewhere])
    shallow = replace(fast, program=ASYNC, num_stages=SHALLOW)
    lone = replace(shallow, num_warps=1, min_blocks=8)
    assert found[STEPS[5]][:2] == [fast, slow] and found[STEPS[4]][0] == shallow and found[STEPS[3]][0] == found[STEPS[2]][0] == lone
    assert found[STEPS[1]][0] == replace(lone, program=row_major.NAME)


class FakeBench:
    """Times and verdicts out of tables; ``wrong`` and ``broken`` are schedules whose kernels give a wrong answer, fail."""

    workload = WORKLOADS[0]

    def __init__(self, us: Mapping[tuple[Schedule, bool], float], wrong: Sequence[Schedule] = (), broken: Sequence[Schedule] = ()) -> None:
        self.us, self.wrong, self.broken = us, wrong, broken

    def contender(self, step: Any, kernel: Schedule) -> measure_attention.Contender:
        loaded: Any = SimpleNamespace(run=id, run_dependent=id if kernel.program == BULK else None)
        return measure_attention.Contender(step, kernel, loaded, torch.empty(0))

    def verified(self, contender: measure_attention.Contender) -> float | None:
        if contender.schedule in self.broken:
            raise RuntimeError("the launch failed")
        return None if contender.schedule in self.wrong else 1e-4

    def time(self, contenders: Sequence[measure_attention.Contender]) -> list[Timing]:
        return [Timing(us := self.us[c.schedule, c.dependent], us, us, 1, 20) for c in contenders]


def test_the_fastest_right_kernel_of_each_step_wins_and_failures_stay_alone(capsys: pytest.CaptureFixture[str]) -> None:
    rows, packed, quick, right, slow, untimed = (
        Schedule(name, 64, 8, 128, stages, 4)
        for name, stages in ((row_major.NAME, 2), (ASYNC, 2), (BULK, 2), (BULK, 3), (BULK, 4), (ASYNC, 3))
    )
    us = {(packed, False): 40.0, (quick, False): 1.0, (right, False): 20.0, (slow, False): 30.0, (right, True): 18.0, (slow, True): 17.0}
    bench: Any = FakeBench(us, wrong=[quick], broken=[rows])
    kernels: Any = {STEPS[1]: [rows], STEPS[2]: [packed], STEPS[4]: [untimed], STEPS[5]: [quick, slow, right]}
    found = climb(bench, kernels)
    assert [(r["step"], r["us"], r["tried"], r["dependent"]) for r in found] == [
        (2, 40.0, 1, False),
        (5, 20.0, 2, False),
        (DEPENDENT.number, 17.0, 2, True),  # of the fastest step another schedule is best so
    ]
    said = capsys.readouterr().out
    assert "left out: step 1" in said and "the launch failed" in said and "left out: step 4" in said
    assert climb(bench, {STEPS[1]: [rows]}) == []  # type: ignore[dict-item]


def defined_bench(monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, dict[Any, list[Any]], list[int]]:
    """A small case on the CPU, its kernels but the row-major one, each the definition of what it computes, and how many calls are timed."""
    defined, calls = DefinedKernels(), list[int]()

    def timed(named: Mapping[str, Sequence[Call]], device: str) -> dict[str, Timing]:
        for of_one in named.values():
            calls.append(len(of_one))
            of_one[-1]()
        return {name: Timing(10.0 + len(named) - i, 9.0, 12.0, len(of_one), 1) for i, (name, of_one) in enumerate(named.items())}

    monkeypatch.setattr(measure_attention, "time_calls", timed)
    bench = Bench(SMALL, replace(cpu_target(), l2=1000), "cpu")

    def made(step: Any, schedule: Schedule) -> Any:
        kernel = defined.find(step.form.workload(SMALL), cpu_target())
        loaded = SimpleNamespace(params=kernel.params, run=kernel.run, run_dependent=kernel.run if schedule.program == BULK else None)
        return SimpleNamespace(schedule=schedule, load=lambda: loaded)

    steps = [step for step in STEPS if step.form is not ROWS_APART]
    return bench, {step: [made(step, drawn(SMALL, HOPPER, [])[step][0])] for step in steps}, calls


def test_a_case_gives_rows_that_the_page_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench, kernels, calls = defined_bench(monkeypatch)
    found = climb(bench, kernels)
    assert [r["step"] for r in found] == [0, 2, 3, 4, 5, DEPENDENT.number] and {r["op"] for r in found} == {"ablation_attention"}
    assert all(0 < r["rel_err"] < 2e-3 and r["us_p20"] <= r["us"] for r in found) and set(calls) == {len(bench.problems)}
    rows = [{"gpu": "a GPU", "run": "r", **r} for r in found]
    assert all(set(ATTENTION_FIELDS) <= set(r) for r in rows)
    (tmp_path / "a-gpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    section = attention_ablation_section(tmp_path)
    assert "kv4_channel, 2 x 256, heads 4/2" in section and all(step.idea in section for step in (*kernels, DEPENDENT))


@pytest.mark.parametrize(("bit", "passes"), [(0, True), (14, False)], ids=["last bit", "exponent"])
def test_only_torchs_attention_may_vary_in_its_last_bits(bit: int, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of step 0 two runs may differ, when both are right; of a kernel of ours they may not."""
    bench, kernels, _ = defined_bench(monkeypatch)
    attended, calls = measure_attention._attended, list[int]()

    def varying(out: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        out.view(torch.int16)[-1, 0, 0, 0] ^= (len(calls) % 2 == 0) << bit
        return out

    monkeypatch.setattr(measure_attention, "_attended", lambda problem, rows: varying(attended(problem, rows)))
    assert (bench.verified(bench.contender(STEPS[0], kernels[STEPS[0]][0])) is not None) == passes
    assert calls
    ours = bench.contender(STEPS[3], kernels[STEPS[3]][0])
    place = ours.kernel.params.index("out")
    kernel: Any = SimpleNamespace(
        params=ours.kernel.params, run=lambda *tensors: (ours.kernel.run(*tensors), varying(tensors[place])), run_dependent=None
    )
    assert bench.verified(replace(ours, kernel=kernel)) is None


@pytest.mark.parametrize("step", [STEPS[0], STEPS[2], STEPS[3]], ids=lambda s: s.idea)
def test_the_gate_sees_each_form_through(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads another sequence's pages is refused in every form."""
    bench, kernels, _ = defined_bench(monkeypatch)
    right = bench.contender(step, kernels[step][0])
    assert bench.verified(right) is not None
    place = right.kernel.params.index("block_tables")

    def swapped(*tensors: torch.Tensor) -> None:
        tensors[place].copy_(tensors[place].flip(0))
        right.kernel.run(*tensors)

    kernel: Any = SimpleNamespace(params=right.kernel.params, run=swapped, run_dependent=None)
    assert bench.verified(replace(right, kernel=kernel)) is None
