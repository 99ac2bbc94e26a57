"""How well schedules are chosen: ``python -m results.measure.selection [--fresh] [--exhaustive]
[--out DIR] [--budget SECONDS]``.

fresh       shapes of real models that no record knows: what ``select`` gives them against what the tuner finds
exhaustive  what the tuner finds against the best of a scan of the rules' whole grid (``grid.py``), and with how many measurements

Candidates are verified and timed by the tuner's isolated worker and recorded in DIR/candidates, so
that a run that stopped is continued. Schedules that are compared are verified and timed once more
at the end, side by side in this process, and only those times are written: a row per workload, to
DIR/<device>.jsonl. A workload whose row of this commit is there is not measured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tilebit.autotune.measure import Timing
from tilebit.autotune.provenance import source_commit
from tilebit.autotune.store import RecordStore
from tilebit.autotune.worker import DeviceWorker
from tilebit.command.bench import write_rows
from tilebit.kernels import build
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.ranker import user_model_path
from tilebit.schedules.records import records_path, shipped_records, user_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose, refresh
from tilebit.schedules.target import Target, detect_target, file_stem
from tilebit.tiles.compiler.pool import CompilePool

from ..report.rows import ROWS, json_rows
from .selection_bench import Bench, BudgetOver
from .selection_grid import scanned

FINALISTS = 5  # of a scan, timed once more beside the tuner's choice: the least of hundreds of times was lucky as well as fast
SYMMETRIC, ASYMMETRIC = QuantFormat(4, 128, True), QuantFormat(4, 128, False)
# Linears of Qwen2 to 3, Llama 1 to 3, Yi, Mistral Nemo and SigLIP; small, medium and large m.
FRESH = (
    Workload(1, 151936, 5120, SYMMETRIC),
    Workload(1, 2560, 9728, ASYMMETRIC),
    Workload(4, 6656, 6656, SYMMETRIC),
    Workload(16, 5120, 25600, ASYMMETRIC),
    Workload(16, 1024, 4096, QuantFormat(8, 128, True)),
    Workload(48, 3456, 1152, ASYMMETRIC),
    Workload(48, 14336, 5120, SYMMETRIC),
    Workload(128, 3584, 18944, ASYMMETRIC),
    Workload(256, 15360, 5120, ASYMMETRIC),
    Workload(256, 7168, 7168, ASYMMETRIC, "bfloat16"),
    Workload(700, 11008, 4096, SYMMETRIC),
    Workload(2048, 22016, 4096, ASYMMETRIC),
)
EXHAUSTIVE = (Workload(1, 4096, 14336, ASYMMETRIC), Workload(64, 6144, 4096, ASYMMETRIC), Workload(256, 10240, 8192, ASYMMETRIC))


def fresh(bench: Bench, workload: Workload) -> dict[str, Any]:
    """The row of a workload that no record knows: ``us`` of the schedule that ``select`` gives
    (where the lint refuses it, of the next one, as a call gets it), ``best_us`` of the tuner's
    choice, both at ``workload.m`` rows."""
    found, best = bench.tuned(workload)
    choice, used = choose(workload, bench.target), build([workload], bench.target)[0].schedule
    times = _times(bench, workload, (used, best.schedule))
    return {
        "kind": "fresh",
        **described(workload),
        "us": round(times[used].us, 3),
        "best_us": round(times[best.schedule].us, 3),
        "schedule": used.to_json(),
        "best_schedule": best.schedule.to_json(),
        "source": choice.source,
        "fallback": used != choice.schedule,
        "candidates": len(candidates(workload.bucketed(), bench.target) or []),
        "measured": found.measured + found.reused,
        "failed": found.failed,
    }


def exhaustive(bench: Bench, workload: Workload) -> dict[str, Any]:
    """The row of a workload (its m is a bucket) whose grid was scanned: ``best_us`` of the fastest
    schedule, ``tuned_us`` of the tuner's choice, ``share`` what the tuner tried, also in vain, of
    what the scan could time."""
    found, tuned = bench.tuned(workload)
    schedules, legal, rule = scanned(workload, bench.target)
    records = bench.scan(workload, schedules)
    working = sorted((r for r in records if r.ok), key=lambda r: r.us or 0.0)
    times = _times(bench, workload, (tuned.schedule, *(r.schedule for r in working[:FINALISTS])))
    best, measured = min(times, key=lambda s: times[s].us), found.measured + found.reused
    return {
        "kind": "exhaustive",
        **described(workload),
        "best_us": round(times[best].us, 3),
        "tuned_us": round(times[tuned.schedule].us, 3),
        "best_schedule": best.to_json(),
        "schedule": tuned.schedule.to_json(),
        "legal": legal,
        "scanned": len(schedules),
        "rule": rule,
        "failed": len(records) - len(working),
        "candidates": len(candidates(workload, bench.target) or []),
        "measured": measured,
        "share": round(measured / len(working), 4),
    }


def _times(bench: Bench, workload: Workload, schedules: Sequence[Schedule]) -> dict[Schedule, Timing]:
    """Each of ``schedules`` once, side by side."""
    several = [*dict.fromkeys(schedules)]
    return dict(zip(several, bench.side_by_side([(workload, schedule) for schedule in several]), strict=True))


KINDS = {"fresh": fresh, "exhaustive": exhaustive}


def described(workload: Workload) -> dict[str, Any]:
    """A workload's fields in a row."""
    w, f = workload, workload.format
    numbers = {"format": f.family, "group_size": f.group_size, "symmetric": f.symmetric, "dtype": w.dtype}
    return {"n": w.n, "k": w.k, "m": w.m, **numbers}


def objections(workloads: Sequence[Workload], target: Target) -> list[str]:
    """Why these workloads would not show what ``select`` does without a record here: sentences,
    empty when they would."""
    shapes = {(w.n, w.k) for w in workloads}
    known = {(w.n, w.k) for r in shipped_records() if r.arch == target.arch and isinstance(w := r.workload, Workload)}
    reasons = [f"the shipped records hold {n} x {k} on {target.arch}; accepted: shapes in no record." for n, k in sorted(shapes & known)]
    if any(r.arch == target.arch for r in user_records()):
        reasons.append(
            f"{records_path()} holds records of {target.arch}; accepted: the shipped ones alone. Set TILEBIT_RECORDS to a new path."
        )
    if Path(user_model_path(target.arch)).is_file():
        reasons.append(f"{user_model_path(target.arch)} is a ranker; accepted: the shipped one alone. Set TILEBIT_RECORDS to a new path.")
    return reasons


def missing(kind: str, workloads: Sequence[Workload], out: Path, target: Target) -> list[Workload]:
    """Those of ``workloads`` without a row of this kind, device and commit in ``out``."""
    there = [row for _, row in json_rows(out) if (row["kind"], row["gpu"], row["commit"]) == (kind, target.name, source_commit() or None)]
    return [w for w in workloads if not any(described(w).items() <= row.items() for row in there)]


def line(row: dict[str, Any], seconds: float) -> str:
    """A row in words."""
    us = row["us"] if row["kind"] == "fresh" else row["tuned_us"]
    named = f"{row['n']} x {row['k']}, m {row['m']}, {row['format']} {'' if row['symmetric'] else 'a'}symmetric {row['dtype']}"
    what = f"select {us:.2f} us ({row['source']}), tuned" if row["kind"] == "fresh" else f"tuned {us:.2f} us, scan of {row['scanned']}"
    counts = f"{row['measured']} measured by the tuner, {row['failed']} failed"
    return f"{row['kind']}  {named}: {what} {row['best_us']:.2f} us, slower by {us / row['best_us'] - 1:.1%}; {counts}; {seconds:.1f} s"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.selection", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fresh", action="store_true", help="shapes without a record (default: both)")
    parser.add_argument("--exhaustive", action="store_true", help="the tuner against a scan (default: both)")
    parser.add_argument("--out", type=Path, default=ROWS / "selection", help="folder of the rows, and of the candidates' records")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is measured; run it again to continue")
    parser.add_argument("--device", default=None, help="cuda or cpu; default: the GPU where there is one")
    options = parser.parse_args(arguments)
    if options.budget is not None and options.budget <= 0:
        parser.error(f"--budget is {options.budget:g}; accepted: seconds above 0")
    begin = time.monotonic()
    target = detect_target(options.device)
    asked = {"fresh": FRESH, "exhaustive": EXHAUSTIVE}
    kinds = [kind for kind in asked if getattr(options, kind)] or list(asked)
    reasons = objections(FRESH if "fresh" in kinds else (), target)
    if reasons:
        parser.error(" ".join(reasons))
    refresh()
    name = file_stem(target.name)
    todo = {kind: missing(kind, asked[kind], options.out, target) for kind in kinds}
    with ExitStack() as stack:
        pool = stack.enter_context(CompilePool(keep=True))
        worker = stack.enter_context(DeviceWorker("cuda:0" if target.is_cuda else "cpu", pool.cache.root / "locks"))
        store = RecordStore(options.out / "candidates" / f"{name}.jsonl")
        bench = Bench(target, pool, worker, store, None if options.budget is None else begin + options.budget)
        print(f"{target.name}; ranker {bench.common['ranker'] or 'none: the analytic model ranks alone'}", flush=True)
        for kind, workloads in todo.items():
            if kind == "fresh":
                bench.compile_ahead(workloads)
            for workload in workloads:
                start = time.monotonic()
                try:
                    row = KINDS[kind](bench, workload)
                except BudgetOver:
                    print(f"the budget of {options.budget:g} s is over at {kind} {workload.title}; run it again to continue", flush=True)
                    return
                write_rows(options.out / f"{name}.jsonl", [{**bench.common, **row}])
                print(line(row, time.monotonic() - start), flush=True)


if __name__ == "__main__":
    main()
