"""What stands between the products of a decoder, as workloads and operations: the residual sum with
its norm, and a gate's activation times what it gates."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, fields, replace
from math import log2
from typing import Any, ClassVar

from ..gemm.operation import OTHER_DTYPE
from ..gemm.parts import ACTIVATIONS
from ..gemm.workload import DTYPES
from ..operands import Operand
from ..rule import Estimate, Operation, Rule
from ..schedule import Schedule
from ..target import Target
from .operation import BARRIER_US, GPUS, LAUNCH_US, WARPS
from .workload import EPS, MOST_ROWS

NORM, GATED = "norm", "gated"
CHUNK = 8  # values that a thread loads and stores at once: 16 bytes
MOST_CHUNKS = 4  # of a row that a thread of a norm holds
CHUNK_US = 0.2  # a chunk more of each thread, one after another
OTHER_KIND = 0.25  # another activation, no residual: nearly the same bytes
KNEE_WARPS = 16  # of an SM that have enough loads in flight


@dataclass(frozen=True, slots=True)
class GlueWorkload:
    """``op`` "norm": y[m, k] of x[m, k], RMSNorm as

        y = x * rsqrt(mean(x^2) + eps) * (norm_weight + offset)

    in fp32, rounded once to ``dtype`` ("float16" or "bfloat16"); with ``residual`` x is first added to
    it: the sum, rounded to ``dtype``, is the new residual, and what is normed. A row whose squares
    have no finite sum gets NaN.

    ``op`` "gated": y[m, k] of x[m, 2 k], activation(x[:, :k]) * x[:, k:] in fp32, rounded once;
    ``activation`` "silu", "gelu_tanh" (GELU's approximation by tanh) or "gelu".

    ``m`` is the number of rows the schedule is chosen for; compiled kernels accept any m. Fields that
    say nothing about an ``op`` are set to their defaults. Raises ``ValueError`` when a field is out
    of range; k is a multiple of 8.
    """

    DYNAMIC: ClassVar[tuple[str, ...]] = ("m",)  # fields that compiled kernels do not depend on
    SIZES: ClassVar[tuple[str, ...]] = ("m", "k")  # whole numbers
    COMMAND: ClassVar[str] = "workload"  # the command line's group of commands

    op: str
    m: int
    k: int
    dtype: str = "float16"
    residual: bool = False
    eps: float = EPS
    offset: float = 0.0
    activation: str = "silu"

    def __post_init__(self) -> None:
        if self.m < 0 or self.k < CHUNK or self.k % CHUNK:
            raise ValueError(f"(m, k) is ({self.m}, {self.k}); accepted: m >= 0, k a multiple of {CHUNK}")
        for name, accepted in (("op", (NORM, GATED)), ("dtype", DTYPES), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(map(repr, accepted))}")
        if not 0 <= self.eps < float("inf") or not abs(self.offset) < float("inf"):
            raise ValueError(f"(eps, offset) is ({self.eps!r}, {self.offset!r}); accepted: finite numbers, eps from 0")
        norm = self.op == NORM
        for name, value in (
            ("residual", self.residual and norm), ("eps", float(self.eps) if norm else EPS),
            ("offset", float(self.offset) if norm else 0.0), ("activation", ACTIVATIONS[0] if norm else self.activation),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """The class of numbers that records must share to say something about each other."""
        return self.op

    def operands(self, arch: str) -> tuple[Operand, ...]:
        """The tensors of a call, in call order; the residual is read, then written."""
        y = Operand("y", self.dtype, ("m", self.k), written=True, read=False)
        if self.op == GATED:
            return (Operand("x", self.dtype, ("m", 2 * self.k)), y)
        return (
            Operand("x", self.dtype, ("m", self.k)),
            Operand("residual", self.dtype, ("m", self.k), written=True, optional=True, absent=not self.residual),
            Operand("norm_weight", self.dtype, (self.k,), advice="pass the norm's weight"),
            y,
        )

    @property
    def flops(self) -> int:
        """About what is computed with each value; no products."""
        return self.m * self.k * (6 + self.residual)

    @property
    def bytes(self) -> int:
        """Bytes that one call must move at least."""
        return 2 * self.m * self.k * (3 if self.op == GATED else 2 + 2 * self.residual) + 2 * self.k * (self.op == NORM)

    def options(self) -> str:
        """The command line's words for this workload."""
        return shlex.quote(json.dumps(self.to_json()))

    def bucketed(self) -> GlueWorkload:
        """The workload whose tuned schedule serves this one: m at powers of two."""
        return replace(self, m=min(1 << max(self.m - 1, 0).bit_length(), MOST_ROWS))

    def static(self) -> GlueWorkload:
        """Equal for all workloads that one compiled kernel serves."""
        return replace(self, m=0)

    @property
    def title(self) -> str:
        """What a person calls it: ``norm m=4 k=4096 after a sum``."""
        return f"{self.op} m={self.m} {self._what}"

    @property
    def served(self) -> str:
        """``title`` without what a compiled kernel does not depend on, and with the dtype."""
        return f"{self.op} {self._what} {self.dtype}"

    @property
    def _what(self) -> str:
        return f"k={self.k}{' after a sum' * self.residual}{f' {self.activation}' if self.op == GATED else ''}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GlueWorkload:
        """Raises ``KeyError`` for a missing field."""
        return cls(**{f.name: data[f.name] for f in fields(cls)})


def chunks(workload: GlueWorkload, schedule: Schedule) -> int:
    """Chunks of 8 values that a thread of a norm holds of its row."""
    return -(-workload.k // (CHUNK * 32 * schedule.num_warps))


def legal(workload: GlueWorkload, schedule: Schedule, target: Target) -> list[str]:
    if schedule.num_warps not in WARPS:
        return [f"num_warps is {schedule.num_warps}; accepted: {', '.join(map(str, WARPS))}."]
    if workload.op == NORM and chunks(workload, schedule) > MOST_CHUNKS:
        most = CHUNK * 32 * schedule.num_warps * MOST_CHUNKS
        return [f"num_warps is {schedule.num_warps}, whose threads hold {most} values of a row; k is {workload.k}: use more."]
    return []


def unserved(workload: GlueWorkload, arch: str) -> list[str]:
    most = CHUNK * MOST_CHUNKS * 32 * WARPS[-1]
    return [f"k is {workload.k}; accepted of a norm: at most {most}."] if workload.op == NORM and workload.k > most else []


def candidates(workload: GlueWorkload, target: Target) -> list[Schedule]:
    """A block has a row of a norm, and no more threads than it has chunks; or chunks of any rows."""
    found = [Schedule(workload.op + "_rows", 1, 1, 1, num_warps=warps) for warps in WARPS]
    if workload.op == NORM:
        found = [s for s in found if CHUNK * 32 * s.num_warps < workload.k + CHUNK * 32]
    return [s for s in found if not legal(workload, s, target)]


def estimate(workload: GlueWorkload, schedule: Schedule, target: Target) -> Estimate:
    """Bytes at the rate of the SMs that have a block, and what one thread does from end to end."""
    w, s = workload, schedule
    norm, threads = w.op == NORM, 32 * s.num_warps
    blocks = max(1, w.m if norm else -(-w.m * w.k // (CHUNK * threads)))
    held = chunks(w, s) if norm else 1
    resident = max(1, min(target.threads_per_sm // threads, target.blocks_per_sm))
    waves, busy = -(-blocks // (target.units * resident)), min(blocks, target.units)
    warps = min(resident, -(-blocks // busy)) * s.num_warps * held  # of an SM, with loads in flight
    flow = min(1.0, (warps / KNEE_WARPS) ** 0.5)
    load = w.bytes / (target.read_gbps * 1e3) / flow / (busy / target.units)
    alone = CHUNK_US * held + (BARRIER_US + 0.01 * s.num_warps if norm and s.num_warps > 1 else 0.0)
    return Estimate(LAUNCH_US + alone + load, 1, load, 0.0, 0.0, alone, 0.0, LAUNCH_US, waves, 1.0)


def distance(there: GlueWorkload, here: GlueWorkload) -> float | None:
    """How far two calls are apart, in factors of two of a size; None for another operation."""
    if there.op != here.op:
        return None
    differ = (there.residual != here.residual) + (there.activation != here.activation)
    return _rank(there, here) + abs(log2(there.k / here.k)) + OTHER_DTYPE * (there.dtype != here.dtype) + OTHER_KIND * differ


def _rank(there: GlueWorkload, here: GlueWorkload) -> float:
    """Kernels serve all m alike: the nearest ones."""
    return abs(log2(max(there.m, 1) / max(here.m, 1)))


def _operation(op: str) -> Operation:
    rule = Rule(
        op + "_rows",
        f"tilebit.tiles.activations.{op}_rows",
        arches=GPUS,
        tried=GPUS,
        reads=frozenset({"num_warps"}),
        unserved=unserved,
        legal=legal,
        candidates=candidates,
        estimate=estimate,
    )  # rows are moved once: no instruction decides, so nothing is promised
    return Operation(op, GlueWorkload, rules=(rule,), gate="tilebit.autotune.problems.glue", distance=distance, rank=_rank)


NORMED, GATING = _operation(NORM), _operation(GATED)
