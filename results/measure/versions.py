"""Time this tree's kernels beside those of another commit: ``python -m results.measure.versions
--before TREE`` appends rows to results/rows/versions.

    git archive COMMIT tilebit layouts schedules tiles autotune | tar -x -C TREE
    TILEBIT_COMMIT_BEFORE=COMMIT python -m results.measure.versions --before TREE [--budget 560]

For each point (a product, a decode step over a low-bit cache, or a prefill) both trees compile the kernel that
they choose themselves ("chosen"), and where they choose different schedules this one also compiles
the other's ("forced"). One process then verifies them, compares their bits and times them in
alternation, in orders that are drawn, beside a copy of the kernel before ("again"), which says how
far equal kernels differ here. On a GPU the host's time of public calls is taken too, of processes
of both trees that take turns ("host").

A run goes on where one of the same two commits ended. ``--target sm_90a`` compiles, without a
device, and says what would be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tilebit.autotune.provenance import source_commit
from tilebit.command.bench import process_fields, write_rows
from tilebit.schedules.operations import workload_from_json
from tilebit.schedules.target import Target, detect_target, file_stem, target_from_name
from tilebit.tiles.compiler.cache import default_root

from ..report.rows import ROWS, json_rows
from ..report.versions import VERSIONS_FIELDS, versions_section
from .versions_points import Point, compile_all, decode, gemm, prefill, rows_of, with_a_copy
from .versions_process import AFTER, BEFORE, measured
from .versions_trees import BudgetOver, Tree, host_times

ROOT = Path(__file__).resolve().parent.parent.parent
COMMIT_BEFORE = "TILEBIT_COMMIT_BEFORE"
SHAPES = ((4096, 4096), (6144, 4096), (4096, 14336), (10240, 8192), (28672, 4096), (8192, 28672), (57344, 8192))  # n, k
MS = (1, 4, 16, 64, 256, 1024)
DECODE = ((1, 32768), (1, 131072), (8, 8192), (32, 4096), (64, 2048), (128, 1024))  # batch, kv_len
CACHES = ("kv8", "kv4", "kv2")
PREFILL = ((1, 4096), (8, 1024))  # batch, length
CPU_SHAPES, CPU_MS, CPU_DECODE, CPU_PREFILL = ((4096, 4096), (14336, 4096)), (1, 32), ((8, 1024),), ()
HOST_WEIGHTS = ((256, 256), (512, 4096))
HOST_PROCESSES, HOST_ROUNDS = 5, 20  # processes of each tree
HOST = "host"


def line(row: dict[str, Any]) -> str:
    """What a run says of a row."""
    times = f"{row['us_before']:.2f} us before, {row['us_after']:.2f} after"
    if row["kind"] == HOST:
        return f"host, {row['title']}: {times}"
    spread = f"{row['spread'][0]:.3f} to {row['spread'][1]:.3f}"
    how = f"{row['title']}, {row['kind']}: {times}, {row['ratio']:.3f} times as fast ({spread})"
    return f"{how}; a copy {row['again']:.3f}; {'the same' if row['same_bits'] else 'other'} bits"


def host_rows(trees: tuple[Tree, Tree], device: str) -> Iterator[dict[str, Any]]:
    """Host time of public calls in both trees: the median over a tree's processes of the quietest
    round of each, and the least and the most of that over processes."""
    found = host_times(trees, {"device": device, "weights": HOST_WEIGHTS}, HOST_ROUNDS, HOST_PROCESSES)
    for title, both in found.items():
        before, after = ([min(process) for process in tree] for tree in both)
        yield {
            "kind": HOST,
            "workload": None,
            "title": title,
            "us_before": round(median(before), 3),
            "us_after": round(median(after), 3),
            "ratio": round(median(before) / median(after), 4),
            "us_range_before": [round(min(before), 3), round(max(before), 3)],
            "us_range_after": [round(min(after), 3), round(max(after), 3)],
            "processes": HOST_PROCESSES,
            "rounds": HOST_ROUNDS,
        }


def known(path: Path, commits: tuple[Any, Any]) -> set[str]:
    """What has rows of these two commits: workloads as JSON, and "null" for the host's time."""
    rows = [row for _, row in json_rows(path.parent, VERSIONS_FIELDS)] if path.is_file() else []
    return {json.dumps(row["workload"], sort_keys=True) for row in rows if (row["commit_before"], row["commit"]) == commits}


class Run:
    """One run of this program: ``points`` on ``target``'s device, rows to ``path``, until
    ``budget`` seconds are over."""

    def __init__(self, target: Target, trees: tuple[Tree, Tree], path: Path, work: Path, budget: float) -> None:
        self.target, self.trees, self.path, self.work = target, trees, path, work
        self.device = "cuda:0" if target.is_cuda else "cpu"
        self.begin, self.deadline = time.monotonic(), time.monotonic() + budget
        self.common = {**process_fields(target), "op": "versions", "commit_before": os.environ.get(COMMIT_BEFORE)}
        self.failed = False

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def known(self) -> set[str]:
        """What has rows of these two commits: workloads as JSON, and "null" for the host's time."""
        rows = [row for _, row in json_rows(self.path.parent, VERSIONS_FIELDS)] if self.path.is_file() else []
        here = [row for row in rows if all(row[name] == self.common[name] for name in ("gpu", "commit", "commit_before"))]
        return {_key(row["workload"]) for row in here}

    def compiled(self, points: Sequence[Point], extra: Sequence[Any], arch: str | None) -> list[Point]:
        """Those of ``points`` whose kernels both trees could compile."""
        self.say(f"{self.target.name}: {len(points)} points to measure; compiling in both trees")
        compile_all(points, self.trees, {"target": arch, "device": self.device}, extra, self.deadline)
        for p in points:
            if p.reasons:
                self.failed = True
                self.say(f"{p.title}: not compiled: {'; '.join(p.reasons)}")
        found = [p for p in points if not {BEFORE, AFTER} & {name for name, made in p.kernels.items() if "failed" in made}]
        self.say(f"compiled {len(found)} points; {sum(not p.same_schedule for p in found)} have another schedule than before")
        return found

    def host(self) -> None:
        try:
            self._write(host_rows(self.trees, self.device))
        except RuntimeError as error:  # the points do not depend on it
            self.failed = True
            self.say(f"host: {error}")

    def measure(self, points: Sequence[Point]) -> None:
        jobs = [with_a_copy(p, self.work / "again") for p in points]
        for index, found in measured(jobs, self.device, self.deadline):
            p = points[index]
            reasons = [f"{name} is wrong: {why}" for name, why in found.get("wrong", {}).items()]
            for reason in [*reasons, *filter(None, [found.get("failed")])]:
                self.failed = True
                self.say(f"{p.title}: {reason}")
            if "kernels" in found:
                self._write(rows_of(p, found))

    def _write(self, found: Iterable[dict[str, Any]]) -> None:
        rows = [{**self.common, **row} for row in found]
        write_rows(self.path, rows)
        for row in rows:
            self.say(line(row))


def _key(workload: dict[str, Any] | None) -> str:
    return json.dumps(workload, sort_keys=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: what was asked for has its rows, or the budget ended, which is said; 1: something failed
    or was wrong, which is said."""
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.versions", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the other tree")
    parser.add_argument("--shapes", help="of weights, 4096x4096,28672x4096, or none (default: seven)")
    parser.add_argument("--ms", help="rows of x, 1,64 (default: six)")
    parser.add_argument("--decode", help="batch x kv_len, 1x32768,8x8192, or none (default: six)")
    parser.add_argument("--caches", default=",".join(CACHES), help="of decode (default: %(default)s)")
    parser.add_argument("--prefill", help="batch x length, 1x4096, or none (default: two)")
    parser.add_argument("--again", action="store_true", help="measure what has rows of these two commits, too")
    parser.add_argument("--no-host", action="store_true", help="do not take the host's time")
    parser.add_argument("--budget", type=float, default=float(1 << 20), help="seconds; run it again to continue")
    parser.add_argument("--device", default=None, help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--target", help="compile for this arch, measure nothing")
    parser.add_argument("--out", type=Path, default=ROWS / "versions", help="folder of the rows")
    parser.add_argument("--work", type=Path, default=default_root() / "versions", help="folder of both trees' kernels")
    options = parser.parse_args(arguments)
    if options.budget <= 0:
        parser.error(f"--budget is {options.budget:g}; accepted: seconds above 0")
    target = target_from_name(options.target) if options.target else detect_target(options.device)
    if not options.target and not os.environ.get(COMMIT_BEFORE):
        parser.error(f"{COMMIT_BEFORE} is not set; accepted: the commit of --before, which every row names")
    if not options.target and not source_commit():
        parser.error("this tree has no history and TILEBIT_COMMIT is not set; accepted: its commit, which every row names")
    trees = Tree(options.before, options.work / "before"), Tree(ROOT, options.work / "after")
    try:
        trees[0].check()
        shapes = _pairs("--shapes", options.shapes, SHAPES if target.is_cuda else CPU_SHAPES)
        cases = _pairs("--decode", options.decode, DECODE if target.is_cuda else CPU_DECODE)
        ms = [int(m) for m in options.ms.split(",")] if options.ms else (MS if target.is_cuda else CPU_MS)
        points = [Point(gemm(n, k, m), {}) for n, k in shapes for m in ms]
        points += [Point(decode(*case, cache), {}) for case in cases for cache in options.caches.split(",")]
        prompts = _pairs("--prefill", options.prefill, PREFILL if target.is_cuda else CPU_PREFILL)
        points += [Point(prefill(*prompt), {}) for prompt in prompts]
        for p in points:
            workload_from_json(p.workload)
    except ValueError as error:
        parser.error(str(error))
    name = file_stem(target.name)
    run = Run(target, trees, options.out / f"{name}.jsonl", options.work, options.budget)
    done = set() if options.again else run.known()
    todo = [p for p in points if _key(p.workload) not in done]
    host = target.is_cuda and not options.no_host and not options.target and _key(None) not in done
    try:
        ready = run.compiled(todo, [gemm(*shape, 1) for shape in HOST_WEIGHTS] if host else [], options.target)
        if options.target:
            for p in ready:
                programs = [p.kernels[name]["schedule"]["program"] for name in (BEFORE, AFTER)]
                print(f"{p.title}: {' -> '.join(programs)}, {'the same' if p.same_schedule else 'another'} schedule")
            return int(run.failed)
        if host:
            run.host()
        run.measure(ready)
    except BudgetOver:
        run.say(f"the budget of {options.budget:g} s is over; run it again to continue")
    print(versions_section(options.out))
    return int(run.failed)


def _pairs(option: str, text: str | None, otherwise: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of sizes "4096x4096,8192x28672"; "none": no pair."""
    if text is None:
        return list(otherwise)
    pairs = [] if text == "none" else [part.split("x") for part in text.split(",")]
    if any(len(pair) != 2 or not all(size.isdigit() for size in pair) for pair in pairs):
        raise ValueError(f"{option} is {text!r}; accepted: pairs such as 4096x4096,8192x28672, or none")
    return [(int(a), int(b)) for a, b in pairs]


if __name__ == "__main__":
    sys.exit(main())
