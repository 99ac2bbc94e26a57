"""The learned ranker, read side: which model is used, when none is, and what `select` and `explain` make of it."""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("xgboost", reason="needs xgboost: pip install tilebit[compile]")

from tests.autotune.made_up import DEVICE, made_up_records
from tilebit.autotune.ranker import records_digest, samples, to_text, train
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules import ranker as reading
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.features import features
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates, legal
from tilebit.schedules.ranker import COMMAND, SUFFIX, Ranker, RankerWarning, kind, known_ranker, load_ranker, user_model_path
from tilebit.schedules.records import TuningRecord, shipped_records
from tilebit.schedules.select import choose, explain, refresh

W = Workload(16, 8192, 8192)
OPTIONS = candidates(W, DEVICE) or []


@pytest.fixture(scope="module")
def text() -> bytes:
    return to_text(train(samples(made_up_records(), "sm_90a")))


@pytest.fixture(scope="module")
def ranker(text):
    return load_ranker(text, "made up")


@pytest.fixture
def user_model(tmp_path, monkeypatch):
    """The path of the user's model; what is known is read anew before and after."""
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    refresh()
    yield Path(user_model_path("sm_90a"))
    refresh()


def record(workload: Workload, schedule, us: float | None = 5.0, **changes) -> TuningRecord:
    changes = changes if us else {"status": "wrong", "reason": "1 element", **changes}
    return TuningRecord(workload, schedule, DEVICE.name, DEVICE.arch, DEVICE.units, us=us, **changes)


def changed(text: bytes, **values) -> bytes:
    return to_text({**json.loads(text), **values})


def test_the_rankers_best_is_chosen(ranker):
    us = dict(zip(OPTIONS, ranker.predict(W, OPTIONS, DEVICE), strict=True))
    choice = choose(W, DEVICE, [], ranker)
    assert (choice.source, choice.predicted_us, choice.record) == ("ranker", min(us.values()), None) and us[choice.schedule] == min(
        us.values()
    )
    assert choice.schedule != choose(W, DEVICE, []).schedule, "the made-up GPU is one that the analytic model gets wrong"


def test_one_prediction_is_a_batch_prediction(ranker):
    together = ranker.predict(W, OPTIONS[:5], DEVICE)
    assert together == [ranker.predict(W, [s], DEVICE)[0] for s in OPTIONS[:5]] and ranker.predict(W, [], DEVICE) == []


def test_tuned_and_twins_go_before_the_ranker(ranker):
    slow = max(OPTIONS, key=lambda s: ranker.predict(W, [s], DEVICE)[0])
    assert choose(W, DEVICE, [record(W, slow)], ranker).source == "tuned"
    good = min(OPTIONS, key=lambda s: estimate(W, s, DEVICE).us)
    for twin in (replace(W, dtype="bfloat16"), replace(W, bias=True), replace(W, format=QuantFormat(4, 128, False))):
        choice = choose(W, DEVICE, [record(twin, good)], ranker)
        assert (choice.source, choice.schedule) == ("nearest", good)
    assert choose(W, DEVICE, [record(replace(W, n=8256), good)], ranker).source == "ranker"


def test_neighbours_join_the_rankers_candidates(ranker, monkeypatch):
    best = choose(W, DEVICE, [], ranker).schedule
    deeper = (replace(s, num_stages=stages) for s in OPTIONS for stages in range(2, 9))
    other = next(s for s in deeper if s not in OPTIONS and not legal(W, s, DEVICE))
    unknown = replace(other, program="gemm_mma", num_warps=4)
    near = [record(replace(W, n=4096), other), record(replace(W, n=4096), unknown)]
    assert choose(W, DEVICE, near, ranker).schedule in (best, other)
    monkeypatch.setattr(Ranker, "predict", lambda self, workload, schedules, target: [1.0 if s == other else 2.0 for s in schedules])
    choice = choose(W, DEVICE, near, ranker)
    assert (choice.schedule, choice.source, choice.predicted_us) == (other, "ranker", 1.0)
    assert choose(W, DEVICE, [*near, record(W, other, us=None)], ranker).schedule == OPTIONS[0]


def test_failed_schedules_are_never_chosen(ranker):
    best = choose(W, DEVICE, [], ranker).schedule
    assert choose(W, DEVICE, [record(W, best, us=None)], ranker).schedule != best


def test_a_model_is_asked_only_about_what_it_saw(ranker):
    assert ranker.kinds >= {kind(W, s) for s in OPTIONS} and ranker.serves(W, OPTIONS)
    eight = replace(W, format=QuantFormat(8))
    other = replace(OPTIONS[0], program="gemm_mma")
    assert not ranker.serves(W, [*OPTIONS, other]) and not ranker.serves(eight, OPTIONS)
    assert choose(eight, DEVICE, [], ranker).source == "model"
    assert all(row.predicted_us is None for row in explain(eight, DEVICE, [], ranker))


def test_features_are_found_by_name(text, ranker):
    """A model that knows a feature which is gone, or lacks one that is new, still answers."""
    document = json.loads(text)
    column = document["features"].index("raster")
    for listed in (document["features"], *(probe["features"] for probe in document["probes"])):
        listed[column] = "no such field" if listed is document["features"] else None
    answers = load_ranker(to_text(document), "older").predict(W, OPTIONS, DEVICE)
    assert answers == pytest.approx(ranker.predict(W, OPTIONS, DEVICE)), "raster never varied in these records"
    assert set(ranker.names) <= {name for s in OPTIONS for name in features(W, s, DEVICE, estimate(W, s, DEVICE))}


def test_without_xgboost_the_analytic_model_ranks(text, user_model, monkeypatch):
    user_model.write_bytes(text)
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known_ranker(DEVICE) is None and choose(W, DEVICE).source in ("nearest", "model")


def test_the_users_model_goes_before_the_shipped_one(text, user_model):
    user_model.write_bytes(changed(text, gpus=["a GPU of this test"]))
    found = known_ranker(DEVICE)
    assert found is not None and found.gpus == ("a GPU of this test",)
    assert choose(W, DEVICE).source == "ranker"
    user_model.unlink()
    assert known_ranker(DEVICE) is found, "read once per process"
    refresh()
    assert known_ranker(DEVICE) is not found


DAMAGED = {
    "not JSON": lambda text: text[:-2000],
    "empty": lambda text: b"",
    "another kind of document": lambda text: b"[1, 2]",
    "another version": lambda text: changed(text, version=2),
    "other trees": lambda text: changed(text, trees={**json.loads(text)["trees"], "version": [1, 0, 0]}),
    "no trees": lambda text: changed(text, trees={}, trees_digest=reading.trees_digest({})),
    "no probes": lambda text: changed(text, probes=[]),
    "a feature less": lambda text: changed(text, features=json.loads(text)["features"][1:]),
    "no kinds": lambda text: to_text({k: v for k, v in json.loads(text).items() if k != "kinds"}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_model_warns_once_and_is_left_out(damage, text, user_model):
    damaged = DAMAGED[damage](text)
    assert damaged != text
    with pytest.raises(ValueError, match=r"model is not a ranker model that can be used.*write it again with"):
        load_ranker(damaged, "model")
    user_model.write_bytes(damaged)
    elsewhere = replace(DEVICE, name="a GPU of this test")
    asked = choose if damage == "empty" else lambda workload, target: known_ranker(target)  # which choose asks, for seconds
    with pytest.warns(RankerWarning) as caught:
        asked(W, elsewhere)
        asked(W.with_m(1), elsewhere)
    assert sum(str(user_model) in str(warning.message) for warning in caught) == 1


def test_a_model_of_another_cost_model_is_left_out(text, monkeypatch):
    monkeypatch.setattr(reading, "seen", lambda *a: {**features(*a), "load_us": 9.0, "mma_us": 9.0})
    with pytest.raises(
        ValueError, match=r"model was trained when the cost model or its features were different \(load_us, mma_us\).*again"
    ):
        load_ranker(text, "model")


def test_explain_shows_predictions(ranker):
    rows = explain(W, DEVICE, [], ranker)
    assert rows[0].chosen and rows[0].why.startswith(f"chosen: the ranker's best, predicted {rows[0].predicted_us:.2f} us")
    predicted = [r.predicted_us for r in rows]
    assert all(us is not None for us in predicted) and predicted == sorted(p for p in predicted if p is not None)
    assert f"predicted {predicted[1]:.2f} us, the chosen one {predicted[0]:.2f} us" in rows[1].why
    broken = replace(OPTIONS[0], block_n=7)
    by = {r.schedule: r for r in explain(W, DEVICE, [record(W, OPTIONS[3], us=11.5), record(W, broken)], ranker)}
    assert by[OPTIONS[3]].chosen and by[OPTIONS[3]].predicted_us is not None and by[broken].predicted_us is None
    assert "not measured here; a tuned schedule goes before" in by[OPTIONS[5]].why


def test_choosing_takes_milliseconds(ranker):
    """Of its own processor time, which other processes' work does not lengthen."""
    spent = []
    for _ in range(6):
        begin = time.process_time()
        choose(W, DEVICE, [], ranker)
        spent.append(time.process_time() - begin)
    assert min(spent) < 0.1


def test_shipped_models_are_those_of_the_shipped_records():
    """They load without a warning, and were trained on the records beside them."""
    folder = resources.files("tilebit.schedules") / "tuned"
    files = [f for f in folder.iterdir() if f.name.endswith(SUFFIX)]
    assert files
    for file in files:
        model = load_ranker(file.read_bytes(), file.name)
        again = f"`{COMMAND} --arch {model.arch} --out schedules/tuned/{file.name}`"
        assert model.digest == records_digest(s.record for s in samples(shipped_records(), model.arch)), f"train {file.name} again: {again}"


@pytest.mark.parametrize("where", ["least", "largest", "missing"])
def test_the_probes_of_shipped_models_notice_a_changed_feature(where, monkeypatch):
    """Each feature in turn, and only where it is at its least, at its largest, or missing in the records that the model was trained on."""
    for entry in resources.files("tilebit.schedules").joinpath("tuned").iterdir():
        if not entry.name.endswith(SUFFIX):
            continue
        document = json.loads(entry.read_bytes())
        model, probes, unnoticed = load_ranker(entry.read_bytes(), entry.name), document["probes"], []
        found = samples(shipped_records(), document["arch"])
        columns = {name: [s.values.get(name) for s in found] for name in model.names if not name.startswith("program=")}
        for name, column in columns.items():
            there = {value for value in column if value is not None}
            target = {"least": min(there), "largest": max(there), "missing": None}[where]
            if target is None and None not in column:
                continue

            def otherwise(workload, schedule, target_, expected, name=name, target=target):
                values = features(workload, schedule, target_, expected)
                return {**values, name: (target or 0.0) + 0.01} if values.get(name) == target else values

            monkeypatch.setattr(reading, "seen", otherwise)
            if not any(name in reading._changed(model, probe) for probe in probes):
                unnoticed.append(name)
        assert unnoticed == []
