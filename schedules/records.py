"""Tuned records, read side: measured facts as JSON lines, from the package and from the user.

The tuner appends to the user's file; this module never writes. Two places are read, later lines
winning over earlier ones: the package data ``schedules/tuned/*.jsonl`` in name order, then the
user's file: ``$TILEBIT_RECORDS``, or else ``~/.config/tilebit/records.jsonl``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

from ..json_reader import parse_json
from ..layouts.outside import NotInstalled
from .faults import machines_fault
from .operations import AnyWorkload, workload_from_json
from .schedule import Schedule
from .target import ARCHES, Target

OK, WRONG = "ok", "wrong"  # wrong: what it computed
# What can become of a candidate; all but "ok" carry a reason and no time.
STATUSES = (OK, "compile_error", "compile_timeout", "corrupt", WRONG, "crash", "hang", "error")
MAX_LINE = 1 << 20  # bytes; the longest that the tuner wrote have 2,000
LEAST_US, MOST_US = 1e-3, 1e12
SHOWN = 3  # of a file's lines that are no records
SHOWN_WORDS = 200  # characters of what is said of one


class RecordWarning(UserWarning):
    """A record file holds lines that are not records; they were skipped."""


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """One measured fact: ``schedule`` on ``workload`` (its sizes are buckets) took ``us`` on a
    device, or failed.

    ``gpu`` is the device's product name (a CPU's too), ``units`` its SMs or cores, ``driver`` the
    NVIDIA driver, ``versions`` the packages that took part. ``us``, ``us_p20``, ``us_p80`` are the
    median and percentiles of one call in microseconds (of a tuner's finalists, which are timed in
    alternation, brought back to the level of its search), ``rel_err`` the largest relative error on
    random floats, of a 128 x 128 block or of a sequence; all None unless ``status`` is "ok".
    ``reason`` says why another status was given. ``key`` is the artifact's key, ``date`` ISO 8601
    in UTC, ``commit`` the measured code's. ``extra`` keeps what a newer writer added.
    """

    workload: AnyWorkload
    schedule: Schedule
    gpu: str
    arch: str
    units: int
    status: str = OK
    us: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    rel_err: float | None = None
    reason: str = ""
    key: str = ""
    driver: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    commit: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status is {self.status!r}; accepted: {', '.join(STATUSES)}")
        if self.arch not in ARCHES:
            raise ValueError(f"arch is {self.arch!r}; accepted: {', '.join(ARCHES)}")
        if self.units < 1:
            raise ValueError(f"units is {self.units}; accepted: a number of SMs or cores")
        timed = isinstance(self.us, int | float) and not isinstance(self.us, bool) and LEAST_US <= self.us <= MOST_US
        if self.status == OK and not timed:
            raise ValueError(
                f"us is {self.us!r:.80} in a record whose status is 'ok'; accepted: a time in microseconds above 0, of {LEAST_US:g} to "
                f"{MOST_US:g}"
            )

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def dependent(self) -> bool:
        """Whether ``us`` is what it took in its place in a model's step (``tilebit.transformers.tune``),
        which says nothing about what it takes by itself."""
        return getattr(self.workload, "dependent", False)

    @property
    def of_machine(self) -> bool:
        """Whether it tells of a fault of the machine, which says nothing about the schedule."""
        return not self.ok and machines_fault(self.status, self.reason)

    def measured_on(self, target: Target) -> bool:
        """Whether this was measured on a device like ``target``: same arch, name and number of
        units."""
        return (self.arch, self.gpu, self.units) == (target.arch, target.name, target.units)

    def measured_on_sibling(self, target: Target) -> bool:
        """Whether this was measured on a device like ``target``, or on a GPU of the same arch with
        as many SMs, which differs from it in memory and clocks (H100 and H200). Processors with as
        many cores have little else in common."""
        alike = target.is_cuda and (self.arch, self.units) == (target.arch, target.units)
        return alike or self.measured_on(target)

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in _TYPES}
        return {**self.extra, **data, "workload": self.workload.to_json(), "schedule": self.schedule.to_json()}

    @classmethod
    def from_json(cls, data: Any, made: Made | None = None) -> TuningRecord:
        """Unknown fields go to ``extra``; a missing or mislabelled one raises ``ValueError``. ``made`` holds what was
        made of others' workloads and schedules, of which many records have the same."""
        if not isinstance(data, dict):
            raise ValueError(f"not a record: {type(data).__name__}; accepted: a JSON object")
        missing = [name for name in ("workload", "schedule", "gpu", "arch", "units") if name not in data]
        if missing:
            raise ValueError(f"fields {', '.join(missing)} are missing")
        values: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, value in data.items():
            if name not in _TYPES:
                extra[name] = value
            elif type(value) in _TYPES[name]:
                values[name] = value
            else:
                accepted = " or ".join(_WORDS[kind] for kind in _TYPES[name])
                raise ValueError(f"{name} is {value!r:.80}; accepted: {accepted}")
        if extra.get("place") == "step":  # as a time in a model's step was marked before workloads said so; it is none of the product alone
            values["workload"] = {**values["workload"], "dependent": True}
            del extra["place"]
        for name, make in (("workload", workload_from_json), ("schedule", Schedule.from_json)):
            values[name] = make(values[name]) if made is None else made.of(make, values[name])
        return cls(**values, extra=extra)


class Made:
    """What functions made of JSON values."""

    def __init__(self) -> None:
        self._held: dict[tuple[Any, str], Any] = {}

    def of(self, make: Callable[[Any], Any], value: Any) -> Any:
        """``make(value)``, made once of equal values."""
        key = make, repr(value)  # by repr 1, 1.0 and True are three
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = make(value)
        return found


_NUMBER = (float, int, type(None))
# Types of a record's fields as JSON has them.
_TYPES: dict[str, tuple[type, ...]] = {
    "workload": (dict,), "schedule": (dict,), "gpu": (str,), "arch": (str,), "units": (int,), "status": (str,), "us": _NUMBER,
    "us_p20": _NUMBER, "us_p80": _NUMBER, "rel_err": _NUMBER, "reason": (str,), "key": (str,), "driver": (str, type(None)),
    "versions": (dict,), "date": (str,), "commit": (str,),
}  # fmt: skip
_WORDS = {dict: "an object", str: "a name", int: "a whole number", float: "a number above 0", type(None): "null"}


def parse_records(text: bytes, source: str) -> list[TuningRecord]:
    """The records in JSON lines. A last line without its newline that is no record (a torn write)
    is left out with a ``RecordWarning``; other lines that are no records are left out with one that
    says how many there are and shows the first few; those of operations and formats of packages
    that are not installed here are left out without a word."""
    records: list[TuningRecord] = []
    shown: list[str] = []
    bad, made = 0, Made()
    lines = text.split(b"\n")
    torn = len(lines) if lines[-1].strip() else 0  # number of a last line that lacks its newline
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if bad >= SHOWN and number != torn and not _may_be_record(line):
            bad += 1
            continue
        try:
            records.append(TuningRecord.from_json(parse_json(line, MAX_LINE), made))
        except NotInstalled:
            continue  # a record of another package's operation or format, which nothing here asks for
        except ValueError as error:
            if number == torn:
                warnings.warn(
                    f"{source}: line {number} is torn (an interrupted write) and was left out; the tuner heals it on its next write",
                    RecordWarning,
                    3,
                )
                continue
            bad += 1
            if bad <= SHOWN:
                shown.append(f"line {number}: {str(error)[:SHOWN_WORDS]}")
    if bad:
        more = f"; and {bad - SHOWN} more" if bad > SHOWN else ""
        message = (
            f"{source}: skipped {bad} lines that are not tuning records ({'; '.join(shown)}{more}). "
            "Accepted: JSON lines written by the tuner; remove these lines."
        )
        warnings.warn(message, RecordWarning, 3)
    return records


def _may_be_record(line: bytes) -> bool:
    """Whether a line is worth parsing: where many are no records, which need not be shown, a look at
    each must do."""
    return len(line) <= MAX_LINE and all(name in line for name in _NAMED)


_NAMED = (b'"workload"', b'"schedule"', b'"gpu"', b'"arch"', b'"units"')


def load_records(path: str | os.PathLike[str]) -> list[TuningRecord]:
    """The records of one file, in its order; what is not a record is skipped with a
    ``RecordWarning``. Raises ``OSError`` when it cannot be read."""
    return parse_records(Path(path).read_bytes(), str(path))


def shipped_records(arch: str | None = None) -> list[TuningRecord]:
    """The records that came with the package, measured on its authors' devices; with ``arch`` those of
    one architecture, without reading the thousands of others."""
    folder = resources.files("tilebit.schedules") / "tuned"
    if not folder.is_dir():
        return []
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
    return [record for f in files for record in _parsed(f.read_bytes(), f.name, arch)]


@lru_cache(maxsize=8)
def _parsed(text: bytes, source: str, arch: str | None) -> tuple[TuningRecord, ...]:
    """Shipped records are thousands and seldom change: ``refresh`` reads them again and parses them
    once."""
    if arch is not None:
        text = b"".join(line for line in text.splitlines(keepends=True) if f'"arch": "{arch}"'.encode() in line)
    return tuple(parse_records(text, source))


def records_path() -> Path:
    """The user's record file: ``$TILEBIT_RECORDS``, or else ``~/.config/tilebit/records.jsonl``. It
    need not exist."""
    named = os.environ.get("TILEBIT_RECORDS")
    return Path(named).expanduser() if named else Path.home() / ".config" / "tilebit" / "records.jsonl"


def user_records() -> list[TuningRecord]:
    """The records of the user's file; none when there is no such file."""
    path = records_path()
    if path.exists() and not path.is_file():
        warnings.warn(f"{path} is no file: no records were read. Set TILEBIT_RECORDS to a file of JSON lines", RecordWarning, 2)
    return load_records(path) if path.is_file() else []


def latest(records: Iterable[TuningRecord]) -> Mapping[tuple[AnyWorkload, Schedule, str, str, int], TuningRecord]:
    """The last record of each (workload, schedule, gpu, arch, units): a new measurement replaces an
    old one, also when it failed. A fault of the machine is no measurement."""
    return {_what(r): r for r in records if not r.of_machine}


def settled(there: Iterable[TuningRecord], more: Iterable[TuningRecord]) -> list[TuningRecord]:
    """The last records of ``there`` and of ``more``, which was measured elsewhere or later, without those
    of ``there`` that would now be the fastest for their workload and device by another clock alone.

    Times of two GPUs of one name, or of two days, differ by ten percent and more at the power limit
    (``results/notes/power-in-turn.md``). Where ``more`` measured again what was the fastest ``there``,
    whatever else was measured ``there`` had lost to it: it cannot win by a time of then."""
    before, after = latest(there), latest(more)
    now = _fastest(after.values())
    then = _fastest(record for record in before.values() if _place(record) in now)
    again = {place for place, record in then.items() if (found := after.get(_what(record))) is not None and found.ok}
    kept = [r for what, r in before.items() if what not in after and not (_place(r) in again and _us(r) <= _us(now[_place(r)]))]
    return [*kept, *after.values()]


def _fastest(records: Iterable[TuningRecord]) -> dict[tuple[AnyWorkload, str, str, int], TuningRecord]:
    """Of each workload and device."""
    found: dict[tuple[AnyWorkload, str, str, int], TuningRecord] = {}
    for record in records:
        if record.ok:
            found[_place(record)] = min(found.get(_place(record), record), record, key=_us)
    return found


def _us(record: TuningRecord) -> float:
    return record.us if record.ok and record.us is not None else inf


def _place(record: TuningRecord) -> tuple[AnyWorkload, str, str, int]:
    return record.workload, record.gpu, record.arch, record.units


def _what(record: TuningRecord) -> tuple[AnyWorkload, Schedule, str, str, int]:
    return record.workload, record.schedule, record.gpu, record.arch, record.units
