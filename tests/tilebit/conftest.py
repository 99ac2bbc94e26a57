"""Shared by the tests of the door: the kernels they call, compiled once for the whole run, and a count of launches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # door_cases


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    """Of a test that runs on both."""
    import torch

    return torch.device(request.param)


@dataclass(frozen=True)
class Launches:
    """Kernels that calls asked for, in order, as (workload, rows): each is launched right after."""

    seen: list[tuple[object, int]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts launches: ``Plan.launcher`` is the only way to one."""
    from tilebit.ops import dispatch

    counted = Launches([])
    real = dispatch.Plan.launcher

    def launcher(plan: dispatch.Plan, m: int):
        counted.seen.append((plan.workload, m))
        return real(plan, m)

    monkeypatch.setattr(dispatch.Plan, "launcher", launcher)
    return counted


@pytest.fixture(scope="session")
def cpu_kernels() -> None:
    """The kernels of ``FORMATS`` x ``ROWS`` for this CPU, compiled into the run's cache by the first test process that asks."""
    from door_cases import FORMATS, ROWS, workload
    from filelock import FileLock

    from tilebit.kernels import build
    from tilebit.schedules.target import cpu_target
    from tilebit.tiles.compiler.cache import ArtifactCache

    with FileLock(ArtifactCache().root / "cpu-kernels.lock"):
        build([workload(case, m) for case in FORMATS for m in ROWS], cpu_target())
