"""Gated products are timed as a decode step launches them: early, behind the norm of their x.

While a norm runs, which needs no bandwidth, a product fills its rings with weights: there a deeper ring
saves what it does not save alone (28672 x 4096, m = 1, 4 bits, four stages instead of two: 1.1 us of a
layer, H200; ``results/notes/step-early.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from .measure import Timing
from .problems import Problem

Call = Callable[[], object]
NORM = "norm"  # what the timings of the norm alone are called


def norm_ahead(problem: Problem) -> Call | None:
    """The norm of as many rows as ``problem`` has, launched early; None where calls stand alone: on CPUs, and of
    products without a gate or with a norm of their own."""
    w, x = problem.workload, problem.operands.get("x")
    if not getattr(w, "gate", "") or getattr(w, "norm", False) or x is None or not x.is_cuda or not x.is_floating_point():
        return None
    from ..ops.rows import add_norm  # defines operators: only where they are called

    rows, weight = x.clone(), torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    return lambda: add_norm(rows, None, weight, dependent=True)


def behind(norm: Call, calls: Mapping[str, Sequence[Call]]) -> dict[str, Sequence[Call]]:
    """Each of ``calls`` with ``norm`` before it, and ``NORM`` alone."""
    norm()  # its kernel is loaded before a graph is captured

    def both(call: Call) -> Call:
        def run() -> None:
            norm()
            call()

        return run

    return {NORM: [norm], **{name: [both(call) for call in those] for name, those in calls.items()}}


def without(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """What the others add to ``NORM``."""
    alone = timings[NORM].us
    found = {name: t for name, t in timings.items() if name != NORM}
    return {name: replace(t, us=t.us - alone, us_p20=t.us_p20 - alone, us_p80=t.us_p80 - alone) for name, t in found.items()}
