"""What an operation and a program's rule are: the values that ``operations.py`` registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from .operands import Operand
from .schedule import Schedule
from .target import Target


class AnyWorkload(Protocol):
    """What is asked of an operation: a frozen, hashable value. ``DYNAMIC`` are the fields that
    compiled kernels do not depend on, sizes above all, ``SIZES`` all whole numbers, ``COMMAND`` the
    command line's group of commands ("" : the main one)."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    DYNAMIC: ClassVar[tuple[str, ...]]
    SIZES: ClassVar[tuple[str, ...]]
    COMMAND: ClassVar[str]

    @property
    def op(self) -> str:
        """The operation's name."""
        ...

    @property
    def dtype(self) -> str: ...

    @property
    def kind(self) -> str:
        """The class of numbers: measurements of another one say nothing about this."""
        ...

    @property
    def title(self) -> str:
        """What a person calls it."""
        ...

    @property
    def served(self) -> str:
        """``title`` without what a compiled kernel does not depend on, and with the dtype."""
        ...

    @property
    def flops(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Bytes that one call must move at least."""
        ...

    def operands(self, arch: str) -> tuple[Operand, ...]: ...

    def options(self) -> str:
        """The command line's words for this workload."""
        ...

    def bucketed(self) -> AnyWorkload:
        """The workload whose tuned schedule serves this one."""
        ...

    def static(self) -> AnyWorkload:
        """Equal for all workloads that one compiled kernel serves."""
        ...

    def to_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, data: dict[str, Any], /) -> AnyWorkload: ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an analytic model expects of one call, all times in microseconds.

    ``us`` = ``launch_us`` + ``pipeline_us`` + ``passes`` * overlap(``load_us``, ``dequant_us`` +
    ``mma_us``) + ``split_us``; overlap is the root of the sum of squares on a GPU, the maximum on a
    CPU. The terms inside are those of one pass over the weight and already contain the idling:
    ``utilization`` is the share of the units' time that is used (1: no idle unit), ``waves`` the
    number of blocks (CPU: task steps) that the busiest place runs one after another. Of the small-m
    programs ``dequant_us`` is the time to issue all instructions, ``mma_us`` the waiting of one
    warp for its products."""

    us: float
    passes: int
    load_us: float
    dequant_us: float
    mma_us: float
    pipeline_us: float
    split_us: float
    launch_us: float
    waves: int
    utilization: float

    @property
    def bound(self) -> str:
        """The longer term: "load" or "compute"."""
        return "load" if self.load_us >= self.dequant_us + self.mma_us else "compute"


def roofline(workload: AnyWorkload, schedule: Schedule, target: Target) -> Estimate:
    """The least that any program can take: the longer of reading all bytes and computing all
    products at the device's rates."""
    load, mma = workload.bytes / (target.read_gbps * 1e3), workload.flops / (target.mma_tflops * 1e6)
    return Estimate(max(load, mma), 1, load, 0.0, mma, 0.0, 0.0, 0.0, 1, 1.0)


def no_workspace(workload: Any, schedule: Schedule, target: Target) -> int:
    """Of a program that needs none: 0 words."""
    return 0


def no_reasons(*_: Any) -> list[Any]:
    """Of a program that accepts everything."""
    return []


def no_sources(workload: Any) -> tuple[str, ...]:
    """Of a program whose own files serve every workload."""
    return ()


ALL_FIELDS = frozenset(f.name for f in fields(Schedule))
# Of the fields that a program does not use; those that every schedule states are 1.
UNUSED = {f.name: 1 if f.default is MISSING else f.default for f in fields(Schedule) if f.name != "program"}


@lru_cache(maxsize=64)
def _unread(reads: frozenset[str]) -> tuple[tuple[str, int], ...]:
    """The fields that a program does not read, and where they must stand."""
    return tuple((name, unused) for name, unused in UNUSED.items() if name not in reads)


@dataclass(frozen=True, slots=True)
class Rule:
    """A program and what it accepts.

    ``module`` holds its ``PROGRAM``; ``arches`` it runs on, those in ``tried`` with candidates of
    its own (elsewhere another program of the operation is never slower). ``reads`` are the fields
    of a ``Schedule`` that it uses: every other must stand at its default, or at 1 where it has
    none. ``legal(workload, schedule, target)`` gives sentences about the fields it reads,
    ``unserved(workload, arch)`` about the workload on an arch. ``candidates(workload, target)`` are schedules worth
    measuring. ``operands(workload, arch)`` are those of a program that reads them in another form
    than the workload's own; ``sources(workload)`` files that decide what it builds for some
    workloads, beside the program's
    own: device functions (names under ``tiles/device``, or absolute paths) and modules of other
    packages. ``promises`` are instructions that lint finds in its code whatever the schedule
    (``tiles/compiler/lint.py`` has their names); ``loading_warps`` load in a block beside the
    computing ones, and take registers from them as ``registers(schedule)`` says: (of a loading
    thread, of a computing one).
    """

    program: str
    module: str
    arches: tuple[str, ...]
    reads: frozenset[str] = ALL_FIELDS
    legal: Callable[[Any, Schedule, Target], list[str]] = no_reasons
    candidates: Callable[[Any, Target], list[Schedule]] = no_reasons
    estimate: Callable[[Any, Schedule, Target], Estimate] = roofline
    workspace_words: Callable[[Any, Schedule, Target], int] = no_workspace
    unserved: Callable[[Any, str], list[str]] = no_reasons
    operands: Callable[[Any, str], tuple[Operand, ...]] | None = None
    sources: Callable[[Any], tuple[str, ...]] = no_sources
    tried: tuple[str, ...] = ()
    promises: tuple[str, ...] = ()
    loading_warps: int = 0
    registers: Callable[[Schedule], tuple[int, int]] | None = None

    def reasons(self, workload: Any, schedule: Schedule, target: Target) -> list[str]:
        """Why ``schedule`` cannot serve ``workload`` on ``target``: sentences, empty when it can."""
        if target.arch not in self.arches:
            return [f"{self.program} does not run on {target.arch}; accepted: {', '.join(self.arches)}."]
        reasons = self.unserved(workload, target.arch) + [
            f"{name} is {getattr(schedule, name)}; accepted by {self.program}, which does not use it: {unused}."
            for name, unused in _unread(self.reads)
            if getattr(schedule, name) != unused
        ]
        return reasons or self.legal(workload, schedule, target)


@dataclass(frozen=True, slots=True)
class Operation:
    """A computation, the programs that compute it, and what of it is compared.

    ``workload`` is the class of its problems. ``gate`` is the module whose ``gate(workload, seed,
    arch, device)`` says whether a kernel is right (``autotune/problems``). ``distance(there,
    here)`` is how far a measurement is from a question, in factors of two of a size; None: it says
    nothing. ``twins(there, here)``: the same shape in other numbers. ``rank(there, here)`` orders
    kernels made for other sizes (the least serves best). ``features(workload, schedule, target,
    estimate)`` are what a learned ranker sees; None: there is none. ``proposed``: numbers of rows m
    at which kernels for a portfolio of a shape are proposed (``schedules/portfolio.py``); empty:
    its kernels are chosen one by one.
    """

    name: str
    workload: type[Any]
    rules: tuple[Rule, ...]
    gate: str
    distance: Callable[[Any, Any], float | None]
    rank: Callable[[Any, Any], Any]
    twins: Callable[[Any, Any], bool] = lambda there, here: False
    features: Callable[[Any, Schedule, Target, Estimate], dict[str, float]] | None = None
    proposed: tuple[int, ...] = ()
