"""Static evidence for speed: ``python -m results.measure.static.report [--arch sm_80 ...]``
compiles the schedules that would be chosen, without a GPU, and writes what their code says to
``results/rows/static/<arch>.jsonl``, one row a kernel; the pages are generated from these rows by
``make results``.

A row depends on the sources, the shipped records and the compilers, which it names, and on nothing
else: running it again with the same compilers must change nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.records import TuningRecord, shipped_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose
from tilebit.schedules.target import ARCHES, Target, target_from_name
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest
from tilebit.tiles.compiler.cuda import CUBIN_NAME, SOURCE_NAME, find_nvcc, run_nvcc
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.lint import disassemble
from tilebit.tiles.compiler.pool import CompilePool

from ...report.rows import ROWS
from . import limits
from .conflicts import conflicts
from .listing import KIB, Spent, spent

GPU_ARCHES = tuple(arch for arch in ARCHES if arch != "cpu")
SHAPES = ((14336, 4096), (4096, 14336))
MS = (1, 16, 64, 256, 4096)
FORMAT = QuantFormat(4, 128, False)
MODEL_TRIES = 4  # schedules of the model, the best first


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel to look at: ``source`` says who chose its schedule (as ``schedules.select.Choice``)."""

    workload: Workload
    schedule: Schedule
    source: str
    next_best: tuple[Schedule, ...] = ()  # in its place where its code does not pass the lint: the model cannot see spills


def cases(target: Target, records: Sequence[TuningRecord]) -> list[Case]:
    """For every workload the schedule that ``select`` gives and, of each other program with
    candidates, the cost model's best."""
    found = []
    for workload in (Workload(m, n, k, FORMAT) for n, k in SHAPES for m in MS):
        choice = choose(workload, target, records)
        options = sorted(candidates(workload, target) or [], key=lambda s: estimate(workload, s, target).us)
        by_program = {p: [s for s in options if s.program == p] for p in sorted({s.program for s in options})}
        same = [s for s in by_program.pop(choice.schedule.program, []) if s != choice.schedule]
        found.append(Case(workload, choice.schedule, choice.source, () if choice.source == "tuned" else tuple(same[:MODEL_TRIES])))
        found += [Case(workload, best[0], "model", tuple(best[1:MODEL_TRIES])) for best in by_program.values()]
    return found


def code_of(kernel: Kernel, arch: str) -> tuple[str, str]:
    """(listing, "sass") of a kernel, or (PTX, "ptx") where neither nvdisasm nor cuobjdump is found."""
    toolkit = Path(find_nvcc()).resolve().parent
    sass = disassemble(kernel.path / CUBIN_NAME, toolkit)
    if sass:
        return sass, "sass"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / SOURCE_NAME).write_bytes((kernel.path / SOURCE_NAME).read_bytes())
        return run_nvcc(Path(folder), arch)[1], "ptx"


def row(case: Case, kernel: Kernel, target: Target) -> dict[str, Any]:
    """What the code of one kernel says."""
    w, s, used = case.workload, case.schedule, kernel.resources
    text, level = code_of(kernel, target.arch)
    fit = limits.blocks_per_sm(used["registers"], used["smem"], used["threads"], target)
    resident = min(float(fit), limits.grid_blocks(w, s, fit * target.units) / target.units)
    return {
        "op": "static",
        "arch": target.arch,
        "target": target.name,
        "m": w.m,
        "n": w.n,
        "k": w.k,
        "format": w.format.name,
        "dtype": w.dtype,
        "schedule": s.to_json(),
        "source": case.source,
        "level": level,
        **{name: used[name] for name in ("registers", "spills", "stack", "smem", "threads")},
        "blocks_per_sm": fit,
        "resident_blocks": round(resident, 2),
        "bytes_in_flight": round(resident * limits.bytes_in_flight(w, s)),
        "bytes_needed": round(limits.bytes_needed(target)),
        **loop_fields(spent(text, level), w, s, target),
        "conflicts": conflicts(s, (kernel.path / SOURCE_NAME).read_text()),
        "versions": {name: kernel.manifest["versions"][name] for name in ("tilelang", "nvcc")},
    }


def loop_fields(loop: Spent, workload: Workload, schedule: Schedule, target: Target) -> dict[str, Any]:
    """Instructions per KiB of packed weights, and the times that issuing them and multiplying take,
    beside the floor.

    Every row of output tiles decodes the weight again, and a block multiplies its whole tile, also
    rows past the end of x."""
    w, s = workload, schedule
    rows_of_tiles = -(-max(w.m, 1) // s.block_m)
    kib = w.n * w.k * w.format.bits / 8 / KIB * rows_of_tiles
    classes = {name: round(loop.per_kib(name), 1) for name in loop.by_class}
    return {
        "looped": loop.looped,
        "per_kib": {"all": round(loop.per_kib(), 1), **classes},
        "issue_us": round(limits.issue_us(loop.per_kib() * kib, target), 2),
        "bits_us": round(limits.issue_us(loop.per_kib("bits") * kib, target, limits.BIT_SLOTS), 2),
        "tensor_us": round(loop.flops / (loop.weight_bytes / KIB) * kib / (target.mma_tflops * 1e6), 2),
        "floor_us": round(limits.floor_us(w, target), 2),
    }


def measure(target: Target, pool: CompilePool, records: Sequence[TuningRecord]) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows of one target in order, sentences about kernels that did not compile or whose code
    could not be read)."""
    chosen = cases(target, records)
    rows, bad = [], []
    while chosen:
        requests = [CompileRequest(c.schedule.program, c.workload, c.schedule, target) for c in chosen]
        compiled = list(zip(chosen, requests, pool.compile(requests), strict=True))
        chosen = []
        for case, request, result in compiled:
            if not isinstance(result, CompileFailure):
                read(case, request, result, target, rows, bad)
            elif result.kind == "lint" and case.next_best:
                chosen.append(replace(case, schedule=case.next_best[0], next_best=case.next_best[1:]))
            else:
                bad.append(str(result))
    rows.sort(key=lambda r: (r["n"], r["k"], r["m"], r["schedule"]["program"]))
    return rows, bad


def read(case: Case, request: CompileRequest, kernel: Kernel, target: Target, rows: list[dict[str, Any]], bad: list[str]) -> None:
    """Add the row of one kernel, or why its code could not be read."""
    try:
        rows.append(row(case, kernel, target))
    except ValueError as error:
        bad.append(f"{request}: {error}")


def write(folder: Path, arch: str, rows: Iterable[dict[str, Any]]) -> None:
    """Replace the rows of one architecture."""
    rows = list(rows)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{arch}.jsonl").write_text("".join(json.dumps(r, sort_keys=True) + "\n" for r in rows))


def main(arguments: list[str] | None = None) -> int:
    """0: written; 1: written, but a schedule does not compile, its code cannot be read, or its
    accesses meet in a bank."""
    parser = argparse.ArgumentParser(prog="python -m results.measure.static.report", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--arch", nargs="+", choices=GPU_ARCHES, default=list(GPU_ARCHES), help="default: all")
    parser.add_argument("--out", type=Path, default=ROWS / "static", help="folder to write <arch>.jsonl in")
    parser.add_argument("--jobs", type=int, default=None, help="compiles at once (default: one per core)")
    options = parser.parse_args(arguments)
    bad: list[str] = []
    with CompilePool(jobs=options.jobs) as pool:
        records = shipped_records()
        for arch in options.arch:
            rows, failures = measure(target_from_name(arch), pool, records)
            write(options.out, arch, rows)
            bad += failures
            bad += [f"{arch}: bank conflicts {r['conflicts']} in {r['schedule']}" for r in rows if any(r["conflicts"].values())]
            print(f"static: wrote {arch}.jsonl, {len(rows)} kernels", flush=True)
    for line in bad:
        print(f"static: {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
