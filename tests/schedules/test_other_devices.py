"""Records of other devices: a failed one, a twin and a later one that differ only in the device's name or in its units say nothing
here that they should not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from lanes import one_of_each

from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.neighbours import Known, neighbours
from tilebit.schedules.operations import candidates
from tilebit.schedules.records import TuningRecord, latest
from tilebit.schedules.select import NEAR_ENOUGH, choose, explain, portfolio, refresh
from tilebit.schedules.target import Target, target_from_name

A100 = target_from_name("sm_80")  # nothing is shipped for it
CPU = Target("cpu", "test cpu", 2, 0, 0, 32 << 20, 20.0, 0.1, 100.0, ("avx512", "avx2"))
W = Workload(64, 4096, 4096)
# What differs from the device, and whether the other counts as its sibling: a GPU of the same arch with as many SMs.
OTHERS: dict[str, tuple[Target, dict[str, Any], bool]] = {
    "another GPU": (A100, {"gpu": "another GPU"}, True),
    "other units": (A100, {"units": A100.units // 2}, False),
    "more units": (A100, {"units": A100.units * 2}, False),
    "another GPU of other units": (A100, {"gpu": "another GPU", "units": A100.units // 2}, False),
    "another arch": (A100, {"arch": "sm_86"}, False),
    "another CPU": (CPU, {"gpu": "another cpu"}, False),
    "other cores": (CPU, {"units": 4}, False),
}


@pytest.fixture(params=one_of_each(OTHERS, lambda name: (OTHERS[name][0].arch, OTHERS[name][2])))
def other(request: pytest.FixtureRequest) -> tuple[Target, dict[str, Any], bool]:
    return OTHERS[request.param]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    refresh()
    yield tmp_path / "records.jsonl"
    refresh()


def record(target: Target, schedule, us: float | None = 5.0, workload: Workload = W, **changes) -> TuningRecord:
    status = "crash" if us is None else "ok"
    return replace(TuningRecord(workload, schedule, target.name, target.arch, target.units, status, us, reason="made up"), **changes)


def by_estimate(target: Target) -> list:
    return sorted(candidates(W, target) or [], key=lambda s: estimate(W, s, target).us)


def test_a_failure_elsewhere_is_none_here(other, mine: Path):
    target, changes, _ = other
    untuned, best = choose(W, target, []), by_estimate(target)[0]
    failed = [record(target, s, None, **changes) for s in by_estimate(target)]
    for records in (failed[:1], failed):
        assert choose(W, target, records) == untuned and untuned.schedule == best
        assert all(row.record is None and "failed" not in row.why for row in explain(W, target, records))
    assert choose(W, target, [record(target, best, None)]).schedule != best, "of this device it is one"

    shape = portfolio(W, target)
    mine.write_text("".join(json.dumps(r.to_json()) + "\n" for r in failed))
    refresh()
    assert portfolio(W, target) == shape and choose(W, target).source != "failed"


def test_a_later_record_of_elsewhere_replaces_none_of_here(other, mine: Path):
    target, changes, _ = other
    first, second, *_ = by_estimate(target)
    here = [record(target, first, 5.0), record(target, second, 4.0)]
    there = [record(target, first, 1.0, **changes), record(target, second, None, **changes)]
    for records in ([*here, *there], [*there, *here]):
        assert set(latest(records)) == {(W, r.schedule, r.gpu, r.arch, r.units) for r in records} and len(latest(records)) == 4
        choice = choose(W, target, records)
        assert (choice.schedule, choice.source, choice.record) == (second, "tuned", here[1])
        rows = {row.schedule: row for row in explain(W, target, records)}
        assert (rows[first].record, rows[second].record) == (here[0], here[1]) and rows[second].chosen
        assert [r for d, r in neighbours(W, target, records) if d == 0] == [here[1], here[0]]
    mine.write_text("".join(json.dumps(r.to_json()) + "\n" for r in (*here, *there)))
    refresh()
    table = portfolio(W, target)
    assert choose(W, target).schedule == second and table is not None and table.at(W.m) == second


def test_a_time_of_elsewhere_is_no_tuned_one(other):
    target, changes, _ = other
    slow = by_estimate(target)[-1]
    choice = choose(W, target, [record(target, slow, 1.0, **changes)])
    assert choice.source != "tuned"
    for row in explain(W, target, [record(target, slow, 1.0, **changes)]):
        assert row.record is None and "measured 1.00 us" not in row.why
    assert choose(W, target, [record(target, slow, 1.0)]).source == "tuned"


def test_what_was_good_is_asked_of_each_device(other):
    """The fastest of a fast device leaves those of a slow one what they are."""
    target, changes, _ = other
    first, second, *_ = by_estimate(target)
    near = replace(W, n=5120)
    here, there = record(target, first, 9.0, near), record(target, second, 1.0, near, **changes)
    assert {r.schedule for good in Known.among([here, there]).good.values() for alike in good for r in alike} == {first, second}


class Ranker:
    """Serves everything, and finds ``best`` the fastest."""

    def __init__(self, best) -> None:
        self.best = best

    def serves(self, workload, schedules) -> bool:
        return True

    def predict(self, workload, schedules, target) -> list[float]:
        return [1.0 if s == self.best else 2.0 for s in schedules]


def test_twins_are_of_this_device_or_a_sibling(other):
    """The same shape in other numbers goes before a ranker, where it was measured here or on a sibling."""
    target, changes, sibling = other
    best, near, *_ = by_estimate(target)
    assert estimate(W, near, target).us <= NEAR_ENOUGH * estimate(W, best, target).us
    twin, ranker = record(target, near, 5.0, replace(W, dtype="bfloat16")), cast(Any, Ranker(best))
    choice = choose(W, target, [twin], ranker)
    assert (choice.schedule, choice.source) == (near, "nearest")
    choice = choose(W, target, [replace(twin, **changes)], ranker)
    assert (choice.schedule, choice.source) == ((near, "nearest") if sibling else (best, "ranker"))
