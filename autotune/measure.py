"""Timing: medians over rotating operands, so that no cache holds what a real call would have to
fetch.

On CUDA a graph of calls is replayed between events, queued behind a spin kernel so that a slow host
never shows; on the CPU calls are timed one by one, in rounds of which the quietest counts. Several
implementations are measured in alternation, so that a change of clocks meets all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch

from .contention import Others

Call = Callable[[], Any]
CACHE_FACTOR = 2.05  # operand sets exceed this many times the last cache
MIN_REPLAYS = 20
MAX_REPLAYS = 60
REPLAY_US = 1500.0  # a graph holds calls for about this long, and at least MIN_CALLS
MIN_CALLS = 20
SPIN_CYCLES = 2_000_000  # about a millisecond: the host runs ahead meanwhile
CPU_SECONDS = 0.04  # of a round, per implementation, once MIN_REPLAYS are done
CPU_MAX_CALLS = 400  # of a round
CPU_ROUNDS = 6  # the quietest counts: one in which another process held the cores says nothing about a kernel
CPU_ENOUGH_SECONDS = 2.0  # no further round after this
BUSY_SHARE = 0.1  # of the cores: where others had more, times are called those of a busy machine,
BUSY_SPREAD = 1.5  # and where the 80th percentile is so many times the 20th
CPU_PAUSE_SECONDS = 0.02  # before a round: a process that has just slept is scheduled first


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: median, 20th and 80th percentile over ``replays`` samples of
    ``calls`` calls each. ``others``: the share of the cores that other processes had meanwhile, of
    calls on the CPU and where the system says it."""

    us: float
    us_p20: float
    us_p80: float
    calls: int
    replays: int
    others: float | None = None


def busy(times: Iterable[tuple[float, float, float | None]]) -> str:
    """A sentence for a reader of times that were taken on a busy machine, empty when none was: of
    each its 20th and 80th percentile and what others had of the cores."""
    times = list(times)
    spread = max((p80 / p20 for p20, p80, _ in times), default=1.0)
    others = max((share for *_, share in times if share is not None), default=0.0)
    signs = [f"other processes had up to {others:.0%} of its cores"] * (others > BUSY_SHARE)
    signs += [f"one in five calls took {spread:.1f} times as long as another"] * (spread > BUSY_SPREAD)
    return f"The machine was busy ({' and '.join(signs)}): a quiet one gives other times, and other ratios." if signs else ""


def copies_needed(operand_bytes: int, cache_bytes: int) -> int:
    """Operand sets to rotate over, so that together they exceed twice the last cache."""
    return int(CACHE_FACTOR * cache_bytes // max(operand_bytes, 1)) + 1


def time_calls(named: Mapping[str, Sequence[Call]], device: str, orders: random.Random | None = None) -> dict[str, Timing]:
    """Time each implementation: ``named[name]`` holds one callable per operand copy, which launches
    on ``device`` ("cpu", "cuda:0"); on CUDA they must be capturable. ``orders`` draws the order of
    every round; None: always that of ``named``. At its power limit a board owes a kernel's time to
    the one before it too. Raises ``ValueError`` when there is nothing to call."""
    for name, calls in named.items():
        if not calls:
            raise ValueError(f"{name!r} has no calls; accepted: one callable per operand copy")
    return _time_cuda(named, orders) if device.startswith("cuda") else _time_cpu(named, orders)


def time_replays(named: Mapping[Any, Call], device: str, orders: random.Random | None = None) -> dict[Any, Timing]:
    """``time_calls`` of what is timed as it stands, without copies: on CUDA replays of captured graphs."""
    if not device.startswith("cuda"):
        return _time_cpu({name: [call] for name, call in named.items()}, orders)
    for call in (*named.values(), *named.values()):  # clocks rise
        call()
    return _replayed({name: (call, 1) for name, call in named.items()}, MAX_REPLAYS, orders)


def _order(names: Iterable[Any], orders: random.Random | None) -> list[Any]:
    """The order of the next round."""
    order = list(names)
    if orders is not None:
        orders.shuffle(order)
    return order


def _summary(samples: list[float], calls: int, others: float | None = None) -> Timing:
    tenths = quantiles(samples, n=10, method="inclusive")
    return Timing(tenths[4], tenths[1], tenths[7], calls, len(samples), others)


def _time_cpu(named: Mapping[Any, Sequence[Call]], orders: random.Random | None) -> dict[Any, Timing]:
    for calls in named.values():
        for call in calls:  # touch every page and wake the threads
            call()
    begin = time.perf_counter()
    rounds = []
    while len(rounds) < CPU_ROUNDS and (not rounds or time.perf_counter() - begin < CPU_ENOUGH_SECONDS):
        rounds.append(_cpu_round(named, orders))
    return min(rounds, key=lambda timings: sum(t.us for t in timings.values()))  # one round for all: it was the same weather for each


def _cpu_round(named: Mapping[Any, Sequence[Call]], orders: random.Random | None) -> dict[Any, Timing]:
    """Calls of all implementations in alternation, each timed on its own."""
    samples: dict[Any, list[float]] = {name: [] for name in named}
    time.sleep(CPU_PAUSE_SECONDS)
    for calls in named.values():
        calls[-1]()  # wakes the threads; calls[0], the first that is timed, stays as cold as the others
    begin, turn, others = time.perf_counter(), 0, Others()
    while turn < MIN_REPLAYS or (turn < CPU_MAX_CALLS and time.perf_counter() - begin < CPU_SECONDS * len(named)):
        for name in _order(named, orders):
            call = named[name][turn % len(named[name])]
            start = time.perf_counter_ns()
            call()
            samples[name].append((time.perf_counter_ns() - start) / 1e3)
        turn += 1
    share = others.share()
    return {name: _summary(values, 1, share) for name, values in samples.items()}


def _time_cuda(named: Mapping[str, Sequence[Call]], orders: random.Random | None) -> dict[str, Timing]:
    graphs = {name: _capture(calls) for name, calls in named.items()}
    slowest = max(us for _, _, us in graphs.values())
    replays = max(MIN_REPLAYS, min(MAX_REPLAYS, int(5e4 / max(slowest, 1.0))))
    return _replayed({name: (graph.replay, calls) for name, (graph, calls, _) in graphs.items()}, replays, orders)


def _replayed(named: Mapping[Any, tuple[Call, int]], replays: int, orders: random.Random | None) -> dict[Any, Timing]:
    """Replays in alternation, of graphs of so many calls each."""
    events = [{name: (_event(), _event()) for name in named} for _ in range(replays)]
    torch.cuda._sleep(SPIN_CYCLES)
    for turn in events:
        for name in _order(named, orders):
            start, stop = turn[name]
            start.record()
            named[name][0]()
            stop.record()
    torch.cuda.synchronize()
    return {
        name: _summary([turn[name][0].elapsed_time(turn[name][1]) * 1e3 / calls for turn in events], calls)
        for name, (_, calls) in named.items()
    }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _capture(functions: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int, float]:
    """(graph, calls in it, microseconds of one replay); the calls rotate over ``functions`` a whole
    number of times."""
    stream, start, stop = torch.cuda.Stream(), _event(), _event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions[:3]:
            function()
        start.record(stream)
        for turn in range(3):
            functions[turn % len(functions)]()
        stop.record(stream)
    torch.cuda.synchronize()
    one = start.elapsed_time(stop) * 1e3 / 3
    calls = max(MIN_CALLS, len(functions), min(64, int(REPLAY_US / max(one, 1.0))))
    calls = -(-calls // len(functions)) * len(functions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for turn in range(calls):
            functions[turn % len(functions)]()
    graph.replay()
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return graph, calls, start.elapsed_time(stop) * 1e3
