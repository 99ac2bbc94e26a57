"""What the tuner measures: operands for each operation, and the gate that a kernel passes before it
is timed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ...schedules.operations import operation
from ...schedules.rule import AnyWorkload


class Problem(Protocol):
    """One call with its operands on a device."""

    @property
    def workload(self) -> Any: ...

    @property
    def operands(self) -> dict[str, Tensor]: ...

    def outputs(self) -> Any:
        """New tensors to write to."""
        ...

    def named(self, outputs: Any, /) -> dict[str, Tensor]:
        """The tensors of a call that writes to ``outputs``, by the names of a kernel's parameters."""
        ...

    def copied(self) -> Problem:
        """The same in other memory."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reasons`` why a kernel is wrong (empty: verified) and its largest relative block error on
    random floats (None if it never got there)."""

    reasons: tuple[str, ...]
    rel_err: float | None = None

    @property
    def ok(self) -> bool:
        return not self.reasons


class AnyGate(Protocol):
    """The references of one workload and the verdict on any number of kernels for it; ``random`` is
    the problem that is timed."""

    @property
    def random(self) -> Problem: ...

    def verify(self, run: Callable[[Any, Any], None], /) -> Verdict:
        """``run(problem, outputs)`` launches the kernel."""
        ...


def gate_of(workload: AnyWorkload, seed: int, arch: str, device: str) -> AnyGate:
    """The gate of the workload's operation, its problems drawn from ``seed`` on ``device``, packed
    for ``arch``."""
    return importlib.import_module(operation(workload.op).gate).gate(workload, seed, arch, device)
