"""The record store: what is written stays, whatever happens to the writer, the disk or the last line."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest

from tilebit.autotune.store import RecordStore, StoreError
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.records import RecordWarning, TuningRecord, records_path
from tilebit.schedules.schedule import Schedule

RECORD = TuningRecord(Workload(1, 4096, 4096), Schedule("gemm_cpu", 32, 1, 32), "test cpu", "cpu", 2, us=5.0, extra={"later": [1, 2]})
OTHERS = [replace(RECORD, us=float(us)) for us in range(6, 10)]


@pytest.fixture
def store(tmp_path) -> RecordStore:
    return RecordStore(tmp_path / "folder" / "records.jsonl")


def test_append_and_read_back(store):
    assert store.records() == []
    for record in (RECORD, *OTHERS):
        store.append(record)
    assert store.records() == [RECORD, *OTHERS]
    assert RecordStore(store.path).records()[0].extra == {"later": [1, 2]}


def test_default_path_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEBIT_RECORDS", str(tmp_path / "mine"))
    assert RecordStore().path == records_path() == tmp_path / "mine"


@pytest.mark.parametrize("keep", [1, 20, 200])
def test_a_torn_tail_is_moved_aside(store, keep):
    store.append(RECORD)
    whole = store.path.read_bytes()
    torn = whole[:keep]
    store.path.write_bytes(whole + torn)
    with pytest.warns(RecordWarning, match="torn"):
        assert store.records() == [RECORD]
    store.append(OTHERS[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.records() == [RECORD, OTHERS[0]]
    assert store.path.read_bytes().startswith(whole)
    assert store.torn_path.read_bytes() == torn + b"\n"


def test_a_tail_longer_than_a_chunk_and_a_file_of_one_torn_line(store):
    store.append(RECORD)
    whole = store.path.read_bytes()
    torn = b'{"reason": "' + b"x" * 200_000
    store.path.write_bytes(whole + torn)
    store.append(OTHERS[0])
    assert store.records() == [RECORD, OTHERS[0]] and store.torn_path.read_bytes() == torn + b"\n"
    store.path.write_bytes(torn)
    store.append(RECORD)
    assert store.records() == [RECORD] and store.torn_path.read_bytes() == (torn + b"\n") * 2


def test_a_whole_line_that_lacks_its_newline_gets_it(store):
    store.append(RECORD)
    store.path.write_bytes(store.path.read_bytes()[:-1])
    store.append(OTHERS[0])
    assert store.records() == [RECORD, OTHERS[0]]
    assert not store.torn_path.exists()


def test_lines_of_others_are_never_rewritten(store):
    store.append(RECORD)
    foreign = b'{"not": "a record"}\n'
    store.path.write_bytes(foreign + store.path.read_bytes())
    before = store.path.read_bytes()
    store.append(OTHERS[0])
    assert store.path.read_bytes().startswith(before)
    with pytest.warns(RecordWarning, match="tuning records .line 1:"):
        assert store.records() == [RECORD, OTHERS[0]]


def test_full_disk_keeps_what_was_there(store, monkeypatch):
    store.append(RECORD)
    before = store.path.read_bytes()
    real = os.write

    def half(descriptor: int, data: bytes) -> int:
        if len(data) > 100:
            real(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(StoreError, match=r"not written \(the disk is full\); all earlier records are intact.*run the tuner again"):
        store.append(OTHERS[0])
    monkeypatch.undo()
    assert store.path.read_bytes() == before
    store.append(OTHERS[0])
    assert store.records() == [RECORD, OTHERS[0]]


def test_a_real_short_write_is_undone(store):
    """A file-size limit makes the kernel write part of the line, as a full disk would."""
    store.append(RECORD)
    before = store.path.read_bytes()
    code = (
        "import resource, signal, sys\n"
        f"sys.path[:] = {sys.path!r}\n"
        "import json\n"
        "from tilebit.autotune.store import RecordStore, StoreError\n"
        "from tilebit.schedules.records import TuningRecord\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 50}, {resource.RLIM_INFINITY}))\n"
        "try:\n"
        f"    RecordStore({str(store.path)!r}).append(TuningRecord.from_json(json.loads({json.dumps(RECORD.to_json())!r})))\n"
        "except StoreError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "the disk is full" in done.stdout, done.stdout
    assert store.path.read_bytes() == before


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"not written.*TILEBIT_RECORDS"):
        RecordStore(tmp_path / "file" / "records.jsonl").append(RECORD)


def test_writers_do_not_interleave(store):
    code = (
        "import sys, json\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from tilebit.autotune.store import RecordStore\n"
        "from tilebit.schedules.records import TuningRecord\n"
        f"record = TuningRecord.from_json(json.loads({json.dumps(replace(RECORD, reason='x' * 5000).to_json())!r}))\n"
        f"store = RecordStore({str(store.path)!r})\n"
        "for _ in range(20): store.append(record)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [w.wait() for w in writers] == [0, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(store.records()) == 60
