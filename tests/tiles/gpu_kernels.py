"""GPU tests: the kernels that they ask for, compiled at once before the first runs, and parts of
them for a machine that is lent for minutes.

A test says with ``@pytest.mark.kernels(of=cases)`` what it launches: ``cases`` takes parameters of
the test by name and returns (workload, schedule) pairs. Those of all selected tests are compiled
in parallel, and the fixture ``kernels`` holds them. ``--part 2/6`` selects the second of six parts, which are disjoint,
cover all selected tests and take about as long as one another; tests of the same kernels are in
the same part, and so are the tests of a file that declare none.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tilebit.schedules.operations import AnyWorkload
    from tilebit.schedules.schedule import Schedule
    from tilebit.schedules.target import Target
    from tilebit.tiles.compiler.kernel import Kernel
    from tilebit.tiles.compiler.request import CompileFailure

    Case = tuple[AnyWorkload, Schedule]
    Built = dict[Case, Kernel | CompileFailure]

BUILT = pytest.StashKey["Built"]()
# About what a test takes on an H200, and a kernel on one of 16 cores.
TEST_SECONDS, KERNEL_SECONDS = 2.0, 0.6


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, metavar="I/N", help="run the I-th of N parts of the selected tests, such as 2/6")


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"part is {text!r}; accepted: I/N with I from 1 to N, such as 2/6")
    return int(match[1]), int(match[2])


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part is None:
        return
    number, parts = config.option.part
    mine = set(split(items, parts)[number - 1])
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = [item for item in items if item in mine]


def asked(item: Any) -> tuple[Case, ...]:
    """The (workload, schedule) pairs whose kernels the test launches; empty when it declares none."""
    mark = item.get_closest_marker("kernels")
    if mark is None:
        return ()
    cases = mark.kwargs["of"]
    return tuple(cases(**{name: item.callspec.params[name] for name in inspect.signature(cases).parameters}))


def split(items: Sequence[Any], parts: int) -> list[list[Any]]:
    """``items`` in ``parts`` lists of about the same duration: the longest group first, each to the list that is the shortest so far."""
    groups: dict[Hashable, list[Any]] = {}
    seconds: dict[Hashable, float] = {}
    for item in items:
        cases = frozenset(asked(item))
        group = cases or str(item.path)
        groups.setdefault(group, []).append(item)
        seconds[group] = seconds.get(group, KERNEL_SECONDS * len(cases)) + TEST_SECONDS
    lists: list[list[Any]] = [[] for _ in range(parts)]
    totals = [0.0] * parts
    for group in sorted(groups, key=lambda g: (-seconds[g], groups[g][0].nodeid)):
        shortest = totals.index(min(totals))
        lists[shortest] += groups[group]
        totals[shortest] += seconds[group]
    return lists


def compiled(items: Iterable[Any], target: Target) -> Built:
    """What became of every kernel that ``items`` ask for and whose program runs on ``target``: from the cache of the run or compiled, as
    many at once as there are cores."""
    from filelock import FileLock

    from tilebit.schedules.operations import find_rule
    from tilebit.tiles.compiler.cache import ArtifactCache
    from tilebit.tiles.compiler.compile import CompileRequest
    from tilebit.tiles.compiler.pool import CompilePool

    every = dict.fromkeys(case for item in items for case in asked(item))
    cases = [(workload, schedule) for workload, schedule in every if target.arch in find_rule(schedule.program).arches]
    cache = ArtifactCache()
    requests = [CompileRequest(schedule.program, workload, schedule, target) for workload, schedule in cases]
    # Test processes compile one after another: the second finds all that it shares with the first.
    with FileLock(cache.root / "gpu-tests.lock"), CompilePool(os.cpu_count() or 1, cache=cache) as pool:
        return dict(zip(cases, pool.compile(requests), strict=True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Compile before the first test begins, so that no test's timeout counts it."""
    if session.config.option.collectonly or not any(item.get_closest_marker("kernels") for item in session.items):
        return
    import torch

    if torch.cuda.is_available():
        from tilebit.schedules.target import detect_target

        session.config.stash[BUILT] = compiled(session.items, detect_target())


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> Built:
    """{(workload, schedule): Kernel or CompileFailure} of all selected tests that declare them."""
    return request.config.stash[BUILT]
