"""Timing and search order."""

from __future__ import annotations

import time

import pytest

from tilebit.autotune.measure import MIN_REPLAYS, copies_needed, time_calls
from tilebit.autotune.search import Patience, shortlist
from tilebit.schedules.gemm.cost import estimate
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import candidates
from tilebit.schedules.target import target_from_name

H200 = target_from_name("sm_90a")


def test_sleeping_calls_are_timed_and_alternate():
    order: list[str] = []

    def sleeper(name: str, seconds: float):
        def call() -> None:
            order.append(name)
            time.sleep(seconds)

        return call

    timings = time_calls({"one": [sleeper("one", 1e-3)], "three": [sleeper("three", 3e-3)]}, "cpu")
    assert 900 < timings["one"].us < 2900 and 2900 < timings["three"].us < 8000
    for t in timings.values():
        assert t.us_p20 <= t.us <= t.us_p80 and t.replays >= MIN_REPLAYS
    assert order[:8] == ["one", "three"] * 4  # warm-up included


def test_calls_rotate_over_their_copies():
    seen: list[int] = []
    time_calls({"kernel": [lambda i=i: seen.append(i) for i in range(3)]}, "cpu")
    assert seen[:10] == [0, 1, 2, 2, 0, 1, 2, 0, 1, 2]  # every copy once, one to wake the threads, then the timed ones


def test_a_disturbed_round_does_not_count():
    """The first round is slow throughout, as when another process holds the cores; the result is of a later one."""
    begin = time.perf_counter()

    def call() -> None:
        time.sleep(20e-3 if time.perf_counter() - begin < 0.3 else 1e-3)

    assert time_calls({"kernel": [call]}, "cpu")["kernel"].us < 10e3


def test_slow_calls_are_not_measured_for_ever():
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.11)

    time_calls({"kernel": [call]}, "cpu")
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
