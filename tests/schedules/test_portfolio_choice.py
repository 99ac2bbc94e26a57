"""What serves every m of a shape: what was measured at the m where something was, legal kernels everywhere, also where tuning failed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, estimate, legal, operation
from tilebit.schedules.portfolio import MOST_KERNELS, Portfolio
from tilebit.schedules.records import TuningRecord, latest, shipped_records
from tilebit.schedules.select import NEAR_ENOUGH, Known, choose, explain, neighbours, portfolio, refresh
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")
A100 = target_from_name("sm_80")  # neither records nor a ranker
TUNED = [r for r in shipped_records() if r.workload.op == "gemm" and r.measured_on(H200)]
SHAPES = list(dict.fromkeys(r.workload.static() for r in TUNED if isinstance(r.workload, Workload)))
SOME = SHAPES[::20]
SIBLING = replace(H200, name="NVIDIA H100 80GB HBM3")
THERE = list(dict.fromkeys(r.workload for r in shipped_records() if isinstance(r.workload, Workload) and r.measured_on(SIBLING)))
# Of which an H100 has no records, nor of a twin, which would say more than an H200's.
OF_ONE = [shape for shape in SHAPES if not any(operation("gemm").twins(other, shape.with_m(other.m)) for other in THERE)]
UNTUNED = Workload(1, 6656, 5120)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The shipped records alone; what was chosen by them is kept from test to test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEBIT_RECORDS", str(tmp_path_factory.mktemp("none") / "records.jsonl"))
        refresh()
        yield
    refresh()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's records, none so far."""
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    refresh()
    yield tmp_path / "records.jsonl"
    refresh()


def by_shape(records: Iterable[TuningRecord]) -> dict[Workload, list[Any]]:
    """Of products alone."""
    found: dict[Workload, list[Any]] = {}
    for r in records:
        if isinstance(r.workload, Workload):
            found.setdefault(r.workload.static(), []).append(r)
    return found


@cache
def all_by_shape() -> dict[Workload, list[Any]]:
    return by_shape(TUNED)


@cache
def last_by_shape() -> dict[Workload, list[Any]]:
    """The last of each workload, schedule and device."""
    return by_shape(latest(TUNED).values())


def rest_are_slow(some: list[Workload], every: list[Workload]) -> list:
    return [pytest.param(s, id=s.served, marks=() if s in some else pytest.mark.slow) for s in every]


@pytest.mark.parametrize("shape", rest_are_slow(SOME, SHAPES))
def test_a_recorded_m_is_served_by_the_fastest_recorded_there(shape: Workload, shipped: None) -> None:
    best: dict[Workload, TuningRecord] = {}
    for r in last_by_shape()[shape]:
        if r.us is not None and r.ok and not legal(r.workload, r.schedule, H200):
            held = best.get(r.workload)
            best[r.workload] = r if held is None or r.us < (held.us or 0) else held
    assert best
    table = portfolio(shape, H200)
    assert table is not None
    for workload, r in best.items():
        assert choose(workload, H200).schedule == r.schedule == table.at(workload.m), workload.m
    assert_legal_at_every_m(shape, table)


def assert_legal_at_every_m(shape: Workload, table: Portfolio) -> None:
    """Its table serves each m by a kernel that is legal there, and a call gets just that."""
    ms = (*range(1, 520), *range(520, 5001, 7))
    assert not [m for m in ms if legal(replace(shape, m=m), table.at(m), H200)]
    for m in (1, 3, 24, 257, 700, 3000, 4999):
        assert choose(replace(shape, m=m), H200).schedule == table.at(m), m


def test_an_untuned_shape_has_a_legal_kernel_at_every_m(shipped: None) -> None:
    table = portfolio(UNTUNED, H200)
    assert table is not None and len(table.kernels) <= MOST_KERNELS
    assert_legal_at_every_m(UNTUNED, table)


@pytest.mark.parametrize("shape", rest_are_slow(OF_ONE[::16], [*OF_ONE[::16], *OF_ONE[1::4]]))
def test_a_sibling_s_tuned_choices_serve_where_nothing_is_tuned(shape: Workload, shipped: None) -> None:
    """An H100 has an H200's cores. What the model expects to be far slower than another is not taken over."""
    tuned, asked = {r.workload.m for r in all_by_shape()[shape] if r.ok}, 0
    for m in tuned:
        workload = replace(shape, m=m)
        here = choose(workload, H200).schedule
        best = min(estimate(workload, s, SIBLING).us for s in candidates(workload, SIBLING) or [here])
        if estimate(workload, here, SIBLING).us <= NEAR_ENOUGH * best:
            assert choose(workload, SIBLING).schedule == here, m
            asked += 1
    assert asked


def test_where_all_failed_when_tuned_the_other_m_are_served_by_what_did_not(mine: Path) -> None:
    before = portfolio(UNTUNED, A100)
    assert before is not None
    at = UNTUNED.with_m(200)
    failed = [TuningRecord(at, s, A100.name, A100.arch, A100.units, status="crash", reason="made up") for s in candidates(at, A100) or []]
    assert {before.at(m) for m in (200, 300, 3000)} & {r.schedule for r in failed}
    mine.write_text("".join(json.dumps(r.to_json()) + "\n" for r in failed))
    refresh()
    table = portfolio(UNTUNED, A100)
    assert table is not None and choose(at, A100).source == "failed" and table.at(200) == choose(at, A100).schedule
    assert not {r.schedule for r in failed} & {table.at(m) for m in (1, 16, 64, 300, 700, 3000)}, "what failed serves nothing else"
    assert table.at(16) == before.at(16)


def test_records_that_say_nothing_are_left_out() -> None:
    """Of another workload only what was about the fastest there; of this one everything that works, with the fastest first."""
    here, there = Workload(64, 4096, 4096), Workload(64, 5120, 4096)
    options = (candidates(here, H200) or [])[:3]
    records = [
        TuningRecord(w, s, H200.name, H200.arch, H200.units, us=us)
        for w in (here, there)
        for s, us in zip(options, (9.0, 5.0, 5.2), strict=True)
    ]
    records.append(TuningRecord(here, options[0], H200.name, H200.arch, H200.units, us=8.0))  # a later measurement
    for known in (records, Known.among(records)):
        found = [(r.workload, r.us) for _, r in neighbours(here, H200, known)]
        assert found == [(here, 5.0), (here, 5.2), (here, 8.0), (there, 5.0), (there, 5.2)]


@pytest.mark.parametrize("gate", ["", "silu"])
def test_times_in_a_step_count_for_products_with_the_same_neighbours(gate: str, mine: Path) -> None:
    """They decide for their own workload and its twins; what does other things beside it asks its own records."""
    here = Workload(1, 6656, 5120, gate=gate)
    first, second, *_ = sorted(candidates(here, H200) or [], key=lambda s: estimate(here, s, H200).us)
    there = [TuningRecord(here, s, H200.name, H200.arch, H200.units, us=us) for s, us in ((first, 7.0), (second, 8.0))]
    placed = replace(there[1], us=6.0, extra={"place": "step"})
    assert placed.in_step and not there[1].in_step and TuningRecord.from_json(placed.to_json()) == placed
    mine.write_text("".join(json.dumps(r.to_json()) + "\n" for r in (*there, placed)))
    refresh()
    assert choose(here, H200).schedule == second
    why = {row.schedule: row.why for row in explain(here, H200)}
    assert why[second] == "chosen: the fastest measured here, 6.00 us in a model's step"
    assert why[first] == "measured 7.00 us, the chosen one 6.00 us"
    assert choose(replace(here, dtype="bfloat16"), H200, (*there, placed)).schedule == second  # a twin
    other = replace(here, gate="" if gate else "silu")
    assert choose(other, H200, (*there, placed)).schedule == first
    shape = portfolio(other, H200)
    assert shape is not None and shape.at(1) != second
