"""The two trees that ``versions.py`` compares: each compiles its kernels and makes its calls in
processes of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("versions_child.py")
FOLDERS = ("layouts", "schedules", "tiles", "autotune")  # of a tree, beside the door, under its import name
HOST_SECONDS = 120.0  # that the calls of both trees may take
Built = dict[str, Any]  # a kernel's path, schedule and words of workspace, or why it failed


class BudgetOver(Exception):
    """The time that was given is over. What was compiled stays in the caches, what was measured in
    the rows."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout at ``root``; ``work`` is a folder for its links and its kernels."""

    root: Path
    work: Path

    def check(self) -> None:
        """Raises ``ValueError`` when this is no checkout of this project."""
        lacking = [name for name in ("tilebit", *FOLDERS) if not (self.root / name).is_dir()]
        if lacking:
            raise ValueError(
                f"{self.root} has no folder {', '.join(lacking)}; accepted: a checkout, or what git archive COMMIT tilebit "
                f"{' '.join(FOLDERS)} gives, unpacked"
            )

    def environment(self) -> dict[str, str]:
        """That of a process which imports this tree as ``tilebit``, wherever else one is installed,
        and keeps its kernels apart."""
        package = self.work / "tree" / "tilebit"
        package.mkdir(parents=True, exist_ok=True)
        wanted = [*(self.root / "tilebit").iterdir(), *(self.root / name for name in FOLDERS)]
        links = {package / path.name: path.resolve() for path in wanted if path.name != "__pycache__"}
        for link in package.iterdir():  # links that are right stay: another process may be importing by them
            if link.is_symlink() and link.readlink() != links.get(link):  # no folder of bytecode that a process has left
                link.unlink()
        for link, path in links.items():
            if not link.is_symlink():
                link.symlink_to(path)
        search = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(search), "PYTHONSAFEPATH": "1", "TILEBIT_CACHE": str(self.work / "kernels")}
        return {**os.environ, **own}

    def start(self, work: str, job: Mapping[str, Any]) -> subprocess.Popen[str]:
        """A process of this tree that was given a job (``versions_child.py``)."""
        process = subprocess.Popen(
            [sys.executable, str(CHILD), work], env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({**job, "tree": str(self.root.resolve())}) + "\n")
        process.stdin.flush()
        return process


def build(wanted: Mapping[Tree, Sequence[Mapping[str, Any]]], job: Mapping[str, Any], deadline: float) -> dict[Tree, list[Built]]:
    """What became of each tree's {workload, schedule}, all trees at once, each with its share of
    the cores. ``job`` names target or device.

    Raises ``BudgetOver`` behind ``deadline`` (of ``time.monotonic``) and ``RuntimeError`` when a
    tree's process ends early.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = max(1, cores // len(wanted))

    def of(tree: Tree) -> list[Built]:
        process = tree.start("build", {**job, "jobs": jobs, "wanted": list(wanted[tree])})
        try:
            said, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise BudgetOver from None
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise RuntimeError(f"compiling in {tree.root} ended with status {process.returncode}; its own words are above")
        return json.loads(said)

    with ThreadPoolExecutor(len(wanted)) as together:
        return dict(zip(wanted, together.map(of, wanted), strict=True))


def host_times(
    trees: Sequence[Tree], job: Mapping[str, Any], rounds: int, processes: int, seed: int = 0
) -> dict[str, list[list[list[float]]]]:
    """Microseconds of the host for each public call (``versions_child.host_calls``): of each tree a
    list for each of its ``processes``, with those of all rounds.

    All live throughout and take turns, in an order that every round draws. A process alone says
    little: where its memory happens to lie moves its times by a tenth. Raises ``RuntimeError`` when
    one ends or all this takes longer than ``HOST_SECONDS``.
    """
    orders, owners = random.Random(seed), [tree for tree in range(len(trees)) for _ in range(processes)]
    started = [trees[owner].start("host", job) for owner in owners]
    late = threading.Timer(HOST_SECONDS, lambda: [process.kill() for process in started])
    late.start()

    def answer(index: int) -> Any:
        process = started[index]
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise RuntimeError(f"calls of {trees[owners[index]].root} ended with status {process.wait()}; its own words are above")
        return json.loads(said)

    try:
        turns = list(range(len(started)))
        calls = [answer(index) for index in turns]
        names = [name for name in calls[0] if all(name in c for c in calls)]
        found: dict[str, list[list[float]]] = {name: [[] for _ in started] for name in names}
        for _ in range(rounds):
            orders.shuffle(turns)
            for index in turns:
                stdin = started[index].stdin
                assert stdin is not None
                stdin.write("\n")
                stdin.flush()
                for name, us in answer(index).items():
                    found[name][index].append(us)
        share = [slice(tree * processes, (tree + 1) * processes) for tree in range(len(trees))]
        return {name: [times[part] for part in share] for name, times in found.items()}
    finally:
        late.cancel()
        for process in started:
            process.kill()
            process.communicate()
