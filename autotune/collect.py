"""Tuned records of several runs put where they ship: ``python -m tilebit.autotune.collect FILE... --into
schedules/tuned`` adds what succeeded to ``<device>.jsonl``, one file a device.

A record is a workload and a schedule on a device. Kernels are shared between numbers of rows, so that
many records have one artifact's key: it says nothing about which of them are there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..json_reader import parse_json
from ..schedules.records import MAX_LINE, TuningRecord, latest, load_records, settled
from ..schedules.target import file_stem


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of one device's records. ``dropped``: of programs that changed, those that ``settled``
    leaves out, and older ones of which the file had a later one."""

    path: Path
    added: int
    replaced: int
    dropped: int


def merged(there: Sequence[TuningRecord], more: Iterable[TuningRecord], changed: frozenset[str] = frozenset()) -> list[TuningRecord]:
    """The latest of ``there`` and ``more`` that succeeded: of two that measured the same the newer,
    in the older's place; where the newer one failed, neither; without what would be the fastest by
    another day's clock alone (``settled``). Of programs that have ``changed``, what ``there`` holds of a
    workload that ``more`` measured goes."""
    fresh = latest(sorted(more, key=lambda r: r.date))
    stale = {(r.workload, r.schedule.program, r.gpu) for r in fresh.values() if r.ok and r.schedule.program in changed}
    found = {what: r for what, r in latest(there).items() if (r.workload, r.schedule.program, r.gpu) not in stale}
    later = {what: r for what, r in fresh.items() if what not in found or found[what].date <= r.date}
    valid = latest(settled(found.values(), later.values()))
    found = {what: r for what, r in found.items() if what in valid} | later
    return [record for record in found.values() if record.ok]


def collect(files: Sequence[Path], into: Path, changed: frozenset[str] = frozenset()) -> list[Collected]:
    """``merged`` for each device that ``files`` have records of. Files are written whole or not at all, and
    lines that are no records here (of packages that are not installed) stay as they are. Raises
    ``OSError`` where a file cannot be read or written."""
    devices: dict[str, list[TuningRecord]] = {}
    for record in (record for file in files for record in load_records(file)):
        devices.setdefault(_file_name(record), []).append(record)
    done = []
    for name, more in sorted(devices.items()):
        path = into / name
        if not path.is_file() and not any(record.ok for record in more):
            continue
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        read = [(line, _record(line)) for line in lines if line.strip()]
        there = [record for _, record in read if record is not None]
        kept = merged(there, more, changed)
        before, after = latest(there), latest(kept)
        added = len(after.keys() - before.keys())
        replaced = sum(before[what] != after[what] for what in before.keys() & after.keys())
        text = [line for line, record in read if record is None] + [json.dumps(record.to_json(), allow_nan=False) for record in kept]
        into.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
        os.replace(partial, path)
        done.append(Collected(path, added, replaced, len(there) + added - len(kept)))
    return done


def _record(line: str) -> TuningRecord | None:
    try:
        return TuningRecord.from_json(parse_json(line.encode(), MAX_LINE))
    except ValueError:
        return None


def _file_name(record: TuningRecord) -> str:
    """As shipped files are called: processors differ by their cores, too."""
    name = file_stem(record.gpu)
    return f"{name}-{record.units}-cores.jsonl" if record.arch == "cpu" else f"{name}.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tilebit.autotune.collect", description="Put tuned records where they ship.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="records that a tuner wrote")
    parser.add_argument("--into", type=Path, required=True, help="the folder with a file for each device")
    parser.add_argument(
        "--changed", action="append", default=[], metavar="PROGRAM", help="its kernels changed: drop older records of the same workloads"
    )
    options = parser.parse_args(arguments)
    try:
        done = collect(options.files, options.into, frozenset(options.changed))
    except OSError as error:
        parser.error(str(error))
    for device in done:
        print(f"{device.path}: {device.added} added, {device.replaced} replaced, {device.dropped} dropped")
    if not done:
        print("no record succeeded: nothing was written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
