"""What ends a run of the tuner, and what is only a candidate's failure."""

from __future__ import annotations

from ..schedules.faults import machines_fault
from ..schedules.operations import AnyWorkload
from ..schedules.schedule import Schedule
from ..tiles.compiler.request import CompileFailure
from .worker import Outcome

MOST_WORDS = 8000  # characters of a record's reason: a compiler may quote whole programs


class TuneError(RuntimeError):
    """The tuner cannot go on, for a reason that is no candidate's fault. What was recorded stays;
    run it again to continue."""


def expect_no_fault(workload: AnyWorkload, schedule: Schedule, outcome: Outcome) -> None:
    """Raises ``TuneError`` when what became of a candidate is the machine's fault and not its own."""
    if machines_fault(outcome.status, outcome.reason):
        raise TuneError(
            f"tuning ended at {workload.title} ({schedule.program}) by a fault of this machine, not of a candidate: "
            f"{outcome.reason[:MOST_WORDS]}. Nothing was recorded of it and earlier records are intact; `tilebit doctor` says what is "
            "missing. Mend it and run the tuner again: it continues from there"
        )


def of_compiling(failure: CompileFailure) -> Outcome:
    """What a failure to compile is to a record. What the cache cannot hold is the disk's fault,
    whatever the words: the status that always is."""
    words = "; ".join(failure.sentences)
    if failure.kind == "cache":
        return Outcome("corrupt", f"cannot compile: {words}")
    return Outcome("compile_timeout" if failure.kind == "timeout" else "compile_error", f"{failure.kind}: {words}")
