"""Training the ranker: boosted trees (XGBoost) on tuning records, written as the document that
``schedules/ranker.py`` reads.

    python -m tilebit.autotune.ranker --arch sm_90a --out schedules/tuned/nvidia-h200.ranker.json

The target is log(us / estimate.us), the analytic model's error, not the slowdown against the
workload's best: with whole shapes left out (409 records of 25 workloads on an H200) its choices
took 1.02 times the best measured time in the mean, those of the slowdown 1.04 times. The same
records give the same document: exact splits, one thread, a fixed seed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, isnan, log
from pathlib import Path
from typing import Any

from ..schedules.operations import AnyWorkload, Estimate, estimate, legal, operation
from ..schedules.ranker import COMMAND, VERSION, Ranker, kind, load_ranker, seen, trees_digest, user_model_path, vector
from ..schedules.records import TuningRecord, latest, load_records, shipped_records, user_records
from ..schedules.target import ARCHES, Target, cpu_target, detect_target, target_from_name

MIN_RECORDS, MIN_WORKLOADS = 200, 10  # fewer say more about their own shapes than about the device
TREES = 200
# Small steps on samples of rows and features: single trees of so few records hang on ties. Depths
# of 3 to 5, 100 to 400 trees and more regularization were within 1 % of this in the mean regret of
# the shipped H200 records, workloads or shapes left out. Of 0.7 of the records one tie decided the
# worst choice: 1.51 times the best schedule, 1.25 of half or with another seed.
PARAMETERS = {
    "max_depth": 4,
    "eta": 0.05,
    "min_child_weight": 2,
    "subsample": 0.5,
    "colsample_bytree": 0.5,
    "base_score": 0.0,  # what the trees do not know is the analytic model's
    "tree_method": "exact",
    "nthread": 1,
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A timed record with its target and what the models see of it."""

    record: TuningRecord
    target: Target
    expected: Estimate
    values: dict[str, float]
    line: str  # the record, as a digest takes it

    @property
    def workload(self) -> AnyWorkload:
        return self.record.workload

    @property
    def us(self) -> float:
        assert self.record.us is not None
        return self.record.us


def samples(records: Iterable[TuningRecord], arch: str) -> list[Sample]:
    """The timed records of ``arch``, of operations that have features, whose schedules the present
    rules accept, but for times in a step, in an order that is not that of the files."""
    found = []
    for r in latest(records).values():
        target = record_target(r) if r.ok and not r.dependent and r.arch == arch else None
        if target is None or operation(r.workload.op).features is None or legal(r.workload, r.schedule, target):
            continue
        expected = estimate(r.workload, r.schedule, target)
        found.append(Sample(r, target, expected, seen(r.workload, r.schedule, target, expected), _line(r)))
    return sorted(found, key=lambda s: s.line)


def record_target(record: TuningRecord) -> Target:
    """The device of a record: its arch's reference rates over its number of units. A CPU's rates
    are this machine's per core."""
    base = cpu_target() if record.arch == "cpu" else target_from_name(record.arch)
    scale = record.units / base.units
    rates = replace(base, mma_tflops=base.mma_tflops * scale, dequant_gops=base.dequant_gops * scale)
    if record.arch == "cpu":
        rates = replace(rates, read_gbps=base.read_gbps * scale)
    return replace(rates, name=record.gpu, units=record.units)


def train(found: Sequence[Sample]) -> dict[str, Any]:
    """The model's document. ``found`` are one arch's samples, at least one."""
    import numpy as np
    import xgboost

    names = sorted({name for s in found for name in s.values})
    exact = np.array([vector(s.values, names) for s in found])
    rows = exact.astype(np.float32)  # as XGBoost has them: values that differ by little are equal
    errors = np.array([log(s.us / s.expected.us) for s in found], dtype=np.float32)
    booster = xgboost.train(PARAMETERS, xgboost.DMatrix(rows, errors), TREES)
    trees = json.loads(booster.save_raw("json"))
    return {
        "version": VERSION,
        "arch": found[0].record.arch,
        "gpus": sorted({s.record.gpu for s in found}),
        "kinds": sorted({kind(s.workload, s.record.schedule) for s in found}),
        "records": len(found),
        "workloads": len({(s.record.workload, s.record.gpu, s.record.units) for s in found}),
        "records_digest": _digest(s.line for s in found),
        "xgboost": xgboost.__version__,
        "features": names,
        "probes": _probes(found, names, exact, booster.inplace_predict(rows)),
        "trees_digest": trees_digest(trees),
        "trees": trees,
    }


def trained(found: Sequence[Sample]) -> Ranker:
    """``train``, as a reader would load it."""
    return load_ranker(to_text(train(found)), "this model")


def to_text(document: dict[str, Any]) -> bytes:
    """One key a line: a model's provenance can be read above its trees."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in document.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def records_digest(records: Iterable[TuningRecord]) -> str:
    """sha256 over what a model learns from: workloads, schedules, devices and times, in any order."""
    return _digest(map(_line, records))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def too_few(found: Sequence[Sample]) -> str | None:
    """Why these samples cannot make a ranker, as a sentence; None when they can."""
    workloads = len({s.record.workload for s in found})
    if len(found) >= MIN_RECORDS and workloads >= MIN_WORKLOADS:
        return None
    return (
        f"there are {len(found)} timed records of {workloads} workloads; accepted: at least {MIN_RECORDS} of at least {MIN_WORKLOADS}; "
        "measure more with `tilebit tune`, and until then the analytic model ranks"
    )


def _telling(rows: Any) -> list[int]:
    """Few samples that together hold of every feature the least and the largest value, and where it
    is missing: what a changed feature would show at."""
    import numpy as np

    picked: set[int] = set()
    for column in rows.T:
        missing = np.isnan(column)
        wanted = [np.flatnonzero(column == value) for value in ({np.nanmin(column), np.nanmax(column)} if not missing.all() else ())]
        for places in (*wanted, np.flatnonzero(missing)):
            if len(places) and picked.isdisjoint(places.tolist()):
                picked.add(int(places[0]))
    return sorted(picked)


def _probes(found: Sequence[Sample], names: Sequence[str], rows: Any, corrections: Any) -> list[dict[str, Any]]:
    """Records whose features and predictions tell a reader that nothing has changed since."""
    probes = []
    for index in _telling(rows):
        s = found[index]
        values = [None if isnan(value) else value for value in vector(s.values, names)]
        probes.append(
            {
                "workload": s.record.workload.to_json(),
                "schedule": s.record.schedule.to_json(),
                "target": s.target.to_json(),
                "features": values,
                "us": s.expected.us * exp(float(corrections[index])),
            }
        )
    return probes


def _line(r: TuningRecord) -> str:
    return json.dumps([r.workload.to_json(), r.schedule.to_json(), r.gpu, r.arch, r.units, r.us], sort_keys=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which records a command is about."""
    parser.add_argument("--records", type=Path, action="append", help="a record file, repeatable; default: the shipped ones and the user's")
    parser.add_argument("--arch", choices=ARCHES, help="default: that of this machine's device")


def asked(options: argparse.Namespace) -> tuple[str, list[Sample]]:
    """The arch and its samples; exits with a sentence when they are too few."""
    arch = options.arch or detect_target().arch
    records = [r for path in options.records for r in load_records(path)] if options.records else [*shipped_records(), *user_records()]
    found = samples(records, arch)
    reason = too_few(found)
    if reason is not None:
        sys.exit(f"error: {arch}: {reason}")
    return arch, found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Train the schedule ranker on tuning records.")
    add_options(parser)
    parser.add_argument("--out", type=Path, help="model file; default: the user's, beside the user's records")
    options = parser.parse_args(arguments)
    arch, found = asked(options)
    path = options.out or Path(user_model_path(arch))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(to_text(train(found)))
    os.replace(partial, path)
    print(f"{path}: trained on {len(found)} records of {len({s.record.workload for s in found})} workloads on {arch}")


if __name__ == "__main__":
    main()
