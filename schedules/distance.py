"""How much a measurement made elsewhere says about a workload here: one unit is a factor of two in a size."""

from __future__ import annotations

from math import log2

from .attention.workload import AttentionWorkload
from .gemm.workload import Workload
from .operations import AnyWorkload
from .records import TuningRecord
from .target import Target

# A record further away than this says less than the cost model. One unit is a factor of two in n, k or m.
MAX_DISTANCE = 3.0
OTHER_DTYPE = 0.25
OTHER_BIAS = 0.0625
OTHER_SYMMETRY = 0.25
OTHER_GROUP = 0.5
OTHER_NAME = 1.0  # another product of the same arch
OTHER_UNITS = 4.0  # per factor of two: splits and thread counts are made for the number of units

# Attention: a persistent grid sees batch x kv heads x kv_len as one line of work, so that each says less than a GEMM's m does.
SIZES = {"batch": 0.5, "kv_len": 0.5, "heads_kv": 0.5, "q_len": 1.0}
OTHER_KEY_SCALES = 0.25
OTHER_PAGE_SIZE = 0.25
OTHER_SCORES = 0.0625  # a window, a cap, sinks, ...: what happens to scores, and what is returned


def distance(record: TuningRecord, workload: AnyWorkload, target: Target) -> float | None:
    """How far a record's situation is from this one (0: the same); None when it says nothing about it: another arch, operation or bit
    width, of attention also another head_dim or group."""
    if record.arch != target.arch:
        return None
    device = OTHER_NAME * (record.gpu != target.name) + OTHER_UNITS * abs(log2(max(record.units, 1) / target.units))
    if isinstance(workload, AttentionWorkload):
        problem = _attention(record.workload, workload) if isinstance(record.workload, AttentionWorkload) else None
    else:
        problem = gemm_distance(record.workload, workload) if isinstance(record.workload, Workload) else None
    return None if problem is None else problem + device


def gemm_distance(there: Workload, here: Workload) -> float | None:
    """How far two GEMMs are apart; None for another bit width."""
    f, g = there.format, here.format
    if f.bits != g.bits:
        return None
    shape = abs(log2(there.n / here.n)) + abs(log2(there.k / here.k)) + abs(log2(max(there.m, 1) / max(here.m, 1)))
    numbers = OTHER_DTYPE * (there.dtype != here.dtype) + OTHER_BIAS * (there.bias != here.bias)
    return shape + numbers + OTHER_SYMMETRY * (f.symmetric != g.symmetric) + OTHER_GROUP * (f.group_size != g.group_size)


def _attention(there: AttentionWorkload, here: AttentionWorkload) -> float | None:
    f, g = there.format, here.format
    if (there.op, there.head_dim, there.group, f.key, f.value) != (here.op, here.head_dim, here.group, g.key, g.value):
        return None
    shape = sum(weight * abs(log2(max(getattr(there, name), 1) / max(getattr(here, name), 1))) for name, weight in SIZES.items())
    scores = ("window", "sink_tokens", "sinks", "soft_cap", "scale", "lse", "rotary")
    flags = OTHER_SCORES * sum(getattr(there, name) != getattr(here, name) for name in scores)
    numbers = OTHER_DTYPE * (there.dtype != here.dtype) + OTHER_KEY_SCALES * (f.key_scales != g.key_scales)
    return shape + flags + numbers + OTHER_PAGE_SIZE * (there.page_size != here.page_size)
