"""Kernels that are prepared beside each other: each thread starts one compiler, however many kernels it builds."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tilebit import kernels
from tilebit.ops.prepare import Preparation
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler import pool
from tilebit.tiles.compiler.compile import CompileFailure

TARGET = target_from_name("sm_90a")
WORKLOADS = [Workload(m, 4096, 4096) for m in (1, 8, 16, 64, 256, 1024)]


class Pools:
    """Stands for ``CompilePool``, for two cores: nothing compiles. ``used`` are the pools that were asked to, by how often; the first two
    wait for each other."""

    def __init__(self) -> None:
        self.used: dict[Any, int] = {}
        self.closed: list[Any] = []
        self.both = threading.Barrier(2)

    def __call__(self, jobs: int | None = None, *_: Any, **options: Any) -> Any:
        made = SimpleNamespace(jobs=jobs or 2, close=lambda: self.closed.append(id(made)))
        made.compile = lambda requests, progress=None: self.compile(id(made), requests)
        return made

    def compile(self, made: int, requests: list[Any]) -> list[CompileFailure]:
        first = made not in self.used
        self.used[made] = self.used.get(made, 0) + len(requests)
        if first:
            self.both.wait(60)
        return [CompileFailure(request, "crash", ("it is made up",)) for request in requests]


def test_a_thread_starts_one_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools()
    monkeypatch.setattr(pool, "CompilePool", pools)
    plan: Any = SimpleNamespace(target=TARGET, missing=lambda ms: WORKLOADS, bounds=())
    preparation = Preparation([plan], None)
    with pytest.raises(kernels.KernelUnavailable, match="it is made up"):
        preparation.wait(60)
    preparation._pool.shutdown()  # type: ignore[union-attr]
    assert preparation.left == 0 and sum(pools.used.values()) == len(WORKLOADS)
    assert len(pools.used) == 2 and sorted(pools.closed) == sorted(pools.used)


def test_builds_of_other_threads_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(pool, "CompilePool", lambda *_, **__: SimpleNamespace(close=lambda: None))
    with kernels.one_compiler():
        for _ in range(2):
            with kernels._compilers(1, None) as one:  # type: ignore[arg-type]
                used.append(one)
        thread = threading.Thread(target=lambda: used.append(kernels._of_thread.pools))
        thread.start()
        thread.join()
    assert used[0] is used[1] and used[2] is None and kernels._of_thread.pools is None
