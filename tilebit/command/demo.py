"""``make demo``: a whole model that writes text in low bits; then 4-bit checkpoints of each family, made
on the spot, imported, packed, compiled, tuned on this machine's device, called from PyTorch, checked
against fp64 and timed beside torch. Downloads nothing; takes a minute or two on two cores.

    python -m tilebit.command.demo [--budget SECONDS]
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..autotune.measure import Timing, busy, copies_needed, time_calls
from ..autotune.problems.verify import worst_tile_error
from ..autotune.tune import tune
from ..kernels import build
from ..ops import dispatch
from ..schedules.gemm.workload import Workload
from ..schedules.target import Target, detect_target
from ..weights.checkpoint import load_checkpoint
from ..weights.modules import QuantLinear
from ..weights.synthetic import write_checkpoint
from .demo_model import run_model

BUDGET_S = 40.0  # of tuning, over all shapes
CANDIDATES = 6  # schedules tried per workload: a taste; `tilebit tune` tries them all
FAMILIES = ("awq", "gptq", "compressed-tensors")
GROUP_SIZE = 128
DTYPE = torch.bfloat16  # the type that torch is fastest in on CPUs, so the comparison is with its best
# (n, k) of the layers of every checkpoint, and the rows that are timed: small enough for a CPU, large enough that a GPU has work.
SHAPES = {False: ((4096, 4096),), True: ((14336, 4096),)}  # by Target.is_cuda
ROWS = {False: (1, 32), True: (1, 16, 256)}
MAX_COPIES = 16  # operand sets that timing rotates over
# A correct kernel rounds once from fp32: twice that, per 128 x 128 block, is the limit.
ERROR_LIMIT = 2 * torch.finfo(DTYPE).eps


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the final table: what a call took, ``error`` the worst block against fp64."""

    family: str
    n: int
    k: int
    m: int
    ours: Timing
    torchs: Timing
    error: float

    @property
    def right(self) -> bool:
        return self.error <= ERROR_LIMIT


def run(console: Console, budget_s: float = BUDGET_S, shapes: Sequence[tuple[int, int]] | None = None) -> list[Line]:
    """The whole demonstration; prints its steps and returns what it measured. ``shapes`` replaces the default (n, k). Raises what a step
    raises."""
    target = detect_target()
    device = "cuda" if target.is_cuda else "cpu"
    shapes = shapes or SHAPES[target.is_cuda]
    console.print(f"[bold]tilebit demo[/] on {target.name} ({target.arch}, {target.units} {'SMs' if target.is_cuda else 'cores'})\n")
    with tempfile.TemporaryDirectory(prefix="tilebit-demo-") as folder:
        layers = {f"layers.{i}": shape for i, shape in enumerate(shapes)}
        with _step(console, f"write {len(FAMILIES)} checkpoints of {len(layers)} layer{'s' * (len(layers) > 1)}: {', '.join(FAMILIES)}"):
            weights = {
                f: write_checkpoint(Path(folder) / f, f, layers, group_size=GROUP_SIZE, symmetric=f != "awq", dtype=DTYPE) for f in FAMILIES
            }
        with _step(console, "import them and pack the weights for this device"):
            modules = {
                (family, name): QuantLinear.from_checkpoint(load_checkpoint(Path(folder) / family), name, DTYPE, device)
                for family in FAMILIES
                for name in layers
            }
    workloads = list(
        dict.fromkeys(
            Workload(m, q.out_features, q.in_features, q.format, "bfloat16") for q in modules.values() for m in ROWS[target.is_cuda]
        )
    )
    with _step(console, f"compile {len(workloads)} kernels, one for each shape, format and number of rows"):
        build(workloads, target, jobs=None)
    with _step(console, f"tune them for at most {budget_s:g} s (what is measured is kept for later runs)"):
        report = tune(workloads, target, budget_s=budget_s, progress=console.is_terminal, max_candidates=CANDIDATES, jobs=CANDIDATES)
        dispatch.forget()
    console.print(
        f"      {sum(r.measured for r in report.results)} schedules measured, {sum(r.reused for r in report.results)} known from before"
    )
    lines = []
    with _step(console, "call them from PyTorch, check against fp64, time them beside torch"):
        for name in layers:
            mine = {family: modules[family, name] for family in FAMILIES}
            dense = {family: weights[family][name].to(device) for family in FAMILIES}
            for m in ROWS[target.is_cuda]:
                lines += _measure(mine, dense, m, target)
    return sorted(lines, key=lambda line: FAMILIES.index(line.family))


def _measure(modules: Mapping[str, QuantLinear], weights: Mapping[str, Tensor], m: int, target: Target) -> list[Line]:
    """Check and time one layer of every family on ``m`` rows; ``weights`` are the dequantized ones in fp32. All are timed in alternation
    with one another and with torch: they compute the same product, so they should be met by the same weather."""
    first = next(iter(weights.values()))
    n, k = first.shape
    x = torch.randn(m, k, device=first.device).to(DTYPE)
    # The packed scales are the checkpoint's, in the same dtype: the reference is exact.
    errors = {f: worst_tile_error(module(x), x.double() @ weights[f].double().t()) for f, module in modules.items()}
    calls: dict[str, list[Callable[[], Tensor]]] = {}
    for family, module in modules.items():
        copies = min(MAX_COPIES, copies_needed(module.packed.nbytes, target.l2))
        calls[family] = [lambda q=q: q(x) for q in (module, *(copy.deepcopy(module) for _ in range(copies - 1)))]
    dense = first.to(DTYPE)
    copies = min(MAX_COPIES, copies_needed(dense.numel() * dense.element_size(), target.l2))
    calls["torch"] = [lambda w=w: torch.nn.functional.linear(x, w) for w in (dense, *(dense.clone() for _ in range(copies - 1)))]
    times = time_calls(calls, "cuda:0" if target.is_cuda else "cpu")
    return [Line(family, n, k, m, times[family], times["torch"], errors[family]) for family in modules]


@contextmanager
def _step(console: Console, title: str) -> Iterator[None]:
    console.print(f"  ... {title}")
    start = time.monotonic()
    yield
    console.print(f"      done in {time.monotonic() - start:.1f} s")


def result_table(lines: Sequence[Line]) -> Table:
    """What was measured, one row per checkpoint family, shape and number of rows."""
    table = Table(
        title=f"y = x @ w^T, w of 4 bits in groups of {GROUP_SIZE}, x in {str(DTYPE).removeprefix('torch.')}", title_justify="left"
    )
    for column in ("checkpoint", "n", "k", "rows", "tilebit us", "torch us", "ratio", "error", ""):
        table.add_column(column, justify="left" if column in ("checkpoint", "") else "right", no_wrap=True)
    for line in lines:
        verdict = "[green]right[/]" if line.right else "[red]WRONG[/]"
        values = (
            str(line.n),
            str(line.k),
            str(line.m),
            f"{line.ours.us:.1f}",
            f"{line.torchs.us:.1f}",
            f"{line.torchs.us / line.ours.us:.2f}x",
            f"{line.error:.1e}",
        )
        table.add_row(line.family, *values, verdict)
    return table


def main() -> int:
    """Exit code 0 when every result was right."""
    parser = argparse.ArgumentParser(
        prog="python -m tilebit.command.demo",
        description="Make, import, pack, compile, tune, call, check and time 4-bit layers on this machine.",
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help=f"seconds of tuning (default {BUDGET_S:g})")
    arguments = parser.parse_args()
    if arguments.budget <= 0:
        parser.error(f"--budget is {arguments.budget:g}; accepted: seconds above 0")
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory(prefix="tilebit-demo-") as scratch:
        run_model(console, Path(scratch), "cuda" if detect_target().is_cuda else "cpu")
    lines = run(console, arguments.budget)
    console.print()
    console.print(result_table(lines))
    if sentence := busy((t.us_p20, t.us_p80, t.others) for line in lines for t in (line.ours, line.torchs)):
        console.print(sentence)
    wrong = sum(not line.right for line in lines)
    if wrong:
        console.print(f"[red]{wrong} of {len(lines)} results are wrong[/]; please report this with the output of `tilebit doctor`")
        return 1
    console.print(f"all {len(lines)} results are right; next: `tilebit bench --help`, `tilebit explain --help`, README.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
