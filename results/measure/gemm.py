"""Measure this machine for the tables: ``python -m results.measure.gemm [--device cuda|cpu]``
appends rows to results/rows/gemm and results/rows/overheads.

One process measures everything, implementations interleaved, so ratios between rows of a run mean
something. Kernels are compiled (in parallel) before anything is timed, with the schedules that
``select`` gives: tune first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilebit
from tilebit.command.bench import measure_workloads, process_fields, write_rows
from tilebit.kernels import build
from tilebit.layouts.formats import QuantFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import Target, detect_target, file_stem
from tilebit.weights.quantize import QuantizedTensor

from ..report.rows import ROWS

GPU_SHAPES = ((4096, 4096), (14336, 4096), (28672, 4096), (4096, 14336), (8192, 28672))
GPU_MS = (1, 16, 64, 256, 4096)
CPU_SHAPES = ((4096, 4096), (14336, 4096))
CPU_MS = (1, 32)
PACKED = (28672, 8192)  # the weight whose packing is timed


def gemm_workloads(target: Target) -> list[Workload]:
    """The table's workloads: on a GPU fp16 with zero points (and 8 bits, and bf16, for two shapes),
    on a CPU bf16 and fp16."""
    if not target.is_cuda:
        return [Workload(m, n, k, QuantFormat(4, 128, True), d) for d in ("bfloat16", "float16") for n, k in CPU_SHAPES for m in CPU_MS]
    main = [Workload(m, n, k, QuantFormat(4, 128, False), "float16") for n, k in GPU_SHAPES for m in GPU_MS]
    more = [
        Workload(m, n, k, format, dtype)
        for format, dtype in ((QuantFormat(8, 128, True), "float16"), (QuantFormat(4, 128, True), "bfloat16"))
        for n, k in ((28672, 4096), (4096, 14336))
        for m in GPU_MS
    ]
    return main + more


def cpu_rates() -> dict[str, float]:
    """What this CPU reaches: GB/s of a plain read (a sum over 1 GiB) and TFLOP/s of a large bf16
    product, best of ten each."""
    data = torch.ones(1 << 28)
    a, b = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()

    def best(call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(10):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return {
        "read_gbps": round(data.numel() * 4 / best(data.sum) / 1e9, 2),
        "mma_tflops": round(2 * 2048**3 / best(lambda: a @ b) / 1e12, 4),
    }


def host_us(call: Callable[[], Any], calls: int, repeats: int = 20) -> float:
    """Host time of one of ``calls`` calls in a row, in microseconds, in the quietest of ``repeats``
    rounds: what other processes of the machine add is no call's. The GPU is idle before each round.
    """
    call()
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return min(samples)


def overheads(target: Target) -> list[dict[str, Any]]:
    """Host time of a call (without and with split-k, torch's own linear beside it), time to pack a
    large weight, peak memory of a call."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows = [row for n, k in ((256, 256), (512, 4096)) for row in call_overheads(n, k, target, generator)]
    n, k = PACKED
    codes = _codes(n, k, generator)
    tilebit.pack(codes, torch.float16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    tilebit.pack(codes, torch.float16)
    torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) * 1e3
    return [*rows, {"impl": "tilebit", "what": "packing a 4-bit weight", "unit": "ms", "value": milliseconds, "n": n, "k": k}]


def call_overheads(n: int, k: int, target: Target, generator: torch.Generator) -> list[dict[str, Any]]:
    """The rows of one small weight at m = 1: ``tilebit.gemm``, the operator as compiled graphs call
    it, and ``F.linear``."""
    weight = tilebit.pack(_codes(n, k, generator), torch.float16)
    x = torch.randn(1, k, dtype=torch.float16, device="cuda")
    dense = torch.randn(n, k, dtype=torch.float16, device="cuda")
    arguments = (x, weight.weight, weight.scales, weight.zeros, weight.row_scales, None, n, weight.format_name)
    op = torch.ops.tilebit.gemm.default
    op(*arguments)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = op(*arguments)
    extra = torch.cuda.max_memory_allocated() - before - y.numel() * y.element_size()
    split = build([Workload(1, n, k, weight.format)], target)[0].manifest["schedule"]["split_k"]
    found = (
        ("tilebit", "host time of one call", "us", host_us(lambda: tilebit.gemm(x, weight), 200)),
        ("tilebit", "host time of one operator call", "us", host_us(lambda: op(*arguments), 200)),
        ("torch", "host time of F.linear", "us", host_us(lambda: torch.nn.functional.linear(x, dense), 200)),
        ("tilebit", "peak memory of a warm call beyond its output", "bytes", extra),
    )
    return [{"impl": i, "what": w, "unit": u, "value": v, "n": n, "k": k, "m": 1, "split_k": split} for i, w, u, v in found]


def _codes(n: int, k: int, generator: torch.Generator) -> QuantizedTensor:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda", generator=generator)
    scales = torch.rand(n, k // 128, device="cuda", generator=generator).to(torch.float16) * 0.01 + 0.005
    return QuantizedTensor(codes, scales, None, QuantFormat(4, 128, True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=None, help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--out", type=Path, default=ROWS, help="folder that holds gemm/ and overheads/")
    options = parser.parse_args()
    target = detect_target(options.device)
    device = "cuda:0" if target.is_cuda else "cpu"
    name = file_stem(target.name)
    workloads = gemm_workloads(target)
    build(workloads, target, jobs=None)
    measured_rates = {} if target.is_cuda else cpu_rates()  # a GPU's are in schedules/target.py
    for measured in measure_workloads(workloads, device):
        rows = [{**row, **measured_rates} for row in measured]
        write_rows(options.out / "gemm" / f"{name}.jsonl", rows)
        print(
            "  ".join(f"{r['impl']} {r['us']:.2f}" for r in rows),
            {key: rows[0][key] for key in ("n", "k", "m", "format", "dtype")},
            flush=True,
        )
    if target.is_cuda:
        common = process_fields(target)
        found = [{**common, **row, "op": "overhead", "value": round(row["value"], 3)} for row in overheads(target)]
        write_rows(options.out / "overheads" / f"{name}.jsonl", found)
        for row in found:
            print(row["impl"], row["what"], row.get("n"), row.get("k"), row["value"], row["unit"], "split", row.get("split_k"))


if __name__ == "__main__":
    main()
