"""The operations that there are, as values: which programs compute each, by which rules, and how
far a record of one problem speaks of another. Everything that chooses, compiles, tunes or ships a
kernel asks here; nothing asks what kind of workload it has.

An operation or a program of another package is named by its module ("my_package.toy", with an
``OPERATION``, a ``RULE`` and a ``PROGRAM``): the name is found in every process that can import it,
so that compile and measuring workers know it too.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from ..layouts.outside import stated
from .activations.glue import GATING, NORMED
from .activations.operation import QUANTIZE
from .attention.operation import APPEND, DECODE, GATHER, PACK, PREFILL
from .gemm.dense import DENSE
from .gemm.expand import EXPAND
from .gemm.operation import GEMM
from .operands import Operand, kernel_params
from .rule import AnyWorkload, Estimate, Operation, Rule
from .schedule import Schedule, in_turn
from .target import Target

__all__ = [
    "OPERATIONS", "AnyWorkload", "Estimate", "Operation", "Rule", "alone", "candidates", "estimate", "find_rule", "legal", "operands",
    "operation", "params", "programs", "unserved", "workload_from_json", "workspace_words",
]  # fmt: skip

MAX_CANDIDATES = 120
_ALL = (GEMM, DECODE, APPEND, PACK, GATHER, PREFILL, QUANTIZE, NORMED, GATING, EXPAND, DENSE)
OPERATIONS: dict[str, Operation] = {o.name: o for o in _ALL}


def operation(name: str) -> Operation:
    """The operation called ``name``, or the ``OPERATION`` of the module of that name. Raises
    ``ValueError`` for any other."""
    if name in OPERATIONS:
        return OPERATIONS[name]
    if "." in name:
        return stated(name, "OPERATION")
    raise ValueError(f"op is {name!r}; accepted: {', '.join(map(repr, OPERATIONS))}, or a module path with an OPERATION")


def programs(op: str | None = None, arch: str | None = None) -> dict[str, Rule]:
    """The rules of this package's programs by their names: all, those of an operation, those that
    run on an arch."""
    rules = [rule for o in OPERATIONS.values() if op in (None, o.name) for rule in o.rules]
    return {rule.program: rule for rule in rules if arch is None or arch in rule.arches}


def find_rule(program: str) -> Rule:
    """The rule of ``program``, or the ``RULE`` of the module of that name. Raises ``ValueError``
    for any other."""
    for known in OPERATIONS.values():
        for rule in known.rules:
            if rule.program == program:
                return rule
    if "." in program:
        return stated(program, "RULE")
    raise ValueError(f"unknown tile program {program!r}; accepted: {', '.join(sorted(programs()))}, or a module path with a PROGRAM")


def alone(workload: Any) -> Any:
    """``workload`` by itself: one that is ``dependent``, as in a model's step, without that; any other is
    itself."""
    return replace(workload, dependent=False) if getattr(workload, "dependent", False) else workload


def workload_from_json(data: Any) -> AnyWorkload:
    """The inverse of ``to_json``. Raises ``ValueError`` for what is no workload: an unknown op, a
    missing field, one that no workload has, a value of another type."""
    do = "accepted: an object as a workload's to_json() gives"
    op = data.get("op", GEMM.name) if isinstance(data, dict) else None
    if not isinstance(op, str):
        raise ValueError(f"{data!r:.80} is no workload; {do}")
    try:
        workload = operation(op).workload.from_json(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a workload is incomplete or has a value of another type ({error!r}); {do}") from None
    known = {"op", *(f.name for f in fields(workload))}
    unknown = sorted(str(name) for name in data.keys() - known)
    if unknown:
        raise ValueError(f"a workload of {op} has no {', '.join(unknown)[:200]}; accepted: {', '.join(sorted(known))}")
    values = {name: (getattr(workload, name), accepted) for name, accepted in _field_types(type(workload)).items()}
    wrong = [f"{name} is {value!r:.80}" for name, (value, accepted) in values.items() if type(value) not in accepted]
    if wrong:
        raise ValueError(f"a workload's {', '.join(wrong)}; accepted: whole numbers for sizes, true or false, numbers and names; {do}")
    return workload


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "bool": (bool,), "str": (str,), "float": (int, float), "float | None": (int, float, type(None))
}  # fmt: skip


@lru_cache(maxsize=64)
def _field_types(workload: type[Any]) -> dict[str, tuple[type, ...]]:
    """Types that the fields of a class of workloads may have, of those that are numbers, names and
    switches."""
    annotated = {f.name: f.type if isinstance(f.type, str) else getattr(f.type, "__name__", "") for f in fields(workload)}
    known = {name: _JSON_TYPES[kind] for name, kind in annotated.items() if kind in _JSON_TYPES}
    return known | dict.fromkeys(workload.SIZES, (int,))


def legal(workload: AnyWorkload, schedule: Schedule, target: Target) -> list[str]:
    """Why ``schedule`` cannot serve ``workload`` on ``target``, one sentence per reason; an empty
    list means that it can."""
    rules = operation(workload.op).rules
    rule = next((rule for rule in rules if rule.program == schedule.program), None)
    if rule is None and "." in schedule.program:
        rule = find_rule(schedule.program)
    if rule is None:
        return [f"program is {schedule.program!r}; accepted for {workload.op}: {', '.join(rule.program for rule in rules)}."]
    return rule.reasons(workload, schedule, target)


def candidates(workload: AnyWorkload, target: Target) -> list[Schedule] | None:
    """Legal schedules worth measuring, at most ``MAX_CANDIDATES``, without duplicates, always in
    the same order, those of several programs in turn; None: there is none."""
    tried = [rule for rule in operation(workload.op).rules if target.arch in rule.tried and not rule.unserved(workload, target.arch)]
    return in_turn([rule.candidates(workload, target) for rule in tried])[:MAX_CANDIDATES] or None


def unserved(workload: AnyWorkload, target: Target) -> str:
    """That no program serves ``workload`` on ``target``, where some do, and what all programs there
    say."""
    rules = operation(workload.op).rules
    serving = {arch for rule in rules for arch in rule.arches if not rule.unserved(workload, arch)}
    accepted = "" if target.arch in serving or not serving else f"; its programs run on: {', '.join(sorted(serving))}"
    here = [rule.unserved(workload, target.arch) for rule in rules if target.arch in rule.arches]
    said = "".join(f" {reason}" for reason in (here[0] if here else ()) if all(reason in other for other in here))
    return f"no schedule for {workload!r} on {target.arch} ({target.name}){accepted}; see schedules/operations.py.{said}"


def estimate(workload: AnyWorkload, schedule: Schedule, target: Target) -> Estimate:
    """The analytic model's expectation for ``schedule``."""
    return find_rule(schedule.program).estimate(workload, schedule, target)


def workspace_words(workload: AnyWorkload, schedule: Schedule, target: Target) -> int:
    """32-bit words of the workspace that the kernel takes; 0: it takes none."""
    return find_rule(schedule.program).workspace_words(workload, schedule, target)


def operands(workload: AnyWorkload, program: str, arch: str) -> tuple[Operand, ...]:
    """The tensors of a call as ``program`` reads them, in call order."""
    own = find_rule(program).operands
    return workload.operands(arch) if own is None else own(workload, arch)


def params(workload: AnyWorkload, schedule: Schedule, target: Target) -> tuple[str, ...]:
    """The parameters of a kernel in call order."""
    return kernel_params(operands(workload, schedule.program, target.arch), workspace_words(workload, schedule, target) > 0)
