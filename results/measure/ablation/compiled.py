"""The kernels of an ablation, compiled before any is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tilebit.schedules.operations import AnyWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target
from tilebit.tiles.compiler.compile import CompileFailure, CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool


class Numbered(Protocol):
    """A step of an ablation."""

    @property
    def number(self) -> int: ...


S = TypeVar("S", bound=Numbered)
W = TypeVar("W", bound=AnyWorkload)


def compiled(
    drawings: Sequence[tuple[W, Mapping[S, Sequence[Schedule]]]],
    target: Target,
    posed: Callable[[W, S], Any] = lambda workload, _: workload,
) -> list[dict[S, list[Kernel]]]:
    """The kernels of every workload's drawing (schedules by step), compiled in parallel; what does
    not compile is named and left out. ``posed`` says what workload a step's kernels are compiled
    for."""
    places = [(i, step, posed(w, step), s) for i, (w, steps) in enumerate(drawings) for step, schedules in steps.items() for s in schedules]
    with CompilePool(keep=True) as pool:
        results = pool.compile([CompileRequest(s.program, w, s, target) for _, _, w, s in places])
    found: list[dict[S, list[Kernel]]] = [{} for _ in drawings]
    for (i, step, _, _), result in zip(places, results, strict=True):
        if isinstance(result, CompileFailure):
            print(f"  left out: step {step.number}: {result}", flush=True)
        else:
            found[i].setdefault(step, []).append(result)
    return found
