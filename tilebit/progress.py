"""What a person sees while something takes long: one bar on a terminal's standard error, nothing elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")
SOON = 0.5  # seconds


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is told how many of ``total`` are done."""
    with _bar(shown=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def waiting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """``counting`` for a library, and what may be there at once: the bar comes after ``SOON`` seconds, and
    is wiped away at the end. Threads may tell it."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    bar = _bar(shown=True, transient=True, redirect_stdout=False)
    task = bar.add_task(what, total=total)
    soon = threading.Timer(SOON, bar.start)
    soon.daemon = True
    soon.start()
    try:
        yield lambda done: bar.update(task, completed=done)
    finally:
        soon.cancel()
        soon.join()
        if bar.live.is_started:
            bar.stop()


def counted(items: Iterable[T], what: str, total: int, shown: bool) -> Iterator[T]:
    """``items``, and a bar that counts them. ``shown=False`` keeps it quiet."""
    with _bar(shown) as bar:
        task = bar.add_task(what, total=total)
        for item in items:
            yield item
            bar.advance(task)


def _bar(shown: bool, **options: Any) -> Progress:
    from rich.console import Console  # not before somebody waits
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal), **options)
