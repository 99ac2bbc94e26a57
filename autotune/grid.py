"""Times of tiles as functions of m: ``python -m tilebit.autotune.grid --shapes 5120x5120 --m
100,300,700 --out FILE --budget 240``.

Kernels do not depend on m. So all schedules that may be good at some of the m are compiled once per
shape, and each is measured wherever the analytic model does not expect it to be far behind, several
of one m in alternation. Every measurement is a tuning record (a verified one, or a failure),
appended to ``--out``; its workload has the m itself. That is what a cost model is checked with, and
what a shape's portfolio is made of (``schedules/portfolio.py``).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product

from ..layouts.formats import QuantFormat
from ..schedules.gemm.cost import estimate
from ..schedules.gemm.tiles import RASTER_M
from ..schedules.gemm.workload import Workload
from ..schedules.operations import candidates, legal
from ..schedules.records import TuningRecord
from ..schedules.schedule import Schedule
from ..schedules.target import Target, detect_target, driver_version, target_from_name
from ..tiles.compiler.cache import ArtifactCache
from ..tiles.compiler.compile import CompileFailure, CompileRequest
from ..tiles.compiler.kernel import Kernel
from ..tiles.compiler.pool import CompilePool
from .failures import expect_no_fault
from .provenance import now, package_versions, source_commit
from .store import RecordStore
from .worker import DeviceWorker, Outcome

BLOCKS_N = ((128, 8), (256, 8), (192, 12), (64, 4), (128, 4))  # of a tile, with its computing warps
BLOCKS_M = range(48, 257, 16)
TOGETHER = 8  # kernels timed in alternation
WITHIN = 1.5  # times the least estimate at an m: what is expected to be slower is not measured there
ANOTHER = 0.1  # of its time that another variant of a shape counts as slower
MIN_BLOCKS = (1, 2)
SECONDS = 6.0  # that verifying and timing one kernel may take: what hangs must not use up the budget


def tiles(workload: Workload, target: Target) -> list[Schedule]:
    """Every tile of ``gemm_wgmma`` that is legal for ``workload``, as deep as shared memory allows,
    in all ways to divide a grid; then the rules' own candidates."""
    found = []
    ways = (False, True) if workload.nibbles else (False,)
    for (bn, warps), bm, resident, joined in product(BLOCKS_N, BLOCKS_M, MIN_BLOCKS, ways):
        base = Schedule("gemm_wgmma", bn, bm, 128, 1, warps, min_blocks=resident, joined=joined)
        grids = [replace(base, split_k=s) for s in (1, 2, 3, 4)]
        grids += [replace(base, stream_k=True), replace(base, tail=2), replace(base, tail=4)]
        for grid, cluster in product(grids, (1, 2)):
            depths = (replace(grid, cluster=cluster, num_stages=d) for d in range(8, 1, -1))
            deepest = next((s for s in depths if not legal(workload, s, target)), None)
            found += [deepest] if deepest is not None else []
    return list(dict.fromkeys([*found, *(candidates(workload, target) or [])]))


def promising(base: Workload, ms: Sequence[int], target: Target, kernels: int) -> dict[int, list[Schedule]]:
    """The schedules to measure at each m, of at most ``kernels`` in all: in turn the next best of
    every m by the analytic model, of each tile shape its best first."""
    ranked: dict[int, list[Schedule]] = {}
    expected: dict[int, dict[Schedule, float]] = {}
    options = dict.fromkeys(s for m in ms for s in tiles(base.with_m(m), target))
    for m in ms:
        us = expected[m] = {s: estimate(base.with_m(m), s, target).us for s in options}
        seen: dict[tuple[int, int, int], int] = {}
        keyed = []
        for s in sorted((s for s in options if not s.raster or m >= RASTER_M), key=us.__getitem__):
            shape = (s.block_n, s.block_m, s.num_warps)
            seen[shape] = seen.get(shape, 0) + 1
            keyed.append((us[s] * (1 + ANOTHER * (seen[shape] - 1)), s))  # another variant of a shape says less than another shape
        ranked[m] = [s for _, s in sorted(keyed, key=lambda pair: pair[0])]
    chosen: dict[Schedule, None] = {}
    for row in zip(*ranked.values(), strict=False):
        for s in row:
            if len(chosen) < kernels:
                chosen[s] = None
    return {
        m: [
            s
            for s in sorted(chosen, key=expected[m].__getitem__)
            if expected[m][s] <= WITHIN * min(expected[m][c] for c in chosen) and (not s.raster or m >= RASTER_M)
        ]
        for m in ms
    }


def measure(
    base: Workload,
    plan: dict[int, list[Schedule]],
    made: dict[Schedule, Kernel | CompileFailure],
    target: Target,
    worker: DeviceWorker,
    store: RecordStore,
    deadline: float,
) -> None:
    """Measure what was compiled at every m of ``plan`` until ``deadline``, a batch of every m in
    turn; append the records, print the best of each m."""
    driver, best = driver_version(), dict[int, list[tuple[float, Schedule]]]()
    right = {m: [s for s in schedules if isinstance(made[s], Kernel)] for m, schedules in plan.items()}
    batches = {m: [rows[i : i + TOGETHER] for i in range(0, len(rows), TOGETHER)] for m, rows in right.items()}
    for turn in range(max(map(len, batches.values()), default=0)):
        for m, rows in batches.items():
            if turn >= len(rows) or time.monotonic() >= deadline:
                continue
            workload, schedules = base.with_m(m), rows[turn]
            paths = [k.path for k in (made[s] for s in schedules) if isinstance(k, Kernel)]
            outcomes = worker.compare(paths, workload, schedules, target)
            if len(paths) > 1 and all(o.status in ("crash", "hang") for o in outcomes):  # whose fault it was is not known
                outcomes = [worker.measure(path, workload, s, target) for path, s in zip(paths, schedules, strict=True)]
            for s, o in zip(schedules, outcomes, strict=True):
                expect_no_fault(workload, s, o)
                store.append(_record(workload, s, target, driver, o))
                if o.us is None:
                    print(f"  {workload.title} {s}: {o.status}: {o.reason}", flush=True)
                else:
                    best.setdefault(m, []).append((o.us, s))
    for m, times in best.items():
        ranked = sorted(times, key=lambda pair: pair[0])
        line = ", ".join(f"{us:.1f} us {name(s)}" for us, s in ranked[:4])
        print(f"  {base.with_m(m).title}: {len(ranked)} kernels; {line}", flush=True)


def name(s: Schedule) -> str:
    """A schedule of ``gemm_wgmma`` in few characters."""
    extra = [f"{f}{getattr(s, f)}" for f in ("split_k", "min_blocks", "cluster", "tail") if getattr(s, f) > 1]
    extra += [f"raster{s.raster}"] * bool(s.raster) + ["stream_k"] * s.stream_k + ["joined"] * s.joined
    return " ".join([f"{s.block_n}x{s.block_m}/{s.num_warps}", *extra])


def _record(workload: Workload, s: Schedule, target: Target, driver: str | None, o: Outcome) -> TuningRecord:
    return TuningRecord(
        workload, s, target.name, target.arch, target.units, o.status, o.us, o.us_p20, o.us_p80, o.rel_err, o.reason,
        CompileRequest(s.program, workload, s, target).key, driver, package_versions(), now(), source_commit(),
    )  # fmt: skip


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Iterable[str] | None = None) -> int:
    """0: done, or the budget ended it."""
    parser = argparse.ArgumentParser(prog="python -m tilebit.autotune.grid", description=__doc__)
    parser.add_argument("--shapes", required=True, help="weights [n]x[k], separated by commas")
    parser.add_argument("--m", type=_numbers, required=True, help="rows of x, separated by commas")
    parser.add_argument("--out", required=True, help="file of records to append to")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds, compiling included")
    parser.add_argument("--kernels", type=int, default=48, help="compiled per shape, at most")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--jobs", type=int, help="compile at once; default: one per core")
    parser.add_argument("--target", help="an arch name: compile only")
    options = parser.parse_args(None if arguments is None else list(arguments))
    target = target_from_name(options.target) if options.target else detect_target()
    begin, cache, store = time.monotonic(), ArtifactCache(), RecordStore(options.out)
    format = QuantFormat(options.bits, 128, not options.asymmetric)
    sizes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    shapes = [Workload(1, n, k, format) for n, k in sizes]
    plans = [promising(shape, options.m, target, options.kernels) for shape in shapes]
    print(f"{time.monotonic() - begin:.1f} s: planned", flush=True)
    with CompilePool(options.jobs or os.cpu_count(), cache=cache) as pool, ThreadPoolExecutor(1) as ahead:

        def compiled(shape: Workload, plan: dict[int, list[Schedule]]) -> dict[Schedule, Kernel | CompileFailure]:
            wanted = list(dict.fromkeys(s for schedules in plan.values() for s in schedules))
            made = pool.compile([CompileRequest(s.program, shape, s, target) for s in wanted])
            failed = [(s, m) for s, m in zip(wanted, made, strict=True) if isinstance(m, CompileFailure)]
            print(f"{time.monotonic() - begin:.1f} s: {shape.served}: {len(wanted)} compiled, {len(failed)} failed", flush=True)
            for s, failure in failed:
                print(f"  {name(s)}: {failure.kind}: {failure.sentences[0]}", flush=True)
            return dict(zip(wanted, made, strict=True))

        jobs = [ahead.submit(compiled, shape, plan) for shape, plan in zip(shapes, plans, strict=True)]
        if options.target:
            for job in jobs:
                job.result()
            return 0
        with DeviceWorker("cuda:0", cache.root / "locks", SECONDS) as worker:
            for i, (shape, plan, job) in enumerate(zip(shapes, plans, jobs, strict=True)):
                made, present = job.result(), time.monotonic()
                deadline = present + max(0.0, begin + options.budget - present) / (len(shapes) - i)
                measure(shape, plan, made, target, worker, store, deadline)
                print(f"{time.monotonic() - begin:.1f} s: {shape.served} measured", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
