"""Choosing: tuned before nearest before the model, never illegal, never known to fail; and explaining all of it."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilebit.layouts.formats import BITS, GROUP_SIZES, QuantFormat
from tilebit.schedules.distance import MAX_DISTANCE, distance
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal
from tilebit.schedules.records import STATUSES, TuningRecord
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import NEAR_ENOUGH, choose, explain, refresh, select
from tilebit.schedules.target import Target, target_from_name

H200 = target_from_name("sm_90a")
CPU = Target("cpu", "test cpu", 2, 0, 0, 32 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
W = Workload(64, 4096, 4096)
ODD = Schedule("gemm_wgmma", 128, 64, 128, 7, 8, split_k=4)  # legal for W, as good as its candidates and none of them


def record(workload: Workload = W, schedule: Schedule = ODD, us: float | None = 5.0, target: Target = H200, **changes) -> TuningRecord:
    if us is None:
        changes = {"status": "wrong", "reason": "1 element", **changes}
    return TuningRecord(workload, schedule, target.name, target.arch, target.units, us=us, **changes)


def test_tuned_before_everything():
    assert ODD not in (candidates(W, H200) or [])
    choice = choose(W, H200, [record()])
    assert (choice.schedule, choice.source, choice.distance) == (ODD, "tuned", 0)


def test_fastest_of_the_tuned():
    fast = replace(ODD, num_stages=6)
    assert select(W, H200, [record(us=5.0), record(schedule=fast, us=4.0)]) == fast
    assert select(W, H200, [record(schedule=fast, us=4.0), record(us=5.0)]) == fast


def test_a_later_measurement_replaces_an_earlier_one():
    slow = replace(ODD, num_stages=6)
    assert select(W, H200, [record(us=5.0), record(schedule=slow, us=4.0), record(schedule=slow, us=9.0)]) == ODD


def test_m_counts_exactly():
    records = [record()]
    assert choose(W.with_m(64), H200, records).source == "tuned"
    assert {choose(W.with_m(m), H200, records).source for m in (33, 63, 65)} <= {"nearest", "model"}
    assert select(W.with_m(0), H200, [record(W.with_m(1))]) == ODD


def test_nearest_when_nothing_is_tuned_here():
    near, far = Workload(64, 5120, 4096), Workload(64, 8192, 4096)
    other = replace(ODD, num_stages=6)
    choice = choose(W, H200, [record(far, other, us=1.0), record(near, us=50.0)])
    assert (choice.schedule, choice.source) == (ODD, "nearest")
    assert choice.record is not None and choice.record.workload == near


def test_an_illegal_nearest_gives_way_to_the_next():
    small = Workload(64, 4096, 1024)
    split, whole = replace(ODD, split_k=16), Schedule("gemm_wgmma", 64, 64, 128, 3, 4, min_blocks=2)
    assert not legal(W, split, H200) and legal(small, split, H200)  # 8 steps of k cannot be split 16 times
    choice = choose(small, H200, [record(Workload(64, 4096, 2048), split, us=1.0), record(Workload(64, 4096, 4096), whole, us=2.0)])
    assert (choice.schedule, choice.source) == (whole, "nearest")


def test_only_what_was_good_there_is_taken_over():
    neighbour = Workload(64, 5120, 4096)
    slow, fast = replace(ODD, num_stages=5), replace(ODD, split_k=16, num_stages=3)
    records = [record(neighbour, slow, us=9.0), record(neighbour, fast, us=5.0)]
    assert choose(neighbour, H200, records).schedule == fast
    assert choose(W, H200, records).schedule != slow


def test_a_neighbour_that_would_be_slow_here_gives_way_to_the_model():
    wide = Workload(256, 28672, 4096)  # four tiles of 64 rows, in four splits that full SMs do not need
    neighbour = record(Workload(64, 28672, 4096), us=1.0)
    assert not legal(wide, ODD, H200) and (distance(neighbour, wide, H200) or 9.0) <= MAX_DISTANCE
    assert choose(wide, H200, [neighbour]).source == "model"
    assert choose(wide, H200, [record(wide, us=1.0)]).source == "tuned"  # what was measured here needs no estimate


def test_an_illegal_tuned_record_is_not_used():
    assert choose(W, H200, [record(schedule=replace(ODD, block_n=7))]).source == "model"


def test_model_when_nothing_is_near():
    best = min(candidates(W, H200) or [], key=lambda s: estimate(W, s, H200).us)
    for records in (
        [],
        [record(Workload(4096, 4096, 4096))],
        [record(Workload(64, 65536, 4096))],
        [record(target=target_from_name("sm_80"))],
    ):
        choice = choose(W, H200, records)
        assert (choice.schedule, choice.source) == (best, "model")


def test_failed_schedules_are_never_chosen():
    best = select(W, H200, [])
    second = select(W, H200, [record(schedule=best, us=None)])
    assert second != best and not legal(W, second, H200)
    near = record(Workload(64, 5120, 4096))
    assert choose(W, H200, [near, record(us=None)]).source == "model"


def test_when_every_candidate_failed_the_next_best_thing_is_chosen():
    options = candidates(W, H200) or []
    by_estimate = sorted(options, key=lambda s: estimate(W, s, H200).us)
    statuses = [s for s in STATUSES if s not in ("ok", "corrupt")]  # what is corrupt is the machine's fault
    failures = [record(schedule=s, us=None, status=statuses[i % len(statuses)]) for i, s in enumerate(by_estimate)]
    assert failures[2].status == "wrong"
    choice = choose(W, H200, failures)
    assert (choice.schedule, choice.source, choice.record) == (by_estimate[0], "failed", failures[0])
    first, *others = explain(W, H200, failures)
    assert "every candidate failed" in first.why and "failed when tuned: compile_error (1 element)" in first.why
    assert first.chosen and all(r.why.startswith("failed when tuned: ") for r in others)

    wrong = [record(schedule=s, us=None) for s in by_estimate]
    assert choose(W, H200, [*wrong[:-1], replace(failures[-1], status="hang")]).schedule == by_estimate[-1], "what is wrong comes last"
    choice = choose(W, H200, wrong)
    assert (choice.schedule, choice.source) == (by_estimate[0], "failed")
    assert "failed when tuned: wrong (1 element)" in explain(W, H200, wrong)[0].why

    slow = replace(ODD, split_k=1, num_stages=2, block_m=16)
    assert not legal(W, slow, H200) and slow not in options
    assert estimate(W, slow, H200).us > NEAR_ENOUGH * estimate(W, by_estimate[0], H200).us
    choice = choose(W, H200, [*failures, record(Workload(64, 5120, 4096), slow)])
    assert (choice.schedule, choice.source) == (slow, "nearest"), "it works, though the model expects it to be slow here"
    choice = choose(W, H200, [*failures[1:], record(Workload(64, 5120, 4096), slow)])
    assert (choice.schedule, choice.source) == (by_estimate[0], "model")

    ranker: Any = SimpleNamespace(serves=lambda *_: True, predict=lambda workload, schedules, target: [float(s != slow) for s in schedules])
    assert choose(W, H200, failures, ranker).source == "failed", "a ranker has nothing left to rank"
    assert choose(W, H200, [*failures, record(Workload(64, 5120, 4096), slow)], ranker).source == "ranker"


def test_a_repaired_candidate_is_no_failure():
    failures = [record(schedule=s, us=None) for s in candidates(W, H200) or []]
    choice = choose(W, H200, [*failures, replace(failures[7], status="ok", reason="", us=9.0)])
    assert (choice.schedule, choice.source) == (failures[7].schedule, "tuned")


def test_distance_by_hand():
    assert distance(record(), W, H200) == 0
    assert distance(record(Workload(64, 8192, 2048)), W, H200) == 2
    assert distance(record(Workload(16, 4096, 4096)), W, H200) == 2
    assert distance(record(Workload(64, 4096, 4096, QuantFormat(8))), W, H200) is None
    assert distance(record(), W, replace(H200, arch="sm_89")) is None
    distances = [
        distance(record(replace(W, bias=True)), W, H200),
        distance(record(replace(W, dtype="bfloat16")), W, H200),
        distance(record(replace(W, format=QuantFormat(4, 64))), W, H200),
        distance(record(), W, replace(H200, name="NVIDIA H100")),
        distance(record(), W, replace(H200, units=66)),
    ]
    closeness = [d for d in distances if d]
    assert len(closeness) == 5
    assert closeness == sorted(closeness) and closeness[-1] > MAX_DISTANCE


def test_a_two_core_record_does_not_choose_threads_for_a_big_cpu():
    two = (candidates(W, CPU) or [])[0]
    big = replace(CPU, units=64)
    assert select(W, big, [record(W, two, target=CPU)]).num_warps == 64
    assert select(W, CPU, [record(W, two, target=CPU)]) == two


def test_no_program_is_an_error_that_names_the_target():
    halves = Workload(4, 64, 256, gate="silu", gate_halves=True)
    with pytest.raises(ValueError, match=r"its programs run on: cpu;.* n is 64 with gates as .*accepted on GPUs: from 128 rows on"):
        select(halves, target_from_name("sm_90a"))
    with pytest.raises(ValueError, match=r"no schedule for Workload.*cpu"):
        select(W, replace(CPU, features=()), [])


shapes = st.builds(
    Workload,
    st.integers(0, 5000),
    st.integers(1, 60000),
    st.integers(1, 30000),
    st.builds(QuantFormat, st.sampled_from(BITS), st.sampled_from(GROUP_SIZES), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(
    shapes, st.sampled_from([*(target_from_name(a) for a in ("sm_80", "sm_86", "sm_89", "sm_90a")), CPU]), st.randoms(use_true_random=False)
)
def test_select_is_legal_whatever_the_records(workload, target, rng):
    others = [Workload(2 ** rng.randrange(13), rng.randrange(1, 60000), rng.randrange(1, 30000), workload.format) for _ in range(3)]
    records = [record(w, s, rng.random() * 9 + 1, target) for w in [*others, workload] for s in rng.sample(candidates(w, target) or [], 2)]
    rng.shuffle(records)
    chosen = select(workload, target, records)
    assert legal(workload, chosen, target) == []
    rows = explain(workload, target, records)
    assert rows[0].chosen and rows[0].schedule == chosen


def test_explain_is_complete():
    options = candidates(W, H200) or []
    wrong, slow, broken = options[3], options[5], replace(ODD, block_n=7)
    records = [record(), record(schedule=wrong, us=None), record(schedule=slow, us=11.5), record(schedule=broken, us=1.0)]
    rows = explain(W, H200, records)
    assert {r.schedule for r in rows} == {*options, ODD, broken} and len(rows) == len({r.schedule for r in rows})
    assert [r.schedule for r in rows if r.chosen] == [ODD] == [rows[0].schedule]
    by = {r.schedule: r for r in rows}
    assert "chosen: the fastest measured here, 5.00 us" in by[ODD].why
    assert "failed when tuned: wrong (1 element)" in by[wrong].why and by[wrong].record == records[1]
    assert "measured 11.50 us, the chosen one 5.00 us" in by[slow].why
    assert by[broken].illegal and by[broken].why.startswith("illegal: block_n is 7")
    unmeasured = [r for r in rows if r.record is None]
    assert unmeasured and all("not measured here" in r.why and r.estimate.us > 0 and not r.illegal for r in unmeasured)


def test_explain_says_where_the_choice_came_from():
    assert "the cost model's best" in explain(W, H200, [])[0].why
    assert all("estimated" in r.why for r in explain(W, H200, [])[1:])
    near = explain(W, H200, [record(Workload(64, 5120, 4096))])[0]
    assert "nearest tuned workload (m=64 n=5120 k=4096" in near.why and "distance" in near.why


def test_known_records_are_read_once_and_refreshed(tmp_path, monkeypatch):
    target = replace(H200, name="a GPU of this test")
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv("TILEBIT_RECORDS", str(path))
    refresh()
    try:
        before = choose(W, target)
        assert before.source != "tuned"
        path.write_text(json.dumps(record(target=target).to_json()) + "\n")
        assert choose(W, target) == before
        refresh()
        assert choose(W, target).source == "tuned"
        assert choose(W, target) is choose(W, target) and select(W, target) is select(W, target), "choices are cached"
    finally:
        refresh()


def test_a_users_tuner_is_not_overruled_by_times_of_another_clock(tmp_path, monkeypatch):
    """Of a slower card of the same name: the shipped runner-up, which the user's tuner did not try, was
    faster on its own card than anything is here."""
    first, second, third = (replace(ODD, num_stages=stages) for stages in (7, 6, 5))
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    monkeypatch.setattr(
        "tilebit.schedules.select.shipped_records", lambda arch: [record(schedule=first, us=9.0), record(schedule=second, us=9.1)]
    )
    own = [record(schedule=first, us=10.0), record(schedule=third, us=9.8)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(r.to_json()) + "\n" for r in own))
    refresh()
    try:
        assert choose(W, H200).schedule == third
    finally:
        monkeypatch.undo()
        refresh()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize(
    ("format", "instead"), [("w8a8_fp8", "w8a8_channel"), ("w8a8_fp8_g128", "w8a8_g128"), ("w4a8_fp8", "w4a8_lqq_g128")]
)
def test_where_no_instruction_multiplies_e4m3_something_else_is_named(arch: str, format: str, instead: str):
    with pytest.raises(ValueError, match=rf"programs run on: cpu, sm_89, sm_90a; .* use .*{instead}.* on {arch}\."):
        select(Workload(16, 512, 512, QuantFormat.parse(format)), target_from_name(arch), [])
