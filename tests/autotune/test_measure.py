"""Timing and search order."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from tilebit.autotune import measure as measuring
from tilebit.autotune.measure import MIN_REPLAYS, copies_needed, time_calls, time_replays
from tilebit.autotune.search import Patience, shortlist
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")


class Clock:
    """Stands in for the ``time`` module of what is tested: time passes in ``sleep`` alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(measuring, "time", clock := Clock())
    return clock


def test_replays_are_timed_as_they_stand(clock: Clock):
    found = time_replays({1: lambda: clock.sleep(1e-3), (2, "b"): lambda: clock.sleep(2e-3)}, "cpu", random.Random(0))
    assert (found[1].us, found[2, "b"].us) == pytest.approx((1000, 2000), rel=1e-5)


def test_sleeping_calls_are_timed_and_alternate(clock: Clock):
    order: list[str] = []

    def sleeper(name: str, seconds: float):
        def call() -> None:
            order.append(name)
            clock.sleep(seconds)

        return call

    timings = time_calls({"one": [sleeper("one", 1e-3)], "three": [sleeper("three", 3e-3)]}, "cpu")
    assert (timings["one"].us, timings["three"].us) == pytest.approx((1000, 3000), rel=1e-5)
    for t in timings.values():
        assert t.us_p20 <= t.us <= t.us_p80 and t.replays >= MIN_REPLAYS
    assert order[:8] == ["one", "three"] * 4  # warm-up included


def test_real_calls_take_real_time():
    """With the machine's own clock, which others may lengthen and nobody can shorten."""
    assert time_calls({"kernel": [lambda: time.sleep(1e-3)]}, "cpu")["kernel"].us >= 1000


def test_calls_rotate_over_their_copies(clock: Clock):
    seen: list[int] = []
    calls = [lambda i=i: (seen.append(i), clock.sleep(1e-3)) for i in range(3)]
    time_calls({"kernel": calls}, "cpu")
    assert seen[:10] == [0, 1, 2, 2, 0, 1, 2, 0, 1, 2]  # every copy once, one to wake the threads, then the timed ones


def test_orders_are_drawn_and_each_counts_once_a_round(clock: Clock):
    """Every implementation comes first, between and last, and each meets all of its copies in turn."""
    seen: list[tuple[str, int]] = []
    calls = {name: [lambda i=i, name=name: (seen.append((name, i)), clock.sleep(1e-3)) for i in range(2)] for name in "abc"}
    time_calls(calls, "cpu", random.Random(0))
    rounds = [seen[start : start + 3] for start in range(9, 9 + 3 * MIN_REPLAYS, 3)]  # behind the warm-up
    assert all(sorted(turn) == [(name, number % 2) for name in "abc"] for number, turn in enumerate(rounds))
    assert len(Counter(tuple(name for name, _ in turn) for turn in rounds)) == 6


def test_a_disturbed_round_does_not_count(clock: Clock):
    """The first round is slow throughout, as when another process holds the cores; the result is of a later one."""
    begin = clock.now
    call = lambda: clock.sleep(20e-3 if clock.now - begin < 0.3 else 1e-3)  # noqa: E731
    assert time_calls({"kernel": [call]}, "cpu")["kernel"].us == pytest.approx(1000, rel=1e-5)


def test_slow_calls_are_not_measured_for_ever(clock: Clock):
    calls: list[int] = []
    time_calls({"kernel": [lambda: (calls.append(1), clock.sleep(0.11))]}, "cpu")
    assert len(calls) == 2 + MIN_REPLAYS, "one round is enough when it takes seconds"


def test_nothing_to_call():
    with pytest.raises(ValueError, match="'kernel' has no calls"):
        time_calls({"kernel": []}, "cpu")


def test_copies_exceed_twice_the_cache():
    for operand in (1, 1000, 1 << 20, 1 << 30):
        copies = copies_needed(operand, 32 << 20)
        assert copies * operand > 2 * (32 << 20) and (copies == 1 or (copies - 1) * operand <= 2.1 * (32 << 20))


def test_shortlist_is_ranked_small_and_varied():
    workload = Workload(1, 4096, 4096)
    options = candidates(workload, H200) or []
    for size in (1, 8, 32, 1000):
        short = shortlist(workload, H200, size) or []
        assert len(short) == min(size, len(options)) and set(short) <= set(options)
        us = [estimate(workload, s, H200).us for s in short]
        assert us == sorted(us)
        assert short[0] == min(options, key=lambda s: estimate(workload, s, H200).us)
    shapes = [(s.block_n, s.block_m, s.num_warps) for s in shortlist(workload, H200, 32) or []]
    assert max(map(shapes.count, shapes)) <= 8 or len(set(shapes)) < 4


def test_patience_counts_what_brought_no_progress():
    patience = Patience(2)
    for us in (None, None, None):
        patience.add(us)
    assert not patience.exhausted, "nothing has worked yet"
    for us in (10.0, 9.95):
        patience.add(us)
    assert not patience.exhausted and patience.best == 10.0
    patience.add(8.0)
    patience.add(None)
    assert not patience.exhausted
    patience.add(8.0)
    assert patience.exhausted and patience.best == 8.0


def test_the_commit_can_be_told_to_a_tree_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilebit.autotune.provenance import source_commit

    source_commit.cache_clear()
    monkeypatch.setenv("TILEBIT_COMMIT", "c0ffee")
    try:
        assert source_commit() == "c0ffee"
    finally:
        source_commit.cache_clear()
