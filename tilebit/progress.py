"""What a person sees while a model is calibrated: one bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def counted(items: Iterable[T], what: str, total: int, shown: bool) -> Iterator[T]:
    """``items``, and a bar on standard error that counts them. ``shown=False``, or a standard error
    that is no terminal, keeps it quiet."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            yield item
            progress.advance(task)
