"""How good choices without a record are: each workload (or shape) of the records left out in turn,
those with few records several at once, and its schedule chosen from the others'.

    python -m tilebit.autotune.regret --arch sm_90a --rows results/rows/ranker/nvidia-h200.jsonl

Only schedules that were measured for a workload can be chosen for it, so that every choice has a
time. Regret is that time over the workload's best: 1.0 is the tuned choice itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from ..schedules.gemm.workload import Workload
from ..schedules.neighbours import Known, neighbours
from ..schedules.ranker import expected_us
from ..schedules.schedule import Schedule
from ..schedules.select import NEAR_ENOUGH
from .provenance import now, source_commit
from .ranker import Sample, add_options, asked, trained

SOURCES = ("analytic", "nearest", "ranker")
LEFT_OUT = ("workload", "shape")  # one m of a shape and format; all of an (n, k)
LEAST = 1 / 20  # of all records, so many that a turn leaves out: each turn trains anew


@dataclass(frozen=True, slots=True)
class Regret:
    """One choice: ``source`` chose for ``workload`` a schedule that took ``us`` microseconds on
    ``gpu``, where the best measured one took ``best_us``; ``left_out`` is what the chooser had not
    seen, the "workload" or its whole "shape"."""

    workload: Workload
    gpu: str
    left_out: str
    source: str
    us: float
    best_us: float

    @property
    def ratio(self) -> float:
        return self.us / self.best_us

    def to_row(self) -> dict[str, Any]:
        """A results row."""
        w = self.workload
        numbers = {"format": w.format.family, "group_size": w.format.group_size, "symmetric": w.format.symmetric, "dtype": w.dtype}
        size = {"shape": f"{w.n}x{w.k}", "m": w.m, "n": w.n, "k": w.k}
        times = {"us": self.us, "best_us": self.best_us}
        return {"op": "ranker", **size, **numbers, "source": self.source, "left_out": self.left_out, **times, "gpu": self.gpu}


def regrets(found: Sequence[Sample], left_out: str, least: float = LEAST) -> list[Regret]:
    """What each of ``SOURCES`` chooses for every workload of ``found`` (one arch's samples) when
    ``left_out`` is unseen. A turn leaves out at least ``least`` of all samples: the more, the fewer
    turns, and the less there is to learn from.

    Raises ``ValueError`` for another ``left_out``, and where leaving one out leaves nothing."""
    if left_out not in LEFT_OUT:
        raise ValueError(f"left_out is {left_out!r}; accepted: {', '.join(LEFT_OUT)}")
    groups = _grouped(found, lambda s: s.record.workload if left_out == "workload" else (s.record.workload.n, s.record.workload.k))
    if len(groups) < 2:
        raise ValueError(f"the records hold {len(groups)} {left_out}s; accepted: at least 2, one to leave out and one to learn from")
    rows = []
    for group in _together(groups, least * len(found)):
        seen = set(map(id, group))
        others = [s for s in found if id(s) not in seen]
        ranker, known = trained(others), Known.among(s.record for s in others)
        for measured in _grouped(group, lambda s: (s.record.workload, s.target)):
            first, schedules = measured[0], [s.record.schedule for s in measured]
            us = {s.record.schedule: s.us for s in measured}
            workload, target = first.record.workload, first.target
            analytic = dict(zip(schedules, expected_us(workload, schedules, target, None), strict=True))
            learned = dict(zip(schedules, expected_us(workload, schedules, target, ranker), strict=True))
            chosen = {
                "analytic": min(schedules, key=analytic.__getitem__),
                "nearest": _nearest(measured, known, analytic),
                "ranker": min(schedules, key=learned.__getitem__),
            }
            best = min(us.values())
            rows += [Regret(workload, first.record.gpu, left_out, source, us[chosen[source]], best) for source in SOURCES]
    return rows


def summary(rows: Iterable[Regret]) -> list[dict[str, Any]]:
    """Median, mean and worst regret of each (left_out, source), and the number of workloads."""
    found = []
    for group in _grouped(rows, lambda r: (r.left_out, r.source)):
        ratios = [r.ratio for r in group]
        found.append(
            {
                "left_out": group[0].left_out,
                "source": group[0].source,
                "workloads": len(group),
                "median": median(ratios),
                "mean": mean(ratios),
                "worst": max(ratios),
            }
        )
    return found


def _nearest(measured: Sequence[Sample], known: Known, expected: dict[Schedule, float]) -> Schedule:
    """What ``select`` takes over from records without a ranker: the nearest one's schedule that is
    not expected to be slow here."""
    first = measured[0]
    bound = NEAR_ENOUGH * min(expected.values())
    near = (r.schedule for _, r in neighbours(first.record.workload, first.target, known))
    return next((s for s in near if expected.get(s, 2 * bound) <= bound), min(expected, key=expected.__getitem__))


def _together(groups: list[list[Sample]], least: float) -> list[list[Sample]]:
    """``groups``, of which those of fewer than ``least`` samples are put together until they have as
    many; as they are, where one would be left."""
    found, few = [group for group in groups if len(group) >= least], []
    for group in groups:
        if len(group) < least:
            few += group
            if len(few) >= least:
                found, few = [*found, few], []
    found += [few] if few else []
    return found if len(found) > 1 else groups


def _grouped(items: Iterable[Any], key: Any) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tilebit.autotune.regret", description="Regret of choices without a record.")
    add_options(parser)
    parser.add_argument("--rows", type=Path, help="write the choices to this file of JSON lines, in place of what it held")
    options = parser.parse_args(arguments)
    _, found = asked(options)
    rows = [r for left_out in LEFT_OUT for r in regrets(found, left_out)]
    print(f"{'left out':10s}{'chosen by':11s}{'workloads':>9s}{'median':>8s}{'mean':>8s}{'worst':>8s}")
    for line in summary(rows):
        ratios = "".join(f"{line[name]:8.3f}" for name in ("median", "mean", "worst"))
        print(f"{line['left_out']:10s}{line['source']:11s}{line['workloads']:9d}{ratios}")
    if options.rows is not None:
        common = {"commit": source_commit(), "date": now()}
        options.rows.parent.mkdir(parents=True, exist_ok=True)
        options.rows.write_text("".join(json.dumps({**r.to_row(), **common}) + "\n" for r in rows))


if __name__ == "__main__":
    main()
