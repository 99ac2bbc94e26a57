"""The command line of any operation, also of another package's: ``tilebit workload compile | tune | explain | pack``.

A workload is named by its JSON, as records and manifests hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .output import usage
from .tasks import (
    Budget,
    Jobs,
    Json,
    Limit,
    PackPath,
    TargetName,
    compile_kernels,
    explain_schedules,
    named_target,
    pack_kernels,
    tune_schedules,
)

if TYPE_CHECKING:
    from ..schedules.operations import AnyWorkload

workload = typer.Typer(
    help="Workloads of any operation, as JSON: compile their kernels, tune them on this device, explain their schedules, ship them.",
    no_args_is_help=True,
)

HELP = 'A workload\'s to_json(), such as \'{"op": "my_package.my_operation", "m": 4}\'; a dotted op is a module with an OPERATION.'
Workloads = Annotated[list[str], typer.Argument(metavar="JSON...", help=HELP)]


@workload.command("compile")
def compile_command(workloads: Workloads, target: TargetName = "auto", jobs: Jobs = None, as_json: Json = False) -> None:
    """Compile the kernels of these workloads into the artifact cache. Needs no GPU: name the --target
    to cross-compile."""
    asked = _parsed(workloads)
    compile_kernels(_subject(asked), asked, named_target(target), jobs, as_json)


@workload.command()
def tune(workloads: Workloads, target: TargetName = "auto", budget: Budget = None, jobs: Jobs = None, as_json: Json = False) -> None:
    """Measure candidate schedules on this machine's device and record the results; later calls use
    the fastest. Measures nothing twice."""
    asked = _parsed(workloads)
    tune_schedules(_subject(asked), asked, named_target(target), budget, jobs, as_json)


@workload.command()
def explain(
    text: Annotated[str, typer.Argument(metavar="JSON", help=HELP)], target: TargetName = "auto", limit: Limit = 20, as_json: Json = False
) -> None:
    """Print every candidate schedule of a workload, the chosen one first, and why the others lost."""
    explain_schedules(_parsed([text])[0], named_target(target), limit, as_json)


@workload.command()
def pack(path: PackPath, workloads: Workloads, target: TargetName = "auto", jobs: Jobs = None, as_json: Json = False) -> None:
    """Compile kernels and export them as a pack: a directory that loads with torch and apache-tvm-ffi
    alone (tilebit.packs.load)."""
    pack_kernels(path, _parsed(workloads), named_target(target), jobs, as_json)


def _parsed(texts: list[str]) -> list[AnyWorkload]:
    """The workloads of one operation; what cannot be one is bad usage."""
    from ..json_reader import parse_json
    from ..schedules.operations import workload_from_json

    found = []
    with usage():
        for text in texts:
            found.append(workload_from_json(parse_json(text)))
        ops = sorted({w.op for w in found})
        if len(ops) > 1:
            raise ValueError(f"the workloads are of {', '.join(ops)}; accepted: one operation at a time")
    return found


def _subject(workloads: list[AnyWorkload]) -> str:
    return ", ".join(dict.fromkeys(w.served for w in workloads))
