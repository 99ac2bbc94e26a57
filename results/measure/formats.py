"""Formats of weights beside one another: ``python -m results.measure.formats [--formats
w4a16_g32,w4a16_mxfp4,w4a16_nvfp4] [--shapes 4096x4096] [--ms 1,16] [--candidates N] [--budget
SECONDS]`` appends rows to results/rows/formats.

For each shape and m every format tries the ``--candidates`` most promising schedules of each of
them, with the tuner's isolated worker, which verifies them; records of all are kept in
DIR/candidates. The fastest of each format is verified once more and timed beside those of the
others, in one process, in orders that are drawn: a row per shape and m. A point that has its row of
this commit is not measured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tilebit.autotune.provenance import source_commit
from tilebit.autotune.search import searched
from tilebit.autotune.store import RecordStore
from tilebit.autotune.worker import DeviceWorker
from tilebit.command.bench import write_rows
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import legal
from tilebit.schedules.ranker import known_ranker
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target, detect_target, file_stem
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.pool import CompilePool

from ..report.rows import ROWS, json_rows
from .selection_bench import Bench, BudgetOver
from .versions import SHAPES

FORMATS = ("w4a16_g32", "w4a16_mxfp4", "w4a16_nvfp4")  # the first is what the others are held against
MS = (1, 4, 16, 256, 1024)
Place = tuple[int, int, int]  # n, k, m


def wanted(place: Place, formats: Sequence[str], dtype: str, target: Target, size: int) -> dict[Workload, list[Schedule]]:
    """By workload what is measured: the ``size`` most promising schedules of each format, where
    they are legal."""
    n, k, m = place
    workloads = [Workload(m, n, k, QuantFormat.parse(name), dtype) for name in formats]
    ranker = known_ranker(target)
    union = dict.fromkeys(s for w in workloads for s in searched(w, target, size, ranker) or [])
    return {w: [s for s in union if not legal(w, s, target)] for w in workloads}


def row_of(bench: Bench, asked: dict[Workload, list[Schedule]]) -> dict[str, Any]:
    """The row of one shape and m. Raises ``RuntimeError`` when a format has no schedule that
    works, ``BudgetOver`` when the time is over."""
    chosen, errors = [], []
    for workload, schedules in asked.items():
        records = bench.scan(workload, schedules)
        working = [record for record in records if record.us is not None]
        if not working:
            raise RuntimeError(f"{workload.title}: no schedule works ({records[0].reason if records else 'none is legal'})")
        best = min(working, key=lambda record: record.us or 0.0)
        chosen.append((workload, best.schedule))
        errors.append(best.rel_err)
    times = bench.side_by_side(chosen)
    return {
        **bench.common,
        "op": "formats",
        **{name: getattr(chosen[0][0], name) for name in ("n", "k", "m", "dtype")},
        "formats": [
            {
                "format": w.format.name,
                "us": round(t.us, 3),
                "us_p20": round(t.us_p20, 3),
                "us_p80": round(t.us_p80, 3),
                "rel_err": error,
                "bytes": w.bytes,
                "tried": len(asked[w]),
                "schedule": s.to_json(),
            }
            for (w, s), t, error in zip(chosen, times, errors, strict=True)
        ],
    }


def missing(places: Sequence[Place], dtype: str, out: Path, target: Target) -> Iterator[Place]:
    """Those of ``places`` without a row of this device and commit in ``out``."""
    here = target.name, source_commit() or None, dtype
    rows = [row for _, row in json_rows(out)]
    done = {(row["n"], row["k"], row["m"]) for row in rows if (row["gpu"], row["commit"], row["dtype"]) == here}
    return (place for place in places if place not in done)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every point has its row, or the budget ended, which is said; 1: one failed, which is said."""
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.formats", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(FORMATS), help="default: %(default)s")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES), help="of weights (default: %(default)s)")
    parser.add_argument("--ms", default=",".join(map(str, MS)), help="rows of x (default: %(default)s)")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--candidates", type=int, default=6, help="schedules of each format to try (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROWS / "formats", help="folder of the rows, and of the candidates' records")
    parser.add_argument("--budget", type=float, default=float(1 << 20), help="seconds; run it again to continue")
    parser.add_argument("--device", default=None, help="cuda or cpu; default: the GPU where there is one")
    options = parser.parse_args(arguments)
    begin, failed, target = time.monotonic(), 0, detect_target(options.device)
    name = file_stem(target.name)
    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
        places = [(n, k, int(m)) for m in options.ms.split(",") for n, k in shapes]
        todo = list(missing(places, options.dtype, options.out, target))
        asked = [wanted(place, options.formats.split(","), options.dtype, target, options.candidates) for place in todo]
    except ValueError as error:
        parser.error(str(error))
    with ExitStack() as stack:
        pool = stack.enter_context(CompilePool(keep=True))
        worker = stack.enter_context(DeviceWorker("cuda:0" if target.is_cuda else "cpu", pool.cache.root / "locks"))
        store = RecordStore(options.out / "candidates" / f"{name}.jsonl")
        bench = Bench(target, pool, worker, store, begin + options.budget)
        requests = [CompileRequest(s.program, w, s, target) for point in asked for w, schedules in point.items() for s in schedules]
        print(f"{target.name}: {len(todo)} points, {len(requests)} kernels", flush=True)
        pool.compile(requests)
        print(f"[{time.monotonic() - begin:5.0f} s] compiled", flush=True)
        for point in asked:
            try:
                row = row_of(bench, point)
            except BudgetOver:
                print(f"the budget of {options.budget:g} s is over; run it again to continue", flush=True)
                break
            except RuntimeError as error:
                failed = 1
                print(error, flush=True)
                continue
            write_rows(options.out / f"{name}.jsonl", [row])
            times = ", ".join(f"{f['format']} {f['us']:.2f} us ({row['formats'][0]['us'] / f['us']:.3f})" for f in row["formats"])
            print(f"[{time.monotonic() - begin:5.0f} s] {row['n']} x {row['k']}, m {row['m']}: {times}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
