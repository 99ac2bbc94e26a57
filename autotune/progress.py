"""What a person sees while the tuner runs: one bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..schedules.operations import AnyWorkload


class TuningBar:
    """A bar on standard error over all candidates of all workloads. ``shown=False``, or a standard
    error that is no terminal, keeps it quiet."""

    def __init__(self, shown: bool) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[best]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not (shown and console.is_terminal))
        self._task = self._progress.add_task("tuning", total=0, best="")
        self._done = self._total = 0

    def __enter__(self) -> TuningBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, workload: AnyWorkload, candidates: int) -> None:
        """Add a workload's candidates to the bar."""
        self._total += candidates
        self._progress.update(self._task, description=workload.title, total=self._total, best="")

    def step(self, best_us: float | None) -> None:
        """One more candidate is settled; ``best_us`` is the workload's fastest so far."""
        self._done += 1
        self._progress.update(self._task, completed=self._done, best="" if best_us is None else f"best {best_us:.1f} us")

    def skip(self, candidates: int) -> None:
        """Take candidates that will not be tried off the bar."""
        self._total -= candidates
        self._progress.update(self._task, total=self._total)
