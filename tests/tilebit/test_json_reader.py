"""One reader of JSON: every file of the package that others may have written is limited in size and depth, and whatever is wrong with
one is the error of who reads it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bad_file_cases import artifact

sys.path.append(str(Path(__file__).parent.parent / "tiles"))
from sample.artifacts import key_of, make_kernel

from tilebit import json_reader, packs
from tilebit.autotune.store import RecordStore
from tilebit.json_reader import MAX_DEPTH, JsonError, parse_json, read_json
from tilebit.layouts.kv_formats import KVFormat
from tilebit.runtime import CorruptArtifact, load_kernel, read_manifest
from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.neighbours import Known
from tilebit.schedules.ranker import load_ranker
from tilebit.schedules.records import MAX_LINE, SHOWN, RecordWarning, TuningRecord, load_records, parse_records
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.weights.checkpoint import CheckpointError, load_checkpoint
from tilebit.weights.synthetic import write_checkpoint

DEEP = {
    "arrays": "[" * 100_000,
    "closed arrays": "[" * 100_000 + "]" * 100_000,
    "objects": '{"a":' * 100_000,
    "not so deep": '{"a":' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("encoded", [False, True])
def test_what_is_nested_too_deeply_is_refused(text: str, encoded: bool):
    with pytest.raises(JsonError, match=f"nested too deeply; accepted: at most {MAX_DEPTH} levels"):
        parse_json(text.encode() if encoded else text)


def test_depth_is_counted_and_brackets_in_strings_are_not():
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deepest) == json.loads(deepest)
    assert parse_json(json.dumps({"a": "[" * 1000, "b": [[]] * 1000})) == {"a": "[" * 1000, "b": [[]] * 1000}
    assert parse_json(json.dumps("{" * 1000)) == "{" * 1000
    assert parse_json(json.dumps([{"x": list(range(9))}] * 500)) == [{"x": list(range(9))}] * 500


@pytest.mark.parametrize("text", ["", "{", "nul", '{"a": 1} x', b"\xff\xfe", b"\xef\xbb\xbf{}", "9" * 5000, '"\n"'])
def test_what_is_no_json_is_refused(text: str | bytes):
    with pytest.raises(JsonError, match="it is not JSON"):
        parse_json(text)


def test_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.json").write_text(json.dumps({"a": "x" * 100}))
    assert read_json(tmp_path / "a.json") == {"a": "x" * 100}
    with pytest.raises(JsonError, match="it has more than 100 bytes; accepted: at most as many"):
        read_json(tmp_path / "a.json", 100)
    with pytest.raises(JsonError, match="more than 10 bytes"):
        parse_json("[1, 2, 3, 4]", 10)


def test_only_objects_in_files_are_read(tmp_path: Path):
    (tmp_path / "list").write_text("[]")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JsonError, match="it holds a list; accepted: a JSON object"):
        read_json(tmp_path / "list")
    for name in ("endless", "folder", "pipe"):
        with pytest.raises(JsonError, match="it is not a file"):
            read_json(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "nothing")


# Each file that is read as JSON, with what reads it and the error that says so.
def manifest(folder: Path) -> tuple[Path, Callable[[], Any], type[Exception]]:
    return artifact(folder / "k") / "manifest.json", lambda: load_kernel(folder / "k"), CorruptArtifact


def pack(folder: Path) -> tuple[Path, Callable[[], Any], type[Exception]]:
    made = artifact(folder / "k")
    packs.export(folder / "p", [Kernel(made, read_manifest(made))])
    return folder / "p" / "pack.json", lambda: packs.read(folder / "p"), CorruptArtifact


def config(folder: Path) -> tuple[Path, Callable[[], Any], type[Exception]]:
    write_checkpoint(folder / "c", "awq", {"layer": (64, 256)})
    return folder / "c" / "config.json", lambda: load_checkpoint(folder / "c").quantized("layer"), CheckpointError


def index(folder: Path) -> tuple[Path, Callable[[], Any], type[Exception]]:
    write_checkpoint(folder / "c", "awq", {"layer": (64, 256)})
    names, shard = ("qweight", "qzeros", "scales"), "model-00001-of-00001.safetensors"
    (folder / "c" / "model.safetensors").rename(folder / "c" / shard)  # a whole one would go before the index
    path = folder / "c" / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {f"layer.{name}": shard for name in names}}))
    return path, lambda: load_checkpoint(folder / "c").quantized("layer"), CheckpointError


def records(folder: Path) -> tuple[Path, Callable[[], Any], type[Exception]]:
    path = folder / "records.jsonl"
    path.write_text(json.dumps(RECORD.to_json()) + "\n")

    def call() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_records(path)

    return path, call, RecordWarning


FILES = [manifest, pack, config, index, records]
SCHEDULE = Schedule("gemm_cpu", 32, 1, 32)
RECORD = TuningRecord(Workload(1, 64, 64), SCHEDULE, "test cpu", "cpu", 2, us=5.0, us_p20=4.0, us_p80=6.0, versions={"torch": "2"})
ATTENDED = AttentionWorkload("decode", 1, 1, 128, 8, 8, 64, KVFormat("int4", "int4"), soft_cap=30.0)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__)
@pytest.mark.parametrize("text", [*DEEP.values(), "{", "[]", "3", "null", '"text"', "\xff"], ids=lambda text: text[:6])
def test_every_reader_says_what_is_wrong_with_its_file(file: Callable[[Path], Any], text: str, tmp_path: Path):
    path, read, error = file(tmp_path)
    read() if file is not manifest else None
    path.write_text(text + "\n", encoding="latin-1")
    with pytest.raises(error) as caught:
        read()
    assert path.name in str(caught.value)
    assert not isinstance(caught.value, (TypeError, RecursionError))


@pytest.mark.parametrize("file", [manifest, pack, config, index], ids=lambda file: file.__name__)
def test_no_reader_takes_a_file_of_any_size(file: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, read, error = file(tmp_path)
    monkeypatch.setattr(json_reader.read_json, "__defaults__", (200,))
    path.write_text(path.read_text() + " " * 200)
    with pytest.raises(error, match="more than 200 bytes"):
        read()


def test_a_deep_ranker_is_no_ranker():
    pytest.importorskip("xgboost", reason="needs xgboost")
    with pytest.raises(ValueError, match=r"nested too deeply.*write it again"):
        load_ranker(('{"version": 1, "trees": ' + DEEP["closed arrays"] + "}").encode(), "model")


def everywhere(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in ``data`` there is a value."""
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from everywhere(value, (*path, key))


OTHERS: tuple[Any, ...] = ([], ["a"], {}, {"a": []}, "text", "", 3, -1, 2.5, 1e400, None, True, "a\0b", "\ud800", 10**400)


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = json.loads(json.dumps(data))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize("record", [RECORD, replace(RECORD, workload=ATTENDED)], ids=["gemm", "attention"])
def test_a_value_of_another_type_in_a_record_is_refused_or_serves(record: TuningRecord):
    """Whatever stands where: what is taken can be looked up, compared and written again."""
    data, refused = record.to_json(), 0
    for path in everywhere(data):
        for value in OTHERS:
            changed = replaced(data, path, value)
            try:
                found = TuningRecord.from_json(changed)
            except ValueError as error:
                refused += 1
                assert len(str(error)) < 2000
                continue
            Known.among([found, record])
            assert hash((found.workload, found.schedule, found.key, found.driver)) is not None
            assert TuningRecord.from_json(found.to_json()) == found
            assert all(type(getattr(found.workload, size)) is int for size in found.workload.SIZES), (path, value)
    assert refused > 200


@pytest.mark.parametrize("file", [manifest, pack, index, config], ids=lambda file: file.__name__)
def test_a_value_of_another_type_is_that_file_s_error(file: Callable[[Path], Any], tmp_path: Path):
    path, read, error = file(tmp_path)
    data, refused = json.loads(path.read_text()), 0
    for place in everywhere(data):
        for value in OTHERS:
            path.write_text(json.dumps(replaced(data, place, value)))
            try:
                read()
            except error:
                refused += 1
            except Exception as other:
                pytest.fail(f"{place} = {value!r:.40}: {other!r:.300}")
    assert refused > 20


def test_a_kernel_s_manifest_with_strange_values_is_quarantined_or_serves(tmp_path: Path):
    """A library that loads, so that everything behind the manifest is reached."""
    folder = make_kernel(tmp_path / "k", key_of("k"))
    data = json.loads((folder / "manifest.json").read_text())
    for place in everywhere(data):
        for value in OTHERS:
            (folder / "manifest.json").write_text(json.dumps(replaced(data, place, value)))
            try:
                found = Kernel(folder, read_manifest(folder))
            except CorruptArtifact:
                continue
            assert all(isinstance(name, str) for name in (found.key, *found.params, found.manifest["target"]["arch"]))
            try:
                assert found.workload and found.schedule
            except ValueError as error:
                assert place[0] in ("workload", "schedule"), error


def test_many_bad_lines_are_counted_and_three_are_shown():
    """In a time that a look at each takes: at most half of what reading as many good lines would."""
    good, count, few = json.dumps(RECORD.to_json()).encode() + b"\n", 20_000, 1_000
    bad = [b"{}\n", b"hello\n", b"[" * 50 + b"\n", b'{"workload": ' + b"[" * 300 + b"\n"]

    def timed(text: bytes) -> tuple[float, list[TuningRecord]]:
        begin = time.thread_time()
        found = parse_records(text, "records.jsonl")
        return time.thread_time() - begin, found

    usual = min(timed(good * few)[0] for _ in range(3)) * count / few
    for line in bad:
        with pytest.warns(RecordWarning) as caught:
            spent, found = min((timed(good + line * count + good) for _ in range(3)), key=lambda pair: pair[0])
        text = str(caught[0].message)
        assert found == [RECORD, RECORD] and spent < usual / 2, (line[:20], spent, usual)
        assert f"skipped {count} lines" in text and "line 2: " in text and "line 4: " in text and f"and {count - SHOWN} more" in text
        assert "line 5" not in text and len(text) < 1000 and len(caught) == 3


def test_a_long_line_is_no_record():
    line = json.dumps({**RECORD.to_json(), "reason": "x" * MAX_LINE}).encode() + b"\n"
    with pytest.warns(RecordWarning, match=f"line 1: it has more than {MAX_LINE} bytes"):
        assert parse_records(line, "records.jsonl") == []


@pytest.mark.parametrize("torn", [*DEEP.values(), '{"a"' * 3, "x" * 3_000_000], ids=lambda text: text[:6])
def test_no_torn_tail_blocks_an_append(tmp_path: Path, torn: str):
    store = RecordStore(tmp_path / "records.jsonl")
    store.append(RECORD)
    with store.path.open("a") as file:
        file.write(torn)
    store.append(RECORD)
    assert store.records() == [RECORD, RECORD] and store.torn_path.read_text() == torn + "\n"


def test_a_thread_with_little_stack_reads_too():
    """Depth is limited by what is read, not by how deep the caller is."""
    seen: list[Exception] = []

    def run(depth: int) -> None:
        if depth:
            return run(depth - 1)
        try:
            parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
            parse_json(DEEP["arrays"])
        except JsonError as error:
            seen.append(error)

    thread = threading.Thread(target=run, args=(400,))
    thread.start()
    thread.join()
    assert len(seen) == 1 and "nested too deeply" in str(seen[0])
