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


@pytest.mark.parametrize("status", ["wrong", "compile_error"])
def test_what_failed_when_it_was_measured_again_goes(status: str):
    """As a tuner writes of a finalist: right when it was searched, wrong when it was timed."""
    failed = replace(OLD, status=status, us=None, reason="3 elements differ.", date="2026-11-03T00:00:00+00:00")
    assert merged([], [NEW, failed]) == merged([], [failed, NEW]) == merged([OLD], [failed]) == merged([OLD], [NEW, failed]) == []
    assert merged([], [replace(failed, date="2026-11-01T12:00:00+00:00"), NEW]) == [NEW], "and what works since then stays"
    lost = replace(failed, status="error", reason="CUDA error: no CUDA-capable device is detected")
    assert merged([OLD], [lost]) == [OLD]


def test_what_a_changed_program_measured_before_goes_for_the_same_workloads_alone():
    elsewhere = replace(OLD, workload=W.with_m(256))
    others = [replace(OLD, schedule=replace(S, num_stages=5)), replace(OLD, schedule=Schedule("gemm_mma", 64, 64, 64, 3, 4)), elsewhere]
    assert merged([OLD, *others], [NEW], frozenset({"gemm_wgmma"})) == [*others[1:], NEW]


def test_what_had_lost_before_does_not_win_by_the_clock_of_then():
    """Another card, at a lower clock: the fastest of before takes 11 us there, something new 10.9."""
    lost, slow = replace(OLD, schedule=replace(S, num_stages=5), us=10.5), replace(OLD, schedule=replace(S, num_stages=6), us=12.0)
    again, other = replace(NEW, us=11.0), replace(NEW, schedule=replace(S, num_stages=7), us=10.9)
    assert merged([OLD, lost, slow], [again, other]) == [again, slow, other]
    assert merged([again, other], [OLD, lost]) == [again, other, lost], "what is older settles nothing"


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


def test_lines_that_are_no_records_here_stay(tmp_path: Path):
    elsewhere = json.dumps({**OLD.to_json(), "workload": {"op": "nowhere.to_be_found"}})
    path = written(tmp_path / "tuned" / "nvidia-h200.jsonl", OLD)
    path.write_text(f"{elsewhere}\n{path.read_text()}")
    (done,) = collect([written(tmp_path / "a.jsonl", replace(NEW, workload=W.with_m(8)))], tmp_path / "tuned")
    assert (done.added, done.replaced, done.dropped) == (1, 0, 0)
    assert path.read_text().splitlines()[0] == elsewhere and load_records(path) == [OLD, replace(NEW, workload=W.with_m(8))]


def test_an_older_twin_is_counted_and_a_fault_of_the_machine_replaces_nothing(tmp_path: Path):
    lost = replace(OLD, status="error", us=None, reason="CUDA error: no CUDA-capable device is detected", date="2026-11-09")
    assert lost.of_machine
    path = written(tmp_path / "tuned" / "nvidia-h200.jsonl", OLD, NEW, lost)
    (done,) = collect([written(tmp_path / "a.jsonl", NEW)], tmp_path / "tuned")
    assert load_records(path) == [NEW] and done.dropped == 2 and done.added == done.replaced == 0


def test_processors_are_told_apart_by_their_cores(tmp_path: Path):
    on_cpu = replace(OLD, gpu="AMD EPYC", arch="cpu", units=2, schedule=Schedule("gemm_cpu", 32, 1, 32))
    (done,) = collect([written(tmp_path / "a.jsonl", on_cpu)], tmp_path / "tuned")
    assert done.path.name == "amd-epyc-2-cores.jsonl"
