"""What commands print: tables or JSON on stdout, and a failed task's reason on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.table import Table


@contextmanager
def failures() -> Iterator[None]:
    """A failed task becomes one message on stderr and exit code 1; anything else is a defect and keeps its traceback."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError | OSError) or type(error).__module__.startswith("tilebit."):
            fail(str(error))
        raise


@contextmanager
def usage() -> Iterator[None]:
    """What an option's value cannot be is bad usage, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


def new_table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_parts(*parts: Any) -> None:
    """Tables and lines, 160 columns wide where stdout is no terminal; empty ones are left out."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    for part in parts:
        if part:
            console.print(part)


def schedule_text(schedule: dict[str, Any]) -> str:
    s = schedule
    tile = f"{s['program']} {s['block_n']}x{s['block_m']}x{s['block_k']}"
    return f"{tile} stages {s['num_stages']} warps {s['num_warps']} split {s['split_k']} blocks/SM {s['min_blocks']}"
