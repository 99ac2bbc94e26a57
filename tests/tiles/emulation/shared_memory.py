"""A block's shared memory: its allocations, its barriers (the 64 bits that ``cuda_ptx.h`` works on), and copies that report to them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from .device_code import build
from .tile_memory import POISON, STORED, Buffer, Element, IllegalAccess

SHARED_BYTES = 228 << 10
GAP, CANARY = 128, 0xC5  # bytes after each allocation that nobody may write
BARRIER = "barrier"  # what an allocation of them has in place of a dtype
BARRIER_BYTES = 8


@cache
def _host() -> ctypes.CDLL:
    return build("")


class SharedMemory:
    """The allocations of one block, in order."""

    def __init__(self) -> None:
        raw = np.full(SHARED_BYTES + 1024, CANARY, dtype=np.uint8)
        self.bytes = raw[-raw.ctypes.data % 1024 :][:SHARED_BYTES]
        self.taken: list[Buffer | Barriers] = []
        self._gaps: list[slice] = []

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def add(self, dtype: str, shape: tuple[int, ...]) -> Buffer | Barriers:
        """A buffer, NaN all over, or barriers (``shape``: the arrivals that a phase of each waits for)."""
        begin = self._gaps[-1].stop if self._gaps else 0
        size = len(shape) * BARRIER_BYTES if dtype == BARRIER else int(np.prod(shape)) * np.dtype(STORED[dtype]).itemsize
        end = begin + size
        self._gaps.append(slice(end, -(-end // GAP) * GAP + GAP))
        if self._gaps[-1].stop > SHARED_BYTES:
            raise IllegalAccess(f"a block asked for more than {SHARED_BYTES} bytes of shared memory")
        memory = self.bytes[begin:end]
        if dtype == BARRIER:
            self.taken.append(Barriers(memory, shape, f"barriers {len(self.taken)}"))
        else:
            memory.view(STORED[dtype])[:] = POISON[dtype]
            self.taken.append(Buffer(shape, dtype, memory.view(STORED[dtype])))
        return self.taken[-1]

    def barrier_at(self, address: int) -> Barrier:
        """The barrier whose 64 bits are there."""
        for array in self.taken:
            if isinstance(array, Barriers) and 0 <= address - array.address < array.states.nbytes:
                return array[(address - array.address) // BARRIER_BYTES]
        raise IllegalAccess("no barrier is there")

    def check(self) -> None:
        """Raises ``IllegalAccess`` when something beside an allocation was written."""
        for index, gap in enumerate(self._gaps):
            unused = gap if index + 1 < len(self._gaps) else slice(gap.start, None)
            if (self.bytes[unused] != CANARY).any():
                raise IllegalAccess(f"a block wrote past the end of its shared allocation {index}")


class Barriers:
    """An array of them in ``memory``; ``arrivals`` that a phase of each waits for."""

    def __init__(self, memory: np.ndarray, arrivals: Sequence[int], name: str) -> None:
        self.states = memory.view(np.uint32).reshape(-1, 2)
        self.address = self.states.ctypes.data
        self.name = name
        for i, count in enumerate(arrivals):
            _host().host_mbarrier_init(ctypes.c_void_p(self[i].address), count)

    def __getitem__(self, index: int) -> Barrier:
        return Barrier(self, index)


class Barrier:
    """One barrier of an array."""

    def __init__(self, array: Barriers, index: int) -> None:
        self.array, self.index = array, index
        self.address = array.address + index * BARRIER_BYTES

    def change(self, arrivals: int, more_bytes: int) -> None:
        """``arrivals`` have come, ``more_bytes`` must land before the phase ends (fewer: have landed)."""
        if _host().host_mbarrier_change(ctypes.c_void_p(self.address), arrivals, more_bytes):
            raise IllegalAccess(f"{self}: more arrivals than its phase waits for")

    def passed(self, parity: int) -> Callable[[], bool]:
        """Whether the phase of ``parity`` has ended, as mbarrier.try_wait.parity asks."""
        state = self.array.states[self.index]
        return lambda: int(state[0]) & 1 != parity

    def __str__(self) -> str:
        return f"{self.array.name}[{self.index}]"


def issue(source: Element, targets: Sequence[tuple[Element, Barrier]]) -> list[Callable[[], None]]:
    """Start copying a region (zeros past a tensor's ends) into each target: spoils the targets now and returns what happens when the data
    lands, each time with its bytes reported to the target's barrier."""
    data = source.buffer.window(source.start, source.extents)

    def landing(target: Element, barrier: Barrier) -> Callable[[], None]:
        def land() -> None:
            target.fill(data)
            barrier.change(0, -data.nbytes)

        return land

    for target, _ in targets:
        assert source.buffer.dtype == target.buffer.dtype
        target.fill(POISON[target.buffer.dtype])
    return [landing(*target) for target in targets]
