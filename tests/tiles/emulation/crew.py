"""Groups of threads that take turns: each runs until it pauses, and who is next is drawn at random among those who can go on.

A kernel's roles (two that load, one that computes, in every block of a cluster) wait for each other at barriers; whatever order they run
in, the result must be the same, and somebody must always be able to run. Copies in flight are ``events``, which happen in between.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from .device_code import KernelFault


class Deadlock(KernelFault):
    """Every group waits, and nothing is in flight that could wake one."""


class _Abandoned(BaseException):
    """Ends a group's thread after another one has failed."""


class _Member:
    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self.name, self.body = name, body
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.ended = False
        self.error: BaseException | None = None


class Crew:
    """Runs some groups to their ends. ``events`` are what is under way: each is called once, some time before the last group ends."""

    def __init__(self, order: random.Random) -> None:
        self.random = order
        self.events: list[Callable[[], None]] = []
        self._members: list[_Member] = []
        self._back = threading.Semaphore(0)
        self._running: _Member | None = None
        self._abandoned = False

    def run(self, bodies: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run every (name, body). Raises what a body raises, and ``Deadlock``."""
        self._members = [_Member(name, body) for name, body in bodies]
        for member in self._members:
            threading.Thread(target=self._live, args=(member,), daemon=True).start()
        try:
            while not all(member.ended for member in self._members):
                self._turn()
            if self.events:
                raise KernelFault(f"every group has ended, and {len(self.events)} copies are in flight")
        finally:
            self._abandoned = True
            for member in self._members:
                if not member.ended:
                    self._resume(member)

    def pause(self, ready: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Called by the group that runs: let others go first, and come back when ``ready``."""
        member = self._running
        assert member is not None
        member.ready, member.waits_for = ready, waits_for
        self._back.release()
        member.go.acquire()
        if self._abandoned:
            raise _Abandoned

    def _turn(self) -> None:
        able = [m for m in self._members if not m.ended and (m.ready is None or m.ready())]
        if not able and not self.events:
            waiting = "; ".join(f"{m.name} waits for {m.waits_for}" for m in self._members if not m.ended)
            raise Deadlock(f"nobody can go on: {waiting}.")
        choice = self.random.randrange(len(able) + len(self.events))
        if choice >= len(able):
            self.events.pop(choice - len(able))()
            return
        self._resume(able[choice])
        if (error := able[choice].error) is not None:
            raise error

    def _resume(self, member: _Member) -> None:
        self._running = member
        member.go.release()
        self._back.acquire()

    def _live(self, member: _Member) -> None:
        member.go.acquire()
        try:
            if not self._abandoned:
                member.body()
        except _Abandoned:
            pass
        except BaseException as error:
            member.error = error
        member.ended = True
        self._back.release()
