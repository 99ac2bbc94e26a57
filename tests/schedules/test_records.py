"""Reading records: round trips, unknown fields, torn and mislabelled lines, and where the files are."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.records import (
    RecordWarning,
    TuningRecord,
    latest,
    load_records,
    records_path,
    settled,
    shipped_records,
    user_records,
)
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name

RECORD = TuningRecord(
    workload=Workload(16, 4096, 11008, QuantFormat(4, 64, False), "bfloat16", True),
    schedule=Schedule("gemm_wgmma", 64, 16, 64, 8, 4, 4, 2, 8),
    gpu="NVIDIA H200", arch="sm_90a", units=132, us=7.25, us_p20=7.2, us_p80=7.4, rel_err=3e-4, key="ab" * 32,
    driver="570.1", versions={"torch": "2.13"}, date="2026-11-21T00:00:00+00:00", commit="c0ffee",
)  # fmt: skip
FAILED = TuningRecord(RECORD.workload, RECORD.schedule, "NVIDIA H200", "sm_90a", 132, status="hang", reason="120 s")


def lines(*records: TuningRecord) -> str:
    return "".join(json.dumps(r.to_json()) + "\n" for r in records)


def test_round_trip_through_a_file(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(lines(RECORD, FAILED))
    assert load_records(path) == [RECORD, FAILED]


def test_equal_workloads_are_one_and_what_is_only_equal_to_them_is_none(tmp_path):
    """1 is no truth value: a line that says it is skipped, behind one that is right."""
    path = tmp_path / "r.jsonl"
    mislabelled = RECORD.to_json()
    mislabelled["workload"]["bias"] = 1
    path.write_text(
        lines(RECORD, FAILED) + json.dumps(mislabelled) + "\n" + lines(replace(RECORD, schedule=replace(RECORD.schedule, raster=0)))
    )
    with pytest.warns(RecordWarning, match="skipped 1 lines"):
        first, failed, other = load_records(path)
    assert first == RECORD and first.workload is failed.workload is other.workload
    assert first.schedule is failed.schedule and other.schedule.raster == 0


def test_unknown_fields_are_kept():
    data = {**RECORD.to_json(), "clock_mhz": 1980, "from_the_future": {"a": [1]}}
    record = TuningRecord.from_json(data)
    assert record.extra == {"clock_mhz": 1980, "from_the_future": {"a": [1]}}
    assert record.to_json() == data


def test_a_time_in_a_step_is_the_dependent_product_s_also_as_it_was_spelled_before():
    in_step = replace(RECORD, workload=replace(RECORD.workload, dependent=True))
    data = in_step.to_json()
    assert data["workload"]["dependent"] is True and "dependent" not in RECORD.to_json()["workload"]
    assert TuningRecord.from_json(data) == in_step and in_step.dependent and not RECORD.dependent
    assert TuningRecord.from_json({"place": "step", "clock_mhz": 1, **RECORD.to_json()}) == replace(in_step, extra={"clock_mhz": 1})
    assert TuningRecord.from_json({"place": "bench", **RECORD.to_json()}) == replace(RECORD, extra={"place": "bench"})
    assert len(latest([RECORD, in_step])) == 2
    with pytest.raises(ValueError, match="dependent is 1"):
        TuningRecord.from_json({**data, "workload": {**data["workload"], "dependent": 1}})


def test_torn_last_line_is_left_out_with_a_warning(tmp_path):
    path = tmp_path / "r.jsonl"
    whole = lines(RECORD, FAILED)
    for length in range(len(lines(RECORD)) + 1, len(whole) - 1, 17):
        path.write_text(whole[:length])
        with pytest.warns(RecordWarning, match="line 2 is torn"):
            assert load_records(path) == [RECORD]


def test_whole_last_line_without_a_newline_counts(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(lines(RECORD, FAILED)[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_records(path) == [RECORD, FAILED]


def broken(**changes: object) -> dict[str, object]:
    return {**RECORD.to_json(), **changes}


MISLABELLED = {
    "no JSON": "hello",
    "no object": "[1, 2]",
    "deeply nested": "[" * 100_000,
    "no workload": json.dumps({k: v for k, v in RECORD.to_json().items() if k != "workload"}),
    "half a workload": json.dumps(broken(workload={"m": 1})),
    "another op": json.dumps(broken(workload={**RECORD.workload.to_json(), "op": "attention"})),
    "a list for a workload": json.dumps(broken(workload=[1])),
    "bits nobody has": json.dumps(
        broken(workload={**RECORD.workload.to_json(), "format": {"bits": 5, "group_size": 64, "symmetric": True}})
    ),
    "text for a size": json.dumps(broken(workload={**RECORD.workload.to_json(), "n": "4096"})),
    "half a size": json.dumps(broken(workload={**RECORD.workload.to_json(), "n": 40.5})),
    "half a schedule": json.dumps(broken(schedule={"program": "gemm_wgmma"})),
    "text in a schedule": json.dumps(broken(schedule={**RECORD.schedule.to_json(), "num_stages": "8"})),
    "no program": json.dumps(broken(schedule={**RECORD.schedule.to_json(), "program": 3})),
    "an unknown arch": json.dumps(broken(arch="sm_13")),
    "an unknown status": json.dumps(broken(status="fine")),
    "ok without a time": json.dumps(broken(us=None)),
    "negative time": json.dumps(broken(us=-1.0)),
    "NaN time": json.dumps(broken(us=float("nan"))),
    "a time in words": json.dumps(broken(us="7 us")),
    "units in words": json.dumps(broken(units="many")),
    "no units": json.dumps(broken(units=0)),
    "a time that is nearly none": json.dumps(broken(us=5e-324)),
    "a time beyond floats": json.dumps(broken(us=10**400)),
    "a field that no workload has": json.dumps(broken(workload={**RECORD.workload.to_json(), "sparsity": "2:4"})),
    "tiles of nothing": json.dumps(broken(schedule={**RECORD.schedule.to_json(), "block_k": 0})),
    "a negative split": json.dumps(broken(schedule={**RECORD.schedule.to_json(), "split_k": -1})),
}


@pytest.mark.parametrize("line", MISLABELLED.values(), ids=MISLABELLED)
def test_mislabelled_lines_are_skipped_and_named(tmp_path, line):
    path = tmp_path / "r.jsonl"
    path.write_text(lines(RECORD) + line + "\n" + lines(FAILED) + "\n" + line + "\n")
    with pytest.warns(RecordWarning, match=r"skipped 2 lines that are not tuning records \(line 2: .*; line 5: .*\)\. Accepted") as caught:
        assert load_records(path) == [RECORD, FAILED]
    assert len(caught) == 1 and str(path) in str(caught[0].message)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n" + lines(RECORD).encode())
    with pytest.warns(RecordWarning, match="1 lines that are not tuning records .line 1:"):
        assert load_records(path) == [RECORD]


def test_missing_file_is_an_error_for_load_and_nothing_for_the_user(tmp_path, monkeypatch):
    with pytest.raises(OSError):
        load_records(tmp_path / "none.jsonl")
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "none.jsonl"))
    assert user_records() == []


def test_where_the_users_records_are(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "mine.jsonl"))
    assert records_path() == tmp_path / "mine.jsonl"
    (tmp_path / "mine.jsonl").write_text(lines(RECORD))
    assert user_records() == [RECORD]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEBIT_RECORDS", "~/mine.jsonl")
    assert user_records() == [RECORD]
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path))
    with pytest.warns(RecordWarning, match="is no file: no records were read. Set TILEBIT_RECORDS"):
        assert user_records() == []
    monkeypatch.delenv("TILEBIT_RECORDS")
    assert records_path() == Path(tmp_path) / ".config/tilebit/records.jsonl"


def test_shipped_records_of_one_arch_are_all_of_that_arch():
    every = shipped_records()
    assert {r.arch for r in every} >= {"sm_90a", "cpu"}
    for arch in {*(r.arch for r in every), "sm_80"}:
        assert shipped_records(arch) == [r for r in every if r.arch == arch]


def test_shipped_records_are_clean():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for record in shipped_records():
            assert record.commit and record.date and record.key, "a shipped number says where it came from"


def test_schedules_of_shipped_records_may_still_be_chosen():
    for record in shipped_records("sm_90a"):
        assert legal(record.workload, record.schedule, target_from_name("sm_90a")) == [], record


def test_latest_replaces_also_by_a_failure():
    faster = TuningRecord(RECORD.workload, RECORD.schedule, "NVIDIA H200", "sm_90a", 132, us=1.0)
    assert list(latest([RECORD, faster]).values()) == [faster]
    assert list(latest([RECORD, FAILED]).values()) == [FAILED]


def test_measured_on_the_same_device_only():
    h200 = target_from_name("sm_90a")
    assert RECORD.measured_on(h200)
    assert not RECORD.measured_on(target_from_name("sm_80"))


def test_siblings_are_gpus_with_the_same_cores():
    h200 = target_from_name("sm_90a")
    assert RECORD.measured_on_sibling(h200) and RECORD.measured_on_sibling(replace(h200, name="NVIDIA H100 80GB HBM3"))
    assert not RECORD.measured_on_sibling(replace(h200, units=114))
    here = target_from_name("cpu")
    of_cpu = replace(RECORD, arch="cpu", gpu=here.name, units=here.units)
    assert of_cpu.measured_on_sibling(here) and not of_cpu.measured_on_sibling(replace(here, name="another processor"))


def at(us: float, raster: int = 8, **fields) -> TuningRecord:
    return replace(RECORD, schedule=replace(RECORD.schedule, raster=raster), us=us, **fields)


def test_of_another_gpu_or_day_what_had_lost_does_not_win_by_its_clock():
    """Shipped: 7.0 by raster 0, 7.2 by 8, 9.0 by 1. Here, at a lower clock, 7.5 by 0 and 7.4 by 4."""
    shipped, own = [at(7.0, 0), at(7.2), at(9.0, 1)], [at(7.5, 0), at(7.4, 4)]
    assert settled(shipped, own) == [at(9.0, 1), *own], "what is slower in any case stays: a ranker learns from it"
    assert settled(shipped, []) == shipped and settled([], own) == own
    assert settled(shipped, [at(6.9, 0)]) == [*shipped[1:], at(6.9, 0)]


def test_what_was_not_compared_with_the_fastest_of_then_leaves_it():
    shipped = [at(7.0, 0), at(7.2)]
    assert settled(shipped, [at(7.4, 4)]) == [*shipped, at(7.4, 4)]
    failed = replace(at(7.0, 0), status="crash", us=None, reason="it fell")
    assert settled(shipped, [failed, at(7.4, 4)]) == [at(7.2), failed, at(7.4, 4)], "the fastest of then works no more"
    elsewhere = [at(7.5, 0, gpu="NVIDIA H100 80GB HBM3"), at(7.5, 0, workload=Workload(32, 4096, 11008))]
    assert settled(shipped, elsewhere) == [*shipped, *elsewhere]
