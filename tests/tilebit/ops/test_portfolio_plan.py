"""Which of a shape's kernels a call runs, at every m: what ``choose`` and ``explain`` say, with a workspace that is long enough."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilebit import packs
from tilebit.layouts.formats import QuantFormat
from tilebit.ops import dispatch, prepare
from tilebit.packs import PackEntry
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import workspace_words
from tilebit.schedules.portfolio import Portfolio
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.select import choose, explain
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")
SHAPE = (6656, 5120)  # without records
SMALL = Schedule("gemm_wgmma", 128, 64, 128, 4, 8, split_k=4)
LARGE = replace(SMALL, block_m=128)
TABLE = Portfolio((64, 128, 192, 512), (SMALL, LARGE, SMALL, LARGE), (1.0, 2.0, 3.0, 4.0))


class Kernels:
    """Stands in for ``find_kernel``: every kernel is at hand and launches nothing. ``asked`` are the workloads, ``bound`` is what each
    launcher was made for: (schedule, rows)."""

    def __init__(self, schedule_of: Callable[[Workload], Schedule]) -> None:
        self.schedule_of, self.asked = schedule_of, list[Workload]()

    def __call__(self, workload: Workload, target: Any) -> Any:
        self.asked.append(workload)
        return SimpleNamespace(schedule=self.schedule_of(workload), prepare=lambda index: None)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> dispatch.Plan:
    """A plan for an H200 that is not there; its launchers are (schedule, rows)."""
    monkeypatch.setattr(dispatch, "device_target", lambda device: H200)
    monkeypatch.setattr(dispatch, "bound", lambda kernel, plan, rows: (kernel.schedule, rows))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(packs, "_loaded", [])
    return dispatch.Plan(torch.device("cuda", 0), *SHAPE, QuantFormat(), torch.float16, False)


def found_in(table: Portfolio) -> Callable[[Workload], Schedule]:
    return lambda workload: table.at(workload.m)


def test_every_m_runs_what_choose_says(plan: dispatch.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(lambda w: choose(w, H200).schedule)
    monkeypatch.setattr(dispatch, "find_kernel", kernels)
    for m in range(1, 5001):
        schedule, rows = plan.launcher(m)  # type: ignore[misc]
        assert schedule == dispatch.portfolio(plan.workload, H200).at(m)  # type: ignore[union-attr]
        assert rows is None or rows >= m, "its workspace is long enough"
    for m in (1, 3, 24, 100, 257, 300, 700, 4999):
        assert plan.launcher(m)[0] == choose(plan.workload.with_m(m), H200).schedule  # type: ignore[index]
    first, *_ = explain(plan.workload.with_m(300), H200)
    assert first.chosen and first.schedule == plan.launcher(300)[0]  # type: ignore[index]
    found = {choose(w, H200).schedule for w in kernels.asked}
    assert len(set(kernels.asked)) == len(found), "a kernel that serves several parts is built once"


def test_a_kernel_that_serves_several_parts_has_the_workspace_of_the_largest(plan: dispatch.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(found_in(TABLE))
    monkeypatch.setattr(dispatch, "find_kernel", kernels)
    monkeypatch.setattr(dispatch, "portfolio", lambda workload, target: TABLE)
    assert [plan.launcher(m) for m in (3, 65, 150, 193, 9999)] == [(SMALL, 192), (LARGE, 128), (SMALL, 192), (LARGE, None), (LARGE, None)]
    assert [w.m for w in kernels.asked] == [192, 512, 512], "and only the last part's takes any number"
    assert workspace_words(plan.workload.with_m(192), SMALL, H200) > workspace_words(plan.workload.with_m(64), SMALL, H200)


def test_a_plan_in_steps_has_kernels_of_its_own_where_steps_were_measured(plan: dispatch.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are found as those of the product alone, so that they are built once for both."""
    monkeypatch.setattr(dispatch, "find_kernel", kernels := Kernels(lambda w: choose(w, H200).schedule))
    early = dispatch.Plan(torch.device("cuda", 0), 6144, 4096, QuantFormat(), torch.float16, False, True)  # its records ship
    for m in (1, 2, 15, 16, 17, 300):
        assert early.launcher(m)[0] == choose(early.workload.with_m(m), H200).schedule  # type: ignore[index]
    assert {w.m for w in kernels.asked if w.dependent} == {1, 16} and not all(w.dependent for w in kernels.asked)


def test_a_plan_keeps_its_table(plan: dispatch.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning in the same process makes another table: a launcher made for a part of the old one may lack workspace for the new one's."""
    wider = Portfolio((512,), (SMALL,), (1.0,))
    tables = [TABLE]
    monkeypatch.setattr(dispatch, "portfolio", lambda workload, target: tables[-1])
    monkeypatch.setattr(dispatch, "find_kernel", Kernels(lambda w: tables[-1].at(w.m)))
    assert plan.launcher(3) == (SMALL, 192)
    tables.append(wider)
    for m in (3, 64, 300, 500):
        rows = plan.launcher(m)[1]  # type: ignore[index]
        assert rows is None or rows >= m


@pytest.mark.parametrize("ms", [[300], [3, 40, 300]])
def test_a_pack_serves_the_m_it_was_made_for(plan: dispatch.Plan, monkeypatch: pytest.MonkeyPatch, ms: list[int]) -> None:
    made_for = (1, 24, 300, 1000)  # none of them a border of the table
    entries = tuple(PackEntry(str(m), plan.workload.with_m(m), "sm_90a", (), Path(str(m)), "") for m in made_for)
    pack = packs.Pack(Path("pack"), entries, {})
    monkeypatch.setattr(packs, "_loaded", [pack])
    monkeypatch.setattr(packs, "load_kernel", lambda path, digest: SimpleNamespace(schedule=path.name, prepare=lambda index: None))
    monkeypatch.setattr(dispatch, "portfolio", lambda *_: pytest.fail("a pack needs no table"))
    for m, serving in ((1, 1), (2, 24), (24, 24), (25, 300), (300, 300), (301, 1000), (1000, 1000), (5000, 1000)):
        assert plan.launcher(m) == (str(serving), serving if serving < 1000 else None)
        assert (entry := pack.entry_for(plan.workload.with_m(m), "sm_90a")) is not None and entry.workload.m == serving
    assert not plan.missing(ms) and not plan.missing(None) and plan.bounds == made_for


def test_threads_that_need_one_kernel_wait_for_it_and_others_do_not(plan: dispatch.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, compiled = threading.Event(), threading.Event()
    kernels = Kernels(found_in(TABLE))

    def find(workload: Workload, target: Any) -> Any:
        kernel = kernels(workload, target)
        if kernel.schedule == LARGE:
            compiling.set()
            assert compiled.wait(60)
        return kernel

    monkeypatch.setattr(dispatch, "find_kernel", find)
    monkeypatch.setattr(dispatch, "portfolio", lambda workload, target: TABLE)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda m=m: results.append(plan.launcher(m)), daemon=True) for m in (100, 101, 128)]
    for thread in threads:
        thread.start()
    assert compiling.wait(60)
    other = threading.Thread(target=plan.launcher, args=(3,), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive(), "a call that needs another kernel does not wait"
    assert not results
    compiled.set()
    for thread in threads:
        thread.join(60)
    assert results == [(LARGE, 128)] * 3 and [w.m for w in kernels.asked].count(512) == 1


def test_prepared_in_the_background(plan: dispatch.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = threading.Event()
    kernels = Kernels(found_in(TABLE))

    def find(workload: Workload, target: Any) -> Any:
        assert compiled.wait(60)
        return kernels(workload, target)

    monkeypatch.setattr(dispatch, "portfolio", lambda workload, target: TABLE)
    monkeypatch.setattr(dispatch, "find_kernel", find)
    monkeypatch.setattr(prepare, "find_kernel", find)
    twin = dispatch.Plan(torch.device("cuda", 0), *SHAPE, QuantFormat(), torch.float16, False, True)
    preparation = prepare.Preparation([plan, twin], None)
    assert preparation.left == 2, "each kernel once, for both plans"
    with pytest.raises(TimeoutError):
        preparation.wait(0.01)
    compiled.set()
    preparation.wait(60)
    assert preparation.left == 0 and set(plan.launchers) == set(twin.launchers) == set(TABLE.bounds)


def test_what_cannot_be_built_is_said_when_it_is_waited_for(plan: dispatch.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(workload: Workload, target: Any) -> Any:
        raise dispatch.KernelUnavailable("no compiler")

    monkeypatch.setattr(dispatch, "portfolio", lambda workload, target: TABLE)
    monkeypatch.setattr(prepare, "find_kernel", find)
    preparation = prepare.Preparation([plan], [3])
    with pytest.raises(dispatch.KernelUnavailable, match="no compiler"):
        preparation.wait(60)
    assert preparation.left == 0
