"""``toy.scaled_add``: y[i, j] = x[i, j] * scale[i] + residual[i, j] in fp32, as an operation.

One program computes it, on CPUs: a task is a row, cut into vectors of ``block_n`` columns.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, fields, replace
from math import log2
from typing import Any, ClassVar

from tilebit.schedules.operands import Operand
from tilebit.schedules.operations import Operation, Rule
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

NAME = "toy.scaled_add"
DTYPES = ("float16", "bfloat16")
VECTORS = (8, 16, 32)  # columns of one vector


@dataclass(frozen=True, slots=True)
class ScaledAdd:
    """``m`` rows, any number at each call, of ``n`` columns. Raises ``ValueError`` when a field is out of range."""

    DYNAMIC: ClassVar[tuple[str, ...]] = ("m",)
    SIZES: ClassVar[tuple[str, ...]] = ("m", "n")
    COMMAND: ClassVar[str] = "workload"

    m: int
    n: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.m < 0 or self.n < 1 or self.dtype not in DTYPES:
            raise ValueError(f"(m, n, dtype) is ({self.m}, {self.n}, {self.dtype!r}); accepted: m >= 0, n >= 1 and a dtype of {DTYPES}")

    @property
    def op(self) -> str:
        return NAME

    @property
    def kind(self) -> str:
        return self.dtype

    @property
    def title(self) -> str:
        return f"scaled_add m={self.m} n={self.n}"

    @property
    def served(self) -> str:
        return f"scaled_add of {self.n} columns in {self.dtype}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n

    @property
    def bytes(self) -> int:
        return 6 * self.m * self.n + 4 * self.m

    def operands(self, arch: str) -> tuple[Operand, ...]:
        rows = ("m", self.n)
        return (
            Operand("x", self.dtype, rows),
            Operand("scale", "float32", ("m",), advice="pass a factor for each row"),
            Operand("residual", self.dtype, rows),
            Operand("y", self.dtype, rows, written=True, read=False),
        )

    def options(self) -> str:
        return shlex.quote(json.dumps(self.to_json()))

    def bucketed(self) -> ScaledAdd:
        """Rows at powers of two."""
        return replace(self, m=1 << max(self.m - 1, 0).bit_length())

    def static(self) -> ScaledAdd:
        return replace(self, m=0)

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ScaledAdd:
        return cls(**{f.name: data[f.name] for f in fields(cls)})


def unserved(workload: ScaledAdd, arch: str) -> list[str]:
    return [f"n is {workload.n}; accepted: multiples of {VECTORS[0]}."] if workload.n % VECTORS[0] else []


def legal(workload: ScaledAdd, schedule: Schedule, target: Target) -> list[str]:
    reasons = []
    if schedule.block_n not in VECTORS or workload.n % schedule.block_n:
        fitting = ", ".join(str(v) for v in VECTORS if workload.n % v == 0)
        reasons.append(f"block_n is {schedule.block_n}; accepted for n {workload.n}: {fitting}.")
    if schedule.num_warps < 1:
        reasons.append(f"num_warps is {schedule.num_warps}; accepted: 1 thread or more.")
    return reasons


def candidates(workload: ScaledAdd, target: Target) -> list[Schedule]:
    threads = dict.fromkeys((target.units, 1))
    found = [Schedule(NAME, vector, 1, 1, num_warps=count) for count in threads for vector in reversed(VECTORS)]
    return [schedule for schedule in found if not legal(workload, schedule, target)]


def distance(there: ScaledAdd, here: ScaledAdd) -> float | None:
    if there.kind != here.kind:
        return None
    return abs(log2(max(there.m, 1) / max(here.m, 1))) + abs(log2(there.n / here.n))


RULE = Rule(
    NAME,
    "toy.scaled_add_program",
    arches=("cpu",),
    tried=("cpu",),
    reads=frozenset({"block_n", "num_warps"}),
    unserved=unserved,
    legal=legal,
    candidates=candidates,
)
OPERATION = Operation(
    NAME,
    ScaledAdd,
    rules=(RULE,),
    gate="toy.scaled_add_problem",
    distance=distance,
    rank=lambda there, here: abs(log2(max(there.m, 1) / max(here.m, 1))),
)
