"""What each idea adds to the speed of products, of 8-bit activations and of any precision too, and of
decode: rows of ``ablation``, ``ablation_int8``, ``ablation_sums``, ``ablation_any`` and ``ablation_attention``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .markdown import number, slug, table
from .rows import json_rows

ABLATION_FIELDS = ("step", "idea", "n", "k", "m", "us")
ANY_FIELDS = ("gpu", "run", "step", "idea", "bits", "n", "k", "m", "us")
ATTENTION_FIELDS = ("gpu", "run", "step", "idea", "format", "batch", "kv_len", "heads_q", "heads_kv", "us")


@dataclass(frozen=True, slots=True)
class Ablation:
    """What each idea adds on one device: ``ideas`` by step, and for each (n, k, m) the µs of each
    step that was measured."""

    gpu: str
    ideas: dict[int, str]
    times: dict[tuple[int, int, int], dict[int, float]]


def read_ablation(folder: Path) -> list[Ablation]:
    """Each device's newest run of each product. Raises ``ValueError`` with file and line for a row
    that lacks a field."""
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
    about = (
        "Median µs of one product as the ideas are added one after another, each with the best of its schedules, in one process; in "
        "brackets, times faster than the first step. A dash: the idea has no schedule for that product."
    )
    return _pictured(studies, about, "what each idea adds", "ablation", _step, numbered=True)


def liquid_ablation_section(studies: list[Ablation]) -> str:
    """µs of LiquidGEMM's product without each of its ideas, and in brackets how many times the whole's,
    which is the last step; "" without rows."""
    about = (
        "Median µs of `w4a8_lqq_g128` on tensor cores with one of LiquidGEMM's ideas taken away, each the fastest of its schedules, in one "
        "process; every variant gives the same numbers and was checked. In brackets, how many times as long as the whole."
    )
    return _pictured(studies, about, "each variant", "ablation_int8", _without, numbered=False)


def sums_ablation_section(studies: list[Ablation]) -> str:
    """µs of a group-wise product by how sums become fp32, and in brackets how many times the library's,
    which is the last step; "" without rows."""
    about = (
        "Median µs of `w4a8_g128_asym` on tensor cores by how int32 sums of 128 values of k become fp32 (MixLLM, section 3.3), each the "
        "fastest of the same schedules, in one process; every variant gives the same numbers and was checked. In brackets, how many times "
        "as long as the last one, which the library has."
    )
    return _pictured(studies, about, "each way", "ablation_sums", _without, numbered=False)


def _pictured(
    studies: list[Ablation], about: str, picture: str, name: str, cell: Callable[[dict[int, float], int], str], numbered: bool
) -> str:
    """A title, the plot of the study ``name`` and a table for each device: steps by products."""
    parts = []
    for study in studies:
        header = [*(["step", "idea"] if numbered else ["variant"]), *(f"{n} x {k}, m = {m}" for n, k, m in study.times)]
        lines = [
            [*[str(step)] * numbered, idea, *(cell(times, step) for times in study.times.values())] for step, idea in study.ideas.items()
        ]
        parts += [f"## {study.gpu}", f"![{picture}](../plots/{slug(study.gpu)}_{name}.svg)", table(header, lines, numbers=False)]
    return "\n\n".join([about, *parts]) if parts else ""


def _without(times: dict[int, float], step: int) -> str:
    if step not in times:
        return "-"
    whole = times[max(times)]
    return number(times[step]) + (f" ({times[step] / whole:.2f}x)" if step != max(times) else "")


def _step(times: dict[int, float], step: int) -> str:
    if step not in times:
        return "-"
    first = times[min(times)]
    return number(times[step]) + (f" ({first / times[step]:.2f}x)" if step != min(times) else "")


def attention_ablation_section(folder: Path) -> str:
    """What each of the papers' ideas is worth in decode: µs of each variant and, in brackets, the
    factor since the first; the newest run of each case. "" without rows. Raises ``ValueError`` with
    file and line for a row that lacks a field."""
    parts = _devices(folder, ATTENTION_FIELDS, _decode_case)
    about = (
        "Median µs of one decode step as the papers' ideas are added one after another, each with the best of its schedules, in one "
        "process; in brackets, times faster than the first step of that case that has a time. A dash: no kernel of that step passed the "
        "gate or ran; under one in the first line, the factors are over a later step, and not to be compared with other cases'."
    )
    return "\n\n".join([about, *parts]) if parts else ""


def any_ablation_section(folder: Path) -> str:
    """What each idea of Any-Precision LLM is worth: µs of each step and, in brackets, the factor since
    the first; the newest run of each case. "" without rows. Raises ``ValueError`` with file and line
    for a row that lacks a field."""
    parts = _devices(folder, ANY_FIELDS, lambda row: f"{row['n']} x {row['k']}, m = {row['m']}, {row['bits']} bits")
    about = (
        "Median µs of one product of bit planes and codebooks as the ideas are added one after another, each with the best of its "
        "schedules, in one process; in brackets, times faster than the first step. Layout, efficient bit transposition and merged "
        "look-ups are Any-Precision LLM's, whose baseline transposes matrices of 8 x 8 bits; tables for each lane, look-ups in "
        "registers and planes multiplied as bits are not. A dash: codes of that width do not have the idea, or no kernel passed the "
        "gate. The last two steps of up to 4 bits, else the last one, are kernels of the library."
    )
    return "\n\n".join([about, *parts]) if parts else ""


def _decode_case(row: dict[str, Any]) -> str:
    return f"{row['format']}, {row['batch']} x {row['kv_len']:,}, heads {row['heads_q']}/{row['heads_kv']}"


def _devices(folder: Path, fields: tuple[str, ...], case_of: Callable[[dict[str, Any]], str]) -> list[str]:
    """A title and a table for each device: its steps by its cases, of each case the newest run."""
    devices: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for _, row in json_rows(folder, fields):
        devices.setdefault(row["gpu"], {}).setdefault(case_of(row), []).append(row)
    parts = []
    for gpu, cases in sorted(devices.items()):
        newest = {case: [row for row in rows if row["run"] == rows[-1]["run"]] for case, rows in cases.items()}
        ideas = dict(sorted((row["step"], row["idea"]) for rows in newest.values() for row in rows))
        times = {case: {row["step"]: row["us"] for row in rows} for case, rows in newest.items()}
        lines = [[str(step), idea, *(_step(of_case, step) for of_case in times.values())] for step, idea in ideas.items()]
        parts += [f"## {gpu}", table(["step", "idea", *times], lines, numbers=False)]
    return parts
