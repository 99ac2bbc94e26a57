"""Products of every width from one store: ``python -m results.measure.any_precision`` appends rows to
results/rows/any_precision.

For each shape and number of rows, tilebit's kernel of every width, and of the formats named by
``--beside``, and torch's product of 16 bits (cuBLAS on a GPU) on what the store stands for at that
width, interleaved. Rows say the largest
relative error of a block of 128 x 128 against fp32.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tilebit.command.bench import measure_workloads, write_rows
from tilebit.kernels import build
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import detect_target, file_stem

from ..report.rows import ROWS

SHAPES = "57344x8192,4096x14336,28672x4096,4096x4096,6144x4096,8192x28672,10240x8192"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.any_precision", description="Time products of every width of any precision."
    )
    parser.add_argument("--device", help="cuda or cpu; default: the GPU where there is one")
    parser.add_argument("--shapes", default=SHAPES, help="n x k of weights")
    parser.add_argument("--ms", default="1,8", help="rows of x (default: 1,8)")
    parser.add_argument("--widths", default="3,4,5,6,7,8", help="bits that are read (default: 3 to 8)")
    parser.add_argument("--beside", default="", help="formats of separate models to time as well, for instance w4a16_g128,w8a16_channel")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds; shapes that are left then are left out, and named")
    parser.add_argument("--out", type=Path, default=ROWS / "any_precision", help="folder of the rows, one file per device")
    options = parser.parse_args(arguments)
    target, start = detect_target(options.device), time.monotonic()
    ms, widths = ([int(number) for number in text.split(",")] for text in (options.ms, options.widths))
    shapes = [tuple(int(number) for number in shape.split("x")) for shape in options.shapes.split(",")]
    formats = [GemmFormat.parse(text) for text in (*(f"w{bits}a16_any" for bits in widths), *filter(None, options.beside.split(",")))]
    wanted = {(n, k): [Workload(m, n, k, format) for m in ms for format in formats] for n, k in shapes}
    build([workload for each in wanted.values() for workload in each], target, jobs=None)
    path = options.out / f"{file_stem(target.name)}.jsonl"
    for (n, k), workloads in wanted.items():
        if time.monotonic() - start > options.budget:
            print(f"{n} x {k} is left out: {options.budget:.0f} s have passed", flush=True)
            continue
        for rows in measure_workloads(workloads, "cuda:0" if target.is_cuda else "cpu"):
            write_rows(path, rows)
            own, dense = rows[0], rows[1]
            print(f"{n} x {k} m {own['m']} {own['format']} {own['us']:.2f} us, {dense['us'] / own['us']:.2f}x", flush=True)


if __name__ == "__main__":
    main()
