"""The product with a weight of 16 bits as a model holds it, for few rows of x, as an operation: of layers
that are not quantized, the output layer above all.

``gemm_dense`` (sm_90a): ``block_n`` output channels by ``block_m`` rows of x a block, 16 channels a
computing warp, ``num_stages`` slots of STAGE_K columns of both.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from math import log2
from typing import Any, ClassVar

from ..operands import Operand
from ..rule import Estimate, Operation, Rule
from ..schedule import Schedule, in_turn
from ..target import Target
from .operation import OTHER_DTYPE
from .residence import crowding
from .rules import WGMMA, handed_on
from .workload import DTYPES, X_COLUMNS

NAME, PROGRAM = "dense", "gemm_dense"
STAGE_K = 64  # 128 bytes of a row, what the swizzle of shared memory spans
BLOCK_N, ROWS = (64, 128, 192, 256), 16  # ROWS: of a warp
BLOCK_M = (16, 32, 48, 64)
STAGES, MAX_MIN_BLOCKS = (2, 16), 3
PRODUCERS, PRODUCER_REGISTERS = WGMMA.producer_threads, 40
STATIC_SMEM = 2048  # barriers; alignment
SPARE = 32  # registers of addresses and loop state
MAX_M = BLOCK_M[-1]  # of more rows the weight is read again
# What is tried: (block_n, min_blocks); bytes of the weight on their way to an SM.
TILES = ((128, 1), (128, 2), (64, 2), (192, 1), (256, 1), (64, 3))
IN_FLIGHT = (144 << 10, 160 << 10, 96 << 10, 192 << 10)
# A launch; a block's first bytes; a block after another. Estimates are 5 % below the median record (H200).
LAUNCH_US, FILL_US, WAVE_US = 2.5, 1.5, 1.0
STORED = 2.2  # what a byte of y costs, in bytes that are read (64 rows: 8 us for 16 MB)


@dataclass(frozen=True, slots=True)
class DenseWorkload:
    """y[m, n] = x[m, k] @ weight[n, k]^T, all of ``dtype`` ("float16" or "bfloat16"), fp32 sums rounded once.

    ``m`` is the number of rows the schedule is chosen for; compiled kernels accept any m. k is a
    multiple of 8. Raises ``ValueError`` when a field is out of range.
    """

    DYNAMIC: ClassVar[tuple[str, ...]] = ("m",)  # fields that compiled kernels do not depend on
    SIZES: ClassVar[tuple[str, ...]] = ("m", "n", "k")  # whole numbers
    COMMAND: ClassVar[str] = "workload"  # the command line's group of commands

    m: int
    n: int
    k: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.m < 0 or self.n < 1 or self.k < 1 or self.k % X_COLUMNS:
            raise ValueError(f"(m, n, k) is ({self.m}, {self.n}, {self.k}); accepted: m >= 0, n >= 1, k a multiple of {X_COLUMNS}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; accepted: {', '.join(map(repr, DTYPES))}")

    @property
    def op(self) -> str:
        return NAME

    @property
    def kind(self) -> str:
        """The class of numbers that records must share to say something about each other."""
        return "w16"

    def operands(self, arch: str) -> tuple[Operand, ...]:
        """The tensors of a call, in call order."""
        return (
            Operand("x", self.dtype, ("m", self.k)),
            Operand("weight", self.dtype, (self.n, self.k)),
            Operand("y", self.dtype, ("m", self.n), written=True, read=False),
        )

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes that one call must move at least: weight, x and y once."""
        return 2 * (self.n * self.k + self.m * (self.n + self.k))

    def options(self) -> str:
        """The command line's words for this workload."""
        return shlex.quote(json.dumps(self.to_json()))

    def with_m(self, m: int) -> DenseWorkload:
        return self if m == self.m else replace(self, m=m)

    def bucketed(self) -> DenseWorkload:
        """The workload whose tuned schedule serves this one: as many rows as its tile has."""
        return self.with_m(next((rows for rows in (1, *BLOCK_M) if rows >= self.m), MAX_M))

    def static(self) -> DenseWorkload:
        """Equal for all workloads that one compiled kernel serves."""
        return replace(self, m=0)

    @property
    def title(self) -> str:
        """What a person calls it: ``m=4 n=128256 k=4096 in 16 bits``."""
        return f"m={self.m} n={self.n} k={self.k} in 16 bits"

    @property
    def served(self) -> str:
        """``title`` without what a compiled kernel does not depend on, and with the dtype."""
        return f"{self.n}x{self.k} {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DenseWorkload:
        """Raises ``KeyError`` for a missing field."""
        return cls(**{f.name: data[f.name] for f in fields(cls)})


def stage_bytes(schedule: Schedule) -> int:
    """Of a slot: of the weight and of x."""
    return (schedule.block_n + schedule.block_m) * STAGE_K * 2


def registers(schedule: Schedule) -> tuple[int, int]:
    """(A loading, a computing thread's) registers, out of the even share that a launch gives to both."""
    return handed_on(schedule, PRODUCER_REGISTERS)


def legal(workload: DenseWorkload, schedule: Schedule, target: Target) -> list[str]:
    s, reasons = schedule, []
    for field, accepted in (("block_n", BLOCK_N), ("block_m", BLOCK_M), ("block_k", (STAGE_K,))):
        if getattr(s, field) not in accepted:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {', '.join(map(str, accepted))}.")
    for field, low, high in (("num_stages", *STAGES), ("min_blocks", 1, MAX_MIN_BLOCKS)):
        if not low <= getattr(s, field) <= high:
            reasons.append(f"{field} is {getattr(s, field)}; accepted: {low} to {high}.")
    if reasons:
        return reasons
    if s.num_warps * ROWS != s.block_n:
        return [f"num_warps is {s.num_warps}; accepted with block_n {s.block_n}: {s.block_n // ROWS}, {ROWS} rows a warp."]
    smem = s.num_stages * stage_bytes(s) + STATIC_SMEM
    reasons += crowding(s, smem, s.num_warps * 32 + PRODUCERS, target, "num_stages, min_blocks or a smaller tile")
    needed, there = s.block_m // 2 + SPARE, registers(s)[1]
    if needed > there:
        reasons.append(f"a thread needs about {needed} registers, {there} are free; use a smaller block_m, block_n or min_blocks.")
    return reasons


def candidates(workload: DenseWorkload, target: Target) -> list[Schedule]:
    """Legal schedules worth measuring of the lowest tile that covers all rows, tiles in turn."""
    if not 0 < workload.m <= MAX_M:
        return []
    block_m = next(rows for rows in BLOCK_M if rows >= workload.m)
    return in_turn([list(_of_tile(n, block_m, blocks, workload, target)) for n, blocks in TILES])


def _of_tile(block_n: int, block_m: int, min_blocks: int, workload: DenseWorkload, target: Target) -> Iterator[Schedule]:
    base = Schedule(PROGRAM, block_n, block_m, STAGE_K, STAGES[0], block_n // ROWS, min_blocks=min_blocks)
    depths = (in_flight // (min_blocks * block_n * STAGE_K * 2) for in_flight in IN_FLIGHT)
    tried = (replace(base, num_stages=min(max(depth, STAGES[0]), STAGES[1])) for depth in dict.fromkeys(depths))
    yield from (s for s in tried if not legal(workload, s, target))


def estimate(workload: DenseWorkload, schedule: Schedule, target: Target) -> Estimate:
    """The bytes of all waves of blocks at memory's rate, and what a block waits for at its begin."""
    w, s = workload, schedule
    passes, tiles = -(-max(w.m, 1) // s.block_m), -(-w.n // s.block_n)
    waves = -(-tiles * passes // (target.units * s.min_blocks))
    load = 2 * (w.n * w.k + STORED * w.m * w.n / passes) / (target.read_gbps * 1e3)
    mma = w.flops / (target.mma_tflops * 1e6) / passes
    split = FILL_US + WAVE_US * (waves - 1) / s.min_blocks
    return Estimate(LAUNCH_US + split + passes * max(load, mma), passes, load, 0.0, mma, split, 0.0, LAUNCH_US, waves, 1.0)


def distance(there: DenseWorkload, here: DenseWorkload) -> float | None:
    """How far two calls are apart, in factors of two of a size."""
    sizes = ((there.n, here.n), (there.k, here.k), (max(there.m, 1), max(here.m, 1)))
    return sum(abs(log2(a / b)) for a, b in sizes) + OTHER_DTYPE * (there.dtype != here.dtype)


def rank(there: DenseWorkload, here: DenseWorkload) -> tuple[bool, float]:
    """A kernel made for as many rows serves best, then the next larger one."""
    return there.m < here.m, abs(log2(max(there.m, 1) / max(here.m, 1)))


RULE = Rule(
    PROGRAM,
    "tilebit.tiles.gemm.dense",
    arches=("sm_90a",),
    tried=("sm_90a",),
    reads=frozenset({"block_n", "block_m", "block_k", "num_stages", "num_warps", "min_blocks"}),
    legal=legal,
    candidates=candidates,
    estimate=estimate,
    promises=("wgmma", "tma", "dependent_waits", "register_reallocations"),
    loading_warps=PRODUCERS // 32,
    registers=registers,
)
DENSE = Operation(NAME, DenseWorkload, rules=(RULE,), gate="tilebit.autotune.problems.dense", distance=distance, rank=rank)
