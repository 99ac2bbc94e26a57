"""The record store: tuning records appended to a file of JSON lines, so that a crash, a full disk
or a second tuner loses nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from filelock import FileLock

from ..json_reader import parse_json
from ..layouts.outside import NotInstalled
from ..schedules.records import MAX_LINE, TuningRecord, load_records, records_path

_CHUNK = 1 << 16


class StoreError(Exception):
    """A record could not be written. The file is as it was before."""


class RecordStore:
    """Records in ``path`` (default: the user's file, see ``schedules.records``). Any number of
    processes may append at once.

    A record is on the disk when ``append`` returns. A torn last line, left by a writer that died,
    is moved to ``<path>.torn`` by the next append; a whole one that only lacks its newline gets it.
    Nothing else is ever rewritten.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path is not None else records_path()
        self.torn_path = self.path.with_name(self.path.name + ".torn")
        self._lock_path = self.path.with_name(self.path.name + ".lock")

    def records(self) -> list[TuningRecord]:
        """All records, oldest first; none when there is no file yet. Lines that are no records are
        skipped with a ``RecordWarning``."""
        return load_records(self.path) if self.path.is_file() else []

    def append(self, record: TuningRecord) -> None:
        """Add one record durably. Raises ``StoreError`` (a full disk, a directory that cannot be
        written) and then has changed nothing."""
        line = json.dumps(record.to_json(), allow_nan=False).encode() + b"\n"
        if len(line) > MAX_LINE:
            raise StoreError(f"{self.path}: a record of {len(line)} bytes was not written; accepted: at most {MAX_LINE}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._lock_path), open(self.path, "a+b", buffering=0) as file:
                self._heal(file.fileno())
                self._write(file.fileno(), line)
        except OSError as error:
            raise StoreError(self._explain(error)) from error

    def _write(self, descriptor: int, line: bytes) -> None:
        """Write and flush ``line`` at the end, or leave the file at its old length."""
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, "only part of the record was written")
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise

    def _heal(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
            return
        start, chunks = size, list[bytes]()  # of the last line, from its end
        while start and not (chunks and b"\n" in chunks[-1]):
            step = min(_CHUNK, start)
            start -= step
            chunks.append(os.pread(descriptor, step, start))
        newline = chunks[-1].rfind(b"\n")
        start, chunks[-1] = start + newline + 1, chunks[-1][newline + 1 :]
        tail = b"".join(reversed(chunks))
        whole = True
        try:
            TuningRecord.from_json(parse_json(tail, MAX_LINE))
        except ValueError as error:
            whole = isinstance(error, NotInstalled)  # a record of a package that is not here
        if not whole:
            with open(self.torn_path, "ab", buffering=0) as torn:
                self._write(torn.fileno(), tail + b"\n")
            os.ftruncate(descriptor, start)
        else:
            self._write(descriptor, b"\n")

    def _explain(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why, do = "the disk is full", "free some space and run the tuner again: it continues after the last record"
        else:
            why, do = error.strerror or str(error), "accepted is a path that can be written; set TILEBIT_RECORDS to one"
        return f"{self.path}: the record was not written ({why}); all earlier records are intact. To continue: {do}."
