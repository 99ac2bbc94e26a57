"""How long the quantizer of any precision takes: ``python -m results.measure.any_quantizer --out FILE``
appends a row to FILE.

One weight of normal numbers, after one warm call; seconds are the median of the calls, which each
end when the device has, on a CPU with as many threads as torch has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from tilebit.command.bench import process_fields, write_rows
from tilebit.schedules.target import detect_target
from tilebit.weights.quantize_any import MAX_BITS, SEED_BITS, quantize_any

CALLS = 3


def seconds_of(w: torch.Tensor, seed_bits: int, max_bits: int, calls: int = CALLS) -> list[float]:
    """Of each of ``calls`` calls, after one more."""
    found = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        quantize_any(w, seed_bits, max_bits)
        if w.is_cuda:
            torch.cuda.synchronize(w.device)
        found.append(time.perf_counter() - start)
    return found[1:]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.measure.any_quantizer", description="Time the quantizer of any precision.")
    parser.add_argument("--device", help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--shape", default="4096x4096", help="n x k of the weight (default: 4096x4096)")
    parser.add_argument("--seed-bits", type=int, default=3, choices=SEED_BITS, help="default: 3")
    parser.add_argument("--max-bits", type=int, default=MAX_BITS, help=f"default: {MAX_BITS}")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"), help="of the weight (default: bfloat16)")
    parser.add_argument("--out", type=Path, required=True, help="the file to append to")
    options = parser.parse_args(arguments)
    target = detect_target(options.device)
    n, k = (int(number) for number in options.shape.split("x"))
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(
        "cuda:0" if target.is_cuda else "cpu", getattr(torch, options.dtype)
    )
    times = seconds_of(w, options.seed_bits, options.max_bits)
    row = {
        **process_fields(target), "op": "any_quantizer", "n": n, "k": k, "seed_bits": options.seed_bits, "max_bits": options.max_bits,
        "dtype": options.dtype, "seconds": round(statistics.median(times), 4), "all_seconds": [round(one, 4) for one in times],
        "load": os.getloadavg()[0],
    }  # fmt: skip
    write_rows(options.out, [row])
    print(f"{n} x {k}, {options.seed_bits} to {options.max_bits} bits on {target.name}: {row['seconds']:.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
