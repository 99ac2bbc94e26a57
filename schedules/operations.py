"""The operations that there are, GEMM and attention, under one set of verbs: what is stored, legal, tried and expected of each."""

from __future__ import annotations

from typing import Any

from .attention import rules as attention
from .attention.cost import attention_estimate
from .attention.workload import OPS, AttentionWorkload
from .gemm import rules as gemm
from .gemm.cost import Estimate
from .gemm.cost import estimate as gemm_estimate
from .gemm.workload import Workload
from .schedule import Schedule
from .target import Target

AnyWorkload = Workload | AttentionWorkload


def workload_from_json(data: dict[str, Any]) -> AnyWorkload:
    """The inverse of ``to_json`` for either kind. Raises ``ValueError`` for an unknown op and ``KeyError`` for a missing field."""
    op = data.get("op", "gemm")
    if op == "gemm":
        return Workload.from_json(data)
    if op in OPS:
        return AttentionWorkload.from_json(data)
    raise ValueError(f"op is {op!r}; accepted: 'gemm', {', '.join(map(repr, OPS))}")


def legal(workload: AnyWorkload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target``, one sentence per reason; an empty list means that it can."""
    if isinstance(workload, AttentionWorkload):
        return attention.legal(workload, schedule, target)
    return gemm.legal(workload, schedule, target)


def candidates(workload: AnyWorkload, target: Target) -> list[Schedule] | None:
    """Legal schedules worth measuring, without duplicates, always in the same order; None: no program runs there."""
    if isinstance(workload, AttentionWorkload):
        return attention.candidates(workload, target)
    return gemm.candidates(workload, target)


def estimate(workload: AnyWorkload, schedule: Schedule, target: Target) -> Estimate:
    """The analytic model's expectation for ``schedule``."""
    if isinstance(workload, AttentionWorkload):
        return attention_estimate(workload, schedule, target)
    return gemm_estimate(workload, schedule, target)


def workspace_words(workload: AnyWorkload, schedule: Schedule, target: Target) -> int:
    """32-bit words of the workspace that the kernel takes; 0: it takes none."""
    if not target.is_cuda:
        return 0
    if isinstance(workload, AttentionWorkload):
        return attention.workspace_words(workload, schedule, target)
    return gemm.workspace_words(workload, schedule, target)
