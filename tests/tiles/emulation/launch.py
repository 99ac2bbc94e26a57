"""What a launch of an emulated kernel is made of: a plan, clusters of blocks that run one after another, and their groups of threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

from .device_code import Place
from .shared_memory import SharedMemory


class Diverged(Exception):
    """Threads of one group would take different paths, from thread ``at`` on."""

    def __init__(self, at: int) -> None:
        super().__init__(f"threads below {at} and from {at} on take different paths")
        self.at = at


@dataclass(frozen=True, slots=True)
class ThreadIndex:
    """threadIdx.x of the threads ``low`` to ``high``, minus ``offset``."""

    low: int
    high: int
    offset: int = 0

    def __lt__(self, bound: int) -> bool:
        at = bound + self.offset
        if self.low < at < self.high:
            raise Diverged(at)
        return self.high <= at

    def __ge__(self, bound: int) -> bool:
        return not self < bound

    def __sub__(self, offset: int) -> ThreadIndex:
        return ThreadIndex(self.low, self.high, self.offset + offset)


@dataclass(frozen=True, slots=True)
class TensorType:
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class Block:
    index: tuple[int, ...]
    rank: int = 0
    shared: SharedMemory = field(default_factory=SharedMemory)


@dataclass(slots=True)
class Cluster:
    """The blocks that run now. ``synced``: groups that have come to the cluster's barrier, ever."""

    blocks: list[Block]
    place: Place
    groups: int
    synced: int = 0


@dataclass(slots=True)
class Group:
    """Threads ``low`` to ``high`` of a block; ``allocated`` counts what it has asked for of shared memory."""

    block: Block
    low: int
    high: int
    allocated: int = 0
    waited: bool = False  # for the kernels before this one
    meeting: int = 0  # of its cluster that it came to last
    products: list[Callable[[], None]] = field(default_factory=list)  # that are under way, the oldest first

    @property
    def size(self) -> int:
        return self.high - self.low


@dataclass(slots=True)
class Plan:
    """What a rehearsal found: the launch, the groups of threads, their memory, and the device functions that are called."""

    grid: tuple[int, ...] = ()
    cluster: tuple[int, int, int] = (1, 1, 1)
    threads: int = 0
    groups: list[tuple[int, int]] = field(default_factory=list)
    allocations: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # of shared memory: dtype and shape
    source: str = field(default="", repr=False)
    calls: dict[str, None] = field(default_factory=dict)

    def clusters(self) -> list[list[tuple[int, ...]]]:
        """Block indices, cluster by cluster, each by rank (x fastest); clusters in the order of their first blocks."""
        grid = (*self.grid, 1, 1)[:3]
        assert all(g % c == 0 for g, c in zip(grid, self.cluster, strict=True)), f"grid {grid} is not whole clusters of {self.cluster}"

        def indices(origin: tuple[int, ...], extents: tuple[int, ...]) -> list[tuple[int, ...]]:
            return [tuple(o + i for o, i in zip(origin, index[::-1], strict=True)) for index in product(*map(range, extents[::-1]))]

        origins = indices((0, 0, 0), tuple(g // c for g, c in zip(grid, self.cluster, strict=True)))
        return [indices(tuple(o * c for o, c in zip(origin, self.cluster, strict=True)), self.cluster) for origin in origins]
