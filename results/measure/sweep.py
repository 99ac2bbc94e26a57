"""Time as a function of m, and shapes that are a multiple of nothing: ``python -m
results.measure.sweep [--device cuda|cpu] [--out DIR] [--budget SECONDS]`` appends rows to
results/rows/sweep.

m    three shapes at every m-bucket's border, the first m after it and one inside, of a shape all in alternation: a cliff between buckets
     shows as a time above the envelope of m, the least time of any m' >= m, since a call of m rows could be padded to m'
odd  three odd shapes, each beside the listed shape nearest to it: time per byte moved at small m, per operation at large m

Kernels, one per shape and m-bucket, are compiled (in parallel) before anything is timed, and come
through the plans of ``dispatch`` as a user's call gets them. Each m is verified before it is timed;
what is wrong is left out, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilebit.autotune.measure import Call, Timing, copies_needed, time_calls
from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import exact_problem, random_problem
from tilebit.autotune.problems.verify import Gate
from tilebit.command.bench import process_fields, write_rows
from tilebit.kernels import build, find_kernel
from tilebit.layouts.formats import QuantFormat
from tilebit.ops.dispatch import Launcher, plan_for
from tilebit.schedules.gemm.operation import distance
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import Target, detect_target, file_stem

from ..report.rows import ROWS
from ..report.sweep import envelope

Shape = tuple[int, int]  # n, k
FORMAT = QuantFormat(4, 128, False)
SHAPES: tuple[Shape, ...] = ((4096, 4096), (28672, 4096), (8192, 28672))  # of the sweep
LARGEST = 512  # m of the sweep: then time grows with m, and a bucket's border is a small step of it
ODD: tuple[Shape, ...] = ((4304, 1152), (152064, 3584), (5120, 27648))
LISTED: tuple[Shape, ...] = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (8192, 28672))
ODD_MS = {1: "bytes", 16: "bytes", 1024: "flops"}  # m, and the field of ``Workload`` that the time is divided by


class Bench:
    """One shape, for calls of ``ms`` rows: the plan that a user's calls take, a problem to verify
    with, rotating operands and outputs."""

    def __init__(self, shape: Shape, ms: Sequence[int], target: Target, device: str) -> None:
        self.workload, self.target = Workload(max(ms), *shape, FORMAT), target
        w, f = self.workload, FORMAT
        dtype = getattr(torch, w.dtype)
        self.plan = plan_for(torch.device(device), w.n, w.k, f.name, dtype, w.bias)
        self.exact, random = (make(w, 0, target.arch, device) for make in (exact_problem, random_problem))
        copies = copies_needed(w.with_m(min(ms)).bytes, target.l2)
        self.problems = [random, *(random.copied() for _ in range(copies - 1))]
        self.outputs = [problem.outputs() for problem in self.problems]

    def verified(self, m: int) -> float | None:
        """The largest relative block error of a call of ``m`` rows; None, and a line about why,
        when it is wrong."""
        exact, random = (replace(p, workload=p.workload.with_m(m), x=p.x[:m]) for p in (self.exact, self.problems[0]))
        verdict = Gate(exact, random).verify(lambda problem, y: _call(self.plan.launcher(m), problem, y)())
        if not verdict.ok:
            print(f"  wrong, left out: {self.workload.with_m(m).title}: {' '.join(verdict.reasons)}", flush=True)
            return None
        return verdict.rel_err

    def calls(self, m: int) -> list[Call]:
        """Calls of ``m`` rows, one per operand copy."""
        return [_call(self.plan.launcher(m), problem, y[:m]) for problem, y in zip(self.problems, self.outputs, strict=True)]

    def row(self, m: int, timing: Timing, rel_err: float) -> dict[str, Any]:
        """The row of ``m``, without its kind and the fields of the process."""
        w, f = self.workload.with_m(m), FORMAT
        return {
            "n": w.n,
            "k": w.k,
            "m": w.m,
            "format": f.family,
            "group_size": f.group_size,
            "symmetric": f.symmetric,
            "dtype": w.dtype,
            "us": round(timing.us, 3),
            "us_p20": round(timing.us_p20, 3),
            "us_p80": round(timing.us_p80, 3),
            "rel_err": rel_err,
            "schedule": find_kernel(w.bucketed(), self.target).manifest["schedule"],
        }


def _call(launcher: Launcher, problem: Problem, y: Tensor) -> Call:
    named = problem.named(y)
    rest = (named.get(name) for name in ("zeros", "row_scales", "bias"))
    return partial(launcher, named["x"], named["weight"], named["scales"], *rest, y)


def sweep_ms(largest: int) -> list[int]:
    """Of every octave up to ``largest``: its first m, one inside, and its last, a power of two."""
    powers = [1 << i for i in range(largest.bit_length()) if 1 << i <= largest]
    buckets = list(pairwise((0, *powers)))
    return sorted({m for low, high in buckets for m in (low + 1, -(-(low + high) // 2), high)})


def neighbour(shape: Shape) -> Shape:
    """The listed shape nearest to ``shape``: a factor of two in n or in k is one unit, as between
    records; of two equally near, the one whose number of weights is nearer."""
    n, k = shape

    def away(listed: Shape) -> tuple[float, float]:
        there, here = (Workload(1, *s, FORMAT) for s in (listed, shape))
        return round(distance(there, here) or 0.0, 9), abs(log2(listed[0] * listed[1] / (n * k)))

    return min(LISTED, key=away)


def sweep(shape: Shape, target: Target, device: str) -> list[dict[str, Any]]:
    """The rows of one shape, one per m whose outputs are right."""
    ms = sweep_ms(LARGEST)
    bench = Bench(shape, ms, target, device)
    errors = {m: error for m in ms if (error := bench.verified(m)) is not None}
    times = time_calls({str(m): bench.calls(m) for m in errors}, device) if errors else {}
    return [bench.row(m, times[str(m)], error) for m, error in errors.items()]


def odd(shape: Shape, target: Target, device: str) -> list[dict[str, Any]]:
    """The rows of an odd shape, one per m at which its outputs and its neighbour's are right.
    ``ratio``: its time per what ``per`` names (bytes or flops), over its neighbour's, in
    alternation."""
    here, there = (Bench(s, [*ODD_MS], target, device) for s in (shape, neighbour(shape)))
    rows = []
    for m, per in ODD_MS.items():
        error, other = here.verified(m), there.verified(m)
        if error is None or other is None:
            continue
        times = time_calls({"here": here.calls(m), "there": there.calls(m)}, device)
        ours, its = (times[name].us / getattr(b.workload.with_m(m), per) for name, b in (("here", here), ("there", there)))
        beside = there.row(m, times["there"], other)
        rows.append(
            {
                **here.row(m, times["here"], error),
                "per": per,
                "ratio": round(ours / its, 4),
                "neighbour": {name: beside[name] for name in ("n", "k", "us", "us_p20", "us_p80", "rel_err", "schedule")},
            }
        )
    return rows


KINDS = {"m": sweep, "odd": odd}


def summary(kind: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines about the rows of one shape."""
    if kind == "odd":
        return [
            f"  m {r['m']}: {r['us']:.2f} us; {r['neighbour']['n']} x {r['neighbour']['k']} {r['neighbour']['us']:.2f} us; "
            f"per {r['per']} {r['ratio']:.3f} times its neighbour's"
            for r in rows
        ]
    times = {r["m"]: r["us"] for r in rows}
    return [
        f"  m {m}: {times[m]:.2f} us, {times[m] / times[least]:.3f} times its envelope (m {least})" for m, least in envelope(times).items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every row was written, or the budget ended the run; 1: something is wrong and was left
    out."""
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--out", type=Path, default=ROWS / "sweep", help="folder of the rows, one file per device")
    parser.add_argument("--budget", type=float, help="seconds, compiling included, after which no further shape is measured")
    options = parser.parse_args(arguments)
    if options.budget is not None and options.budget <= 0:
        parser.error(f"--budget is {options.budget:g}; accepted: seconds above 0")
    begin, target = time.monotonic(), detect_target(options.device)
    device = "cuda:0" if target.is_cuda else "cpu"
    asked = [("m", shape, sweep_ms(LARGEST)) for shape in SHAPES] + [("odd", shape, [*ODD_MS]) for shape in ODD]
    served = [(shape, ms) for _, shape, ms in asked] + [(neighbour(shape), [*ODD_MS]) for shape in ODD]
    build({Workload(m, *shape, FORMAT).bucketed() for shape, ms in served for m in ms}, target, jobs=None)
    common = {**process_fields(target), "op": "sweep"}
    path = options.out / f"{file_stem(target.name)}.jsonl"
    complete = True
    for index, (kind, shape, ms) in enumerate(asked):
        if options.budget is not None and time.monotonic() - begin >= options.budget:
            left = ", ".join(f"{k} {n} x {depth}" for k, (n, depth), _ in asked[index:])
            print(f"the budget of {options.budget:g} s is over; not measured: {left}", flush=True)
            break
        start = time.monotonic()
        rows = KINDS[kind](shape, target, device)
        write_rows(path, [{**common, "kind": kind, **row} for row in rows])
        complete &= len(rows) == len(ms)
        print(f"{kind}  {shape[0]} x {shape[1]}: {len(rows)} of {len(ms)} m, {time.monotonic() - start:.1f} s", flush=True)
        for line in summary(kind, rows):
            print(line, flush=True)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
