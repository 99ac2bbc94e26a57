"""Products tuned in a step: which are found, what their records say, and that the model's next steps use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import llama, made

import tilebit
import tilebit.transformers
from tilebit.autotune import tune as tuner
from tilebit.autotune.measure import Timing
from tilebit.autotune.store import RecordStore
from tilebit.schedules.gemm.dense import DenseWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.records import TuningRecord, load_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose, refresh
from tilebit.schedules.target import Target, cpu_target
from tilebit.transformers import tuning
from tilebit.transformers.tuning import FINALIST_WITHIN, FINALISTS, _finalists, _Place

ROWS, TOKENS = 2, 130
ALONE = (10.0, 11.0)  # of a product's two schedules


def model() -> Any:
    torch.manual_seed(0)
    found = made(llama(), torch.float16)
    tilebit.quantize_model(found, "w4a16_g64")
    return tilebit.transformers.compile(found, (ROWS,), 256)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The user's records, to which a tuner that measures nothing writes two schedules of each product."""
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv("TILEBIT_RECORDS", str(path))
    refresh()

    def tune(workloads: Iterable[Workload], target: Target, *, store: RecordStore, **_: Any) -> None:
        for workload in dict.fromkeys(workloads):
            assert not workload.dependent
            for schedule, us in zip((candidates(workload, target) or [])[:2], ALONE, strict=True):
                store.append(TuningRecord(workload, schedule, target.name, target.arch, target.units, us=us, rel_err=1e-3))

    monkeypatch.setattr(tuner, "tune", tune)
    yield path
    monkeypatch.undo()
    refresh()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[dict[Schedule, float]]:
    """Times of a step with each schedule: 4 us more with the first."""
    asked: list[dict[Schedule, float]] = []

    def times(named: Mapping[Schedule, Callable[[], Any]], device: str, orders: Any) -> dict[Schedule, Timing]:
        for step in named.values():
            step()  # runs
        us = {schedule: 104.0 - 4.0 * place for place, schedule in enumerate(named)}
        asked.append(us)
        return {schedule: Timing(each, each, each, 1, 1) for schedule, each in us.items()}

    monkeypatch.setattr(tuning, "time_replays", times)
    return asked


@pytest.mark.slow
def test_what_a_step_takes_decides(alone: Path, seconds: list[Any]):
    of = model()
    ids = torch.randint(2, 256, (ROWS, 20), generator=torch.Generator().manual_seed(1))
    cache = tilebit.transformers.TilebitCache(of.config, "kv16", max_tokens=64, sequences=ROWS)
    expected = of.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
    found = tilebit.transformers.tune(of, tokens=TOKENS, progress=False)
    assert sorted((p.workload.n, p.workload.k, p.workload.gate, p.calls) for p in found) == [
        (128, 256, "", 4), (512, 128, "", 2), (512, 128, "silu", 2),  # o as down, qkv, gate and up
    ]  # fmt: skip
    target = cpu_target()
    for product in found:
        first, second = (candidates(product.workload, target) or [])[:2]
        assert (product.schedule, product.tried) == (second, 2)
        assert product.us == pytest.approx(ALONE[0] - 4.0 / product.calls)
        assert choose(product.workload, target).schedule == second
        assert product.workload.dependent and choose(replace(product.workload, dependent=False), target).schedule == first
        kept = {r.schedule: r for r in load_records(alone) if r.workload == product.workload}
        assert kept[first].us == ALONE[0] and kept[second].us == pytest.approx(product.us)
        assert all(r.ok and r.rel_err == 1e-3 and r.us_p20 is None and r.date for r in kept.values())
    assert len(seconds) == len(found)
    again = tilebit.transformers.tune(of, tokens=TOKENS, progress=False)  # the schedule that was the fastest there is now the first
    for once, product in zip(found, again, strict=True):
        first, _ = (candidates(product.workload, target) or [])[:2]
        assert (product.schedule, product.tried, product.before_us) == (first, 2, once.us)
        assert once.us is not None and product.us == pytest.approx(once.us - 4.0 / product.calls)
    cache.reset()
    assert torch.equal(of.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False), expected)


def test_a_product_that_nothing_was_measured_for_is_named(alone: Path, monkeypatch: pytest.MonkeyPatch):
    """The budget ended before."""
    monkeypatch.setattr(tuner, "tune", lambda *_, **__: None)
    monkeypatch.setattr(tuning, "shipped_records", lambda: [])
    found = tilebit.transformers.tune(model(), tokens=TOKENS, budget_s=1.0, progress=False)
    assert [(p.us, p.before_us, p.tried) for p in found] == [(None, None, 0)] * 3 and not alone.exists()


def test_an_output_layer_that_is_not_quantized_is_tuned_alone(alone: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def workload_of(layer: torch.nn.Linear, rows: int, dtype: str, target: Target) -> DenseWorkload:
        return DenseWorkload(rows, layer.out_features, layer.in_features, dtype)

    monkeypatch.setattr(tuning, "workload_of", workload_of)
    monkeypatch.setattr(tuner, "tune", lambda workloads, *_, **__: asked.extend(workloads))
    of = model()
    found = tilebit.transformers.tune(of, tokens=TOKENS, progress=False)
    assert len(found) == 3 and asked[-1] == DenseWorkload(ROWS, of.config.vocab_size, of.config.hidden_size)
    assert [w.op for w in asked] == ["gemm", "gemm", "gemm", "dense"]


def test_a_place_counts_calls_and_puts_everything_back(monkeypatch: pytest.MonkeyPatch):
    of = model()
    place = _Place(of.tilebit_steps, ROWS, "kv4_channel", TOKENS)
    before = [place._cache.cache.length(handle) for handle in place._cache.handles]
    calls = place.calls()
    own = {plan: plan.launchers[ROWS] for plan in calls}
    assert sorted((plan.workload.n, count) for plan, count in calls.items()) == [(128, 4), (512, 2), (512, 2)]
    plan, taken = next(iter(calls)), []

    def launch(*operands: Any) -> None:
        taken.append(len(operands))
        own[plan](*operands)

    monkeypatch.setattr(tuning, "time_replays", lambda named, *_: [step() for step in named.values()])
    place.times(plan, {Schedule("gemm_cpu", 1, 1, 1, 1, 1): launch})
    assert len(taken) == calls[plan]
    assert {plan: plan.launchers[ROWS] for plan in calls} == own
    assert [place._cache.cache.length(handle) for handle in place._cache.handles] == before == [TOKENS] * ROWS


def test_finalists_are_near_and_what_was_used_is_among_them():
    target, w = cpu_target(), Workload(ROWS, 512, 128)
    options = candidates(w, target) or []
    assert len(options) > FINALISTS + 1
    near = [TuningRecord(w, s, target.name, target.arch, target.units, us=10.0 + i / 10) for i, s in enumerate(options[: FINALISTS + 2])]
    there = replace(w, dependent=True)
    assert _finalists(near, there, target, options[0]) == near[:FINALISTS]
    assert _finalists(near, there, target, options[FINALISTS + 1]) == [*near[:FINALISTS], near[FINALISTS + 1]]
    far = TuningRecord(w, options[1], target.name, target.arch, target.units, us=10.0 * FINALIST_WITHIN + 0.1)
    placed = [replace(r, workload=there, us=us) for r, us in ((near[3], 9.5), (near[FINALISTS + 1], 9.0))]
    wanted = [placed[1], placed[0], *near[:3], *near[4 : FINALISTS - 1]]
    assert _finalists([*placed, *near], there, target, options[0]) == wanted, "in steps and alone"
    others = TuningRecord(Workload(ROWS, 512, 256), options[1], target.name, target.arch, target.units, us=1.0)
    failed = TuningRecord(w, options[2], target.name, target.arch, target.units, status="compile_error", reason="spills")
    assert _finalists([near[0], far, others, failed], there, target, options[0]) == [near[0]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_sizes": (1,)}, r"batch_sizes is \[1\]; accepted: some of \[2\]"),
        ({"batch_sizes": ()}, r"batch_sizes is \[\]; accepted"),
        ({"tokens": 256}, "tokens is 256; accepted: 1 to 255"),
        ({"tokens": 0}, "tokens is 0; accepted"),
    ],
)
def test_wrong_calls_say_what_is_accepted(options: dict[str, Any], says: str, tiny: Any):
    with pytest.raises(ValueError, match=says):
        tilebit.transformers.tune(tiny, **options)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return model()


def test_only_compiled_models_are_tuned(tiny: Any):
    with pytest.raises(ValueError, match="the model is not compiled; accepted: one of a known kind, after"):
        tilebit.transformers.tune(made(llama(), torch.float16))
    with pytest.raises(TypeError, match="model is str"):
        tilebit.transformers.tune("a model")  # type: ignore[arg-type]
