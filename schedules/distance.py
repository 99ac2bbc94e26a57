"""How much a measurement made elsewhere says about a workload here: one unit is a factor of two in
a size."""

from __future__ import annotations

from math import log2

from .operations import operation
from .records import TuningRecord
from .rule import AnyWorkload
from .target import Target

# A record further away than this says less than the cost model.
MAX_DISTANCE = 3.0
OTHER_NAME = 1.0  # another product of the same arch
OTHER_UNITS = 4.0  # per factor of two: splits and thread counts are made for the number of units


def distance(record: TuningRecord, workload: AnyWorkload, target: Target) -> float | None:
    """How far a record's situation is from this one (0: the same); None when it says nothing about
    it: another arch, operation or class of numbers, or what else the operation's own distance asks.
    """
    if record.arch != target.arch or record.workload.op != workload.op:
        return None
    problem = operation(workload.op).distance(record.workload, workload)
    device = OTHER_NAME * (record.gpu != target.name) + OTHER_UNITS * abs(log2(max(record.units, 1) / target.units))
    return None if problem is None else problem + device
