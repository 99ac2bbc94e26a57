"""The command line: ``tilebit compile | tune | bench | explain | show | pack | doctor``.

Exit codes: 0 done, 1 the task failed (the reason is on stderr), 2 bad usage. With ``--json`` stdout holds JSON alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from .schedules.target import Target
    from .schedules.workload import Workload
    from .tiles.kernel import Kernel

app = typer.Typer(
    name="tilebit",
    help="Low-bit GEMM kernels: compile them, tune them on this device, measure them, ship them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

N = Annotated[int, typer.Option("--n", "-n", help="Output channels of the weight [n, k].", min=1)]
K = Annotated[int, typer.Option("--k", "-k", help="Input channels of the weight [n, k].", min=1)]
Ms = Annotated[
    list[int] | None,
    typer.Option("--m", "-m", help="Rows of x; repeat it for several. Default: 1, 16, 64, 256 and 4096 (on the CPU: 1 and 32).", min=1),
]
Format = Annotated[str, typer.Option("--format", help="Weight format, such as w4a16_g128, w4a16_g64_asym or w8a16_channel.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float16 or bfloat16: the type of x, y, scales and bias.")]
Bias = Annotated[bool, typer.Option("--bias", help="The layer has a bias.")]
TargetName = Annotated[str, typer.Option("--target", help="auto (this machine's GPU, else its CPU), cpu, sm_80, sm_86, sm_89 or sm_90a.")]
Jobs = Annotated[int | None, typer.Option("--jobs", help="Compile processes at once. Default: one per core.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

DEFAULT_MS = {True: (1, 16, 64, 256, 4096), False: (1, 32)}  # by Target.is_cuda


def main() -> None:
    """The ``tilebit`` command."""
    app(prog_name="tilebit")


@app.command("compile")
def compile_command(
    n: N,
    k: K,
    m: Ms = None,
    format: Format = "w4a16_g128",
    dtype: Dtype = "float16",
    bias: Bias = False,
    target: TargetName = "auto",
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels that calls of this shape will use, into the artifact cache. Needs no GPU: name the --target to cross-compile."""
    chosen, workloads = _asked(n, k, m, format, dtype, bias, target)
    with _failures():
        kernels = _compiled(workloads, chosen, jobs)
    rows = [
        {"m": w.m, "key": kernel.key, "path": str(kernel.path), "schedule": kernel.manifest["schedule"], "resources": kernel.resources}
        for w, kernel in kernels
    ]
    if as_json:
        _print_json({"target": chosen.arch, "kernels": rows})
        return
    table = _table(f"{workloads[0].format.name} [{n}, {k}] {dtype} for {chosen.arch}", "m", "schedule", "resources", "path")
    for (w, kernel), row in zip(kernels, rows, strict=True):
        resources = ", ".join(f"{name} {value}" for name, value in kernel.resources.items() if isinstance(value, int))
        table.add_row(str(w.m), _schedule_text(row["schedule"]), resources, row["path"])
    _print(table)


@app.command()
def tune(
    n: N,
    k: K,
    m: Ms = None,
    format: Format = "w4a16_g128",
    dtype: Dtype = "float16",
    bias: Bias = False,
    target: TargetName = "auto",
    budget: Annotated[
        float | None, typer.Option("--budget", help="Seconds to spend; a later run continues where this one stopped.", min=1.0)
    ] = None,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Measure candidate schedules on this machine's device and record the results; later calls use the fastest. Measures nothing twice."""
    chosen, workloads = _asked(n, k, m, format, dtype, bias, target)
    with _failures():
        from .autotune.tune import tune as run
        from .schedules.records import records_path

        report = run(workloads, chosen, budget_s=budget, progress=not as_json, jobs=jobs)
        rows = [
            {
                "m": r.workload.to_json()["m"],
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
        _print_json({"target": chosen.arch, "records": str(records_path()), "seconds": round(report.seconds, 3), "results": rows})
    else:
        table = _table(
            f"{workloads[0].format.name} [{n}, {k}] {dtype} on {chosen.name}",
            "m",
            "best us",
            "schedule",
            "measured",
            "known",
            "failed",
            "left",
            "stopped",
        )
        for row in rows:
            best = ("-", "-") if row["us"] is None else (f"{row['us']:.2f}", _schedule_text(row["schedule"]))
            table.add_row(str(row["m"]), *best, *(str(row[name]) for name in ("measured", "reused", "failed", "left", "stopped")))
        _print(table, f"records: {records_path()}")
    if any(row["us"] is None for row in rows):
        _fail("no working schedule was found for m = " + ", ".join(str(row["m"]) for row in rows if row["us"] is None))


@app.command()
def bench(
    n: N,
    k: K,
    m: Ms = None,
    format: Format = "w4a16_g128",
    dtype: Dtype = "bfloat16",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda[:i]: where to measure.")] = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="Append the rows to this JSON-lines file.", dir_okay=False)] = None,
    as_json: Json = False,
) -> None:
    """Time tilebit and torch on this machine, interleaved in one process: torch's 16-bit linear (cuBLAS on a GPU) and, on the CPU, its
    int4 kernel."""
    chosen, workloads = _asked(n, k, m, format, dtype, False, {"auto": "auto", "cpu": "cpu"}.get(device, device))
    rows: list[dict[str, Any]] = []
    with _failures():
        from .bench import measure_workloads, write_rows

        for measured in measure_workloads(workloads, device if device != "auto" else ("cuda:0" if chosen.is_cuda else "cpu")):
            rows += measured
            if out is not None:
                write_rows(out, measured)
    if as_json:
        _print_json(rows)
        return
    table = _table(f"[{n}, {k}] {dtype} on {chosen.name}", "m", "implementation", "us", "p20..p80", "against torch", "rel. error")
    dense = {row["m"]: row["us"] for row in rows if row["impl"] in ("torch", "cublas")}
    for row in rows:
        name = f"{row['impl']} {row['format']}" + (f" g{row['group_size']}" if row["group_size"] else "")
        table.add_row(
            str(row["m"]),
            name,
            f"{row['us']:.2f}",
            f"{row['us_p20']:.2f}..{row['us_p80']:.2f}",
            f"{dense[row['m']] / row['us']:.2f}x",
            f"{row['rel_err']:.1e}",
        )
    _print(table, f"rows: {out}" if out is not None else "")


@app.command()
def explain(
    n: N,
    k: K,
    m: Annotated[int, typer.Option("--m", "-m", help="Rows of x.", min=1)] = 1,
    format: Format = "w4a16_g128",
    dtype: Dtype = "float16",
    bias: Bias = False,
    target: TargetName = "auto",
    limit: Annotated[int, typer.Option("--limit", help="Rows to print; 0 prints all.", min=0)] = 20,
    as_json: Json = False,
) -> None:
    """Print every candidate schedule of a workload, the chosen one first, and why the others lost."""
    chosen, workloads = _asked(n, k, [m], format, dtype, bias, target)
    with _failures():
        from .schedules.select import explain as rows_of

        rows = rows_of(workloads[0], chosen)
    shown = rows[: limit or None]
    if as_json:
        _print_json(
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
    title = f"m = {m}, {workloads[0].format.name} [{n}, {k}] {dtype} on {chosen.name}"
    table = _table(title, "schedule", "estimate us", "predicted us", "measured us", "verdict")
    for r in shown:
        times = (r.estimate.us, r.predicted_us, r.record.us if r.record is not None else None)
        table.add_row(_schedule_text(r.schedule.to_json()), *("-" if us is None else f"{us:.2f}" for us in times), r.why)
    _print(table, f"{len(rows) - len(shown)} more: --limit 0 prints all" if len(shown) < len(rows) else "")


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A packed weight (sm_90a:4, cpu:8), a KV cache (format:head_dim[:page_size], as kv4_channel:128), a checkpoint layout "
            "(awq:4) or a fragment (wgmma_a:k16). 'list' prints names."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write, .svg or .png. Default: NAME.svg here.", dir_okay=False)
    ] = None,
    by: Annotated[
        str, typer.Option("--by", help="How a packed layout is drawn: word (storage order) or element (the weight matrix).")
    ] = "word",
    as_json: Json = False,
) -> None:
    """Draw which thread and register holds which element of a fragment, which bit of a packed layout holds which weight, or which lane owns
    which token and channel of a KV cache and where its scales lie."""
    from .pictures import names, picture, write

    if name == "list":
        if as_json:
            _print_json(names())
        else:
            typer.echo("\n".join(names()))
        return
    path = out or Path(name.replace(":", "_") + ".svg")
    try:
        drawn = picture(name, by)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if path.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"{str(path)!r} ends in {path.suffix!r}; accepted: .svg, .png", param_hint="--out")
    with _failures():
        write(drawn, path)
    if as_json:
        _print_json({"name": name, "path": str(path)})
    else:
        typer.echo(str(path))


@app.command()
def pack(
    path: Annotated[Path, typer.Argument(help="Directory to write; it must not exist yet.")],
    n: N,
    k: K,
    m: Ms = None,
    format: Format = "w4a16_g128",
    dtype: Dtype = "float16",
    bias: Bias = False,
    target: TargetName = "auto",
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Compile kernels and export them as a pack: a directory that loads with torch and apache-tvm-ffi alone (tilebit.packs.load)."""
    chosen, workloads = _asked(n, k, m, format, dtype, bias, target)
    with _failures():
        from .packs import export

        kernels = _compiled(workloads, chosen, jobs)
        export(path, dict(kernels))
    keys = list(dict.fromkeys(kernel.key for _, kernel in kernels))
    if as_json:
        _print_json({"path": str(path), "target": chosen.arch, "kernels": keys})
    else:
        typer.echo(f"{path}: {len(keys)} kernels for {chosen.arch}; load it with tilebit.packs.load({str(path)!r})")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can do with tilebit, what is missing, and how to get it. Exits with 1 if it cannot compile and run for its
    own device."""
    from .doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        _print_json(diagnosis.to_json())
    else:
        table = _table("This machine", "", "found", "what to do")
        marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "missing": "[red]missing[/]"}
        from rich.markup import escape

        for f in diagnosis.findings:
            table.add_row(f"{marks[f.status]} {f.name}", escape(f.found), escape(f.do))
        can = _table("It can", "", "")
        for task, possible in diagnosis.abilities.items():
            can.add_row(task, "[green]yes[/]" if possible else "[red]no[/]")
        _print(table, can)
    if not diagnosis.healthy:
        raise typer.Exit(1)


def _asked(n: int, k: int, ms: list[int] | None, format: str, dtype: str, bias: bool, arch: str) -> tuple[Target, list[Workload]]:
    """The target of ``arch`` (or of a device, "cuda:1") and one workload per m; what cannot be one is bad usage."""
    from .layouts.formats import QuantFormat
    from .schedules.target import detect_target, target_from_name
    from .schedules.workload import Workload

    try:
        here = detect_target(arch if arch.startswith("cuda") else None)
        target = here if arch == "auto" or arch.startswith("cuda") or arch == here.arch else target_from_name(arch)
        parsed = QuantFormat.parse(format)
        return target, [Workload(m, n, k, parsed, dtype, bias) for m in dict.fromkeys(ms or DEFAULT_MS[target.is_cuda])]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _compiled(workloads: list[Workload], target: Target, jobs: int | None) -> list[tuple[Workload, Kernel]]:
    """(workload of each m-bucket, kernel) in order, from the cache or compiled now."""
    from .kernels import build
    from .schedules.workload import m_bucket

    bucketed = list(dict.fromkeys(w.with_m(m_bucket(w.m)) for w in workloads))
    return list(zip(bucketed, build(bucketed, target, jobs), strict=True))


@contextmanager
def _failures() -> Iterator[None]:
    """A failed task becomes one message on stderr and exit code 1; anything else is a defect and keeps its traceback."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError | OSError) or type(error).__module__.startswith("tilebit."):
            _fail(str(error))
        raise


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(*parts: Any) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    for part in parts:
        if part:
            console.print(part)


def _schedule_text(schedule: dict[str, Any]) -> str:
    s = schedule
    tile = f"{s['program']} {s['block_n']}x{s['block_m']}x{s['block_k']}"
    return f"{tile} stages {s['num_stages']} warps {s['num_warps']} split {s['split_k']} blocks/SM {s['min_blocks']}"


if __name__ == "__main__":
    main()
