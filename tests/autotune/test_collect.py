"""Tuned records are put where they ship: none lost, none twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tilebit.autotune.collect import collect, main, merged
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import TuningRecord, load_records
from tilebit.schedules.schedule import Schedule

W, S = Workload(64, 4096, 4096), Schedule("gemm_wgmma", 128, 64, 128, 4, 8)
OLD = TuningRecord(W, S, "NVIDIA H200", "sm_90a", 132, us=10.0, key="one kernel", date="2026-11-01T00:00:00+00:00")
NEW = replace(OLD, us=9.0, date="2026-11-02T00:00:00+00:00")


def written(path: Path, *records: TuningRecord) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record.to_json()) + "\n" for record in records))
    return path


def test_records_that_share_a_kernel_are_all_kept():
    more_rows = [replace(OLD, workload=W.with_m(m)) for m in (16, 32, 128)]
    assert merged([OLD], more_rows) == [OLD, *more_rows]


def test_the_newer_of_two_measurements_stays_where_the_older_was():
    other = replace(OLD, schedule=replace(S, num_stages=5))
    assert merged([OLD, other], [NEW]) == [NEW, other] and merged([NEW], [OLD]) == [NEW]


def test_failures_are_not_collected():
    failed = replace(OLD, status="crash", us=None, reason="it fell")
    assert merged([OLD], [replace(failed, schedule=replace(S, num_stages=6))]) == [OLD]


def test_what_a_changed_program_measured_before_goes_for_the_same_workloads_alone():
    elsewhere = replace(OLD, workload=W.with_m(256))
    others = [replace(OLD, schedule=replace(S, num_stages=5)), replace(OLD, schedule=Schedule("gemm_mma", 64, 64, 64, 3, 4)), elsewhere]
    assert merged([OLD, *others], [NEW], frozenset({"gemm_wgmma"})) == [*others[1:], NEW]


def test_each_device_has_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    into = tmp_path / "tuned"
    written(into / "nvidia-h200.jsonl", OLD)
    on_another = replace(OLD, gpu="NVIDIA H100 80GB HBM3", extra={"later": 1})
    first, second = written(tmp_path / "a.jsonl", NEW, on_another), written(tmp_path / "b.jsonl", replace(NEW, workload=W.with_m(8)))
    assert main([str(first), str(second), "--into", str(into)]) == 0
    assert load_records(into / "nvidia-h200.jsonl") == [NEW, replace(NEW, workload=W.with_m(8))]
    assert load_records(into / "nvidia-h100-80gb-hbm3.jsonl") == [on_another]
    assert "nvidia-h200.jsonl: 1 added, 1 replaced, 0 dropped" in capsys.readouterr().out
    assert [(c.added, c.replaced) for c in collect([first, second], into)] == [(0, 0), (0, 0)]
    assert {path.name for path in into.iterdir()} == {"nvidia-h200.jsonl", "nvidia-h100-80gb-hbm3.jsonl"}


def test_nothing_is_written_without_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    failed = replace(OLD, status="crash", us=None, reason="it fell")
    assert main([str(written(tmp_path / "a.jsonl", failed)), "--into", str(tmp_path / "tuned")]) == 0
    assert "nothing was written" in capsys.readouterr().out and not (tmp_path / "tuned").exists()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.jsonl"), "--into", str(tmp_path)])
