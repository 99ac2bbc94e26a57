"""Training: what is learned, that it is always the same, and how good choices without a record are."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

pytest.importorskip("xgboost", reason="needs xgboost: pip install tilebit[compile]")

from tilebit.autotune import ranker as training
from tilebit.autotune import regret
from tilebit.autotune.ranker import main, record_target, records_digest, samples, to_text, too_few, train, trained
from tilebit.autotune.regret import SOURCES, regrets, summary
from tilebit.autotune.search import MAX_PLACES, MIN_PLACES, places, shortlist
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.ranker import COMMAND, load_ranker
from tilebit.schedules.records import shipped_records
from tilebit.schedules.target import target_from_name

from .made_up import DEVICE, SHAPES, WORKLOADS, made_up_records, made_up_us

UNSEEN = Workload(16, 8192, 8192)


@pytest.fixture(scope="module")
def records():
    return made_up_records()


@pytest.fixture(scope="module")
def found(records):
    return samples(records, "sm_90a")


@pytest.fixture(scope="module")
def ranker(found):
    return trained(found)


def test_it_learns_what_the_analytic_model_does_not_know(ranker):
    options = candidates(UNSEEN, DEVICE) or []
    us = {s: made_up_us(UNSEEN, s) for s in options}
    best = min(us.values())
    learned = options[min(range(len(options)), key=ranker.predict(UNSEEN, options, DEVICE).__getitem__)]
    analytic = min(options, key=lambda s: estimate(UNSEEN, s, DEVICE).us)
    assert us[learned] < 1.05 * best and us[learned] < us[analytic]


def test_predictions_are_microseconds(ranker, found):
    errors = []
    for s in found[::7]:
        (us,) = ranker.predict(s.record.workload, [s.record.schedule], DEVICE)
        errors.append(abs(us / s.us - 1))
    assert max(errors) < 0.25 and sorted(errors)[len(errors) // 2] < 0.03


def test_the_same_records_make_the_same_document(records, found):
    shuffled = list(records)
    random.Random(3).shuffle(shuffled)
    once, again = (to_text(train(samples(r, "sm_90a"))) for r in (records, shuffled))
    assert once == again
    document = json.loads(once)
    assert document["records"] == len(found) and document["workloads"] == len(WORKLOADS) and document["gpus"] == ["NVIDIA H200"]
    assert document["records_digest"] == records_digest(records) != records_digest(records[1:])


def test_no_feature_names_a_device(records):
    """The same times on a GPU of another name make the same trees."""
    renamed = [replace(r, gpu="another GPU") for r in records]
    one, other = (train(samples(r, "sm_90a")) for r in (records, renamed))
    assert one["trees_digest"] == other["trees_digest"] and other["gpus"] == ["another GPU"]


def test_samples_are_timed_legal_and_of_the_arch(records):
    first, second, third, *_ = records
    wrong = replace(first, us=None, status="wrong")
    illegal = replace(second, schedule=replace(second.schedule, block_n=7))
    elsewhere = replace(third, arch="sm_80")
    again = replace(third, us=99.0)
    in_step = replace(third, workload=replace(third.workload, dependent=True))
    assert samples([wrong, illegal, elsewhere, in_step], "sm_90a") == []
    assert [s.us for s in samples([third, again], "sm_90a")] == [99.0], "a later measurement takes an earlier one's place"


def test_rates_of_a_records_device_follow_its_units():
    full = target_from_name("sm_90a")
    half = replace(made_up_records(WORKLOADS[:1])[0], gpu="half", units=full.units // 2)
    assert record_target(half).mma_tflops == full.mma_tflops / 2 and record_target(half).read_gbps == full.read_gbps


def test_too_few_records_are_refused_with_a_sentence(found, tmp_path):
    assert too_few(found) is None
    for few in (found[:100], [s for s in found if (s.record.workload.n, s.record.workload.k) == (4096, 4096)]):
        assert "accepted: at least 200 of at least 10" in (too_few(few) or "")
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(s.record.to_json()) + "\n" for s in found[:3]))
    with pytest.raises(SystemExit, match=r"sm_90a: there are 3 timed records of 1 workloads.*tilebit tune"):
        main(["--records", str(path), "--arch", "sm_90a", "--out", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()


def test_the_command_writes_a_model_that_loads(records, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "load_records", lambda path: records)
    main(["--records", "records.jsonl", "--arch", "sm_90a", "--out", str(tmp_path / "models" / "gpu.ranker.json")])
    assert f"trained on {len(records)} records of {len(WORKLOADS)} workloads" in capsys.readouterr().out
    (path,) = (tmp_path / "models").iterdir()
    assert load_ranker(path.read_bytes(), path.name).arch == "sm_90a"


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["workload", "shape"])
def test_regret_of_the_made_up_gpu(found, left_out):
    rows = regrets(found, left_out)
    assert len(rows) == len(SOURCES) * len(WORKLOADS) and min(r.ratio for r in rows) >= 1.0
    by = {line["source"]: line for line in summary(rows)}
    assert by["ranker"]["mean"] < 1.02 < 1.05 < by["analytic"]["mean"] and by["ranker"]["worst"] < by["analytic"]["worst"]
    row = rows[0].to_row()
    assert row["shape"] == f"{row['n']}x{row['k']}" and row["us"] >= row["best_us"] and row["left_out"] == left_out


@pytest.mark.parametrize(("least", "turns"), [(0.0, 3), (0.5, 2), (2.0, 3)])
def test_those_of_few_records_are_left_out_together(found, monkeypatch, least, turns):
    """Every workload is chosen for once, by a ranker that has not seen its shape; one turn would leave nothing to learn from."""
    few = [s for s in found if (s.record.workload.n, s.record.workload.k) in SHAPES[:3]]
    learned = []
    monkeypatch.setattr(regret, "trained", lambda others: learned.append(others) or trained(others))
    rows = regrets(few, "shape", least)
    assert len(learned) == turns
    assert len(rows) == len(SOURCES) * len({(s.record.workload, s.target) for s in few})
    shapes = [{(s.record.workload.n, s.record.workload.k) for s in others} for others in learned]
    assert not set.intersection(*shapes)


def test_regret_needs_something_to_learn_from(found):
    with pytest.raises(ValueError, match="the records hold 1 shapes; accepted: at least 2"):
        regrets([s for s in found if (s.record.workload.n, s.record.workload.k) == (4096, 4096)], "shape")
    with pytest.raises(ValueError, match="left_out is 'gpu'; accepted: workload, shape"):
        regrets(found, "gpu")


@pytest.mark.slow
def test_regret_on_the_shipped_records():
    """The bound that choices without a record must keep, whole shapes left out: a sixth of the records at once, where the study leaves out
    a twentieth, so that every turn learns from less."""
    by = {line["source"]: line for line in summary(regrets(samples(shipped_records(), "sm_90a"), "shape", least=1 / 6))}
    assert by["ranker"]["median"] <= 1.10 and by["ranker"]["worst"] <= 1.35
    others = min(by["analytic"]["mean"], by["nearest"]["mean"])
    assert by["ranker"]["mean"] <= others + 0.005, f"train differently: {COMMAND}"


def test_the_tuner_measures_what_the_ranker_prefers(ranker):
    options = candidates(UNSEEN, DEVICE) or []
    short = shortlist(UNSEEN, DEVICE, None, ranker) or []
    assert len(short) == places(len(options), True) <= max(MIN_PLACES, -(-len(options) // 4))
    assert min(made_up_us(UNSEEN, s) for s in short) <= 1.05 * min(made_up_us(UNSEEN, s) for s in options)
    predicted = ranker.predict(UNSEEN, short, DEVICE)
    assert predicted == sorted(predicted)
    assert len(shortlist(UNSEEN, DEVICE) or []) == min(MAX_PLACES, len(options))
