"""What serves every m of a shape: what was measured at the m where something was, legal kernels everywhere, also where tuning failed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules import select
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.neighbours import Known, neighbours
from tilebit.schedules.operations import AnyWorkload, candidates, estimate, legal, operation
from tilebit.schedules.portfolio import MOST_KERNELS, Portfolio
from tilebit.schedules.ranker import Ranker
from tilebit.schedules.records import TuningRecord, latest, shipped_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import NEAR_ENOUGH, choose, explain, portfolio, refresh
from tilebit.schedules.target import Target, target_from_name

H200 = target_from_name("sm_90a")
A100 = target_from_name("sm_80")  # neither records nor a ranker
EVERY = [r for r in shipped_records() if r.workload.op == "gemm" and r.measured_on(H200)]
TUNED = [r for r in EVERY if not r.dependent]
IN_STEPS = [r for r in EVERY if r.dependent]
SHAPES = list(dict.fromkeys(r.workload.static() for r in TUNED if isinstance(r.workload, Workload)))
SIBLING = replace(H200, name="NVIDIA H100 80GB HBM3")
THERE = list(dict.fromkeys(r.workload for r in shipped_records() if isinstance(r.workload, Workload) and r.measured_on(SIBLING)))
# Of which an H100 has no records, nor of a twin, which would say more than an H200's.
OF_ONE = [shape for shape in SHAPES if not any(operation("gemm").twins(other, shape.with_m(other.m)) for other in THERE)]


def one_of_each_kind(shapes: list[Workload]) -> list[Workload]:
    """Of each format, and of products that do something beside, one: each portfolio takes a good part of a second. Not the first of each,
    which would be of one size."""
    kinds: dict[Workload, list[Workload]] = {}
    for shape in shapes:
        kinds.setdefault(replace(shape, n=64, k=64, width=64 if shape.width else 0), []).append(shape)
    return [of_kind[i % len(of_kind)] for i, of_kind in enumerate(kinds.values())]


CHECKED, CHECKED_OF_ONE = one_of_each_kind(SHAPES), one_of_each_kind(OF_ONE)
SHAPE = (6656, 5120)
UNTUNED = Workload(1, *SHAPE)


@pytest.fixture(scope="module", autouse=True)
def asked_once() -> Iterator[None]:
    """What a ranker says of a schedule depends on no record: tests that change those ask it of most schedules again."""
    known: dict[tuple[Ranker, Target, AnyWorkload, Schedule], float] = {}
    asked = Ranker.predict_pairs

    def predict_pairs(ranker: Ranker, pairs: Sequence[tuple[AnyWorkload, Schedule]], target: Target) -> list[float]:
        new = [pair for pair in pairs if (ranker, target, *pair) not in known]
        known.update(((ranker, target, *pair), us) for pair, us in zip(new, asked(ranker, new, target), strict=True))
        return [known[(ranker, target, *pair)] for pair in pairs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranker, "predict_pairs", predict_pairs)
        yield


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


@pytest.mark.parametrize("shape", rest_are_slow(CHECKED[::5], CHECKED))
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


@pytest.mark.parametrize("shape", rest_are_slow(CHECKED_OF_ONE[::4], CHECKED_OF_ONE))
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


def write(path: Path, records: Iterable[TuningRecord]) -> None:
    path.write_text("".join(json.dumps(r.to_json()) + "\n" for r in records))
    refresh()


def timed(workload: Workload, *times: tuple[Schedule, float]) -> list[TuningRecord]:
    return [TuningRecord(workload, s, H200.name, H200.arch, H200.units, us=us) for s, us in times]


@pytest.mark.parametrize("gate", ["", "silu"])
def test_a_product_in_a_step_takes_the_records_of_steps(gate: str, mine: Path) -> None:
    """Whatever is faster by itself; of a schedule that was not in a step its time alone is said."""
    here = Workload(1, *SHAPE, gate=gate)
    there = replace(here, dependent=True)
    first, second, third, *_ = sorted(candidates(here, H200) or [], key=lambda s: estimate(here, s, H200).us)
    write(mine, [*timed(here, (first, 7.0), (second, 6.5), (third, 8.0)), *timed(there, (second, 7.5), (third, 7.4))])
    assert choose(here, H200).schedule == second and choose(there, H200).schedule == third
    why = {row.schedule: row.why for row in explain(there, H200)}
    assert why[third] == "chosen: the fastest measured here, 7.40 us in a model's step"
    assert why[second] == "measured 7.50 us in a model's step, the chosen one 7.40 us"
    assert why[first] == "measured 7.00 us, the chosen one 7.40 us"
    assert "step" not in " ".join(row.why for row in explain(here, H200))
    alone, in_steps = portfolio(here, H200), portfolio(there, H200)
    assert alone is not None and in_steps is not None and alone.at(1) == second and in_steps.at(1) == third
    assert [m for m in range(1, 5000) if alone.at(m) != in_steps.at(m)] == [1], "other numbers of rows keep the choices of the product"
    assert all(choose(there.with_m(m), H200).schedule == alone.at(m) for m in (2, 3, 16, 4999))


def test_times_in_a_step_say_nothing_of_what_is_launched_alone_or_does_other_things_beside(mine: Path) -> None:
    """A twin in steps asks them, here and on a GPU with as many cores."""
    here = Workload(16, *SHAPE, dependent=True)
    others = [
        replace(here, dependent=False), replace(here, gate="silu"), replace(here, residual=True), replace(here, norm=True),
        here.with_m(17), replace(here, n=SHAPE[0] + 128), replace(here, width=SHAPE[0] - 16),
    ]  # fmt: skip
    asked = [(w, H200) for w in others] + [(w, SIBLING) for w in others[:2]]
    before = [choose(w, target).schedule for w, target in asked]
    shapes = [portfolio(replace(w, m=1), H200) for w in others if w.n == here.n and w.m == 16]
    options = sorted(candidates(here, H200) or [], key=lambda s: estimate(here, s, H200).us)
    placed = next(s for s in options if s not in before)  # near enough to be taken over by whatever asks
    used = next(
        shape.at(m) for shape in shapes if shape for m in (8, 32, 64) if shape.at(m) not in before and not legal(here, shape.at(m), H200)
    )
    write(mine, timed(here, (placed, 0.5), (used, 0.51)))
    assert choose(here, H200).schedule == placed
    assert [choose(w, target).schedule for w, target in asked] == before
    assert [portfolio(replace(w, m=1), H200) for w in others if w.n == here.n and w.m == 16] == shapes
    for twin, target in ((replace(here, dtype="bfloat16"), H200), (here, SIBLING)):
        choice, shape = choose(twin, target), portfolio(twin, target)
        assert (choice.schedule, choice.source) == (placed, "nearest") and shape is not None and shape.at(16) == placed


@pytest.mark.parametrize("target", [H200, SIBLING, A100], ids=lambda target: target.name)
def test_without_records_of_steps_a_product_there_is_served_as_it_is_alone(target: Target, mine: Path) -> None:
    for shape in (UNTUNED, Workload(1, 8192, 8192), Workload(1, 4096, 4096, QuantFormat(8, 128), "bfloat16")):
        there = replace(shape, dependent=True)
        assert portfolio(there, target) == portfolio(shape, target)
        for m in (1, 16, 17, 300):
            assert choose(there.with_m(m), target) == choose(shape.with_m(m), target)


def test_a_gate_in_turn_says_nothing_of_schedules_that_were_timed_in_halves(mine: Path) -> None:
    here = Workload(1, *SHAPE, gate="silu", gate_halves=True, dependent=True)
    there = replace(here, gate_halves=False)
    first, second, *_ = [s for s in candidates(here, H200) or [] if not legal(there, s, H200)]
    write(mine, [*timed(here, (first, 7.2), (second, 7.4)), *timed(there, (second, 7.0))])
    assert choose(here, H200).schedule == first and choose(there, H200).schedule == second
    assert choose(here, SIBLING).schedule == first
    write(mine, [*timed(here, (first, 7.2)), *timed(there, (second, 7.0))])
    assert choose(here, H200).schedule == second, "of which nothing else is known"


def test_what_failed_alone_is_not_chosen_in_a_step(mine: Path) -> None:
    here = Workload(1, *SHAPE, dependent=True)
    alone = replace(here, dependent=False)
    best = choose(here, H200).schedule
    failed = TuningRecord(alone, best, H200.name, H200.arch, H200.units, status="hang", reason="made up")
    write(mine, [failed])
    assert choose(here, H200).schedule == choose(alone, H200).schedule != best
    write(mine, [failed, *timed(here, (best, 1.0))])
    assert choose(here, H200).schedule == best, "what ran in a step since works"


@cache
def fastest_in_steps() -> dict[Workload, TuningRecord]:
    found: dict[Workload, TuningRecord] = {}
    for r in IN_STEPS:
        if isinstance(r.workload, Workload) and (r.workload not in found or (r.us or 0) < (found[r.workload].us or 0)):
            found[r.workload] = r
    return found


def test_products_of_an_8b_model_s_steps_ship_with_the_times_that_they_have_there() -> None:
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    asked = {Workload(m, n, k, gate="silu" if n == 28672 and m < 64 else "", dependent=True) for m in (1, 16, 64) for n, k in shapes}
    of_four = {Workload(4, n, k, dependent=True) for n, k in shapes if n != 28672}
    in_halves = {Workload(m, 28672, 4096, gate="silu", gate_halves=True, dependent=True) for m in (1, 4)}
    assert set(fastest_in_steps()) == asked | of_four | in_halves


@pytest.mark.parametrize("there", fastest_in_steps(), ids=lambda w: f"{w.m}x{w.n}x{w.k}{w.gate}{'_halves' * w.gate_halves}")
def test_the_fastest_in_a_step_serves_there_and_there_alone(there: Workload, shipped: None) -> None:
    best, choice, shape = fastest_in_steps()[there], choose(there, H200), portfolio(there, H200)
    assert (choice.schedule, choice.source, choice.record) == (best.schedule, "tuned", best)
    assert shape is not None and shape.at(there.m) == best.schedule and choose(there, SIBLING).schedule == best.schedule


def test_what_ships_of_steps_changes_nothing_alone(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [replace(w, dependent=False) for w in fastest_in_steps()]
    asked = [(w, H200) for w in alone] + [(w, SIBLING) for w in alone if w.n == w.k]

    def chosen() -> list[Any]:
        return [(choose(w, target), portfolio(w, target)) for w, target in asked]

    found = chosen()
    monkeypatch.setattr(select, "shipped_records", lambda arch: [r for r in shipped_records(arch) if not r.dependent])
    refresh()
    assert found == chosen()
