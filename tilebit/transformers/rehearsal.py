"""Kernels of a step or a prompt, had before it is taken."""

from __future__ import annotations

from collections.abc import Callable

from ..cache.batch import Batch
from ..kernels import build
from ..ops.plans import rehearsed
from ..progress import waiting


def rehearse(batch: Batch, call: Callable[[], object]) -> None:
    """Compile what ``call`` will launch, in parallel."""
    missing = rehearsed(call)
    batch.written.clear()  # it is all written again
    for target in dict.fromkeys(target for _, target in missing):
        workloads = [workload for workload, of in missing if of == target]
        with waiting("compiling kernels", len(workloads)) as settled:
            build(workloads, target, jobs=None, progress=settled)
