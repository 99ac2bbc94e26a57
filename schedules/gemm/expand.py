"""The expansion of one width of a weight of any precision to 16 bits, as an operation: what products
of many rows start with, which are a library's from there on.

``expand_any`` (CUDA): a block of ``num_warps`` warps has 32 output channels, its warps take 16 of them
and 256 k in turn.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from math import log2
from typing import Any, ClassVar

from ...layouts.formats import GemmFormat
from ...layouts.planes import CUDA_TILE_K
from ..operands import Operand
from ..rule import Estimate, Operation, Rule
from ..schedule import Schedule
from ..target import Target
from . import any_wgmma
from .any import ARCHES, ENTRY, any_candidates
from .any_cost import LAUNCH_US, any_estimate
from .any_wgmma_cost import any_wgmma_estimate
from .operation import OTHER_DTYPE
from .workload import Workload

NAME, PROGRAM = "expand", "expand_any"
WARPS = (16, 8, 4, 2)
ROWS, TILES = 16, 2  # of a warp; of a block
REGISTER_BITS = 3  # as ``AnyExpand`` (device/codecs/any_expand.cuh)
OPS = 4.0  # lanes a number: selected, looked up and joined; counted, not measured
COLUMNS = 8  # of y's rows, stored at once
RATE = 0.75  # of memory's: 8192 x 28672 at 8 bits takes 203 us, at 3 bits 163 (H200)
# Rows of x at which a pass begins, or a last one is full.
LOOKED_AT = tuple(range(17, 129, 16)) + tuple(range(145, 513, 32)) + (512, 768, 769, 1024, 1025, 2048, 4096)


@dataclass(frozen=True, slots=True)
class ExpandWorkload:
    """y[n, k rounded up to 8] = codebook[n, code[n, k]] of ``bits`` bits in ``dtype`` ("float16" or
    "bfloat16"); columns from k on hold numbers of the codebook. Raises ``ValueError`` when a field is
    out of range."""

    DYNAMIC: ClassVar[tuple[str, ...]] = ()
    SIZES: ClassVar[tuple[str, ...]] = ("n", "k", "bits")
    COMMAND: ClassVar[str] = "workload"

    n: int
    k: int
    bits: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        _ = self.product  # says what is wrong with them

    @property
    def product(self) -> Workload:
        """A product with this weight."""
        return Workload(1, self.n, self.k, GemmFormat.parse(f"w{self.bits}a16_any"), self.dtype)

    @property
    def op(self) -> str:
        return NAME

    @property
    def kind(self) -> str:
        """The class of numbers that records must share to say something about each other."""
        return f"{self.bits}"

    @property
    def columns(self) -> int:
        """Of y: as many as x has, as products read it."""
        return -(-self.k // COLUMNS) * COLUMNS

    def operands(self, arch: str) -> tuple[Operand, ...]:
        """The tensors of a call: planes, codebooks, y."""
        held = [o for o in self.product.operands(arch) if o.name in ("weight", "scales")]
        return (*held, Operand("y", self.dtype, (self.n, self.columns), written=True, read=False))

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        """Bytes that one call must move at least."""
        return self.product.weight_bytes + 2 * self.n * self.columns

    def options(self) -> str:
        """The command line's words for this workload."""
        return shlex.quote(json.dumps(self.to_json()))

    def bucketed(self) -> ExpandWorkload:
        return self

    def static(self) -> ExpandWorkload:
        return self

    @property
    def title(self) -> str:
        return f"expand n={self.n} k={self.k} {self.bits} bits"

    @property
    def served(self) -> str:
        return f"{self.title} {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ExpandWorkload:
        """Raises ``KeyError`` for a missing field."""
        return cls(**{f.name: data[f.name] for f in fields(cls)})


def legal(workload: ExpandWorkload, schedule: Schedule, target: Target) -> list[str]:
    if schedule.num_warps not in WARPS:
        return [f"num_warps is {schedule.num_warps}; accepted: {', '.join(map(str, WARPS))}."]
    return []


def candidates(workload: ExpandWorkload, target: Target) -> list[Schedule]:
    """Those of which every warp has a step of k."""
    turns = TILES * -(-workload.k // CUDA_TILE_K)
    return [Schedule(PROGRAM, 1, 1, 1, num_warps=warps) for warps in WARPS if warps <= turns]


def tables_bytes(workload: ExpandWorkload) -> int:
    """Bytes of a block's tables; codes of up to REGISTER_BITS bits are looked up in registers."""
    return ENTRY << workload.bits if workload.bits > REGISTER_BITS else 0


def estimate(workload: ExpandWorkload, schedule: Schedule, target: Target) -> Estimate:
    """Bytes at RATE of memory's, instructions at that of all lanes."""
    load = workload.bytes / (RATE * target.read_gbps * 1e3)
    compute = OPS * workload.n * workload.k / (target.dequant_gops * 1e3)
    return Estimate(LAUNCH_US + max(load, compute), 1, load, compute, 0.0, 0.0, 0.0, LAUNCH_US, 1, 1.0)


def distance(there: ExpandWorkload, here: ExpandWorkload) -> float | None:
    """How far two calls are apart, in factors of two of a size; None for another width."""
    if there.bits != here.bits:
        return None
    return abs(log2(there.n / here.n)) + abs(log2(there.k / here.k)) + OTHER_DTYPE * (there.dtype != here.dtype)


RULE = Rule(
    PROGRAM,
    "tilebit.tiles.gemm.expand_any",
    arches=ARCHES,
    tried=ARCHES,
    reads=frozenset({"num_warps"}),
    legal=legal,
    candidates=candidates,
    estimate=estimate,
)
EXPAND = Operation(
    NAME, ExpandWorkload, rules=(RULE,), gate="tilebit.autotune.problems.expand", distance=distance, rank=lambda there, here: 0.0
)


@lru_cache(maxsize=4096)
def library_from(product: Workload, target: Target) -> int | None:
    """The least number of rows from which on expanding the weight and a library's 16-bit product should
    take less than the fastest program that looks numbers up itself, once for every tile of rows; None:
    there is none, or no expansion for this target."""
    first = None
    if target.arch not in ARCHES or not product.format.codebook:
        return None
    own = ExpandWorkload(product.n, product.k, product.format.bits, product.dtype)
    once = min(estimate(own, schedule, target).us for schedule in candidates(own, target))
    for m in sorted(LOOKED_AT, reverse=True):
        many = product.with_m(m)
        moved = 2 * (m * (own.n + own.columns) + own.n * own.columns) / (target.read_gbps * 1e3)
        library = LAUNCH_US + max(moved, many.flops / (target.mma_tflops * 1e6))
        own_us = [any_estimate(many, schedule, target).us for schedule in any_candidates(many, target)]
        if target.arch in any_wgmma.ARCHES:
            own_us += [any_wgmma_estimate(many, schedule, target).us for schedule in any_wgmma.any_wgmma_candidates(many, target)]
        if min(own_us, default=0.0) <= once + library:
            break
        first = m
    return first
