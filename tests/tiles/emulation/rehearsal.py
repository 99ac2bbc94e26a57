"""A walk through a tile program that computes nothing: every branch once, to learn its launch, its groups of threads and its calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .launch import Block, Diverged, Group, Plan
from .tile_language import TileLanguage
from .tile_memory import ThreadLocal


class Rehearsal(TileLanguage):
    """``plan`` is complete after ``walk``."""

    def __init__(self, symbols: dict[str, int]) -> None:
        super().__init__(symbols, Plan(), None, random.Random(0))

    def walk(self, main: Callable[[], None]) -> Plan:
        """Run ``main`` once for each group of threads that stays together."""
        bounds = [(0, 1)]
        while bounds:
            low, high = bounds.pop()
            self.local.group = Group(Block((0, 0, 0)), low, high)
            try:
                main()
                self.plan.groups.append((low, self.group.high))
            except Diverged as split:
                bounds += [(split.at, self.group.high), (low, split.at)]
        return self.plan

    @contextmanager
    def Kernel(self, *grid: int, threads: int, cluster_dims: Any = None) -> Iterator[Any]:
        x, y, z, *_ = (*([cluster_dims] if isinstance(cluster_dims, int) else cluster_dims or ()), 1, 1, 1)
        self.plan.grid, self.plan.threads, self.plan.cluster = grid, threads, (x, y, z)
        if self.group.high == 1:
            self.group.high = threads
        with super().Kernel(*grid, threads=threads) as index:
            yield index

    def import_source(self, source: str) -> None:
        self.plan.source = source

    def alloc_shared(self, shape: tuple[int, ...], dtype: str) -> Any:
        self.group.allocated += 1
        if self.group.allocated > len(self.plan.allocations):
            self.plan.allocations.append((dtype, shape))
        return self.group.block.shared.add(dtype, shape)

    def alloc_local(self, shape: tuple[int, ...], dtype: str) -> ThreadLocal:
        found = super().alloc_local(shape, dtype)
        found.data[:] = 1  # flags that a device function would set
        return found

    def call_extern(self, _: str, name: str, *arguments: Any) -> None:
        self.plan.calls[name] = None

    def call_pure_extern(self, dtype: str, name: str, *arguments: int) -> int:
        self.plan.calls[name] = None
        return 1

    def Parallel(self, *extents: int) -> Iterator[tuple[int, ...]]:
        return iter(())

    def skipped(self, *_: Any, **__: Any) -> None:
        """Needs data or other threads."""

    clear = copy = tma_copy = barrier_arrive = mbarrier_wait_parity = gemm = wgmma_gemm = wait_wgmma = _may_touch = skipped
    cluster_sync = cluster_arrive_relaxed = cluster_wait = skipped
