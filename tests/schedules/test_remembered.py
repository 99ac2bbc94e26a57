"""Choices of earlier processes: they are what this one would find, and what cannot be used is done without."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilebit.layouts.formats import GemmFormat
from tilebit.layouts.kv_formats import KVFormat
from tilebit.schedules import remembered, select
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import RecordWarning
from tilebit.schedules.select import Choice, choose, portfolio, refresh
from tilebit.schedules.target import target_from_name

H200, A100 = target_from_name("sm_90a"), target_from_name("sm_80")
W4 = GemmFormat.parse("w4a16_g128")
TUNED = Workload(1, 4096, 4096, W4)
ASKED = (
    (TUNED, H200), (TUNED.with_m(300), H200), (Workload(1, 4096, 4096, W4, dependent=True), H200), (Workload(4, 576, 576, W4), A100),
    (AttentionWorkload("decode", 1, 1, 4096, 32, 8, 128, KVFormat.from_name("kv4_channel")), H200),
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a process that remembers, with a cache of its own."""
    monkeypatch.setattr(remembered, "ENABLED", True)
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "records.jsonl"))
    refresh()
    yield tmp_path / "cache" / "choices"
    monkeypatch.undo()
    refresh()


def answers() -> list[object]:
    shapes = [portfolio(workload, target) for workload, target in ASKED if workload.op == "gemm"]
    return [*shapes, *(choose(workload, target) for workload, target in ASKED)]


def nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would have to be found, or shipped records be read for, fails."""

    def refused(*_: object) -> None:
        raise AssertionError("a choice was not remembered")

    for name in ("_new_choice", "_new_portfolio", "shipped_records"):
        monkeypatch.setattr(select, name, refused)


def lines(folder: Path) -> list[dict]:
    (path,) = folder.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_next_process_finds_the_same_and_computes_nothing(own_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remembered, "ENABLED", False)
    expected = answers()
    assert not own_folder.exists()
    monkeypatch.setattr(remembered, "ENABLED", True)
    refresh()
    assert answers() == expected
    assert {json.loads(line["asked"])[0] for line in lines(own_folder)} == {"choice", "portfolio"}
    refresh()
    nothing_new(monkeypatch)
    assert answers() == expected
    sources = {found.source for found in expected if isinstance(found, Choice)}
    assert {"tuned", "ranker"} <= sources, "records and predictions are remembered, too"


def test_the_cache_is_private(own_folder: Path):
    choose(TUNED, H200)
    (path,) = own_folder.iterdir()
    assert [oct(made.stat().st_mode & 0o777) for made in (own_folder.parent, own_folder, path)] == ["0o700", "0o700", "0o600"]


def test_a_process_of_its_own_remembers(own_folder: Path):
    choose(TUNED, H200)
    code = (
        "from tilebit.schedules import select, remembered\n"
        "from tilebit.schedules.gemm.workload import Workload\n"
        "from tilebit.schedules.target import target_from_name\n"
        "select.shipped_records = None\n"
        "print(select.choose(Workload(1, 4096, 4096), target_from_name('sm_90a')).source, len(list(remembered._path().parent.iterdir())))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.split()) == (0, ["tuned", "1"]), run.stderr


def test_other_measurements_and_other_sources_are_other_files(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = choose(TUNED, H200)
    assert found.record is not None and found.record.us is not None and len(list(own_folder.iterdir())) == 1
    own = {**found.record.to_json(), "us": found.record.us / 2, "schedule": {**found.schedule.to_json(), "num_warps": 4}}
    (tmp_path / "records.jsonl").write_text(json.dumps(own) + "\n")
    refresh()
    assert choose(TUNED, H200).schedule.num_warps == 4 and len(list(own_folder.iterdir())) == 2
    (tmp_path / "records.sm_90a.ranker.json").write_text("{}")  # a model of the user's, though it is none
    refresh()
    with pytest.warns(UserWarning, match="not a ranker model"):
        choose(TUNED, H200)
    assert len(list(own_folder.iterdir())) == 3
    before = remembered._path()
    package = tmp_path / "made_up_sources"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(remembered, "SOURCES", (*remembered.SOURCES, package.name))
    paths = {before}
    for text in ("", "a = 1\n", "a = 2\n"):
        (package / "rule.py").write_text(text)
        remembered.forget()
        paths.add(remembered._path())
    assert len(paths) == 4


def test_a_damaged_file_of_records_is_named_in_every_process(tmp_path: Path):
    (tmp_path / "records.jsonl").write_text("no record\n")
    for _ in range(2):
        refresh()
        with pytest.warns(RecordWarning, match="line 1"):
            choose(TUNED, H200)


@pytest.mark.parametrize("spoilt", ["not json", '{"asked": 3}', '{"asked": ["x"], "answer": {}}', '{"asked": "x"'])
def test_lines_that_are_no_answers_are_done_without(own_folder: Path, spoilt: str):
    expected = answers()
    (path,) = own_folder.iterdir()
    path.write_text(spoilt + "\n" + path.read_text()[:-40])  # the last one torn
    refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answers() == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.pop("schedule", answer.pop("serving", None)),
        lambda answer: answer.update(schedule={"program": "gemm_wgmma"}, serving=[{}]),
        lambda answer: answer.update(us=[]),
        lambda answer: [s.update(block_n=72) for s in answer.get("serving", [answer.get("schedule")])],
        lambda answer: answer.update(record={}, tuned=3),
        lambda answer: [s.update(program="tests.nowhere") for s in answer.get("serving", [answer.get("schedule")])],
    ],
)
def test_answers_that_are_not_legal_are_found_anew(own_folder: Path, change):
    expected = answers()
    (path,) = own_folder.iterdir()
    kept = lines(own_folder)
    for line in kept:
        change(line["answer"])
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    refresh()
    assert answers() == expected


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, own_folder: Path):
    (tmp_path / "cache").write_text("a file where the folder would be")
    choose(TUNED, H200)
    refresh()
    assert choose(TUNED, H200).source == "tuned" and not own_folder.exists()


def test_what_another_package_defines_is_not_remembered(own_folder: Path):
    class Elsewhere:
        def to_json(self) -> dict[str, object]:
            return {"op": "gemm", "format": {"name": "another.package"}, "m": 1, "eps": 0.5}

    remembered.keep("choice", Elsewhere(), H200, {})  # pyright: ignore[reportArgumentType]
    assert not own_folder.exists() and remembered.recall("choice", Elsewhere(), H200) is None  # pyright: ignore[reportArgumentType]


def test_the_oldest_files_go(own_folder: Path, tmp_path: Path):
    for i in range(remembered.MOST_FILES + 3):
        (tmp_path / "records.jsonl").write_text("\n" * i)
        refresh()
        choose(TUNED, H200)
    assert remembered._path() in list(own_folder.iterdir()) and len(list(own_folder.iterdir())) == remembered.MOST_FILES
