"""Tuned records of several runs put where they ship: ``python -m tilebit.autotune.collect FILE... --into
schedules/tuned`` adds what succeeded to ``<device>.jsonl``, one file a device.

A record is a workload and a schedule on a device. Kernels are shared between numbers of rows, so that
many records have one artifact's key: it says nothing about which of them are there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schedules.records import TuningRecord, load_records


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of one device's records."""

    path: Path
    added: int
    replaced: int
    dropped: int


def identity(record: TuningRecord) -> tuple[Any, ...]:
    """What two records share that measured the same."""
    return record.workload, record.schedule, record.gpu, record.arch, record.units


def merged(there: Sequence[TuningRecord], more: Iterable[TuningRecord], changed: frozenset[str] = frozenset()) -> list[TuningRecord]:
    """``there`` and those of ``more`` that succeeded: of one ``identity`` the newer, in the older's place.
    Of programs that have ``changed``, what ``there`` holds of a workload that ``more`` measured goes."""
    fresh = {identity(record): record for record in sorted((r for r in more if r.ok), key=lambda r: r.date)}
    stale = {(r.workload, r.schedule.program, r.gpu) for r in fresh.values() if r.schedule.program in changed}
    found = {identity(r): r for r in there if (r.workload, r.schedule.program, r.gpu) not in stale}
    for name, record in fresh.items():
        if name not in found or found[name].date <= record.date:
            found[name] = record
    return list(found.values())


def collect(files: Sequence[Path], into: Path, changed: frozenset[str] = frozenset()) -> list[Collected]:
    """``merged`` for each device that ``files`` have records of. Files are written whole or not at all.
    Raises ``OSError`` where one cannot be read or written."""
    devices: dict[str, list[TuningRecord]] = {}
    for record in (record for file in files for record in load_records(file)):
        if record.ok:
            devices.setdefault(record.gpu, []).append(record)
    done = []
    for gpu, more in sorted(devices.items()):
        path = into / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.jsonl"
        there = load_records(path) if path.is_file() else []
        kept = merged(there, more, changed)
        before, after = {identity(r): r for r in there}, {identity(r): r for r in kept}
        added, dropped = len(after.keys() - before.keys()), len(before.keys() - after.keys())
        replaced = sum(before[name] != after[name] for name in before.keys() & after.keys())
        into.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in kept), encoding="utf-8")
        os.replace(partial, path)
        done.append(Collected(path, added, replaced, dropped))
    return done


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
