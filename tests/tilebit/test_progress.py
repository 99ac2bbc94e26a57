"""Bars while kernels compile: on a terminal's standard error, after a moment, and nowhere else."""

from __future__ import annotations

import io
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress

from tilebit import progress
from tilebit.kernels import KernelUnavailable
from tilebit.ops import prepare
from tilebit.ops.prepare import Preparation
from tilebit.progress import waiting
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.target import target_from_name

TARGET = target_from_name("sm_90a")
WORKLOADS = [Workload(m, 4096, 4096) for m in (1, 16, 64)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, threading.Event]:
    """(what a terminal's standard error gets from here on, what is set when the bar is there: at once). No fixture: pytest sets its own
    standard error behind those."""
    found, there, real = Terminal(), threading.Event(), Progress.start
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Progress, "start", lambda self: (real(self), there.set()))
    return found, there


def prepared(monkeypatch: pytest.MonkeyPatch, find: Any) -> Preparation:
    monkeypatch.setattr(prepare, "find_kernel", find)
    plan: Any = SimpleNamespace(target=TARGET, missing=lambda ms: WORKLOADS, bounds=())
    return Preparation([plan], None)


def test_kernels_are_counted_where_they_compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is printed meanwhile goes to standard output as ever."""
    stderr, there = shown(monkeypatch)
    counts, real = list[str](), progress.waiting

    def watched(what: str, total: int) -> Any:
        counts.append(f"{what}, {total}")
        return real(what, total)

    monkeypatch.setattr(prepare, "waiting", watched)

    def find(workload: Workload, target: Any) -> None:
        assert there.wait(20)
        print("printed meanwhile")

    prepared(monkeypatch, find).wait(20)
    assert counts == ["compiling kernels, 3"]
    text = stderr.getvalue()
    assert "compiling kernels" in text and "0/3" in text and text.endswith("\x1b[2K")  # wiped away
    assert capsys.readouterr().out == "printed meanwhile\n" * 3


def test_what_fails_says_so_behind_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, there = shown(monkeypatch)

    def find(workload: Workload, target: Any) -> None:
        assert there.wait(20)
        raise KernelUnavailable("no compiler")

    with pytest.raises(KernelUnavailable, match="no compiler"):
        prepared(monkeypatch, find).wait(20)
    assert "compiling kernels" in stderr.getvalue()


def test_what_is_there_at_once_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, _ = shown(monkeypatch)
    monkeypatch.setattr(progress, "SOON", 60.0)
    prepared(monkeypatch, lambda *_: None).wait(20)
    assert stderr.getvalue() == ""


def test_no_terminal_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where an environment variable asks for colours."""
    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for stderr in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        prepared(monkeypatch, lambda *_: None).wait(20)
        assert stderr is None or stderr.getvalue() == ""


def test_threads_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, there = shown(monkeypatch)
    builds: list[Future[None]] = [Future() for _ in range(2)]
    with waiting("compiling kernels", len(builds)) as settled:
        for done, build in enumerate(builds, 1):
            build.add_done_callback(lambda _, done=done: settled(done))
        assert there.wait(20)
        for build in builds:
            thread = threading.Thread(target=build.set_result, args=(None,))
            thread.start()
            thread.join()
    assert "2/2" in stderr.getvalue()
