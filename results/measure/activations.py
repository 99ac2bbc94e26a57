"""Measure the quantization of activations on this machine: ``python -m results.measure.activations
[--shapes 4096x8192,1x8192] [--kinds int8_token,int8_group] [--candidates N]`` appends rows to
results/rows/activations.

For each m x k every kind tries the ``--candidates`` schedules that the cost model expects most of
(the tuned one first; 0: all). All kernels of a shape are timed side by side in one process, with a
copy that reads and writes as many bytes as the quantization of a token moves (3 m k). Operands
rotate so that no cache holds what a call reads; where that takes too many (a few rows), they are in
L2, where a preceding kernel leaves them. Every kernel passes the gate of
``autotune.problems.activations`` before it is timed; one that is wrong is named and left out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilebit.autotune.measure import Call, copies_needed, time_calls
from tilebit.autotune.problems.activations import QuantizeGate, QuantizeProblem, edge_problem, random_problem
from tilebit.autotune.worker_process import launch
from tilebit.command.bench import process_fields, write_rows
from tilebit.runtime import LoadedKernel
from tilebit.schedules.activations.workload import QuantizeWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import explain
from tilebit.schedules.target import Target, detect_target, file_stem
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

from ..peers.attention_plugin import clocks
from ..report.rows import ROWS

SHAPES = "1x4096,1x8192,16x8192,256x8192,4096x4096,4096x8192,16384x8192,4096x28672"
KINDS = {
    "int8_token": QuantizeWorkload(1, 1),
    "int8_group": QuantizeWorkload(1, 1, group=128),
    "e4m3_token": QuantizeWorkload(1, 1, out="e4m3"),
    "e4m3_group": QuantizeWorkload(1, 1, out="e4m3", group=128),
    "int8_token_norm": QuantizeWorkload(1, 1, norm=True),
    "int8_group_norm_smooth": QuantizeWorkload(1, 1, group=128, norm=True, smooth=True),
}
COPY = "copy"
MOST_COPIES = 512  # of a problem


def promising(w: QuantizeWorkload, target: Target, count: int) -> list[Schedule]:
    """The ``count`` schedules of which most is expected, the chosen one first; 0: all."""
    found = [row.schedule for row in explain(w, target) if not row.illegal]
    return found[:count] if count else found


def compiled(cases: Sequence[tuple[QuantizeWorkload, Schedule]], target: Target) -> dict[tuple[QuantizeWorkload, Schedule], LoadedKernel]:
    """Those that compile; what became of the others is printed."""
    requests = [CompileRequest(s.program, w, s, target) for w, s in cases]
    with CompilePool(keep=True) as pool:
        results = dict(zip(cases, pool.compile(requests), strict=True))
    for case, result in results.items():
        if not isinstance(result, Kernel):
            print(f"  not compiled, left out: {case}: {result}", flush=True)
    return {case: result.load() for case, result in results.items() if isinstance(result, Kernel)}


def copies_of(bytes: int, target: Target) -> int:
    return min(copies_needed(bytes, target.l2), MOST_COPIES)


def copy_calls(w: QuantizeWorkload, target: Target, device: str) -> list[Call]:
    """A copy that reads and writes 3 m k bytes together."""
    half = w.m * w.k * 3 // 2
    pairs = [torch.zeros(2, half, dtype=torch.uint8, device=device) for _ in range(copies_of(2 * half, target))]
    return [partial(pair[1].copy_, pair[0]) for pair in pairs]


def kernel_calls(kernel: LoadedKernel, problem: QuantizeProblem, target: Target) -> list[Call]:
    copies = copies_of(problem.workload.bytes, target)
    named = [p.named(p.outputs()) for p in (problem, *(problem.copied() for _ in range(copies - 1)))]
    return [partial(kernel.run, *(tensors[name] for name in kernel.params)) for tensors in named]


def measured(m: int, k: int, kinds: Sequence[str], count: int, target: Target, device: str) -> list[dict[str, Any]]:
    """The rows of one shape."""
    asked = {name: replace(KINDS[name], m=m, k=k) for name in kinds}
    cases = {(w, s): name for name, w in asked.items() for s in promising(w, target, count)}
    kernels, calls, errors = compiled(list(cases), target), {}, {}
    labels = {case: str(i) for i, case in enumerate(kernels)}
    for name, w in asked.items():
        problem = random_problem(w, 0, target.arch, device)
        gate = QuantizeGate(edge_problem(w, 1, target.arch, device), problem)
        for case, kernel in kernels.items():
            if cases[case] != name:
                continue
            kernel.prepare()
            verdict = gate.verify(partial(launch, kernel, {}))
            if not verdict.ok:
                print(f"  wrong, left out: {w.title} {case[1]}: {' '.join(verdict.reasons)}", flush=True)
                continue
            errors[case] = verdict.rel_err
            calls[labels[case]] = kernel_calls(kernel, problem, target)
    times = time_calls({COPY: copy_calls(next(iter(asked.values())), target, device), **calls}, device)
    copy = times[COPY].us
    return [
        {
            "op": "quantize",
            "impl": "tilebit",
            "kind": cases[case],
            "dtype": case[0].dtype,
            "m": m,
            "k": k,
            "us": round(times[labels[case]].us, 4),
            "us_p20": round(times[labels[case]].us_p20, 4),
            "us_p80": round(times[labels[case]].us_p80, 4),
            "copy_us": round(copy, 4),
            "bytes": case[0].bytes,
            "gbps": round(case[0].bytes / times[labels[case]].us / 1e3, 1),
            "rel_err": error,
            "schedule": case[1].to_json(),
        }
        for case, error in errors.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.activations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help=f"m x k of each (default: {SHAPES})")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"what is asked for (default: {','.join(KINDS)})")
    parser.add_argument("--candidates", type=int, default=1, help="schedules of each workload, the chosen one first (0: all; default: 1)")
    parser.add_argument("--out", type=Path, default=ROWS / "activations", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    kinds, shapes = options.kinds.split(","), [re.fullmatch(r"(\d+)x(\d+)", text) for text in options.shapes.split(",")]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds names {', '.join(sorted(unknown))}; accepted: {', '.join(KINDS)}")
    if not all(shapes):
        parser.error(f"--shapes is {options.shapes}; accepted: m x k of each, such as 4096x8192,1x8192")
    target = detect_target()
    if not target.is_cuda:
        parser.error(f"this machine's device is {target.name}; accepted: an NVIDIA GPU (the shapes are a GPU's)")
    common = {**process_fields(target), "timer": "tilebit"}
    path = options.out / f"{file_stem(target.name)}.jsonl"
    for match in filter(None, shapes):
        found = measured(int(match[1]), int(match[2]), kinds, options.candidates, target, "cuda:0")
        now = clocks()  # right after the bout: before the first, they are an idle GPU's
        write_rows(path, [{**common, **row, "clocks": now} for row in found])
        for r in found:
            s = r["schedule"]
            share = f"{r['copy_us'] / r['us']:.0%} of a copy's rate"
            print(f"{r['m']} x {r['k']} {r['kind']} {s['block_m']} rows, {s['num_warps']} warps: {r['us']:.2f} us, {share}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
