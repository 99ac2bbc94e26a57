"""This tree's kernels beside those of another commit: the page of ``versions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .cells import commits_of
from .markdown import details, number, short_commit, table
from .problems import BANDS, geometric_mean
from .rows import json_rows

VERSIONS_FIELDS = ("gpu", "kind", "workload", "title", "commit", "commit_before", "us_before", "us_after", "ratio")
POINT_FIELDS = ("spread", "again", "schedule_before", "schedule_after", "same_schedule", "same_bits")
# What is asked of a change that is to lose no speed, as the time before over the time after.
MEAN, WORST = 0.995, 0.97
AGREE = 0.01  # a kernel and its copy


def read_versions(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By device the newest row of each point and kind against the commit before of the newest row.
    Raises ``ValueError`` with file and line for a row that lacks a field."""
    devices: dict[str, list[dict[str, Any]]] = {}
    for place, row in json_rows(folder, VERSIONS_FIELDS):
        lacking = [field for field in POINT_FIELDS if field not in row] if row["kind"] != "host" else []
        if lacking:
            raise ValueError(f"{place}: {', '.join(lacking)} missing; accepted: rows as the measuring programs write them")
        devices.setdefault(row["gpu"], []).append(row)
    return {
        gpu: list({(row["kind"], row["title"]): row for row in rows if row["commit_before"] == rows[-1]["commit_before"]}.values())
        for gpu, rows in sorted(devices.items())
    }


def versions_section(folder: Path) -> str:
    """Markdown of each device's newest comparison; "" without rows. Raises ``ValueError`` with file
    and line for a row that lacks a field."""
    parts = []
    for gpu, rows in read_versions(folder).items():
        commits = f"{commits_of(rows)} against {short_commit(rows[0]['commit_before'])}"
        parts += [f"## {gpu}", _said(rows, commits), table(_HEADER, list(_classes(rows)))]
        host = [
            [r["title"], number(r["us_before"]), number(r["us_after"]), _judged(r["ratio"], 1 - AGREE)] for r in rows if r["kind"] == "host"
        ]
        if host:
            said = (
                "The host's time of a call in the quietest round of each tree, whose processes take turns; a ratio above 0.99 is no loss."
            )
            parts += [said, table(["call", "µs before", "µs after", "times as fast"], host)]
        points = [_line(row) for row in rows if row["kind"] != "host"]
        header = ["point", "µs before", "µs after", "times as fast", "bouts", "a copy", "program", "schedule", "bits"]
        parts.append(details(f"all {len(points)} points", table(header, points, numbers=False)))
    return "\n\n".join(parts)


_HEADER = ["what", "points", "geometric mean", "worst point", "worst copy"]


def _said(rows: Sequence[dict[str, Any]], commits: str) -> str:
    timed = [row for row in rows if row["kind"] == "chosen"]
    equal = [row for row in rows if row["kind"] != "host" and row["same_schedule"]]
    bits = sum(bool(row["same_bits"]) for row in equal)
    unsteady = sum(abs(row["again"] - 1) > AGREE for row in timed)
    others = max((row.get("others") or 0.0 for row in timed), default=0.0)
    return (
        f"Commit {commits}: the time before over the time after, in one process, in alternation; above 1 the newer kernel is faster. "
        f"Asked: a geometric mean of at least {MEAN} and no point under {WORST}. Where both run the same schedule ({len(equal)} points) "
        f"the results are equal bit for bit at {bits}. A copy is the kernel before once more: it is off by more than {AGREE:.0%} at "
        f"{unsteady} of {len(timed)} points." + (f" Other processes had up to {others:.0%} of the cores." if others > AGREE else "")
    )


def _classes(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """A line for each class of points: what the trees choose, by kind of work, band of m, format
    and program; then equal schedules."""
    chosen = [row for row in rows if row["kind"] == "chosen"]
    gemms = [row for row in chosen if row["workload"]["op"] == "gemm"]
    others = [row for row in chosen if row["workload"]["op"] == "decode"]
    classes = {"product": gemms}
    classes |= {f"product, {band}": [r for r in gemms if first <= r["workload"]["m"] <= last] for band, first, last in BANDS}
    classes["decode"] = others
    for row in others:
        classes.setdefault(f"decode, {row['workload']['format']['key']} cache", []).append(row)
    classes["prefill"] = [row for row in chosen if row["workload"]["op"] == "prefill"]
    for row in sorted(chosen, key=lambda row: row["schedule_after"]["program"]):
        classes.setdefault(f"`{row['schedule_after']['program']}`", []).append(row)
    classes["the schedule before in both"] = [row for row in rows if row["kind"] != "host" and row["same_schedule"]]
    for name, points in classes.items():
        if points:
            worst = min(points, key=lambda row: row["ratio"])
            copy = max((row["again"] for row in points), key=lambda again: abs(again - 1))
            mean = _judged(geometric_mean(row["ratio"] for row in points), MEAN)
            yield [name, str(len(points)), mean, f"{_judged(worst['ratio'], WORST)} ({worst['title']})", f"{copy:.3f}"]


def _judged(ratio: float, least: float) -> str:
    return f"{ratio:.3f}" if ratio >= least else f"**{ratio:.3f}**"


def _line(row: dict[str, Any]) -> list[str]:
    before, after = row["schedule_before"]["program"], row["schedule_after"]["program"]
    schedule = ("the same" if row["same_schedule"] else "another") if row["kind"] == "chosen" else "the one before"
    times = number(row["us_before"]), number(row["us_after"]), _judged(row["ratio"], WORST)
    spread = f"{row['spread'][0]:.3f} to {row['spread'][1]:.3f}"
    programs = before if before == after else f"{before}, now {after}"
    return [row["title"], *times, spread, f"{row['again']:.3f}", programs, schedule, "equal" if row["same_bits"] else "other"]
