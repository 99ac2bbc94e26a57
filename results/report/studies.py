"""Sections on what each idea adds to speed, on how well schedules are chosen and on how time follows m and the shape: rows of
results/ablation (of attention: its folder ``attention``), results/ranker, results/selection and results/sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .markdown import details, number, slug, table
from .rows import json_rows

ABLATION_FIELDS = ("step", "idea", "n", "k", "m", "us")
ATTENTION_FIELDS = ("gpu", "run", "step", "idea", "format", "batch", "kv_len", "heads_q", "heads_kv", "us")
RANKER_FIELDS = ("shape", "m", "source", "us", "best_us")
SELECTION_FIELDS = ("gpu", "kind", "n", "k", "m", "format", "group_size", "symmetric", "dtype", "best_us", "candidates", "measured")
FRESH_FIELDS, SCAN_FIELDS = ("us", "source"), ("tuned_us", "legal", "scanned", "failed", "share")
# What is asked of the choices: slower by at most so much, with at most such a share of what the scan could time.
FRESH_MEDIAN, FRESH_WORST, SCAN_WORST = 0.10, 0.25, 0.03
SCAN_SHARE = 0.25
SWEEP_FIELDS = ("gpu", "run", "kind", "n", "k", "m", "format", "group_size", "symmetric", "dtype", "us")
ODD_FIELDS = ("per", "ratio", "neighbour")
SWEEP_WORST = 0.15  # what is asked: so much above the envelope, and so much more time per byte or operation than the neighbour


@dataclass(frozen=True, slots=True)
class Ablation:
    """What each idea adds on one device: ``ideas`` by step, and for each (n, k, m) the µs of each step that was measured."""

    gpu: str
    ideas: dict[int, str]
    times: dict[tuple[int, int, int], dict[int, float]]


def read_ablation(folder: Path) -> list[Ablation]:
    """Each device's newest run of each product. Raises ``ValueError`` with file and line for a row that lacks a field."""
    devices: dict[str, dict[tuple[int, int, int], list[dict[str, Any]]]] = {}
    for place, row in json_rows(folder, ABLATION_FIELDS):
        if row.get("op", "ablation") == "ablation":
            products = devices.setdefault(row.get("gpu") or place.split(".jsonl")[0], {})
            products.setdefault((row["n"], row["k"], row["m"]), []).append(row)
    found = []
    for gpu, products in sorted(devices.items()):
        ideas, times = {}, {}
        for product, rows in sorted(products.items(), key=lambda item: (item[0][0] * item[0][1], item[0])):
            newest = sorted((row for row in rows if row.get("run") == rows[-1].get("run")), key=lambda row: row["step"])
            times[product] = {row["step"]: row["us"] for row in newest}
            ideas |= {row["step"]: row["idea"] for row in newest}
        found.append(Ablation(gpu, dict(sorted(ideas.items())), times))
    return found


def ablation_section(studies: list[Ablation]) -> str:
    """µs after each step, and in brackets the factor since the first; "" without rows."""
    parts = []
    for study in studies:
        header = ["step", "idea", *(f"{n} x {k}, m = {m}" for n, k, m in study.times)]
        lines = [[str(step), idea, *(_step(times, step) for times in study.times.values())] for step, idea in study.ideas.items()]
        parts += [f"### {study.gpu}", f"![what each idea adds](plots/{slug(study.gpu)}_ablation.svg)", table(header, lines, numbers=False)]
    about = (
        "Median µs of one product as the ideas are added one after another, each with the best of its schedules, in one process; in "
        "brackets, times faster than the first step. A dash: the idea has no schedule for that product."
    )
    return "\n\n".join(["## What each idea adds", about, *parts]) if parts else ""


def _step(times: dict[int, float], step: int) -> str:
    if step not in times:
        return "-"
    first = times[min(times)]
    return number(times[step]) + (f" ({first / times[step]:.2f}x)" if step != min(times) else "")


def attention_ablation_section(folder: Path) -> str:
    """What each of the papers' ideas is worth in decode: µs of each variant and, in brackets, the factor since the first; the newest run of
    each case. "" without rows. Raises ``ValueError`` with file and line for a row that lacks a field."""
    devices: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for _, row in json_rows(folder, ATTENTION_FIELDS):
        case = f"{row['format']}, {row['batch']} x {row['kv_len']:,}, heads {row['heads_q']}/{row['heads_kv']}"
        devices.setdefault(row["gpu"], {}).setdefault(case, []).append(row)
    parts = []
    for gpu, cases in sorted(devices.items()):
        newest = {case: [row for row in rows if row["run"] == rows[-1]["run"]] for case, rows in cases.items()}
        ideas = dict(sorted((row["step"], row["idea"]) for rows in newest.values() for row in rows))
        times = {case: {row["step"]: row["us"] for row in rows} for case, rows in newest.items()}
        lines = [[str(step), idea, *(_step(of_case, step) for of_case in times.values())] for step, idea in ideas.items()]
        parts += [f"### {gpu}", table(["step", "idea", *times], lines, numbers=False)]
    about = (
        "Median µs of one decode step as the papers' ideas are added one after another, each with the best of its schedules, in one "
        "process; in brackets, times faster than the first step of that case that has a time. A dash: no kernel of that step passed the "
        "gate or ran; under one in the first line, the factors are over a later step, and not to be compared with other cases'."
    )
    return "\n\n".join(["## What each idea adds to attention", about, *parts]) if parts else ""


def ranker_section(folder: Path) -> str:
    """How much slower the schedules are that are chosen without a record of their workload; "" without rows."""
    by_source: dict[str, list[dict[str, Any]]] = {}
    for _, row in json_rows(folder, RANKER_FIELDS):
        by_source.setdefault(row["source"], []).append(row)
    if not by_source:
        return ""
    lines, points = [], []
    for source, rows in sorted(by_source.items(), key=lambda item: median(map(_loss, item[1]))):
        losses = list(map(_loss, rows))
        lines.append([source, str(len(rows)), f"{median(losses):.1%}", f"{max(losses):.1%}"])
        for row in rows:
            times = number(row["us"]), number(row["best_us"]), f"{_loss(row):.1%}"
            points.append([_shape(row["shape"]), str(row["m"]), source, *times])
    about = (
        "Each workload's records are left out in turn, and a schedule is chosen for it by each source: how much slower it is than the best "
        "schedule that was measured for this workload."
    )
    folded = details("Every workload", table(["n x k", "m", "source", "µs", "best µs", "slower by"], points))
    return "\n\n".join(["## Choosing without a record", about, table(["source", "workloads", "median", "worst"], lines), folded])


def selection_section(folder: Path) -> str:
    """What ``select`` gives for shapes without a record against the tuner's choice, and that against the best of a scan, the newest row of
    each workload; "" without rows. Raises ``ValueError`` with file and line for a row that lacks a field."""
    devices: dict[str, dict[str, dict[tuple[Any, ...], dict[str, Any]]]] = {}
    for place, row in json_rows(folder, SELECTION_FIELDS):
        _require(place, row, FRESH_FIELDS if row["kind"] == "fresh" else SCAN_FIELDS)
        of_kind = devices.setdefault(row["gpu"], {}).setdefault(row["kind"], {})
        of_kind[row["n"], row["k"], row["m"], _numbers(row)] = row
    parts = []
    for gpu, kinds in sorted(devices.items()):
        parts.append(f"### {gpu}")
        if "fresh" in kinds:
            parts += _fresh(list(kinds["fresh"].values()))
        if "exhaustive" in kinds:
            parts += _scans(list(kinds["exhaustive"].values()))
    return "\n\n".join(["## How well schedules are chosen", *parts]) if parts else ""


def _fresh(rows: list[dict[str, Any]]) -> list[str]:
    """A summary in words and the table of workloads without a record."""
    losses = [row["us"] / row["best_us"] - 1 for row in rows]
    said = (
        f"Without a record: what `select` gives for workloads of shapes in no record ({len(rows)}), beside the tuner's choice, timed side "
        f"by side. Slower in the median by **{median(losses):.1%}** ({_bar(median(losses), FRESH_MEDIAN)}), in the worst case by "
        f"**{max(losses):.1%}** ({_bar(max(losses), FRESH_WORST)})."
    )
    lines = []
    for row, loss in zip(rows, losses, strict=True):
        times = row["source"], number(row["us"]), number(row["best_us"]), f"{loss:.1%}"
        lines.append([*_asked(row), *times, f"{row['measured']} of {row['candidates']}"])
    return [said, table(["n x k", "m", "format", "chosen by", "µs", "tuned µs", "slower by", "tuner measured"], lines)]


def _scans(rows: list[dict[str, Any]]) -> list[str]:
    """A summary in words and the table of scanned workloads."""
    losses, shares = [row["tuned_us"] / row["best_us"] - 1 for row in rows], [row["share"] for row in rows]
    said = (
        f"Against a scan: the tuner's choice beside the fastest of a scan of all that the rules accept ({len(rows)} workloads). Where they "
        "accept too much, the scan takes the rules' own candidates, the cost model's fastest of each tile shape, and an even draw (`rule` "
        f"of the rows). Slower at worst by **{max(losses):.1%}** ({_bar(max(losses), SCAN_WORST)}), with at most **{max(shares):.1%}** of "
        f"the scan's measurements ({_bar(max(shares), SCAN_SHARE)})."
    )
    lines = []
    for row, loss, share in zip(rows, losses, shares, strict=True):
        scan = f"{row['legal']:,}", f"{row['scanned']} ({row['failed']} failed)"
        times = number(row["best_us"]), number(row["tuned_us"]), f"{loss:.1%}"
        lines.append([*_asked(row), *scan, *times, f"{row['measured']} of {row['candidates']}", f"{share:.1%}"])
    header = ["n x k", "m", "format", "legal", "scanned", "best µs", "tuned µs", "slower by", "tuner measured", "of the scan"]
    return [said, table(header, lines)]


def envelope(times: Mapping[int, float]) -> dict[int, int]:
    """For each m of ``times`` (its µs) the m' >= m of the least time, the smaller of two equal ones, in ascending order: a call of m rows
    could be padded to m'."""
    return {m: min((other for other in sorted(times) if other >= m), key=lambda other: times[other]) for m in sorted(times)}


def sweep_section(folder: Path) -> str:
    """How far time as a function of m lies above its envelope, of the newest run of each shape, and odd shapes beside their nearest listed
    neighbour, the newest row of each; "" without rows. Raises ``ValueError`` with file and line for a row that lacks a field."""
    swept: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    odd: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for place, row in json_rows(folder, SWEEP_FIELDS):
        shape = row["n"], row["k"], _numbers(row)
        if row["kind"] == "odd":
            _require(place, row, ODD_FIELDS)
            odd.setdefault(row["gpu"], {})[*shape, row["m"]] = row
        else:
            swept.setdefault(row["gpu"], {}).setdefault(shape, []).append(row)
    parts = []
    for gpu in sorted(swept.keys() | odd.keys()):
        parts.append(f"### {gpu}")
        if gpu in swept:
            parts += _sweeps([[row for row in rows if row["run"] == rows[-1]["run"]] for rows in swept[gpu].values()])
        if gpu in odd:
            parts += _odd(list(odd[gpu].values()))
    return "\n\n".join(["## Between m-buckets, and odd shapes", *parts]) if parts else ""


def _sweeps(shapes: list[list[dict[str, Any]]]) -> list[str]:
    """A summary in words and the table of the swept shapes, each a list of its rows."""
    lines, worst = [], []
    for rows in shapes:
        times = {row["m"]: row["us"] for row in rows}
        least = envelope(times)
        above = {m: times[m] / times[least[m]] - 1 for m in times}
        m = max(above, key=lambda m: above[m])
        worst.append(above[m])
        shape, cell = _shape((rows[0]["n"], rows[0]["k"])), f"{number(times[least[m]])} (m = {least[m]})"
        found = str(len(times)), f"{above[m]:.1%}", str(m), number(times[m]), cell, _verdict(above[m], SWEEP_WORST)
        lines.append([shape, _numbers(rows[0]), *found])
    said = (
        "Time as a function of m: at the border of every m-bucket, the first m after it and one inside, timed in alternation. A call of m "
        "rows could be padded to any m' above it, so that the least time of any m' from m on is m's envelope. Above it at worst by "
        f"**{max(worst):.1%}** ({_bar(max(worst), SWEEP_WORST)})."
    )
    header = ["n x k", "format", "m measured", "worst above the envelope", "at m", "µs", "envelope µs", f"at most {SWEEP_WORST:.0%}"]
    return [said, table(header, lines)]


def _odd(rows: list[dict[str, Any]]) -> list[str]:
    """A summary in words and the table of odd shapes."""
    losses = [row["ratio"] - 1 for row in rows]
    said = (
        "Shapes that are a multiple of nothing, each beside the nearest shape of the tables (a factor of two in n or in k is one unit of "
        "distance), timed side by side: how much more time each takes per byte it must move (small m) or per operation (large m). At worst "
        f"**{max(losses):.1%}** ({_bar(max(losses), SWEEP_WORST)})."
    )
    lines = []
    for row, loss in zip(rows, losses, strict=True):
        near = row["neighbour"]
        times = number(row["us"]), _shape((near["n"], near["k"])), number(near["us"])
        lines.append([*_asked(row), *times, row["per"], f"{loss:+.1%}", _verdict(loss, SWEEP_WORST)])
    header = ["n x k", "m", "format", "µs", "neighbour", "its µs", "time per", "against it", f"at most {SWEEP_WORST:.0%}"]
    return [said, table(header, lines)]


def _require(place: str, row: dict[str, Any], fields: Sequence[str]) -> None:
    """Raises ``ValueError`` when ``row``, which is at ``place``, lacks a field of its kind."""
    lacking = [field for field in fields if field not in row]
    if lacking:
        raise ValueError(f"{place}: {', '.join(lacking)} missing; accepted: rows as the measuring programs write them")


def _bar(value: float, bar: float) -> str:
    return f"asked: at most {bar:.0%}, {_verdict(value, bar)}"


def _verdict(value: float, bar: float) -> str:
    return "met" if value <= bar else "**missed**"


def _asked(row: dict[str, Any]) -> list[str]:
    return [_shape((row["n"], row["k"])), str(row["m"]), _numbers(row)]


def _numbers(row: dict[str, Any]) -> str:
    return f"{row['format']}_g{row['group_size']}{'' if row['symmetric'] else '_asym'}, {row['dtype']}"


def _loss(row: dict[str, Any]) -> float:
    return row["us"] / row["best_us"] - 1


def _shape(shape: Any) -> str:
    return shape if isinstance(shape, str) else " x ".join(str(size) for size in shape)
