"""What each idea of Any-Precision LLM is worth: ``python -m results.measure.ablation.any [--shapes
4096x4096] [--widths 3,4,8] [--out DIR]`` times a product of one row with one idea after another
added (``steps_any.py``).

Each step is the fastest of a few schedules that passed the gate of ``autotune.verify``; the winners
of a workload's steps are timed once more side by side, and only those times are written. Copies of
the weight rotate, so that no cache holds what a call reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tilebit.autotune.measure import Timing
from tilebit.command.bench import process_fields, write_rows
from tilebit.layouts.formats import GemmFormat
from tilebit.schedules.gemm.any import ARCHES
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import detect_target

from ...report.rows import ROWS
from .any_variants.variant import FORMS
from .compiled import compiled
from .gemm import Bench, Contender, climb, folder_file, format_row
from .steps_any import drawn

SHAPES, WIDTHS = "4096x4096,28672x4096,57344x8192", "3,4,8"


def row(workload: Workload, contender: Contender, timing: Timing, rel_err: float, tried: int) -> dict[str, Any]:
    """One step's row, without the fields of the process; ``tried`` counts the verified schedules it
    was the fastest of."""
    c, bits = contender, workload.format.bits
    return {**format_row("ablation_any", workload, c.step, c.idea, c.schedule, timing, rel_err, tried), "bits": bits}


def workloads(shapes: str = SHAPES, widths: str = WIDTHS) -> list[Workload]:
    """Products of one row, of every shape ("n x k") in every width."""
    sizes = [tuple(int(size) for size in shape.split("x")) for shape in shapes.split(",")]
    return [Workload(1, n, k, GemmFormat.parse(f"w{bits}a16_any")) for n, k in sizes for bits in widths.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m results.measure.ablation.any", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help=f"n x k of weights (default: {SHAPES})")
    parser.add_argument("--widths", default=WIDTHS, help=f"bits of codes, 3 to 8 (default: {WIDTHS})")
    parser.add_argument("--out", type=Path, default=ROWS / "ablation_any", help="folder to append <device>.jsonl in")
    options = parser.parse_args(arguments)
    target = detect_target()
    if target.arch not in ARCHES:
        parser.error(f"this machine's device is {target.name} ({target.arch}); accepted: an NVIDIA GPU, {', '.join(ARCHES)}")
    common, wanted = process_fields(target), workloads(options.shapes, options.widths)
    path = folder_file(options.out, target)
    for workload, made in zip(wanted, compiled([(w, drawn(w, target)) for w in wanted], target), strict=True):
        print(workload.title, flush=True)
        rows = [{**common, **found} for found in climb(Bench(workload, target, forms=FORMS), made, row)]
        write_rows(path, rows)
        for r in rows:
            print(f"  {r['step']}  {r['us']:9.2f} us  {r['idea']}  ({r['tried']} tried)", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
