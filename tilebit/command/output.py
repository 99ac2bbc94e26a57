"""What commands print: tables or JSON on stdout, and a failed task's reason on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
        if isinstance(error, OSError):
            fail(said(error))
        if isinstance(error, ValueError) or type(error).__module__.startswith("tilebit."):
            fail(str(error))
        raise


def said(error: OSError) -> str:
    """What the system refused, and of which file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}; accepted: a path that exists and may be used so: create its folder, or name another"


def new_file(path: Path, *, folders: bool = False) -> None:
    """Fail, before a long task, where ``path`` could not be written after it; ``folders``: the task
    makes those that are missing."""
    folder = path.absolute().parent
    while folders and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        fail(f"{path} cannot be written: {folder} is no folder; accepted: a path in a folder that exists: create it, or name another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        fail(f"{path} cannot be written: permission denied; accepted: a path that you may write: name another")


@contextmanager
def printed() -> Iterator[None]:
    """What is printed inside reaches standard output, or the command fails with one line: a disk may
    be full and a descriptor closed. (A pipe whose reader has left ends it without a word.)"""
    if sys.stdout is None:
        print("error: standard output is closed; accepted: an open one: redirect it to a file or to /dev/null", file=sys.stderr)
        raise SystemExit(1)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in buffers would fail again at exit
        if not isinstance(error, BrokenPipeError):
            what = (
                said(error)
                if error.filename is not None
                else f"standard output cannot be written ({error.strerror}): make room, or redirect it"
            )
            print(f"error: {what}", file=sys.stderr)
        raise SystemExit(1) from None


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
