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
        self.go = threading.Lock()  # held until it is the member's turn
        self.go.acquire()
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.ended = False


class Crew:
    """Runs some groups to their ends. ``events`` are what is under way: each is called once, some time before the last group ends.

    Who pauses or ends draws who is next, and wakes it; nothing is switched where that is itself."""

    def __init__(self, order: random.Random) -> None:
        self.random = order
        self.events: list[Callable[[], None]] = []
        self._members: list[_Member] = []
        self._done = threading.Lock()  # held until every member has ended, or one has failed
        self._running: _Member | None = None
        self._abandoned = False
        self._error: BaseException | None = None

    def run(self, bodies: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run every (name, body). Raises what a body raises, and ``Deadlock``."""
        self._members = [_Member(name, body) for name, body in bodies]
        threads = [threading.Thread(target=self._live, args=(member,), daemon=True) for member in self._members]
        self._done.acquire()
        for thread in threads:
            thread.start()
        self._pass_on(self._next())
        self._done.acquire()
        self._abandoned = True
        for member, thread in zip(self._members, threads, strict=True):
            if not member.ended:
                member.go.release()
            thread.join()
        if self._error is not None:
            raise self._error
        if self.events:
            raise KernelFault(f"every group has ended, and {len(self.events)} copies are in flight")

    def pause(self, ready: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Called by the group that runs: let others go first, and come back when ``ready``."""
        member = self._running
        assert member is not None
        member.ready, member.waits_for = ready, waits_for
        chosen = self._next()
        if chosen is member:
            return
        self._pass_on(chosen)
        member.go.acquire()
        if self._abandoned:
            raise _Abandoned

    def _next(self) -> _Member:
        """Who goes on; events that are drawn before happen here. Raises ``Deadlock``."""
        draw = self.random.randrange
        while True:
            able = [m for m in self._members if not m.ended and (m.ready is None or m.ready())]
            if not able and not self.events:
                waiting = "; ".join(f"{m.name} waits for {m.waits_for}" for m in self._members if not m.ended)
                raise Deadlock(f"nobody can go on: {waiting}.")
            choice = draw(len(able) + len(self.events))
            if choice < len(able):
                return able[choice]
            self.events.pop(choice - len(able))()

    def _pass_on(self, chosen: _Member) -> None:
        self._running = chosen
        chosen.go.release()

    def _live(self, member: _Member) -> None:
        member.go.acquire()
        if self._abandoned:
            return
        try:
            member.body()
            member.ended = True
            if not all(other.ended for other in self._members):
                return self._pass_on(self._next())
        except _Abandoned:
            return
        except BaseException as error:
            member.ended, self._error = True, error
        self._done.release()
