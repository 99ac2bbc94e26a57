"""What the commands of GEMM and of attention share: options, and what is done with the workloads that were asked for, and printed.

``subject`` is what all workloads of a command have in common, in words: a table's title begins with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..progress import counting
from .output import fail, failures, new_file, new_table, print_json, print_parts, schedule_text, usage

if TYPE_CHECKING:
    from ..schedules.operations import AnyWorkload
    from ..schedules.target import Target
    from ..tiles.compiler.kernel import Kernel

TargetName = Annotated[str, typer.Option("--target", help="auto (this machine's GPU, else its CPU), cpu, sm_80, sm_86, sm_89 or sm_90a.")]
Budget = Annotated[float | None, typer.Option("--budget", help="Seconds to spend; a later run continues where this one stopped.", min=1.0)]
Jobs = Annotated[int | None, typer.Option("--jobs", help="Compile processes at once. Default: one per core.", min=1)]
Limit = Annotated[int, typer.Option("--limit", help="Rows to print; 0 prints all.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
PackPath = Annotated[
    Path,
    typer.Argument(
        help="Directory to write; it must not exist yet. To make one of two, in Python, with tilebit.packs: "
        "export(PATH, read(A).kernels + read(B).kernels)."
    ),
]


def named_target(name: str) -> Target:
    """The target of an arch, of "auto", or of a device ("cuda:1"); another name is bad usage."""
    from ..schedules.target import detect_target, target_from_name

    with usage():
        if name == "cpu":  # the same wherever it is asked for: torch, which takes seconds to import, finds GPUs
            return target_from_name(name)
        here = detect_target(name if name.startswith("cuda") else None)
        return here if name == "auto" or name.startswith("cuda") or name == here.arch else target_from_name(name)


def compile_kernels(subject: str, workloads: Sequence[AnyWorkload], target: Target, jobs: int | None, as_json: bool) -> None:
    """Compile a kernel for each bucket of the workloads."""
    with failures():
        kernels = _compiled(workloads, target, jobs)
    rows = [
        {
            **_sizes(w),
            "key": kernel.key,
            "path": str(kernel.path),
            "schedule": kernel.manifest["schedule"],
            "resources": kernel.resources,
        }
        for w, kernel in kernels
    ]
    if as_json:
        print_json({"target": target.arch, "kernels": rows})
        return
    sizes = list(_sizes(workloads[0]))
    table = new_table(f"{subject} for {target.arch}", *sizes, "schedule", "resources", "path")
    for row in rows:
        resources = ", ".join(f"{name} {value}" for name, value in row["resources"].items() if isinstance(value, int))
        table.add_row(*(str(row[size]) for size in sizes), schedule_text(row["schedule"]), resources, row["path"])
    print_parts(table)


def tune_schedules(
    subject: str, workloads: Sequence[AnyWorkload], target: Target, budget: float | None, jobs: int | None, as_json: bool
) -> None:
    """Tune each bucket of the workloads; it fails where one is left without a working schedule."""
    with failures():
        from ..autotune.tune import tune
        from ..schedules.records import records_path

        report = tune(workloads, target, budget_s=budget, progress=not as_json, jobs=jobs)
    rows = [
        {
            **_sizes(r.workload),
            "us": r.best.us if r.best else None,
            "schedule": r.best.schedule.to_json() if r.best else None,
            "measured": r.measured,
            "reused": r.reused,
            "failed": r.failed,
            "left": r.left,
            "stopped": r.stopped,
        }
        for r in report.results
    ]
    if as_json:
        print_json({"target": target.arch, "records": str(records_path()), "seconds": round(report.seconds, 3), "results": rows})
    else:
        sizes = list(_sizes(workloads[0]))
        table = new_table(f"{subject} on {target.name}", *sizes, "best us", "schedule", "measured", "known", "failed", "left", "stopped")
        for row in rows:
            best = ("-", "-") if row["us"] is None else (f"{row['us']:.2f}", schedule_text(row["schedule"]))
            counts = (str(row[name]) for name in ("measured", "reused", "failed", "left", "stopped"))
            table.add_row(*(str(row[size]) for size in sizes), *best, *counts)
        print_parts(table, f"records: {records_path()}")
    hopeless = [
        f"no working schedule was found for {r.workload.title}: {r.failure or 'the budget was used up before one was measured'}"
        for r in report.results
        if r.best is None
    ]
    if hopeless:
        fail("\n".join(hopeless))


def explain_schedules(workload: AnyWorkload, target: Target, limit: int, as_json: bool) -> None:
    """Every candidate of a workload, ``limit`` of them printed (0: all)."""
    with failures():
        from ..schedules.select import explain

        rows = explain(workload, target)
    shown = rows[: limit or None]
    if as_json:
        print_json(
            [
                {
                    "schedule": r.schedule.to_json(),
                    "estimate_us": r.estimate.us,
                    "predicted_us": r.predicted_us,
                    "measured_us": r.record.us if r.record else None,
                    "illegal": list(r.illegal),
                    "chosen": r.chosen,
                    "why": r.why,
                }
                for r in shown
            ]
        )
        return
    title = f"{workload.title} {workload.dtype} on {target.name}"
    table = new_table(title, "schedule", "estimate us", "predicted us", "measured us", "verdict")
    for r in shown:
        times = (r.estimate.us, r.predicted_us, r.record.us if r.record is not None else None)
        table.add_row(schedule_text(r.schedule.to_json()), *("-" if us is None else f"{us:.2f}" for us in times), r.why)
    print_parts(table, f"{len(rows) - len(shown)} more: --limit 0 prints all" if len(shown) < len(rows) else "")


def pack_kernels(path: Path, workloads: Sequence[AnyWorkload], target: Target, jobs: int | None, as_json: bool) -> None:
    """Compile a kernel for each bucket of the workloads and export them to the new directory ``path``."""
    if path.exists():
        fail(f"{path} exists; accepted: a directory that does not exist yet: name another, or remove it")
    new_file(path, folders=True)
    with failures():
        from ..packs import export

        kernels = _compiled(workloads, target, jobs)
        export(path, dict(kernels))
    keys = list(dict.fromkeys(kernel.key for _, kernel in kernels))
    if as_json:
        print_json({"path": str(path), "target": target.arch, "kernels": keys})
    else:
        typer.echo(f"{path}: {len(keys)} kernels for {target.arch}; load it with tilebit.packs.load({str(path)!r})")


def _compiled(workloads: Sequence[AnyWorkload], target: Target, jobs: int | None) -> list[tuple[AnyWorkload, Kernel]]:
    """(workload of each bucket, kernel) in order, from the cache or compiled now."""
    from ..kernels import build

    bucketed = list(dict.fromkeys(w.bucketed() for w in workloads))
    with counting("compiling", len(bucketed)) as settled:
        return list(zip(bucketed, build(bucketed, target, jobs, settled), strict=True))


def _sizes(workload: AnyWorkload) -> dict[str, Any]:
    """What tells the workloads of one command apart: m of a GEMM; op, batch, q_len and kv_len of attention."""
    names = [name for name in workload.DYNAMIC if name in workload.SIZES]
    return {name: getattr(workload, name) for name in (["op"] if workload.COMMAND else []) + names}  # a group of commands has several
