"""Products of every kind of low-bit weight on this machine's CPU: ``python -m results.measure.cpu
[--threads N] [--shapes 4096x4096] [--ms 1,32]`` appends rows to results/rows/cpu.

For each shape and number of rows of x one process times ``tilebit.gemm`` with each format, torch's
bf16 linear, and torch's dynamically quantized linear, which takes fp32 and quantizes x at each call.
Formats of int8 x have two rows: ``x`` is "codes", quantized beforehand, or "quantized" by the call.
Implementations are interleaved, each round in a drawn order; each has several copies of its operands,
and what the others read comes between two of its calls. Linux says how long each thread has been
ready to run without a core: a call in which one of this process was, since other processes had them, is
left out (``calls`` of ``of`` count).

Every kernel passes the gate of ``autotune.problems`` before it is timed; one that is wrong ends the run.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

import tilebit
from tilebit.autotune.contention import Others, OwnTime
from tilebit.autotune.measure import copies_needed
from tilebit.autotune.problems.gemm import Problem
from tilebit.autotune.problems.gemm_drawn import random_problem
from tilebit.autotune.problems.verify import gate, worst_tile_error
from tilebit.autotune.worker_process import launch
from tilebit.command.bench import MAX_COPIES, int8_peer, process_fields, write_rows
from tilebit.kernels import find_kernel
from tilebit.layouts.formats import GemmFormat
from tilebit.ops.dispatch import plan_for
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import Target, cpu_target, file_stem

from ..report.rows import ROWS

FORMATS = "w4a16_g128,w4a8_lqq_g64,w4a8_lqq_g128,w8a8_channel,w8a16_g128," + ",".join(f"w{bits}a16_any" for bits in range(3, 9))
PEERS = "w8a8_channel"  # of whose weight torch's linears are made
DTYPE = "bfloat16"
ENOUGH, MOST = 100, 300  # undisturbed calls of each
WAITED = 0.02  # of a call: what a thread of it may have waited for a core
PAUSE_SECONDS = 0.01  # after a call that was disturbed: who has slept is scheduled first
QUANTIZED_ERROR = 0.02  # relative: of x with 8 bits, a scale for each row

Call = Callable[[], Tensor]
Case = tuple[str, str, str | None]  # implementation, format, what x is


def packed_weight(problem: Problem) -> tilebit.PackedWeight:
    """The weight of ``problem`` as a user holds it."""
    w, o = problem.workload, problem.operands
    held = (o["weight"], o["scales"], o.get("zeros"), w.n, w.k, w.format, getattr(torch, w.dtype), "cpu")
    return tilebit.PackedWeight(*held, row_scales=o.get("row_scales"))


def copies_of(problem: Problem, target: Target) -> list[Problem]:
    count = min(MAX_COPIES, copies_needed(sum(t.numel() * t.element_size() for t in problem.operands.values()), target.l2))
    return [problem, *(problem.copied() for _ in range(count - 1))]


def checked(workload: Workload, target: Target) -> dict[str, Any]:
    """The schedule of the kernel that serves ``workload``, once it has passed the gate. Raises ``ValueError`` where it does not."""
    w = workload
    plan = plan_for(torch.device("cpu"), w.n, w.k, w.format.name, getattr(torch, w.dtype), w.bias)
    kernel = find_kernel(plan.serving(w.m), target)
    kernel.prepare()
    verdict = gate(w, 0, target.arch, "cpu").verify(partial(launch, kernel, {}))
    if not verdict.ok:
        raise ValueError(f"{w.title} is wrong: {' '.join(verdict.reasons)}")
    return kernel.manifest["schedule"]


def our_calls(problems: Sequence[Problem]) -> dict[str | None, list[Call]]:
    """Calls of ``tilebit.gemm`` by what its x is."""
    weights = [packed_weight(problem) for problem in problems]
    first = problems[0]
    if not first.workload.format.x:
        return {None: [partial(tilebit.gemm, first.x, weight) for weight in weights]}
    x = first.floats(torch.float32).to(getattr(torch, first.workload.dtype))
    codes: list[Call] = [partial(tilebit.gemm, first.x, weight, token_scales=first.operands["token_scales"]) for weight in weights]
    return {"codes": codes, "quantized": [partial(tilebit.gemm, x, weight) for weight in weights]}


def peer_calls(problem: Problem, target: Target) -> dict[Case, list[Call]]:
    """torch's linears with the weight of ``problem``, whose x is int8 codes."""
    weight, x = problem.dequantized(), problem.floats(torch.float32)
    x, weight = x.to(getattr(torch, problem.workload.dtype)), weight.to(getattr(torch, problem.workload.dtype))
    dense = copies_needed(weight.numel() * weight.element_size(), target.l2)
    linear = torch.nn.functional.linear
    found: dict[Case, list[Call]] = {("torch", "bf16", None): [partial(linear, x, weight.clone()) for _ in range(min(MAX_COPIES, dense))]}
    calls = int8_peer(problem, min(MAX_COPIES, copies_needed(weight.numel(), target.l2)))
    return found if calls is None else {**found, ("torch", "int8", "quantized"): calls}


def measured(m: int, n: int, k: int, formats: Sequence[str], target: Target, patience: float) -> list[dict[str, Any]]:
    """The rows of one shape. Raises ``ValueError`` where a result is wrong."""
    calls: dict[Case, list[Call]] = {}
    fields: dict[Case, dict[str, Any]] = {}
    for name in formats:
        workload = Workload(m, n, k, GemmFormat.parse(name), DTYPE)
        schedule = checked(workload, target)
        problem = random_problem(workload, 0, target.arch, "cpu")
        for x, own in our_calls(copies_of(problem, target)).items():
            error = worst_tile_error(own[0](), problem.reference())
            if x == "quantized" and error > QUANTIZED_ERROR:
                raise ValueError(f"{workload.title}, x quantized by the call: its relative error is {error}; accepted: {QUANTIZED_ERROR}")
            calls["tilebit", name, x] = own
            fields["tilebit", name, x] = {"rel_err": error, "schedule": schedule}
    calls |= peer_calls(random_problem(Workload(m, n, k, GemmFormat.parse(PEERS), DTYPE), 0, target.arch, "cpu"), target)
    times = undisturbed(calls, patience)
    return [
        {
            "impl": impl,
            "format": name,
            "x": x,
            "dtype": DTYPE,
            "m": m,
            "n": n,
            "k": k,
            **times[impl, name, x],
            **fields.get((impl, name, x), {}),
        }
        for impl, name, x in calls
    ]


def undisturbed(named: Mapping[Case, Sequence[Call]], patience: float) -> dict[Case, dict[str, Any]]:
    """Times of each, of the calls in which no thread of this process waited for a core that another process had: ``ENOUGH`` calls
    of each, or as many as there are after ``patience`` seconds. Raises ``ValueError`` where there are none of one."""
    wake = torch.zeros(1 << 17)
    orders, turn, end, others = random.Random(0), 0, time.monotonic() + patience, Others()
    samples: dict[Case, list[float]] = {case: [] for case in named}
    made, disturbed = dict.fromkeys(named, 0), False
    while min(map(len, samples.values())) < ENOUGH and (turn < 3 or time.monotonic() < end):
        order = [case for case in named if len(samples[case]) < MOST]
        orders.shuffle(order)
        for case in order:
            if disturbed:
                time.sleep(PAUSE_SECONDS)
                wake.add_(1)  # by all threads
            call, own = named[case][turn % len(named[case])], OwnTime(os.getpid())
            start = time.perf_counter_ns()
            call()
            us = (time.perf_counter_ns() - start) / 1e3
            own.seconds()
            made[case] += 1
            disturbed = own.waited * 1e6 > WAITED * us
            if not disturbed:
                samples[case].append(us)
        turn += 1
    if none := [" ".join(map(str, case)) for case, found in samples.items() if len(found) < 2]:
        raise ValueError(f"other processes disturbed all calls but one of {', '.join(none)}; wait for a quieter machine, or longer")
    share = others.share()
    return {case: {**spread_of(found), "calls": len(found), "of": made[case], "others": share} for case, found in samples.items()}


def spread_of(us: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    tenths = quantiles(us, n=10, method="inclusive")
    return {"us": round(tenths[4], 3), "us_p20": round(tenths[1], 3), "us_p80": round(tenths[7], 3)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, help="and cores, the first ones of this process (default: all of them)")
    parser.add_argument("--shapes", default="4096x4096", help="n x k of weights (default: 4096x4096)")
    parser.add_argument("--ms", default="1,32", help="rows of x (default: 1,32)")
    parser.add_argument("--formats", default=FORMATS, help=f"of weights (default: {FORMATS})")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for undisturbed calls, of each size (default: 120)")
    parser.add_argument("--out", type=Path, default=ROWS / "cpu", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: options.threads])
    torch.set_num_threads(len(cores[: options.threads]))
    target = cpu_target()
    shapes = [tuple(int(number) for number in shape.split("x")) for shape in options.shapes.split(",")]
    common = process_fields(target)
    path = options.out / f"{file_stem(target.name)}.jsonl"
    for n, k in shapes:
        for m in map(int, options.ms.split(",")):
            rows = measured(m, n, k, options.formats.split(","), target, options.patience)
            write_rows(path, [{**common, "features": list(target.features), **row} for row in rows])
            print(f"{n} x {k}, m = {m}, others had {rows[0]['others'] or 0:.0%} of the cores", flush=True)
            for row in rows:
                print(f"  {row['impl']} {row['format']} {row['x'] or ''} {row['us']:.0f} us", flush=True)


if __name__ == "__main__":
    main()
